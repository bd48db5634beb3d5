from __future__ import annotations

import numpy as np
import pytest

from hp_core.data.fingerprint import document_hash
from hp_core.data.split import held_out
from hp_core.errors import ArgumentError


def split(texts: list[str], fraction: float) -> list[str]:
    hashes = np.array([document_hash(text.encode()) for text in texts], dtype=np.uint64)
    chosen = held_out(hashes, np.array([bool(text) for text in texts]), fraction)
    return [text for text, is_held in zip(texts, chosen, strict=True) if is_held]


TEXTS = [f"document {number}" for number in range(2000)]


@pytest.mark.parametrize(("fraction", "low", "high"), [(0.1, 160, 240), (0.5, 930, 1070), (0.02, 20, 65)])
def test_about_the_fraction_is_held_out(fraction: float, low: int, high: int) -> None:
    assert low <= len(split(TEXTS, fraction)) <= high


def test_the_choice_depends_on_the_text_alone() -> None:
    held = set(split(TEXTS, 0.1))
    assert set(split(TEXTS[::-1], 0.1)) == held
    assert set(split(TEXTS[:500], 0.1)) == held & set(TEXTS[:500])
    assert held < set(split(TEXTS, 0.2))


def test_at_least_one_document_with_text_is_held_out_with_all_its_copies() -> None:
    held = split(["", "a", "b", "c", "a", "b", "c"], 1e-9)
    assert len(held) == 2
    assert held[0] == held[1] != ""


def test_nothing_is_held_out_without_a_fraction() -> None:
    assert split(TEXTS, 0) == []


@pytest.mark.parametrize("texts", [["only"], ["same", "same", ""]])
def test_something_must_be_left_to_train_on(texts: list[str]) -> None:
    with pytest.raises(ArgumentError, match="leaves none to train on"):
        split(texts, 0.01)


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_a_fraction_is_from_zero_to_below_one(fraction: float) -> None:
    with pytest.raises(ArgumentError, match="validation_fraction"):
        split(TEXTS, fraction)
