"""Chat templates of many styles, each with the text that it must make, written out by hand in Python."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from hp_plugins.tokenizers.pretrained import PretrainedTokenizer
from tests.data.chat.tokenizers import Kind, finished

Turn = dict[str, Any]
# A piece of the text, and the number of the message whose answer and stop token it is; None for all else.
Piece = tuple[str, int | None]


@dataclass(frozen=True)
class Style:
    """A template, its tokenizer's special tokens, and `pieces`: its text by hand.

    With `glues`, the blank before an answer may be part of the answer's first token. With `strips`, blanks behind a
    special token are lost in the ids.
    """

    name: str
    template: str
    special: tuple[str, ...]
    pieces: Callable[[Sequence[Turn]], Iterator[Piece]]
    eos: str
    bos: str | None = None
    kind: Kind = "bytes"
    system: bool = True
    tool: bool = False
    glues: bool = False
    strips: bool = False

    def tokenizer(self, template: str | None = None) -> PretrainedTokenizer:
        return _tokenizer(self, template)


@cache
def _tokenizer(style: Style, template: str | None) -> PretrainedTokenizer:
    return finished(
        style.kind,
        style.special,
        eos=style.eos,
        bos=style.bos,
        template=template or style.template,
        right_stripping=style.strips,
        name=style.name,
    )


def owner(turn: Turn, number: int) -> int | None:
    return number if turn["role"] == "assistant" else None


# ChatML: every turn alike; and the same with generation marks.

CHATML = """\
{%- for turn in messages %}
{{- '<|im_start|>' ~ turn.role ~ '\\n' ~ turn.content ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

MARKED = """\
{%- for turn in messages %}
{{- '<|im_start|>' ~ turn.role ~ '\\n' }}
{%- if turn.role == 'assistant' %}{% generation %}{{ turn.content }}{% endgeneration %}{{ '<|im_end|>' }}
{%- else %}{{ turn.content ~ '<|im_end|>' }}{% endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""


def chatml(turns: Sequence[Turn]) -> Iterator[Piece]:
    for number, turn in enumerate(turns):
        yield f"<|im_start|>{turn['role']}\n", None
        yield f"{turn['content']}<|im_end|>", owner(turn, number)
        yield "\n", None


# Llama-2: the prompt in brackets, no special token for roles, blanks around the answer.

LLAMA_2 = """\
{%- set found = namespace(system='') %}
{%- for turn in messages %}
{%- if turn.role == 'system' %}{% set found.system = '<<SYS>>\\n' ~ turn.content.strip() ~ '\\n<</SYS>>\\n\\n' %}
{%- elif turn.role == 'user' %}{{ bos_token ~ '[INST] ' ~ found.system ~ turn.content.strip() ~ ' [/INST]' }}
{%- set found.system = '' %}
{%- elif turn.role == 'assistant' %}{{ ' ' ~ turn.content.strip() ~ ' ' ~ eos_token }}
{%- else %}{{ raise_exception('only system, user and assistant turns') }}{% endif %}
{%- endfor %}"""


def llama_2(turns: Sequence[Turn]) -> Iterator[Piece]:
    system = ""
    for number, turn in enumerate(turns):
        content = turn["content"].strip()
        if turn["role"] == "system":
            system = f"<<SYS>>\n{content}\n<</SYS>>\n\n"
        elif turn["role"] == "user":
            yield f"<s>[INST] {system}{content} [/INST]", None
            system = ""
        else:
            yield " ", None
            yield f"{content} </s>", number


# Llama-3: headers of special tokens, trimmed contents.

LLAMA_3 = """\
{{- bos_token }}
{%- for turn in messages %}
{{- '<|start_header_id|>' ~ turn.role ~ '<|end_header_id|>\\n\\n' ~ turn.content | trim ~ '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""


def llama_3(turns: Sequence[Turn]) -> Iterator[Piece]:
    yield "<|begin_of_text|>", None
    for number, turn in enumerate(turns):
        yield f"<|start_header_id|>{turn['role']}<|end_header_id|>\n\n", None
        yield f"{turn['content'].strip()}<|eot_id|>", owner(turn, number)


# Mistral: brackets that are special tokens, calls and results of tools, the system's text with the last question.

MISTRAL = """\
{{- bos_token }}
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- set turns = messages[1:] if messages[0].role == 'system' else messages %}
{%- for turn in turns %}
{%- if turn.role == 'user' %}
{{- '[INST] ' ~ (system ~ '\\n\\n' if system and loop.first else '') ~ turn.content ~ '[/INST]' }}
{%- elif turn.role == 'tool' %}{{ '[TOOL_RESULTS] ' ~ turn.content ~ '[/TOOL_RESULTS]' }}
{%- elif turn.tool_calls is defined %}
{{- '[TOOL_CALLS] [' }}
{%- for call in turn.tool_calls %}{{ call.function | tojson }}{{ ', ' if not loop.last }}{% endfor %}
{{- ']' ~ eos_token }}
{%- else %}{{ ' ' ~ turn.content ~ eos_token }}{% endif %}
{%- endfor %}"""


def mistral(turns: Sequence[Turn]) -> Iterator[Piece]:
    yield "<s>", None
    system = ""
    for number, turn in enumerate(turns):
        if turn["role"] == "system":
            system = turn["content"] + "\n\n" if turn["content"] else ""
        elif turn["role"] == "user":
            yield f"[INST] {system}{turn['content']}[/INST]", None
            system = ""
        elif turn["role"] == "tool":
            yield f"[TOOL_RESULTS] {turn['content']}[/TOOL_RESULTS]", None
        elif "tool_calls" in turn:
            calls = ", ".join(json.dumps(call["function"], ensure_ascii=False) for call in turn["tool_calls"])
            yield f"[TOOL_CALLS] [{calls}]</s>", number
        else:
            yield " ", None
            yield f"{turn['content']}</s>", number


# Gemma: another word for the assistant, no system turn.

GEMMA = """\
{{- bos_token }}
{%- for turn in messages %}
{%- if turn.role == 'system' %}{{ raise_exception('there is no system turn') }}{% endif %}
{%- set role = 'model' if turn.role == 'assistant' else turn.role %}
{{- '<start_of_turn>' ~ role ~ '\\n' ~ turn.content | trim ~ '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""


def gemma(turns: Sequence[Turn]) -> Iterator[Piece]:
    yield "<bos>", None
    for number, turn in enumerate(turns):
        yield f"<start_of_turn>{'model' if turn['role'] == 'assistant' else turn['role']}\n", None
        yield f"{turn['content'].strip()}<end_of_turn>", owner(turn, number)
        yield "\n", None


# Phi: special tokens that swallow the blanks behind them, and an end token behind the whole conversation.

PHI = """\
{%- for turn in messages %}
{{- '<|' ~ turn.role ~ '|>\\n' ~ turn.content ~ '<|end|>\\n' }}
{%- endfor %}
{{- '<|assistant|>\\n' if add_generation_prompt else eos_token }}"""


def phi(turns: Sequence[Turn]) -> Iterator[Piece]:
    for number, turn in enumerate(turns):
        yield f"<|{turn['role']}|>\n", None
        yield f"{turn['content']}<|end|>", owner(turn, number)
        yield "\n", None
    yield "<|endoftext|>", None


# DeepSeek: the answer right behind its mark, and what an answer thought before is left out later.

DEEPSEEK = """\
{{- bos_token }}
{%- for turn in messages %}
{%- if turn.role == 'system' %}{{ turn.content }}
{%- elif turn.role == 'user' %}{{ '<｜User｜>' ~ turn.content }}
{%- else %}{{ '<｜Assistant｜>' ~ turn.content.split('</think>')[-1] ~ eos_token }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"""


def deepseek(turns: Sequence[Turn]) -> Iterator[Piece]:
    yield "<｜begin▁of▁sentence｜>", None
    for number, turn in enumerate(turns):
        if turn["role"] == "assistant":
            yield "<｜Assistant｜>", None
            yield turn["content"].split("</think>")[-1] + "<｜end▁of▁sentence｜>", number
        else:
            yield ("<｜User｜>" if turn["role"] == "user" else "") + turn["content"], None


# Qwen3: thoughts of the answers behind the last question, an empty thought for the last answer without one, tools.

QWEN_3 = """\
{%- if tools %}
{{- '<|im_start|>system\\n' ~ (messages[0].content ~ '\\n\\n' if messages[0].role == 'system' else '') ~ 'Tools:' }}
{%- for tool in tools %}{{ '\\n' ~ tool | tojson }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' ~ messages[0].content ~ '<|im_end|>\\n' }}{% endif %}
{%- set found = namespace(last=0) %}
{%- for turn in messages %}{% if turn.role == 'user' %}{% set found.last = loop.index0 %}{% endif %}{% endfor %}
{%- for turn in messages %}
{%- if turn.role == 'user' %}{{ '<|im_start|>user\\n' ~ turn.content ~ '<|im_end|>\\n' }}
{%- elif turn.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' ~ turn.content ~ '\\n</tool_response><|im_end|>\\n' }}
{%- elif turn.role == 'assistant' %}
{%- set content = turn.content if turn.content is string else '' %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > found.last and (loop.last or turn.reasoning_content) %}
{{- '<think>\\n' ~ (turn.reasoning_content or '').strip('\\n') ~ '\\n</think>\\n\\n' ~ content.lstrip('\\n') }}
{%- else %}{{ content }}{% endif %}
{%- for call in turn.tool_calls or [] %}
{{- '\\n' if loop.index0 or content }}{{- '<tool_call>\\n' ~ call.function | tojson ~ '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""


def qwen_3(turns: Sequence[Turn]) -> Iterator[Piece]:
    last = max(number for number, turn in enumerate(turns) if turn["role"] == "user")
    for number, turn in enumerate(turns):
        role, content = turn["role"], turn.get("content", "")
        if role == "tool":
            yield f"<|im_start|>user\n<tool_response>\n{content}\n</tool_response><|im_end|>\n", None
        elif role != "assistant":
            yield f"<|im_start|>{role}\n{content}<|im_end|>\n", None
        else:
            yield "<|im_start|>assistant\n", None
            calls = [json.dumps(call["function"], ensure_ascii=False) for call in turn.get("tool_calls", [])]
            written = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
            written = ("\n" if written and content else "") + written
            thought = turn.get("reasoning_content", "")
            if number > last and thought:
                thought = thought.strip("\n")
                yield f"<think>\n{thought}\n</think>\n\n{content.lstrip(chr(10))}{written}<|im_end|>", number
            elif number > last and number == len(turns) - 1:
                yield "<think>\n\n</think>\n\n", None
                yield f"{content.lstrip(chr(10))}{written}<|im_end|>", number
            else:
                yield f"{content}{written}<|im_end|>", number
            yield "\n", None


# Zephyr: roles in plain text, the end token behind every turn.

ZEPHYR = """\
{%- for turn in messages %}
{{- '<|' ~ turn.role ~ '|>\\n' ~ turn.content ~ eos_token ~ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""


def zephyr(turns: Sequence[Turn]) -> Iterator[Piece]:
    for number, turn in enumerate(turns):
        yield f"<|{turn['role']}|>\n", None
        yield f"{turn['content']}</s>", owner(turn, number)
        yield "\n", None


# GLM: nothing closes a turn but the mark of the next one.

GLM = """\
{{- '[gMASK]<sop>' }}
{%- for turn in messages %}
{{- ('<|observation|>' if turn.role == 'tool' else '<|' ~ turn.role ~ '|>') ~ '\\n' ~ turn.content }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""


def glm(turns: Sequence[Turn]) -> Iterator[Piece]:
    names = {"tool": "<|observation|>", **{role: f"<|{role}|>" for role in ("system", "user", "assistant")}}
    yield "[gMASK]<sop>", None
    mark: Piece = (names[turns[0]["role"]], None)
    for number, turn in enumerate(turns):
        yield mark
        following = names[turns[number + 1]["role"]] if number + 1 < len(turns) else "<|user|>"
        mark = following, None
        if turn["role"] == "assistant":
            yield "\n", None
            yield turn["content"] + following, number
            mark = "", None
        else:
            yield f"\n{turn['content']}", None


_IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_S = ("<s>", "</s>")
_PHI = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>")
_GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>")
_LLAMA_3 = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_MISTRAL = (*_S, "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
_DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")

STYLES = {
    style.name: style
    for style in (
        Style("chatml", CHATML, _IM, chatml, "<|im_end|>", tool=True),
        Style("marked", MARKED, _IM, chatml, "<|im_end|>", tool=True),
        Style("llama_2", LLAMA_2, _S, llama_2, "</s>", "<s>", "metaspace", glues=True),
        Style("llama_3", LLAMA_3, _LLAMA_3, llama_3, "<|eot_id|>", "<|begin_of_text|>", tool=True),
        Style("mistral", MISTRAL, _MISTRAL, mistral, "</s>", "<s>", "metaspace", tool=True, glues=True),
        Style(
            "gemma",
            GEMMA,
            ("<bos>", "<start_of_turn>", "<end_of_turn>", "<eos>"),
            gemma,
            "<eos>",
            "<bos>",
            "metaspace_never",
            system=False,
        ),
        Style("phi", PHI, _PHI, phi, "<|endoftext|>", strips=True),
        Style("deepseek", DEEPSEEK, _DEEPSEEK, deepseek, "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>"),
        Style("qwen_3", QWEN_3, _IM, qwen_3, "<|im_end|>", kind="bytes_nfc", tool=True),
        Style("zephyr", ZEPHYR, _S, zephyr, "</s>", "<s>", "metaspace"),
        Style("glm", GLM, _GLM, glm, "<|endoftext|>", tool=True),
    )
}
