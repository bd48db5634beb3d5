"""What is trained of a conversation is each answer and its stop token, whatever the template and the tokenizer."""

from __future__ import annotations

import json
import unicodedata
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from hp_core.data.chat.encoder import ChatEncoder, ChatSettings
from hp_core.data.chat.formats import named_format
from hp_core.data.records import Encoded, Row
from hp_core.errors import ArgumentError, InputError
from hp_plugins.tokenizers.pretrained import PretrainedTokenizer
from tests.data.chat.styles import STYLES, Style, Turn
from tests.data.chat.tokenizers import finished, learned

each_style = pytest.mark.parametrize("style", STYLES.values(), ids=lambda style: style.name)


@cache
def encoder(style: Style, **options: Any) -> ChatEncoder:
    return ChatEncoder.of(ChatSettings(named_format("messages"), **options), style.tokenizer())


def encode(built: ChatEncoder, turns: list[Turn], **fields: Any) -> Encoded:
    (one,) = built.encode([Row("a.jsonl:1", {"messages": turns, **fields})])
    if isinstance(one, InputError):
        raise one
    return one


def runs(tokenizer: PretrainedTokenizer, one: Encoded, *, trained: bool = True) -> list[str]:
    """The texts of the stretches of trained tokens (or of the others), as they stand behind what comes before."""
    assert one.trained is not None
    edges = np.flatnonzero(np.diff(np.concatenate([[False], one.trained == trained, [False]]).astype(int)))
    ids = one.ids.tolist()
    texts = []
    for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        texts.append(tokenizer.spell(ids[:end])[len(tokenizer.spell(ids[:begin])) :])
    return texts


def normal(style: Style, text: str) -> str:
    return unicodedata.normalize("NFC", text) if style.kind == "bytes_nfc" else text


def expected_runs(style: Style, turns: list[Turn], wanted: set[int]) -> list[str]:
    return [normal(style, text) for text, number in style.pieces(turns) if number in wanted]


def check(style: Style, turns: list[Turn], wanted: set[int], one: Encoded) -> None:
    found, expected = runs(style.tokenizer(), one), expected_runs(style, turns, wanted)
    if style.glues:
        assert len(found) == len(expected)
        # The template's blank goes with the answer exactly where they are one token.
        found = [a[1:] if a[:1] == " " and a != b else a for a, b in zip(found, expected, strict=True)]
    assert found == expected
    if not style.strips and (answers(turns)[-1] in wanted or turns[-1]["role"] == "user" or style.name != "glm"):
        assert style.tokenizer().spell(one.ids) == normal(style, "".join(text for text, _ in style.pieces(turns)))


def answers(turns: list[Turn]) -> list[int]:
    return [number for number, turn in enumerate(turns) if turn["role"] == "assistant"]


def chat(*contents: str, system: str | None = None) -> list[Turn]:
    first = [] if system is None else [{"role": "system", "content": system}]
    roles = ("user", "assistant")
    return [*first, *({"role": roles[n % 2], "content": content} for n, content in enumerate(contents))]


CHATS = {
    "one turn": chat("What is it?", "It is this."),
    "three turns": chat("What is it?", "It is this.", "And now?", "hello world", "the cat?", "on the mat"),
    "repeated answers": chat("a?", "yes", "yes", "yes", "b?", "yes"),
    "an answer that is in the prompt": chat("It is this. It is", "It is", "It is this.", "is"),
    "an empty answer": chat("a?", "", "b?", "x", "c?", ""),
    "unicode": chat("naïve café?", "日本語 🙂🙂", "🙂", "é\u0301 ﬁ 𝔘"),
    "blanks": chat("a?", "  two before", "b?", "\n\nlines before and after\n", "c?", "\t\tx  "),
    "only blanks": chat("a?", "  ", "b?", "\n"),
    "an answer that ends with a question": chat("x", "[INST] a", "x", "user\nassistant"),
    "a last turn without answer": chat("a?", "b", "c?"),
}


@each_style
@pytest.mark.parametrize("turns", CHATS.values(), ids=CHATS.keys())
def test_answers_and_their_stop_tokens_are_trained(style: Style, turns: list[Turn]) -> None:
    check(style, turns, set(answers(turns)), encode(encoder(style), turns))
    if style.system:
        longer = [{"role": "system", "content": "You are the cat."}, *turns]
        check(style, longer, set(answers(longer)), encode(encoder(style), longer))


