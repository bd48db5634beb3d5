"""Sequences cut among ranks: every token and target once, and attention that sees what it would see uncut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_core.data.protocols import IGNORED_LABEL
from hp_core.parallel.context.sequence import SLICE, SequenceSlice, cut, slices_of


class Group:
    """As much of a process group as cutting needs."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks

    def size(self) -> int:
        return self.num_ranks


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_each_position_is_held_once_and_by_equal_parts(balanced, num_ranks):
    parts = slices_of(24, num_ranks, balanced=balanced)
    assert sorted(torch.cat(parts).tolist()) == list(range(24))
    assert {len(part) for part in parts} == {24 // num_ranks}


def test_head_and_tail_by_hand():
    assert [part.tolist() for part in slices_of(8, 2, balanced=True)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [part.tolist() for part in slices_of(8, 2, balanced=False)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_balanced_parts_have_the_same_work(num_ranks):
    work = [int((part + 1).sum()) for part in slices_of(32, num_ranks, balanced=True)]
    assert len(set(work)) == 1
    uneven = [int((part + 1).sum()) for part in slices_of(32, num_ranks, balanced=False)]
    assert uneven == sorted(uneven)
    assert uneven[-1] > work[0]


@st.composite
def batches(draw):
    length = draw(st.integers(2, 17))
    starts = draw(st.lists(st.booleans(), min_size=length, max_size=length))
    positions, count = [], 0
    for index, is_start in enumerate(starts):
        count = 0 if is_start or index == 0 else count + 1
        positions.append(count)
    labels = draw(st.lists(st.sampled_from([IGNORED_LABEL, 1, 2, 3]), min_size=length, max_size=length))
    return torch.tensor([positions]), torch.tensor([labels])


@settings(max_examples=60, deadline=None)
@given(batches(), st.sampled_from([2, 3, 4]), st.booleans(), st.sampled_from([None, 1, 3]))
def test_tokens_targets_and_attention_are_those_of_the_whole(batch, num_ranks, balanced, window):
    positions, labels = batch
    length = labels.shape[1]
    ids = torch.arange(length)[None]
    columns = torch.arange(length)[None].float()
    seen: dict[int, tuple[int, int, float, list[int]]] = {}
    for rank in range(num_ranks):
        model_inputs, loss_inputs = cut(
            {"input_ids": ids, "position_ids": positions, "use_cache": False},
            {"labels": labels, "w": columns, "sample_ids": torch.tensor([7])},
            rank=rank,
            group=Group(num_ranks),
            balanced=balanced,
        )
        part = model_inputs[SLICE]
        assert isinstance(part, SequenceSlice)
        assert model_inputs["use_cache"] is False
        assert loss_inputs["sample_ids"].tolist() == [7]
        mask = part.mask(window)
        assert mask.shape == (1, 1, len(part.positions), len(part.all_positions))
        for place, position in enumerate(part.positions.tolist()):
            if position >= length:
                assert loss_inputs["labels"][0, place] == IGNORED_LABEL
                assert loss_inputs["is_padding"][0, place]
                continue
            assert position not in seen
            sees = sorted(part.all_positions[mask[0, 0, place]].tolist())
            seen[position] = (
                int(model_inputs["input_ids"][0, place]),
                int(loss_inputs["labels"][0, place]),
                float(loss_inputs["w"][0, place]),
                sees,
            )
            assert model_inputs["position_ids"][0, place] == positions[0, position]
    assert sorted(seen) == list(range(length))
    for position, (token, label, column, sees) in seen.items():
        assert (token, label, column) == (position, int(labels[0, position]), float(position))
        start = position - int(positions[0, position])
        first = start if window is None else max(start, position - window + 1)
        assert sees == list(range(first, position + 1))


def test_lengths_that_divide_are_not_padded():
    inputs = {"input_ids": torch.ones(2, 8), "position_ids": torch.arange(8).expand(2, 8)}
    _, loss_inputs = cut(inputs, {"labels": torch.ones(2, 8)}, rank=0, group=Group(2), balanced=True)
    assert set(loss_inputs) == {"labels"}
    assert loss_inputs["labels"].shape == (2, 4)


def test_rows_that_fill_up_stay_padding_where_the_length_is_padded():
    inputs = {"input_ids": torch.ones(2, 3), "position_ids": torch.arange(3).expand(2, 3)}
    loss_inputs = {"labels": torch.full((2, 3), 5), "sample_ids": torch.tensor([4, -1])}
    parts = [cut(inputs, loss_inputs, rank=rank, group=Group(2), balanced=False)[1] for rank in (0, 1)]
    is_padding = torch.cat([part["is_padding"] for part in parts], dim=1)
    assert is_padding.tolist() == [[False, False, False, True], [True, True, True, True]]
