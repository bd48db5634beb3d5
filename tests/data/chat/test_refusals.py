"""A chat template that can't be masked is refused with the reason, before a row is read."""

from __future__ import annotations

import datetime
import os
import pickle
import subprocess
import sys
from typing import Any

import pytest

from hp_core.data.chat.encoder import ChatEncoder, ChatSettings
from hp_core.data.chat.formats import named_format
from hp_core.data.chat.template import ChatTemplate, ChatTokenizer
from hp_core.data.records import Row
from hp_core.errors import ArgumentError, InputError
from hp_plugins.tokenizers.bpe import bpe
from hp_plugins.tokenizers.byte_level import byte_tokenizer
from tests.data.chat.styles import CHATML, MARKED, STYLES, Turn
from tests.data.chat.test_masks import CHATS, answers, chat, encode, runs
from tests.data.chat.tokenizers import Kind, finished

IM = STYLES["chatml"].special
ENDLESS = """\
{%- for turn in messages %}{{- turn.role ~ ': ' ~ turn.content ~ '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- 'assistant: ' }}{% endif %}"""


def build(template: str | None, kind: Kind = "bytes", special: tuple[str, ...] = IM, **options: Any) -> ChatEncoder:
    tokenizer = finished(kind, special, eos=special[1], bos=special[0], template=CHATML, name="made")
    return ChatEncoder.of(ChatSettings(named_format("messages"), template=template, **options), tokenizer)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (ENDLESS, "closes this answer with no special token.*end assistant turns with `{{ eos_token }}`"),
        (CHATML.replace("turn.content", "'it'"), "doesn't show the content of this answer once"),
        (CHATML.replace("turn.content", "turn.content ~ turn.content"), "doesn't show the content of this answer once"),
        (CHATML.replace("turn.content", "turn.content[::-1]"), "doesn't show the content of this answer once"),
        (MARKED.replace("{{ turn.content }}", "it"), "doesn't show the content"),
        (MARKED.replace("turn.role == 'assistant'", "loop.last"), "sets no generation mark for this answer"),
        (MARKED.replace("turn.role == 'assistant'", "turn.role == 'user'"), "generation mark"),
        (MARKED.replace("turn.role == 'assistant'", "true"), "generation mark"),
        (CHATML.replace("turn.content", "turn.text.strip()"), "refuses the conversation"),
        ("{{ raise_exception('no chats') }}", "refuses the conversation: no chats"),
        (ENDLESS.replace("turn.role ~", "bos_token ~ turn.role ~"), "closes this answer with no special token"),
    ],
)
def test_a_template_that_cannot_be_masked_is_refused_with_the_reason(template: str, reason: str) -> None:
    with pytest.raises(
        ArgumentError, match=rf"^chat_template: the chat template of 'made' can't be masked: .*{reason}"
    ):
        build(template)


def test_a_template_with_an_error_is_refused_with_its_line() -> None:
    with pytest.raises(ArgumentError, match=r"^chat_template: line 2 of the chat template: .*'fo'"):
        build("{% if true %}\n{% fo x in y %}")


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), bpe()], ids=["bytes", "bpe"])
def test_a_tokenizer_without_special_tokens_is_refused(tokenizer: Any) -> None:
    assert not isinstance(tokenizer, ChatTokenizer)
    with pytest.raises(ArgumentError, match=r"^tokenizer: chats need a finished tokenizer.*name: pretrained"):
        ChatEncoder.of(ChatSettings(named_format("messages")), tokenizer)


def test_a_tokenizer_without_a_template_needs_one() -> None:
    tokenizer = finished("bytes", IM, eos="<|im_end|>")
    assert isinstance(tokenizer, ChatTokenizer)
    with pytest.raises(ArgumentError, match=r"^chat_template: the tokenizer 'made' has no chat template; give one"):
        tokenizer.chat_template()
    assert (
        tokenizer.chat_template(CHATML).render([{"role": "user", "content": "a"}], None).text.startswith("<|im_start|>")
    )
    assert (
        tokenizer.with_chat_template(CHATML).chat_template().fingerprint == tokenizer.chat_template(CHATML).fingerprint
    )
    with pytest.raises(ArgumentError, match="no chat template"):
        tokenizer.chat_template()


def test_arguments_reach_the_template_and_others_are_refused() -> None:
    template = STYLES["qwen_3"].template.replace("'Tools:'", "shout ~ 'Tools:'")
    tokenizer = STYLES["qwen_3"].tokenizer()
    plain, quiet = (tokenizer.chat_template(template, arguments=one) for one in ({}, {"enable_thinking": False}))
    ask: list[Turn] = [{"role": "user", "content": "a?"}]
    prompts = [one.render(ask, None, add_generation_prompt=True).text for one in (plain, quiet)]
    assert prompts[1] == prompts[0] + "<think>\n\n</think>\n\n"
    assert plain.fingerprint != quiet.fingerprint
    for name, reason in (
        ("enable_thinkin", "changes nothing: the chat template reads no such variable; did you mean 'enable_thinking'"),
        ("messages", "is given to the chat template by the trainer"),
        ("add_generation_prompt", "is given to the chat template by the trainer"),
        ("eos_token", "is given to the chat template by the trainer"),
        ("tokenize", "is given to the chat template by the trainer"),
    ):
        with pytest.raises(ArgumentError, match=rf"^chat_template_kwargs\.{name}: {reason}"):
            tokenizer.chat_template(template, arguments={name: True})


TODAY = CHATML.replace("{%- for", "{{- strftime_now('%d %b %Y') ~ '\\n' }}\n{%- for", 1)


