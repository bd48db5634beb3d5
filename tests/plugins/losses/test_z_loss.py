"""The z-loss around other losses: its value by hand, its reduction, and losses that leave no logits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hp_core import Target
from hp_core.errors import ArgumentError, InputError
from hp_core.training.loss import ModelOutputLoss, contract_of
from hp_plugins.losses.causal_lm import CausalLMLoss
from hp_plugins.losses.z_loss import ZLoss
from tests.plugins.losses import plain

VOCAB = 97


class ByRow(nn.Module):
    """A loss with a value for each row."""

    reduction = "sample"

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> torch.Tensor:
        return model_output.logits.flatten(1).mean(1)


def a_batch() -> dict[str, torch.Tensor]:
    loss_inputs = plain.a_batch(VOCAB)[1]
    return {**loss_inputs, "weights": loss_inputs["weights"].nan_to_num(1.0)}


def inner(path: str = "hp_plugins.losses.causal_lm.CausalLMLoss", **arguments: Any) -> Target:
    return Target("loss_fn.loss", "hp.losses", import_path=path, arguments=arguments)


def some_logits(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return (3 * torch.randn(2, 6, VOCAB, generator=generator, dtype=torch.float64)).to(dtype)


def entries(loss_fn: ZLoss, logits: torch.Tensor, **fields: Any) -> dict[str, torch.Tensor]:
    loss_inputs = a_batch()
    columns = {name: loss_inputs[name] for name in loss_fn.columns}
    output = SimpleNamespace(logits=logits, **fields)
    return loss_fn(model_output=output, labels=loss_inputs["labels"], **columns)


def squares(logits: torch.Tensor) -> torch.Tensor:
    return logits.exp().sum(-1).log() ** 2


@pytest.mark.parametrize("arguments", [{}, {"ignore_index": 3}, {"token_weights": "weights"}, {"z_loss": 0.1}])
def test_it_is_added_to_the_other_loss_and_counts_the_same_tokens(arguments: dict[str, Any]) -> None:
    loss_inputs = a_batch()
    logits = some_logits()
    found = entries(ZLoss(inner(**arguments), 0.25), logits)
    plain = CausalLMLoss(**arguments)
    columns = {name: loss_inputs[name] for name in plain.columns}
    alone = plain(model_output=SimpleNamespace(logits=logits), labels=loss_inputs["labels"], **columns)
    assert list(found) == ["task_loss", "z_loss"]
    assert torch.equal(found["task_loss"], alone)
    total = 0.0
    for square, label, weight in zip(
        squares(logits).flatten(), loss_inputs["labels"].flatten(), loss_inputs["weights"].flatten(), strict=True
    ):
        if int(label) not in (-100, arguments.get("ignore_index", -100)):
            total += 0.25 * square.item() * (weight.item() if "token_weights" in arguments else 1)
    assert found["z_loss"].item() == pytest.approx(total, rel=1e-12)


def test_a_token_by_hand() -> None:
    logits = torch.tensor([[[2.0, 1.0, 1.0]]]).log()
    found = ZLoss(inner(), 0.5)(model_output=SimpleNamespace(logits=logits), labels=torch.tensor([[0]]))
    assert found["z_loss"].item() == pytest.approx(0.5 * 1.3862943611**2, rel=1e-6)


def test_around_a_mean_it_is_a_mean_and_around_rows_a_value_for_each() -> None:
    logits, labels = some_logits(), a_batch()["labels"]
    supervised = squares(logits)[labels != -100]
    around_mean = ZLoss(inner("hp_core.training.loss.ModelOutputLoss"), 0.5)
    found = entries(around_mean, logits, loss=torch.tensor(2.0))
    assert found["task_loss"].item() == 2.0
    assert found["z_loss"].item() == pytest.approx(0.5 * supervised.mean().item(), rel=1e-12)
    by_row = entries(ZLoss(inner(f"{__name__}.ByRow"), 0.5), logits)["z_loss"]
    wanted = [0.5 * squares(logits)[row][labels[row] != -100].mean().item() for row in range(2)]
    assert by_row.tolist() == pytest.approx(wanted, rel=1e-12)


def test_it_declares_what_the_other_loss_does_and_lets_the_model_have_its_labels() -> None:
    loss_fn = ZLoss(inner(token_weights="weights", ignore_index=3))
    assert contract_of(loss_fn) == contract_of(CausalLMLoss(token_weights="weights", ignore_index=3))
    given = {"input_ids": 1, "labels": 2}
    assert loss_fn.prepare_model_inputs(given, {}) == {"input_ids": 1}
    own = ZLoss(inner("hp_core.training.loss.ModelOutputLoss"))
    assert own.prepare_model_inputs(given, {}) == given
    assert isinstance(own.loss_fn, ModelOutputLoss)


def test_logits_are_taken_in_fp32() -> None:
    logits = some_logits(torch.bfloat16)
    found, wanted = (entries(ZLoss(inner()), one)["z_loss"] for one in (logits, logits.double()))
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(wanted.item(), rel=1e-6)


def test_the_coefficient_acts() -> None:
    one, ten = (entries(ZLoss(inner(), c), some_logits())["z_loss"].item() for c in (1e-4, 1e-3))
    assert ten == pytest.approx(10 * one, rel=1e-9)


CHUNKED = "hp_plugins.losses.chunked_causal_lm.ChunkedCausalLMLoss"


def test_a_loss_that_leaves_no_logits_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"returns no logits.*z_loss: 0\.0002"):
        ZLoss(inner(CHUNKED), 2e-4)


def test_so_is_one_around_it_and_the_recipe_s_place_is_told() -> None:
    around = inner("hp_plugins.losses.z_loss.ZLoss", loss=inner(CHUNKED))
    with pytest.raises(InputError, match="returns no logits") as caught:
        ZLoss(around)
    assert caught.value.problems[0].path == "loss_fn.loss.loss"


def test_two_z_losses_around_one_another_are_refused() -> None:
    with pytest.raises(ArgumentError, match="has a z-loss around it already"):
        ZLoss(inner("hp_plugins.losses.z_loss.ZLoss", loss=inner()))
