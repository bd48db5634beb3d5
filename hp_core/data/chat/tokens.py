"""The tokens of a rendered conversation, cut where a prompt ends, and which of them are trained."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from hp_core.data.chat.template import ChatTokenizer, PlacedTokens

# What a text may be encoded behind, to see how its first token looks when it doesn't begin a text.
_ANCHORS = ("\n", ".", "a")


class CutError(Exception):
    """A text that can't be cut at the end of a prompt; the text of the exception is the reason."""


class Cutter:
    """Encodes texts such that no token lies across the end of a prompt, as none does when an answer is generated."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.tokenizer = tokenizer
        one_stop = "|".join(re.escape(stop) for stop in sorted(tokenizer.stop_tokens, key=len, reverse=True)) or r"(?!)"
        self._special = re.compile(one_stop)

    def cut(self, text: str, boundaries: Iterable[int], whole: PlacedTokens) -> PlacedTokens:
        """The tokens `whole` of the text, those across a boundary replaced. Raises `CutError`."""
        across = [
            boundary for boundary in boundaries if bool(((whole.starts < boundary) & (whole.ends > boundary)).any())
        ]
        if not across:
            return whole
        pieces: list[PlacedTokens] = []
        begin = 0
        for boundary in across:
            match = self._special.search(text, boundary)
            end = len(text) if match is None else match.start()
            (left,) = self.tokenizer.place([text[begin:boundary]])
            pieces += [_moved(left, begin), _moved(self._continuation(text[boundary:end], left), boundary)]
            begin = end
        if begin < len(text):
            (rest,) = self.tokenizer.place([text[begin:]])
            pieces.append(_moved(rest, begin))
        return PlacedTokens(*(np.concatenate(arrays) for arrays in zip(*pieces, strict=True)))

    def _continuation(self, text: str, left: PlacedTokens) -> PlacedTokens:
        """The tokens of a text that goes on behind others, without the blank some tokenizers set before a text."""
        if not text:
            return PlacedTokens(*(array[:0] for array in left))
        before = self.tokenizer.spell(left.ids.tolist())
        for tokens in self._candidates(text):
            joined = self.tokenizer.spell([*left.ids.tolist(), *tokens.ids.tolist()])
            if _same(joined, before + text):
                return tokens
        raise CutError(
            f"a token of {self.tokenizer.name!r} holds the end of the prompt and the beginning of the answer"
            f" {text[:20]!r}, and the two can't be encoded apart"
        )

    def _candidates(self, text: str) -> Iterable[PlacedTokens]:
        (alone,) = self.tokenizer.place([text])
        yield alone
        for anchor in _ANCHORS:
            (both,) = self.tokenizer.place([anchor + text])
            behind = both.starts >= len(anchor)
            if not bool((both.ends[~behind] > len(anchor)).any()):
                yield _moved(PlacedTokens(*(array[behind] for array in both)), -len(anchor))


def covered(tokens: PlacedTokens, begin: int, end: int) -> NDArray[np.bool_]:
    """The tokens that hold a character of `[begin, end)`."""
    held: NDArray[np.bool_] = (tokens.starts < end) & (tokens.ends > begin)
    return held


def _moved(tokens: PlacedTokens, by: int) -> PlacedTokens:
    return PlacedTokens(tokens.ids, tokens.starts + by, tokens.ends + by)


def _same(one: str, other: str) -> bool:
    """Whether two texts differ in nothing but how their characters are composed, which tokenizers may change."""
    return one == other or unicodedata.normalize("NFC", one) == unicodedata.normalize("NFC", other)


def as_placed(ids: Sequence[int], offsets: Sequence[tuple[int, int]]) -> PlacedTokens:
    """Ids and their `(start, end)` as arrays."""
    places = np.fromiter(chain.from_iterable(offsets), dtype=np.int64, count=2 * len(ids)).reshape(-1, 2)
    return PlacedTokens(np.array(ids, dtype=np.int64), places[:, 0], places[:, 1])
