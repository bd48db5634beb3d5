"""What is trained of a conversation is each answer and its stop token, whatever the template and the tokenizer."""

from __future__ import annotations

import unicodedata
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hp_core.data.chat.encoder import ChatEncoder, ChatSettings
from hp_core.data.chat.formats import named_format
from hp_core.data.records import Encoded, Row
from hp_core.errors import InputError
from hp_plugins.tokenizers.pretrained import PretrainedTokenizer
from tests.data.chat.styles import STYLES, Style, Turn

each_style = pytest.mark.parametrize("style", STYLES.values(), ids=lambda style: style.name)


def encoder(style: Style, **options: Any) -> ChatEncoder:
    return ChatEncoder.of(ChatSettings(named_format("messages"), **options), style.tokenizer())


def encode(built: ChatEncoder, turns: list[Turn], **fields: Any) -> Encoded:
    (one,) = built.encode([Row("a.jsonl:1", {"messages": turns, **fields})])
    if isinstance(one, InputError):
        raise one
    return one


def runs(tokenizer: PretrainedTokenizer, one: Encoded) -> list[str]:
    """The texts of the stretches of trained tokens, as they stand behind what comes before them."""
    assert one.trained is not None
    edges = np.flatnonzero(np.diff(np.concatenate([[False], one.trained, [False]]).astype(int)))
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
    if not style.strips:
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
@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(turns=conversations(), train_on=st.sampled_from(["assistant", "last"]))
def test_any_conversation_is_masked_exactly(style: Style, turns: list[Turn], train_on: Any) -> None:
    if not style.system:
        turns = [turn for turn in turns if turn["role"] != "system"]
    candidates = answers(turns) if train_on == "assistant" else answers(turns)[-1:]
    wanted = {number for number in candidates if turns[number].get("train") is not False}
    check(style, turns, wanted, encode(encoder(style, train_on=train_on), turns))