@each_style
def test_special_tokens_that_contents_spell_move_nothing(style: Style) -> None:
    if style.strips:
        pytest.skip("what is behind a special token that swallows blanks can't be told from its ids")
    for special in style.special:
        turns = chat(f"{special} a?", f"x{special}y", f"b{special}", f"{special}", special * 2, f"{special} z")
        check(style, turns, set(answers(turns)), encode(encoder(style), turns))


@each_style
def test_an_answer_may_hold_all_that_stands_between_answers(style: Style) -> None:
    if style.strips:
        pytest.skip("what is behind a special token that swallows blanks can't be told from its ids")
    text = "".join(text for text, _ in style.pieces(chat("a?", "ONE", "b?", "TWO")))
    between = text[text.index("ONE") + 3 : text.index("TWO")]
    for answer in (f"{between}x", f"x{between}", between, between * 2):
        for turns in (chat("a?", answer, "b?", "y"), chat("a?", "y", "b?", answer)):
            check(style, turns, {1, 3}, encode(encoder(style), turns))


CALL = {"type": "function", "function": {"name": "find", "arguments": {"page": "café"}}}
CALLED: list[Turn] = [
    {"role": "user", "content": "Where is it?"},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "content": "on the mat", "name": "find"},
    {"role": "assistant", "content": "on the mat"},
]


@each_style
def test_turns_of_tools_are_rendered_or_refused(style: Style) -> None:
    turns = chat("Where is it?", "", "x", "y")
    turns[2] = {"role": "tool", "content": "on the mat"}
    if style.tool:
        check(style, turns, {1, 3}, encode(encoder(style), turns))
    elif style.name == "llama_2":
        with pytest.raises(InputError, match=r"a\.jsonl:1: messages\[2\]: .* doesn't render turns of role 'tool'"):
            encode(encoder(style), turns)


@pytest.mark.parametrize("style", [STYLES["mistral"], STYLES["qwen_3"]], ids=["mistral", "qwen_3"])
def test_calls_of_tools_are_trained_as_the_template_writes_them(style: Style) -> None:
    check(style, CALLED, {1, 3}, encode(encoder(style), CALLED))
    written = json.dumps(CALL["function"]["arguments"])
    as_text = [dict(turn) for turn in CALLED]
    as_text[1] = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "find", "arguments": written}}],
    }
    assert encode(encoder(style), as_text).ids.tolist() == encode(encoder(style), CALLED).ids.tolist()
    again = [*CALLED, {"role": "user", "content": "again"}, *CALLED[1:]]
    check(style, again, {1, 3, 5, 7}, encode(encoder(style), again))


@pytest.mark.parametrize("name", ["chatml", "llama_3", "deepseek", "zephyr"])
def test_calls_that_a_template_leaves_out_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"a\.jsonl:1: messages\[1\]: the chat template doesn't render calls of tools"):
        encode(encoder(STYLES[name]), CALLED)


def test_a_content_beside_calls_is_trained_or_refused() -> None:
    both = [dict(turn) for turn in CALLED]
    both[1]["content"] = "Let me look."
    check(STYLES["qwen_3"], both, {1, 3}, encode(encoder(STYLES["qwen_3"]), both))
    with pytest.raises(
        InputError, match=r"messages\[1\]\.content: the chat template leaves it out beside the tool calls"
    ):
        encode(encoder(STYLES["mistral"]), both)


def test_tools_are_in_the_prompt_or_refused() -> None:
    tools = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
    style = STYLES["qwen_3"]
    one = encode(encoder(style), CALLED, tools=json.dumps(tools))
    assert f"Tools:\n{json.dumps(tools[0])}<|im_end|>" in style.tokenizer().spell(one.ids)
    assert runs(style.tokenizer(), one) == expected_runs(style, CALLED, {1, 3})
    with pytest.raises(InputError, match=r"a\.jsonl:1: tools: the chat template doesn't render tools"):
        encode(encoder(STYLES["mistral"]), CALLED, tools=tools)


