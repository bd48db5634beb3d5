"""Steps of a tiny model on any layout of ranks: losses, every gradient and the weights, whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from hp_core.config.compile import CompileConfig
from hp_core.config.memory import ActivationCheckpointConfig, ActivationSwapConfig
from hp_core.config.models import AcceleratorConfig, FsdpConfig, MixedPrecisionConfig
from hp_core.config.peft import PeftConfig
from hp_core.config.plan_override import PlanOverride
from hp_core.model.activation_swap import swap_of
from hp_core.model.compile import start_compiling
from hp_core.model.tiny import tiny_config
from hp_core.parallel.context.sequence import own_part
from hp_core.parallel.environment import ProcessEnvironment
from hp_core.parallel.pipeline.runner import counted_parameters
from hp_core.parallel.plan.planner import Planner
from hp_core.parallel.setup import DistributedSetup
from hp_core.parallel.tiny import tiny_setup
from hp_core.testing.checks import whole
from hp_core.testing.ranks import run_ranks
from hp_core.training.accounting import MicroBatch, StepLoss, count_step
from hp_core.training.gradients import clip, norm_and_count
from hp_core.training.loss import IGNORE_INDEX, contract_of
from hp_core.training.state import seed_everything
from hp_core.training.step import Entries, Passes, accumulate_gradients, require_same_entries
from hp_plugins.losses.causal_lm import CausalLMLoss
from hp_plugins.trainers.text import get_batch
from tests.e2e.runs import WITH_COMPONENTS
from tests.model.tiny import build

NUM_ROWS = 4
NUM_STEPS = 5
MAX_NORM = 0.5
# A plain update: Adam's first steps are the signs of gradients, which are noise where a gradient is close to zero.
RATE, MOMENTUM = 0.1, 0.9
WITH_FAMILIES = (*WITH_COMPONENTS, "transformers.models.deepseek_v3.modeling_deepseek_v3", __name__)


def beyond(values: Iterable[Any], *core: Any) -> list[Any]:
    """Parameters of a test, of which all but the core are left to `pytest -m layouts`."""
    return [value if value in core else pytest.param(value, marks=pytest.mark.layouts) for value in values]


# Rows of three packed documents, with targets that differ in number between rows and halves of a row.
DOCUMENTS = (7, 1, 8)


@dataclass(frozen=True)
class Layout:
    """How many ranks there are and how they share the work; `backend` is what compiles the layers, if anything does.

    `modules` names what is computed again and swapped; None takes the layers.
    """

    num_ranks: int = 1
    accelerator: dict[str, Any] = field(default_factory=dict)
    fsdp: dict[str, Any] = field(default_factory=dict)
    num_micro_batches: int = 1
    checkpointing: str = "off"
    param_dtype: str | None = None
    swapping: bool = False
    backend: str | None = None
    modules: list[str] | None = None


@dataclass(frozen=True)
class Case:
    """What is trained: a family, rows of a length, a loss, rows without a target, contracts of modules, adapters."""

    family: str = "llama"
    length: int = 16
    loss: Any = CausalLMLoss
    arguments: dict[str, Any] = field(default_factory=dict)
    silent: tuple[int, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    overrides: tuple[PlanOverride, ...] = ()
    peft: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"

    def batch(self, step: int = 0) -> dict[str, torch.Tensor]:
        """The whole batch of a step, as a collator gives it."""
        generator = torch.Generator().manual_seed(1 + step)
        ids = torch.randint(0, 90, (NUM_ROWS, self.length), generator=generator)
        labels = torch.randint(0, 90, (NUM_ROWS, self.length), generator=generator)
        pieces = torch.cat([torch.arange(size) for size in DOCUMENTS])
        positions = torch.cat([pieces, torch.arange(max(0, self.length - len(pieces)))])[: self.length]
        labels[:, positions == 0] = IGNORE_INDEX
        for row in range(NUM_ROWS):
            labels[row, : 3 * row] = IGNORE_INDEX
        labels[list(self.silent)] = IGNORE_INDEX
        return {
            "input_ids": ids,
            "labels": labels,
            "position_ids": positions.expand(NUM_ROWS, -1).clone(),
            "sample_ids": torch.arange(NUM_ROWS),
        }


@dataclass(frozen=True)
class Found:
    """A step's loss and its gradients, and their norm."""

    loss: float
    gradients: dict[str, torch.Tensor]
    norm: float = 0.0


@dataclass(frozen=True)
class Steps:
    """The first of some steps before its update, the losses of all, and the weights after them."""

    first: Found
    losses: list[float]
    weights: dict[str, torch.Tensor]


def found_on(case: Case, layout: Layout, timeout: float = 120.0) -> Found:
    """The case's first step."""
    return Found(*_merged(run_ranks(_step, layout.num_ranks, case, layout, timeout=timeout, preload=WITH_FAMILIES)))


def steps_on(cases: Sequence[Case], layout: Layout, timeout: float = 300.0) -> list[Steps]:
    """Five steps of each case, clipped and with momentum, all in the same processes."""
    by_rank = run_ranks(_all_steps, layout.num_ranks, cases, layout, timeout=timeout, preload=WITH_FAMILIES)
    return [
        Steps(
            Found(*_merged([one.first for one in ranks])),
            ranks[0].losses,
            {name: value for one in ranks for name, value in one.weights.items()},
        )
        for ranks in zip(*by_rank, strict=True)
    ]


def _merged(by_rank: Sequence[Found]) -> tuple[float, dict[str, torch.Tensor], float]:
    gradients = {name: value for one in by_rank for name, value in one.gradients.items()}
    return by_rank[0].loss, gradients, by_rank[0].norm


