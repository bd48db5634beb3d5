"""Models of images and text give the numbers of one process on any layout, whichever ranks have images."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.equivalence.images import ImageCase, images_on, transformers_on
from tests.equivalence.layouts import Found, Layout, assert_same

CASES = {
    "qwen3_vl": ImageCase("qwen3_vl"),
    "qwen3_vl_moe": ImageCase("qwen3_vl_moe"),
}
DENSE = {
    "2 micro-batches": Layout(num_micro_batches=2),
    "4 micro-batches": Layout(num_micro_batches=4),
    "fsdp 2": Layout(2),
    "fsdp 2, 2 micro-batches": Layout(2, num_micro_batches=2),
    "fsdp 4": Layout(4),
    "tp 2": Layout(2, {"tp_size": 2}),
    "cp 2": Layout(2, {"cp_size": 2}),
    "cp 2 contiguous": Layout(2, {"cp_size": 2, "cp_layout": "contiguous"}),
    "cp 2 ring": Layout(2, {"cp_size": 2, "cp_method": "ring"}),
    "cp 2 ulysses": Layout(2, {"cp_size": 2, "cp_method": "ulysses"}),
    "fsdp 2 x tp 2": Layout(4, {"tp_size": 2}),
    "fsdp 2 x cp 2": Layout(4, {"cp_size": 2}),
}
EXPERTS = {
    "fsdp 2, ep 2": Layout(2, {"ep_size": 2}),
    "fsdp 4, ep 2": Layout(4, {"ep_size": 2}),
    "tp 2, ep 2": Layout(2, {"tp_size": 2, "ep_size": 2}),
    "cp 2, ep 2": Layout(2, {"cp_size": 2, "ep_size": 2}),
}


@cache
def alone(family: str) -> Found:
    return images_on(CASES[family], Layout())


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *(("qwen3_vl", layout) for layout in DENSE),
        *(("qwen3_vl_moe", layout) for layout in (*DENSE, *EXPERTS)),
    ],
)
def test_a_layout_gives_the_numbers_of_one_process(family: str, layout: str) -> None:
    assert_same(images_on(CASES[family], {**DENSE, **EXPERTS}[layout]), alone(family))


@pytest.mark.parametrize("family", CASES)
def test_every_part_of_the_vision_tower_is_trained(family: str) -> None:
    gradients = alone(family).gradients
    towers = {name: value for name, value in gradients.items() if name.startswith("model.visual.")}
    assert any("deepstack" in name for name in towers)
    assert any("merger" in name for name in towers)
    # A constant added to all keys changes no attention, so the part of the bias that does that has no gradient.
    assert [name for name, value in towers.items() if float(value.abs().max()) < 1e-6] == []


@pytest.mark.parametrize("family", CASES)
def test_rows_without_images_leave_the_tower_as_it_is(family: str) -> None:
    """A blank image adds exactly nothing, and the tower's gradients are zero, not missing."""
    without = ImageCase(family, images=((), (), (), ()))
    one, two = images_on(without, Layout()), images_on(without, Layout(2))
    text_only = images_on(ImageCase(family, images=((), (), (), ()), blank=False), Layout())
    assert one.loss == text_only.loss
    for name, value in text_only.gradients.items():
        assert torch.equal(one.gradients[name], value), name
    towers = {name for name in one.gradients if name.startswith("model.visual.")}
    assert towers == set(one.gradients) - set(text_only.gradients)
    for found in (one, two):
        assert all(not found.gradients[name].any() for name in towers)
    assert_same(two, one)


@pytest.mark.parametrize("family", CASES)
def test_one_process_gives_the_numbers_of_transformers(family: str) -> None:
    """Rows of two documents each, against transformers' own model on each document alone, positions left to it."""
    case = ImageCase(family, images=((0, 1), (2,), (), (1, 2)))
    found = images_on(case, Layout())
    wanted, gradients = transformers_on(case)
    assert found.loss == pytest.approx(wanted, abs=1e-6)
    for name, value in gradients.items():
        torch.testing.assert_close(found.gradients[name], value, atol=1e-6, rtol=1e-4)
