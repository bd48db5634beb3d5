"""bf16 with float32 master weights on every layout: no further from float32 than one process that computes in bf16."""

from functools import cache

import pytest
import torch

from tests.equivalence.layouts import Case, Found, Layout, beyond, found_on

LAYOUTS = {
    "two micro-batches": Layout(1, num_micro_batches=2),
    "fsdp2": Layout(2),
    "fsdp2, two micro-batches": Layout(2, num_micro_batches=2),
    "hsdp": Layout(2, fsdp={"dp_replicate_size": 2}),
    "tp2": Layout(2, {"tp_size": 2}),
    "tp2, sequence and loss parallel": Layout(2, {"tp_size": 2, "sequence_parallel": True, "loss_parallel": True}),
    "cp2": Layout(2, {"cp_size": 2}),
    "cp2, ring": Layout(2, {"cp_size": 2, "cp_method": "ring"}),
    "cp2, ulysses": Layout(2, {"cp_size": 2, "cp_method": "ulysses"}),
    "ep2": Layout(2, {"ep_size": 2}),
    "pp2": Layout(2, {"pp_size": 2}, num_micro_batches=2),
    "fsdp2 x tp2": Layout(4, {"tp_size": 2}),
    "recomputed": Layout(2, checkpointing="full"),
}
CORE = ("two micro-batches", "fsdp2", "tp2", "cp2", "ep2", "pp2", "fsdp2 x tp2")


def in_bf16(layout: Layout) -> Layout:
    fields = (layout.num_ranks, layout.accelerator, layout.fsdp, layout.num_micro_batches, layout.checkpointing)
    return Layout(*fields, param_dtype="bfloat16")


DENSE = "llama"
# Each token goes to every expert: rounding can't send it elsewhere.
MIXTURE = "qwen3_moe"
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 4}


def case(family: str) -> Case:
    return Case(family, config=EXPERTS if family == MIXTURE else {})


@cache
def alone(family: str) -> Found:
    return found_on(case(family), Layout())


@cache
def alone_in_bf16(family: str) -> Found:
    return found_on(case(family), in_bf16(Layout()))


def distance(found: Found, exact: Found) -> dict[str, float]:
    """How far each gradient is from the exact one, as a share of its length."""
    assert set(found.gradients) == set(exact.gradients)
    return {
        name: float((found.gradients[name] - gradient).norm() / gradient.norm())
        for name, gradient in exact.gradients.items()
    }


@pytest.mark.parametrize("name", beyond(LAYOUTS, *CORE))
def test_a_layout_is_as_near_to_float32_as_one_process(name: str) -> None:
    family = MIXTURE if "ep2" in name else DENSE
    exact, usual = alone(family), distance(alone_in_bf16(family), alone(family))
    found = found_on(case(family), in_bf16(LAYOUTS[name]))
    assert {gradient.dtype for gradient in found.gradients.values()} == {torch.float32}
    # The loss is a float32 one of logits that were rounded to 8 bits.
    assert found.loss != exact.loss
    assert abs(found.loss - exact.loss) <= 2e-3 * exact.loss
    # Rounding differs by the order of sums, so single tensors may be a little worse, and all together are not.
    distances = distance(found, exact)
    assert max(distances.values()) <= 0.05
    assert {name: value for name, value in distances.items() if value > 2.5 * usual[name] + 2e-3} == {}
    assert sum(distances.values()) <= 1.3 * sum(usual.values())