def _setup(environment: ProcessEnvironment, layout: Layout) -> Any:
    accelerator, fsdp = AcceleratorConfig(**layout.accelerator), FsdpConfig(**layout.fsdp)
    precision = MixedPrecisionConfig(param_dtype=layout.param_dtype)
    return tiny_setup(environment, accelerator=accelerator, fsdp=fsdp, precision=precision)


def _step(environment: ProcessEnvironment, case: Case, layout: Layout) -> Found:
    with _setup(environment, layout) as setup:
        return Trial(setup, case, layout).found()


def _all_steps(environment: ProcessEnvironment, cases: Sequence[Case], layout: Layout) -> list[Steps]:
    with _setup(environment, layout) as setup:
        return [Trial(setup, case, layout).steps() for case in cases]


def _compile_config(backend: str) -> CompileConfig:
    return CompileConfig(mode="default", backend=backend, on_failure="eager")


class Trial:
    """A case's model on these ranks, and what the engine does with it."""

    def __init__(self, setup: DistributedSetup, case: Case, layout: Layout) -> None:
        self.setup, self.case, self.layout = setup, case, layout
        setup = dataclasses.replace(setup, planner=Planner(case.overrides))
        recomputed = (
            None
            if layout.checkpointing == "off"
            else ActivationCheckpointConfig(mode=layout.checkpointing, modules=layout.modules)
        )
        swapped = ActivationSwapConfig(mode="host", modules=layout.modules) if layout.swapping else None
        compiled = None if layout.backend is None else _compile_config(layout.backend)
        features = {
            "peft_config": PeftConfig(**case.peft) if case.peft else None,
            "activation_checkpoint": recomputed,
            "activation_swap": swapped,
            "compile_config": compiled,
        }
        self.model = build(setup, {**tiny_config(case.family), **case.config}, dtype=case.dtype, **features)
        assert (swap_of(self.model) is not None) == layout.swapping
        start_compiling(self.model)
        self.loss_fn = case.loss(**case.arguments)
        self.loss_fn.bind_model(self.model, setup)
        self.contract = contract_of(self.loss_fn)
        seed_everything(7, setup.random_rank)

    def found(self, step: int = 0) -> Found:
        """The loss, gradients and norm of a step."""
        loss = self._accumulate(step)
        norm = self._norm()
        gradients = {name: one.grad for name, one in self.model.named_parameters() if one.grad is not None}
        return Found(loss, self._whole(gradients), norm)

    def steps(self) -> Steps:
        """Five steps of the optimizer; every gradient is clipped."""
        parameters = list(self.model.parameters())
        optimizer = torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM)
        first = self.found()
        losses, norm = [first.loss], first.norm
        for step in range(1, NUM_STEPS + 1):
            clip(parameters, norm, MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            if step < NUM_STEPS:
                losses.append(self._accumulate(step))
                norm = self._norm()
        return Steps(first, losses, self._whole(dict(self.model.named_parameters())))

    def _norm(self) -> float:
        norm, _ = norm_and_count(counted_parameters(self.model), torch.zeros(()), self.setup)
        return norm

    def _accumulate(self, step: int) -> float:
        micro_batches = self._micro_batches(step)
        step_loss = StepLoss(self.contract, count_step(micro_batches, self.contract, self.setup))

        def forward(one: MicroBatch) -> Any:
            prepared = self.loss_fn.prepare_model_inputs(one.model_inputs, one.loss_inputs)
            return self.model(**prepared), one.loss_inputs

        def loss(outputs: Any, loss_inputs: dict[str, Any]) -> Any:
            return self.loss_fn(model_output=outputs, labels=loss_inputs["labels"])

        accumulate_gradients(micro_batches, Passes(self.model, self.loss_fn, forward, loss), step_loss, self.setup)
        names = require_same_entries(step_loss, Entries(), self.setup).all
        return sum(map(sum, self.setup.gather_on_host([float(step_loss.logged[name]) for name in names])))

    def _micro_batches(self, step: int) -> list[MicroBatch]:
        batch, number = self.case.batch(step), self.layout.num_micro_batches
        size = NUM_ROWS // (self.setup.dp_size * number)
        micro_batches = []
        for index in range(self.setup.dp_rank * number, (self.setup.dp_rank + 1) * number):
            rows = {name: value[index * size : (index + 1) * size] for name, value in batch.items()}
            inputs = get_batch(iter([rows]))
            if self.setup.sizes.cp > 1:
                inputs = own_part(*inputs, self.setup)
            micro_batches.append(MicroBatch.of(*inputs, self.contract))
        return micro_batches

    def _whole(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The whole of each on the first rank of a stage, which speaks for the others."""
        gathered = {name: whole(value).detach().clone() for name, value in tensors.items()}
        return gathered if self.setup.rank % (self.setup.world_size // self.setup.sizes.pp) == 0 else {}


def assert_same(
    found: Found, wanted: Found, *, loss: float = 1e-6, absolute: float = 1e-6, relative: float = 1e-5
) -> None:
    """The loss within `loss`; each gradient within `absolute` and, of its largest element, `relative`."""
    assert abs(found.loss - wanted.loss) <= loss, (found.loss, wanted.loss)
    assert abs(found.norm - wanted.norm) <= relative * wanted.norm, (found.norm, wanted.norm)
    assert set(found.gradients) == set(wanted.gradients)
    for name, gradient in wanted.gradients.items():
        difference = float((found.gradients[name] - gradient).abs().max())
        limit = min(absolute, relative * float(gradient.abs().max()) + 1e-9)
        assert difference <= limit, (name, difference, limit)
