"""What counts the tokens: uneven ranks, shared sequences, router losses and idle experts, with numbers by hand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hp_core.parallel.environment import ProcessEnvironment
from hp_core.testing.ranks import run_ranks
from hp_core.training.loss import IGNORE_INDEX
from hp_plugins.losses.causal_lm import CausalLMLoss
from tests.e2e.runs import recipe, steps, train
from tests.equivalence.layouts import Case, Layout, assert_same, beyond, found_on
from tests.parallel.test_experts import MOE

HSDP = {"dp_replicate_size": 2}


@dataclass(frozen=True)
class Counted(Case):
    """Rows with so many targets each."""

    targets: tuple[int, ...] = ()

    def batch(self, step: int = 0) -> dict[str, torch.Tensor]:
        batch = super().batch(step)
        batch["labels"] = batch["input_ids"].roll(-1, 1)
        for row, number in enumerate(self.targets):
            batch["labels"][row, number:] = IGNORE_INDEX
        return batch


@pytest.mark.parametrize("targets", [(1, 0, 3, 0), (0, 0, 4, 0), (0, 0, 1, 2)], ids=str)
@pytest.mark.parametrize("layout", [Layout(2), Layout(2, fsdp=HSDP), Layout(2, num_micro_batches=2)], ids=str)
def test_ranks_with_other_numbers_of_targets(layout: Layout, targets: tuple[int, ...]) -> None:
    """One and three, none and four. The mean of the ranks' means would be off by a third of the largest gradient."""
    case = Counted(targets=targets)
    assert_same(found_on(case, layout), found_on(case, Layout()))


class OneForEach(nn.Module):
    """1 for each target, with the gradient of the logarithm of its loss."""

    reduction = "sum"

    def bind_model(self, model: nn.Module, distributed_setup: Any) -> None:
        pass

    def prepare_model_inputs(self, model_inputs: dict[str, Any], loss_inputs: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in model_inputs.items() if "labels" not in name}

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> torch.Tensor:
        losses = F.cross_entropy(model_output.logits.flatten(0, 1).float(), labels.flatten(), reduction="none")
        losses = losses[labels.flatten() != IGNORE_INDEX]
        return (losses / losses.detach()).sum()


@pytest.mark.parametrize(
    "layout",
    [
        Layout(2, {"cp_size": 2}),
        Layout(4, {"cp_size": 2}),
        Layout(4, {"cp_size": 2, "cp_method": "ring"}, HSDP),
        Layout(2, {"tp_size": 2}),
        Layout(4, {"cp_size": 2, "tp_size": 2}),
    ],
    ids=str,
)
def test_a_loss_of_one_for_each_token_is_one(layout: Layout) -> None:
    """Sequences of 200 tokens, 100 on each of two ranks: not 0.5."""
    case = Counted(length=200, loss=OneForEach, targets=(200,) * 4, config={"max_position_embeddings": 256})
    found = found_on(case, layout)
    assert found.loss == pytest.approx(1.0, abs=1e-6)
    assert_same(found, found_on(case, Layout()))


class RoutersAlone(CausalLMLoss):
    """The losses of the routers, without that of the task."""

    def forward(self, **inputs: Any) -> Any:
        found = super().forward(**inputs)
        return {name: value * 0 for name, value in found.items()} if isinstance(found, dict) else found * 0


ROUTER = "model.layers.0.mlp.gate.weight"
ROUTED = [
    Layout(2),
    Layout(1, num_micro_batches=2),
    Layout(1, checkpointing="full"),
    Layout(2, {"tp_size": 2}),
    Layout(2, {"cp_size": 2}),
    Layout(4, {"ep_size": 2}, num_micro_batches=1, checkpointing="full"),
]


def router_case(coefficient: float, **more: Any) -> Case:
    return Case("qwen3_moe", loss=RoutersAlone, arguments={"router_balance": coefficient}, **more)


