"""Layers that are compiled, on every layout, against one process that runs them as they are written."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch._dynamo import lookup_backend
from torch._dynamo.backends.registry import register_backend

from hp_core.config.compile import CompileConfig
from hp_core.config.models import AcceleratorConfig
from hp_core.model.compile import compile_settings, compiler_of
from hp_core.parallel.environment import ProcessEnvironment
from hp_core.testing.ranks import run_ranks
from hp_core.training.compiling import Compilations
from tests.equivalence.layouts import WITH_FAMILIES, Case, Found, Layout, Trial, _merged, _setup, assert_same, found_on

# More than torch compiles versions of a function: layers that are alike must share one.
NUM_LAYERS = 9
TP2, EP2 = {"tp_size": 2}, {"ep_size": 2}
SP2 = {**TP2, "sequence_parallel": True}
RING = {"cp_size": 2, "cp_method": "ring"}
ZERO_BUBBLE = {"pp_size": 2, "pp_schedule": "zbv_zero_bubble"}


Outcome = tuple[Found, Mapping[str, Any]]


def step(environment: ProcessEnvironment, case: Case, layout: Layout, cache_dir: str) -> Outcome:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache_dir
    settings = CompileConfig(mode="default", backend="aot_eager")
    accelerator = AcceleratorConfig.model_validate(layout.accelerator)
    with compile_settings(settings, accelerator), _setup(environment, layout) as setup:
        trial = Trial(setup, case, layout)
        compiler = compiler_of(trial.model)
        assert compiler is not None
        compilations = Compilations(compiler)
        found = trial.found()
        compilations.read()
        return found, compilations.facts()


@cache
def alone() -> Found:
    return found_on(case(), Layout())


def case() -> Case:
    return Case("qwen3_moe", config={"num_hidden_layers": NUM_LAYERS})


def compiled_alike(layout: Layout, cache_dir: str = "") -> Mapping[str, Any]:
    """What rank 0 compiled, after the numbers were found to be those of one process that compiles nothing."""
    preload = (*WITH_FAMILIES, __name__)
    by_rank = run_ranks(step, layout.num_ranks, case(), layout, cache_dir, timeout=300.0, preload=preload)
    assert_same(Found(*_merged([found for found, _ in by_rank])), alone())
    assert all(facts["failures"] == facts["given_up"] == {} for _, facts in by_rank)
    return by_rank[0][1]


def on(num_ranks: int, accelerator: dict[str, Any] | None = None, **values: Any) -> Layout:
    return Layout(num_ranks, accelerator or {}, **{"backend": "aot_eager", **values})


WHOLE = {
    "one process": on(1),
    "fsdp2, again": on(2, checkpointing="full"),
    "tp2, sequence parallel, selective": on(2, SP2, checkpointing="selective"),
    "cp2": on(2, {"cp_size": 2}),
    "pp2, zero bubble": on(2, ZERO_BUBBLE, num_micro_batches=4),
    "one process, again": on(1, checkpointing="full"),
    "one process, selective": on(1, checkpointing="selective"),
    "fsdp2, selective": on(2, checkpointing="selective", num_micro_batches=2),
    "tp2": on(2, TP2),
    "fsdp2, swapped": on(2, swapping=True),
    "fsdp2, swapped, again": on(2, swapping=True, checkpointing="full"),
    "fsdp2, swapped, selective": on(2, swapping=True, checkpointing="selective"),
    "tp2, again": on(2, TP2, checkpointing="full"),
    "cp2, ulysses, selective": on(2, {"cp_size": 2, "cp_method": "ulysses"}, checkpointing="selective"),
    "pp2, selective": on(2, {"pp_size": 2}, num_micro_batches=2, checkpointing="selective"),
    "fsdp2 x tp2, again": on(4, TP2, checkpointing="full"),
}
CORE = ("one process", "fsdp2, again", "tp2, sequence parallel, selective", "cp2", "pp2, zero bubble")


def beyond(names: Iterable[str], core: Container[str]) -> list[Any]:
    return [name if name in core else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", beyond(WHOLE, CORE))
def test_layers_share_one_graph_and_compute_the_same(name: str) -> None:
    facts = compiled_alike(WHOLE[name])
    own = NUM_LAYERS if "pp" not in name else facts["modules"]
    assert (facts["modules"], facts["graphs"], facts["graph_breaks"]) == (own, 1, {})


# Where, and why, a layer is more than one graph.
IN_PIECES = {
    "ep2": (on(2, EP2), "modeling_qwen3_moe.py"),
    "ep2, again": (on(2, EP2, checkpointing="full"), "modeling_qwen3_moe.py"),
    "cp2, ring": (on(2, RING), "attention.py"),
    "cp2, ring, again": (on(2, RING, checkpointing="full"), "attention.py"),
}


@pytest.mark.parametrize("name", beyond(IN_PIECES, ("ep2, again", "cp2, ring")))
def test_what_can_not_be_compiled_is_told_and_the_rest_is_compiled(name: str) -> None:
    layout, place = IN_PIECES[name]
    facts = compiled_alike(layout)
    (told,) = facts["graph_breaks"]
    assert place in told.partition(": ")[0]
    # Of a layer, what is before and what is after, and no more however many there are.
    assert 2 <= facts["graphs"] <= 5


@pytest.mark.parametrize("checkpointing", ["off", pytest.param("full", marks=pytest.mark.slow)])
def test_tensor_ranks_drop_what_they_drop_without(checkpointing: str) -> None:
    dropping = Case("qwen3", config={"num_hidden_layers": NUM_LAYERS, "attention_dropout": 0.2})
    layout = on(2, TP2, checkpointing=checkpointing)
    by_rank = run_ranks(step, 2, dropping, layout, "", timeout=300.0, preload=(*WITH_FAMILIES, __name__))
    wanted = found_on(dropping, replace(layout, backend=None))
    assert_same(Found(*_merged([found for found, _ in by_rank])), wanted)
    assert wanted.loss != found_on(replace(dropping, config={"num_hidden_layers": NUM_LAYERS}), Layout()).loss
    facts = by_rank[0][1]
    assert facts["failures"] == facts["given_up"] == {}
    assert "random_numbers.py" in str(facts["graph_breaks"])


def step_that_one_can_not_compile(environment: ProcessEnvironment) -> Outcome:
    @register_backend(name="fails_on_the_last")
    def fails(graph: Any, inputs: Any) -> Any:
        if environment.rank == environment.world_size - 1:
            raise NotImplementedError("no code here")
        return lookup_backend("aot_eager")(graph, inputs)

    return step(environment, case(), on(environment.world_size, SP2, backend="fails_on_the_last"), "")


def test_a_rank_that_alone_runs_layers_as_they_are_written_computes_with_the_others() -> None:
    by_rank = run_ranks(step_that_one_can_not_compile, 2, timeout=200.0, preload=(*WITH_FAMILIES, __name__))
    assert_same(Found(*_merged([found for found, _ in by_rank])), alone())
    assert [facts["graphs"] for _, facts in by_rank] == [1, 0]
    failures = {"NotImplementedError: no code here": "model.layers.0"}
    assert [facts["failures"] for _, facts in by_rank] == [{}, failures]


INDUCTOR = {
    "one process": on(1),
    "fsdp2, again": on(2, checkpointing="full"),
    "tp2, sequence parallel, selective": on(2, SP2, checkpointing="selective"),
    "cp2": on(2, {"cp_size": 2}),
    "ep2": on(2, EP2),
    "pp2": on(2, {"pp_size": 2}, num_micro_batches=2),
    "fsdp2 x tp2": on(4, TP2),
}


@pytest.mark.parametrize("name", beyond(INDUCTOR, ()))
def test_inductor_computes_the_same(name: str, tmp_path: Path) -> None:
    facts = compiled_alike(replace(INDUCTOR[name], backend="inductor"), str(tmp_path))
    assert facts["from_cache"] + facts["not_in_cache"] > 0