def test_a_template_that_prints_the_date_needs_one_that_stays() -> None:
    with pytest.raises(ArgumentError, match=r"it prints today's date, .*; give one: `date: '2026-01-31'`"):
        build(TODAY)
    with pytest.raises(ArgumentError, match=r"^date: '31\.1\.2026' is no date such as '2026-01-31'"):
        build(TODAY, date="31.1.2026")
    with pytest.raises(ArgumentError, match=r"^date: changes nothing"):
        build(CHATML, date="2026-01-31")
    built = build(TODAY, date="2026-01-31")
    one = encode(built, chat("a?", "b"))
    spelled = built.tokenizer.spell(one.ids)
    assert spelled == "31 Jan 2026\n<|im_start|>user\na?<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    assert built.fingerprint != build(TODAY, date="2026-02-01").fingerprint
    given = TODAY.replace("strftime_now('%d %b %Y')", "(today if today is defined else strftime_now('%d %b %Y'))")
    assert "in May" in build(given, arguments={"today": "in May"}).tokenizer.spell(
        encode(build(given, arguments={"today": "in May"}), chat("a?", "b")).ids
    )


def test_the_date_changes_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands at the head of a template is kept, whatever is set before it."""
    tokenizer = finished("bytes", IM, eos="<|im_end|>")
    messages: list[Turn] = [{"role": "user", "content": "a"}]
    today = datetime.datetime.now().strftime("%Y")
    for head in (
        "",
        "\n",
        "\n\n",
        "  ",
        "  {% if true %}x{% endif %}\n",
        "{%- if true %}\n x{% endif %}",
        "\n  {{ 'y' }}",
    ):
        text = f"{head}{{{{ strftime_now('%Y') }}}}"
        dated = tokenizer.chat_template(text, date=f"{today}-01-01").render(messages, None).text
        plain = tokenizer._tokenizer.apply_chat_template(messages, chat_template=text, tokenize=False)
        assert dated == plain


@pytest.mark.parametrize("style", STYLES.values(), ids=lambda style: style.name)
def test_renderings_are_those_of_apply_chat_template(style: Any) -> None:
    template: ChatTemplate = style.tokenizer().chat_template()
    for turns in CHATS.values():
        for prompt in (False, True):
            expected = style.tokenizer()._tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=prompt
            )
            assert template.render(turns, None, add_generation_prompt=prompt).text == expected


SPLIT = """\
{%- for turn in messages %}
{{- (turn.role | upper) ~ ': ' ~ turn.content ~ (eos_token if turn.role == 'assistant') ~ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"""


@pytest.mark.parametrize("kind", ["bytes", "metaspace", "metaspace_never", "legacy"])
def test_tokens_are_cut_where_the_prompt_ends(kind: Kind) -> None:
    """The blank of the prompt would go with the answer, and no model sees that when it answers."""
    built = build(SPLIT, kind, ("<s>", "</s>"))
    tokenizer = built.tokenizer
    for turns in CHATS.values():
        one = encode(built, turns)
        assert runs(tokenizer, one) == [turns[number]["content"] + "</s>" for number in answers(turns)]  # type: ignore[arg-type]
        first = turns[:1]
        prompt = built.template.render(first, None, add_generation_prompt=True).text
        (alone,) = tokenizer.place([prompt])
        assert one.ids[: len(alone.ids)].tolist() == alone.ids.tolist()
        assert one.trained is not None
        assert not one.trained[: len(alone.ids)].any()


def test_an_encoder_can_be_sent_to_a_process() -> None:
    built = build(CHATML)
    rows = [Row("a:1", {"messages": chat("a?", "b")}), Row("a:2", {"messages": []})]
    first, fault = pickle.loads(pickle.dumps(built)).encode(rows)
    assert first.ids.tolist() == built.encode(rows)[0].ids.tolist()
    assert isinstance(fault, InputError)
    assert str(fault) == "a:2: messages: the conversation is empty"
    assert pickle.loads(pickle.dumps(built)).fingerprint == built.fingerprint


def test_a_row_that_is_nested_too_deep_is_faulty() -> None:
    deep: Any = {}
    for _ in range(20_000):
        deep = {"items": deep}
    row = Row("a:1", {"messages": chat("a?", "b"), "tools": [{"name": "find", "parameters": deep}]})
    (fault,) = build(CHATML).encode([row])
    assert isinstance(fault, InputError)
    assert str(fault) == "a:1: the row is nested too deep"


def test_the_fingerprint_is_the_same_in_every_process() -> None:
    """Sets have another order in each, unless the seed of their hashes is given."""
    program = (
        "from hp_core.data.chat.encoder import ChatEncoder, ChatSettings\n"
        "from hp_core.data.chat.formats import named_format\n"
        "from tests.data.chat.styles import STYLES\n"
        "for name in ('messages', 'sharegpt', 'alpaca', 'prompt_completion'):\n"
        "    print(ChatEncoder.of(ChatSettings(named_format(name)), STYLES['chatml'].tokenizer()).fingerprint)\n"
    )
    found = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split()
        for seed in ("1", "2")
    ]
    assert len(set(found[0])) == 4
    assert found[0] == found[1]


def test_whatever_changes_ids_or_masks_changes_the_fingerprint() -> None:
    prints = {
        build(CHATML).fingerprint,
        build(CHATML + "{# other #}").fingerprint,
        build(CHATML, train_on="last").fingerprint,
        build(CHATML, train_on="all").fingerprint,
        build(CHATML, has_weights=True).fingerprint,
        build(CHATML, "bytes", ("<s>", "<|im_end|>", "<|im_start|>")).fingerprint,
        ChatEncoder.of(ChatSettings(named_format("sharegpt")), STYLES["chatml"].tokenizer()).fingerprint,
    }
    assert len(prints) == 7
    assert build(CHATML).fingerprint == build(CHATML).fingerprint