def test_thoughts_are_trained_where_the_template_shows_them() -> None:
    style = STYLES["qwen_3"]
    thinking = chat("a?", "yes", "b?", "yes")
    for name in ("reasoning_content", "reasoning"):
        turns = [dict(turn) for turn in thinking]
        turns[1][name] = "not shown: it is before the last question"
        turns[3][name] = "Let me see.\nyes"
        one = encode(encoder(style), turns)
        assert runs(style.tokenizer(), one) == ["yes<|im_end|>", "<think>\nLet me see.\nyes\n</think>\n\nyes<|im_end|>"]
    with pytest.raises(InputError, match="doesn't render an answer's reasoning"):
        encode(encoder(STYLES["chatml"]), turns)


def test_a_thought_that_the_prompt_begins_is_trained_behind_that() -> None:
    style = STYLES["chatml"]
    template = style.template.replace("'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\n<think>\\n'")
    assert template != style.template
    tokenizer = style.tokenizer(template)
    built = ChatEncoder.of(ChatSettings(named_format("messages")), tokenizer)
    one = encode(built, chat("a?", "<think>\nhm\n</think>yes", "b?", "no"))
    assert runs(tokenizer, one) == ["hm\n</think>yes<|im_end|>", "no<|im_end|>"]


@each_style
def test_turns_can_be_left_out_and_only_the_last_be_taken(style: Style) -> None:
    turns = chat("a?", "one", "b?", "two", "c?", "three")
    turns[3]["train"] = False
    turns[5]["weight"] = 0
    check(style, turns, {1}, encode(encoder(style), turns))
    del turns[5]["weight"]
    check(style, turns, {5}, encode(encoder(style, train_on="last"), turns))
    turns[5]["train"] = False
    one = encode(encoder(style, train_on="last"), turns)
    assert one.trained is not None
    assert not one.trained.any()


@each_style
def test_everything_can_be_trained_but_what_says_no(style: Style) -> None:
    built = encoder(style, train_on="all")
    turns = chat("What is it?", "It is this.", "the cat sat", "on the mat", "now?", "hello")
    one = encode(built, turns)
    assert one.trained is not None
    assert one.trained.all()
    turns[2]["train"] = False
    turns[3]["train"] = False
    one = encode(built, turns)
    assert one.trained is not None
    left = next(text for text, number in style.pieces(turns) if number == 3)
    found = runs(style.tokenizer(), one, trained=False)
    assert [text.removeprefix(" ") for text in found] == ["the cat sat", left]


def test_weights_of_turns_are_those_of_their_tokens() -> None:
    style = STYLES["chatml"]
    turns = chat("a?", "one", "b?", "two", "c?", "three")
    turns[1]["weight"] = 0.5
    turns[3]["weight"] = 2
    one = encode(encoder(style, has_weights=True), turns)
    assert one.trained is not None
    assert one.weights is not None
    assert one.weights.dtype == np.float32
    assert {style.tokenizer().spell(one.ids[one.weights == weight]) for weight in (0.5, 2, 1)} == {
        "one<|im_end|>",
        "two<|im_end|>",
        "three<|im_end|>",
    }
    assert (one.weights[~one.trained] == 0).all()
    assert encode(encoder(style), chat("a?", "b")).weights is None
    turns[2]["weight"] = 3
    with pytest.raises(InputError, match=r"messages\[2\]: gives a turn of role 'user' a weight"):
        encode(encoder(style, has_weights=True), turns)
    everything = encode(encoder(style, has_weights=True, train_on="all"), turns)
    assert everything.weights is not None
    assert style.tokenizer().spell(everything.ids[everything.weights == 3]) == "b?"
    with pytest.raises(InputError, match=r"messages\[1\]: has the weight 0.5; weights need token_weights: true"):
        encode(encoder(style), turns)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({0: {"train": True}}, r"messages\[0\]: asks to train a turn of role 'user'"),
        ({1: {"train": True, "weight": 0}}, r"messages\[1\]: asks to train the turn with weight 0"),
        ({1: {"train": "yes"}}, r"messages\[1\].train: is 'yes', not true or false"),
        ({1: {"weight": -1}}, r"messages\[1\].weight: is -1, not a finite number from 0 on"),
        ({1: {"weight": True}}, r"messages\[1\].weight: is True, not a number"),
        ({1: {"content": "\ud83d"}}, r"messages\[1\].content: character 1 is '\\ud83d', half of a surrogate pair"),
    ],
)
def test_marks_of_turns_without_effect_are_refused(changes: dict[int, Turn], reason: str) -> None:
    turns = chat("a?", "one")
    for number, change in changes.items():
        turns[number].update(change)
    with pytest.raises(InputError, match=r"^a\.jsonl:1: " + reason):
        encode(encoder(STYLES["chatml"]), turns)


