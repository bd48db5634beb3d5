from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_core.spelling import did_you_mean, nearest


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("causl_lm", "causal_lm"),
        ("causal-lm", "causal_lm"),
        ("Causal_LM", "causal_lm"),
        ("sdg", "sgd"),
        ("completely different", None),
        ("", None),
    ],
)
def test_nearest_finds_one_slip(word: str, expected: str | None) -> None:
    assert nearest(word, ["sgd", "causal_lm", "muon"]) == expected


def test_nearest_of_nothing_is_none() -> None:
    assert nearest("adamw", []) is None


@given(st.lists(st.text(max_size=8), max_size=6), st.text(max_size=8), st.randoms(use_true_random=False))
def test_the_answer_is_a_choice_and_does_not_depend_on_the_order(choices: list[str], word: str, random) -> None:
    shuffled = random.sample(choices, len(choices))
    answer = nearest(word, choices)
    assert answer is None or answer in choices
    assert nearest(word, shuffled) == answer


def test_did_you_mean_quotes_the_choice_or_says_nothing() -> None:
    assert did_you_mean("adamv", ["adamw"]) == "did you mean 'adamw'?"
    assert did_you_mean("lion", ["adamw"]) == ""