@pytest.mark.parametrize("layout", beyond(ROUTED, ROUTED[0], ROUTED[-1]), ids=str)
def test_router_losses_train_routers_in_proportion_on_any_layout(layout: Layout) -> None:
    wanted = found_on(router_case(0.1), Layout())
    assert wanted.gradients[ROUTER].abs().max() > 1e-5
    once, twice = found_on(router_case(0.1), layout), found_on(router_case(0.2), layout)
    assert_same(once, wanted)
    torch.testing.assert_close(twice.gradients[ROUTER], 2 * once.gradients[ROUTER], rtol=1e-5, atol=1e-10)
    assert twice.loss == pytest.approx(2 * once.loss, rel=1e-6)


SPREAD = ("--accelerator.ep_size=2",)
ONE_FOR_ALL = "--loss_fn={_target_: tests.equivalence.test_expert_parallel.OneForAll}"


def test_ten_steps_of_spread_experts_are_those_of_one_process(tmp_path: Path) -> None:
    common = [*MOE, "--training.train_iters=10", "--optimizer={name: sgd, lr: 0.1, momentum: 0.9}"]
    alone = train(recipe(tmp_path), *common, out=tmp_path / "alone")
    rows = train(recipe(tmp_path), *common, *SPREAD, nproc=2, out=tmp_path / "spread")
    assert steps(rows) == pytest.approx(steps(alone), abs=2e-6)
    assert steps(rows, "grad_norm") == pytest.approx(steps(alone, "grad_norm"), rel=1e-5)


def test_idle_experts_have_moments_that_are_saved(tmp_path: Path) -> None:
    """All tokens go to the first expert: the second rank's experts are decayed, and resumed, like any others."""
    path, common = recipe(tmp_path), [MOE[0], ONE_FOR_ALL]
    alone = train(path, *common, out=tmp_path / "alone")
    unbroken = train(path, *common, *SPREAD, nproc=2, out=tmp_path / "unbroken")
    assert steps(unbroken) == pytest.approx(steps(alone), abs=2e-6)
    out = tmp_path / "broken"
    train(path, *common, *SPREAD, "--training.stop_after=3", nproc=2, out=out)
    rows = train(path, *common, *SPREAD, "--checkpoint.resume=latest", nproc=2, out=out)
    assert steps(rows) == steps(unbroken)
    states = run_ranks(moments, 2, str(path), [*common, *SPREAD, f"--output_dir={tmp_path / 'seen'}"])
    for idle, held in states:
        assert idle == held > 0


def moments(environment: ProcessEnvironment, path: str, overrides: list[str]) -> tuple[int, int]:
    """Of the rank's experts: the parameters with moments of their own size, and all."""
    from hp_core.config import load_recipe
    from hp_core.training.base import BaseTrainer
    from hp_core.training.session import train as train_session

    found: list[tuple[int, int]] = []
    finish = BaseTrainer._finish

    def looking(self: BaseTrainer, evaluation: Any) -> Any:
        experts = [p for name, p in self.model.named_parameters() if ".experts." in name]
        state = self.optimizer.state
        same = [p for p in experts if state[p]["exp_avg"].to_local().shape == p.to_local().shape]
        found.append((len(same), len(experts)))
        return finish(self, evaluation)

    BaseTrainer._finish = looking  # type: ignore[method-assign]
    train_session(load_recipe(path, overrides), environment=environment)
    return found[0]


def test_ranks_with_three_and_two_rows_take_the_same_steps(tmp_path: Path) -> None:
    """Five rows of training and of validation for two ranks, an evaluation after each step."""
    common = [
        "--dataset.num_rows=5",
        "--dataset.validation_rows=5",
        "--training={train_epochs: 2, global_batch_size: 2, seed: 3}",
        "--evaluation.every=1",
    ]
    alone = train(recipe(tmp_path), *common, out=tmp_path / "alone")
    rows = train(recipe(tmp_path), *common, nproc=2, out=tmp_path / "two")
    assert len(steps(rows)) == len(steps(alone)) == 6
    assert steps(rows) == pytest.approx(steps(alone), abs=2e-6)
    evaluations = [[row["eval_loss"] for row in one if "eval_loss" in row] for one in (rows, alone)]
    assert evaluations[0] == pytest.approx(evaluations[1], abs=2e-6)
    assert {row["eval_tokens"] for row in rows if "eval_tokens" in row} == {sum(16 - r for r in range(5))}