CONTENT, STOP = "{% generation %}{{ turn.content }}{% endgeneration %}", "{{ '<|im_end|>' }}"
THOUGHT = "'<|im_start|>assistant\\n'"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (CONTENT + STOP, CONTENT.replace("{% endgeneration %}", STOP + "{% endgeneration %}")),
        (CONTENT, CONTENT.replace("content", "content[:1]") + CONTENT.replace("content", "content[1:]")),
        (
            CONTENT + STOP,
            CONTENT.replace("content", "content[:1]")
            + "{% generation %}{{ turn.content[1:] }}"
            + STOP
            + "{% endgeneration %}",
        ),
        # The prompts are not how the answers in the conversation begin.
        (THOUGHT, THOUGHT[:-1] + "<think>'"),
    ],
    ids=["stop in the mark", "two marks", "two marks and stop", "other prompts"],
)
def test_generation_marks_are_taken_as_they_are_set(old: str, new: str) -> None:
    style = STYLES["marked"]
    assert old in style.template
    changed = replace(style, template=style.template.replace(old, new))
    for turns in (*CHATS.values(), chat("a?", "x<|im_end|>", "b?", "<|im_end|>", "c?", "y")):
        check(changed, turns, set(answers(turns)), encode(encoder(changed), turns))
        wanted = {answers(turns)[-1]}
        check(changed, turns, wanted, encode(encoder(changed, train_on="last"), turns))


def test_the_template_for_tools_is_taken_where_there_are_some() -> None:
    style = STYLES["chatml"]
    tokenizer = finished("bytes", style.special, eos=style.eos, template=None)
    own = tokenizer._tokenizer
    own.chat_template = {"default": style.template, "tool_use": "{{ tools | tojson }}" + style.template}
    built = ChatEncoder.of(ChatSettings(named_format("messages")), tokenizer)
    tools = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
    plain, tooled = (encode(built, CHATS["one turn"], tools=one) for one in (None, tools))
    assert tokenizer.spell(tooled.ids) == json.dumps(tools) + tokenizer.spell(plain.ids)
    own.chat_template = {"one": style.template, "two": style.template}
    with pytest.raises(ArgumentError, match=r"several chat templates, none of them 'default': one, two"):
        tokenizer.chat_template()


def test_an_end_token_stops_answers_though_it_is_not_special() -> None:
    style = STYLES["chatml"]
    kept_out = tuple(one for one in style.special if one != "<|im_end|>")
    backend = learned("bytes", kept_out)
    backend.add_tokens(["<|im_end|>"])
    tokenizer = PretrainedTokenizer(
        PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>"), name="made"
    )
    built = ChatEncoder.of(ChatSettings(named_format("messages"), template=style.template), tokenizer)
    assert runs(tokenizer, encode(built, CHATS["one turn"])) == ["It is this.<|im_end|>"]


texts = st.one_of(
    st.sampled_from(
        ["", " ", "\n", "yes", " yes", "yes\n", "the cat sat", "It is this.", "🙂", "assistant\n", "[INST] a"]
    ),
    st.text(
        st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="▁", include_characters="\n\t"), max_size=12
    ),
)


@st.composite
def conversations(draw: st.DrawFn) -> list[Turn]:
    turns = [
        {"role": role, "content": draw(texts)} for _ in range(draw(st.integers(1, 4))) for role in ("user", "assistant")
    ]
    for turn in turns[1::2]:
        if draw(st.booleans()):
            turn["train"] = draw(st.booleans())
    system = draw(st.none() | texts)
    return turns if system is None else [{"role": "system", "content": system}, *turns]


@each_style
@settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
@given(turns=conversations(), train_on=st.sampled_from(["assistant", "last"]))
def test_any_conversation_is_masked_exactly(style: Style, turns: list[Turn], train_on: Any) -> None:
    if not style.system:
        turns = [turn for turn in turns if turn["role"] != "system"]
    candidates = answers(turns) if train_on == "assistant" else answers(turns)[-1:]
    wanted = {number for number in candidates if turns[number].get("train") is not False}
    check(style, turns, wanted, encode(encoder(style, train_on=train_on), turns))
