"""Distillation against its definition in float64, by hand, and what becomes of the teacher: nothing."""

from __future__ import annotations

import copy
import itertools
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import nn

from hp_core.errors import ArgumentError, InputError, RunError
from hp_core.testing.models import tiny_batch, tiny_model
from hp_core.testing.setups import tiny_setup
from hp_core.training import beside
from hp_core.training.evaluation import evaluating
from hp_plugins.losses.distillation import DistillationLoss
from hp_plugins.losses.divergence import Divergence
from hp_plugins.losses.z_loss import ZLoss
from tests.plugins.losses.plain import Options, TinyLM, a_batch, assert_same, gradients, run_loss
from tests.plugins.losses.teachers import Distilling, plain_teacher, teacher, token_by_token
from tests.plugins.losses.test_z_loss import inner

VOCAB = 97
CHUNKS: tuple[Any, ...] = (1, 7, 64)
ALL = [
    Distilling(*values)
    for values in itertools.product(("forward", "reverse"), (1.0, 2.5), (1.0, 0.3, 0.0), (-100, 3), (None, "weights"))
]


def bound(model: nn.Module, of_teacher: Any = None, **arguments: Any) -> DistillationLoss:
    loss_fn = DistillationLoss(of_teacher or teacher(), **arguments)
    with tiny_setup() as setup:
        loss_fn.bind_model(model, setup)
    return loss_fn


def plain_logits(model: nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids).logits


@pytest.mark.parametrize("options", ALL, ids=str)
def test_it_is_its_definition_with_every_gradient_at_any_chunk_size(options: Distilling) -> None:
    model_inputs, loss_inputs = a_batch(VOCAB)
    model = TinyLM(Options(bias=True), VOCAB)
    of_teacher = plain_logits(plain_teacher(distributed_setup=None), model_inputs["input_ids"]).detach()
    wanted = token_by_token(plain_logits(model, model_inputs["input_ids"]), of_teacher, loss_inputs, options)
    wanted[0].backward()
    wanted_gradients = gradients(model)
    for chunk_size in CHUNKS:
        entries = run_loss(bound(model, chunk_size=chunk_size, **asdict(options)), model, model_inputs, loss_inputs)
        entries["loss"].backward()
        assert list(entries) == ["loss", "kl_divergence", "cross_entropy"]
        for found, one in zip(entries.values(), wanted, strict=True):
            assert found.dtype == torch.float64
            assert found.item() == pytest.approx(one.item(), rel=1e-12)
        assert_same(gradients(model), wanted_gradients, 1e-12, chunk_size)


TRANSFORMS = (Options(), Options(softcap=1.5), Options(scale=0.3), Options(softcap=1.5, scale=0.3, tied=True))


@pytest.mark.parametrize("of_student", TRANSFORMS, ids=lambda one: f"student {one.softcap} {one.scale}")
@pytest.mark.parametrize("of_teacher", TRANSFORMS[:3], ids=lambda one: f"teacher {one.softcap} {one.scale}")
def test_what_each_model_does_to_its_logits_is_honoured(of_student: Options, of_teacher: Options) -> None:
    model_inputs, loss_inputs = a_batch(VOCAB)
    arguments = {"softcap": of_teacher.softcap, "scale": of_teacher.scale, "bias": True}
    options = Distilling("reverse", 2.0, 0.6)
    model = TinyLM(of_student, VOCAB)
    theirs = plain_logits(plain_teacher(**arguments, distributed_setup=None), model_inputs["input_ids"]).detach()
    wanted, *_ = token_by_token(plain_logits(model, model_inputs["input_ids"]), theirs, loss_inputs, options)
    wanted.backward()
    wanted_gradients = gradients(model)
    loss_fn = bound(model, teacher(**arguments), chunk_size=4, **asdict(options))
    found = run_loss(loss_fn, model, model_inputs, loss_inputs)["loss"]
    found.backward()
    assert found.item() == pytest.approx(wanted.item(), rel=1e-12)
    assert_same(gradients(model), wanted_gradients, 1e-12, arguments)


def test_each_option_changes_the_loss() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"direction": "reverse"},
        {"temperature": 2.0},
        {"kl_weight": 0.9},
        {"ignore_index": 3},
        {"token_weights": "weights"},
        {"of_teacher": teacher(moved_by=0.4)},
    ]
    model = TinyLM(Options(), VOCAB)
    values = {run_loss(bound(model, **one), model, *a_batch(VOCAB))["loss"].item() for one in changes}
    assert len(values) == len(changes)


# By hand.


@pytest.mark.parametrize(
    ("divergence", "wanted"),
    [
        # Student (1/2, 1/4, 1/4), teacher (1/4, 1/2, 1/4): both directions are 1/4 log 2.
        (Divergence(), 0.25 * 0.6931471806),
        (Divergence("reverse"), 0.25 * 0.6931471806),
        (Divergence(kl_weight=0.25), 0.25 * 0.25 * 0.6931471806 + 0.75 * 0.6931471806),
        # With a temperature of 1/2 they are (4, 1, 1) / 6 and (1, 4, 1) / 6: 1/2 log 4, times 1/4.
        (Divergence(temperature=0.5), 0.25 * 0.5 * 1.3862943611),
    ],
)
def test_a_token_by_hand(divergence: Divergence, wanted: float) -> None:
    student, of_teacher = (torch.tensor([one], dtype=torch.float64).log() for one in ([2.0, 1, 1], [1.0, 2, 1]))
    sums = divergence.sums_and_gradient_(student, of_teacher, torch.tensor([0]), None)
    assert sums[0].item() == pytest.approx(wanted, rel=1e-9)
    assert sums[2].item() == pytest.approx(0.6931471806, rel=1e-9)


@pytest.mark.parametrize(("direction", "wanted"), [("forward", 0.5108256238), ("reverse", 0.3680642071)])
def test_the_directions_are_told_apart_by_hand(direction: Any, wanted: float) -> None:
    # Teacher (1/2, 1/2), student (1/10, 9/10): forward is log(5) / 2 + log(5 / 9) / 2, reverse the other sum.
    student, of_teacher = (torch.tensor([one], dtype=torch.float64).log() for one in ([0.1, 0.9], [0.5, 0.5]))
    sums = Divergence(direction).sums_and_gradient_(student, of_teacher, torch.tensor([0]), None)
    assert sums[1].item() == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_a_teacher_like_the_student_teaches_nothing(direction: Any, temperature: float) -> None:
    model = tiny_model("gemma2", seed=1)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(8.0)
    batch = tiny_batch("gemma2")
    loss_fn = bound(
        model,
        teacher("tiny_teacher", family="gemma2"),
        direction=direction,
        temperature=temperature,
        kl_weight=1.0,
        chunk_size=5,
    )
    entries = run_loss(loss_fn, model, {**batch, "use_cache": False}, {"labels": batch["labels"]})
    entries["loss"].backward()
    assert entries["loss"].item() == entries["kl_divergence"].item() == 0.0
    assert entries["cross_entropy"].item() > 1.0
    assert not any(one.any() for one in gradients(model).values())


# Dtypes.


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_bf16_is_near_float64(family: str) -> None:
    found: list[tuple[float, torch.Tensor]] = []
    for dtype in (torch.bfloat16, torch.float64):
        model = tiny_model("llama", dtype=dtype)
        batch = tiny_batch("llama")
        loss_fn = bound(model, teacher("tiny_teacher", family=family), temperature=2.0, kl_weight=0.5)
        entries = run_loss(loss_fn, model, {**batch, "use_cache": False}, {"labels": batch["labels"]})
        assert entries["loss"].dtype == (torch.float32 if dtype == torch.bfloat16 else dtype)
        entries["loss"].backward()
        found.append((entries["loss"].item(), model.lm_head.weight.grad.double()))
    (low, low_gradient), (high, high_gradient) = found
    assert low == pytest.approx(high, rel=1e-2)
    assert float((low_gradient - high_gradient).norm() / high_gradient.norm()) < 3e-2


# The teacher.


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The models that were built as teachers."""
    models: list[nn.Module] = []
    plain = beside.as_module

    def keep(built: Any, section: str) -> nn.Module:
        models.append(plain(built, section))
        return models[-1]

    monkeypatch.setattr(beside, "as_module", keep)
    return models


def test_the_teacher_stays_as_it_is(held: list[nn.Module]) -> None:
    model = TinyLM(Options(), VOCAB)
    loss_fn = bound(model)
    (own,) = held
    before = copy.deepcopy(own.state_dict())
    for training in (True, False):
        loss_fn.train(training)
        loss = run_loss(loss_fn, model, *a_batch(VOCAB))["loss"]
        loss.backward()
        assert not any(one.training for one in own.modules())
    assert all(not one.requires_grad and one.grad is None for one in own.parameters())
    assert all(torch.equal(one, before[name]) for name, one in own.state_dict().items())


def test_the_loss_holds_no_teacher_that_a_checkpoint_or_an_optimizer_would_see(held: list[nn.Module]) -> None:
    model = TinyLM(Options(), VOCAB)
    names = set(model.state_dict())
    loss_fn = bound(model)
    assert held
    assert list(loss_fn.modules()) == [loss_fn]
    assert not loss_fn.state_dict()
    assert not list(loss_fn.parameters())
    assert set(model.state_dict()) == names


def test_random_numbers_go_on_as_without_a_teacher() -> None:
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    model = tiny_model("llama")
    loss_fn = bound(model, teacher("tiny_teacher"))
    batch = tiny_batch("llama")
    loss_fn.prepare_model_inputs({**batch, "use_cache": False}, {"labels": batch["labels"]})
    assert torch.equal(torch.rand(3), wanted)


def test_a_teacher_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(InputError, match=r"loss_fn\.teacher: has a vocabulary of 98, the model one of 97; .*tokenizer"):
        bound(TinyLM(Options(), VOCAB), teacher(vocab=98))


class Headless(nn.Module):
    """No language model."""


def headless() -> nn.Module:
    return Headless()


def test_a_teacher_without_a_head_is_refused_as_the_teacher() -> None:
    target = teacher()
    broken = type(target)("loss_fn.teacher", "hp.models", import_path=f"{__name__}.headless")
    with pytest.raises(InputError, match=r"loss_fn\.teacher: Headless has no output embeddings"):
        bound(TinyLM(Options(), VOCAB), broken)


# Its life in a run.


def test_an_evaluation_has_no_gradient_and_leaves_the_head_plain() -> None:
    model = TinyLM(Options(), VOCAB)
    loss_fn = bound(model)
    plain = plain_logits(model, a_batch(VOCAB)[0]["input_ids"])
    with evaluating(model, loss_fn):
        evaluated = run_loss(loss_fn, model, *a_batch(VOCAB))
    assert not evaluated["loss"].requires_grad
    trained = run_loss(loss_fn, model, *a_batch(VOCAB))
    assert evaluated["loss"].item() == trained["loss"].item()
    assert not trained["kl_divergence"].requires_grad
    assert torch.equal(plain_logits(model, a_batch(VOCAB)[0]["input_ids"]), plain)


def test_nothing_supervised_is_exactly_zero() -> None:
    model = TinyLM(Options(bias=True), VOCAB)
    model_inputs, loss_inputs = a_batch(VOCAB)
    silent = {**loss_inputs, "labels": torch.full_like(loss_inputs["labels"], -100)}
    entries = run_loss(bound(model), model, model_inputs, silent)
    entries["loss"].backward()
    assert [one.item() for one in entries.values()] == [0.0, 0.0, 0.0]
    assert set(gradients(model)) == {name for name, _ in model.named_parameters()}


def test_it_is_told_when_a_step_is_left_out() -> None:
    model = TinyLM(Options(), VOCAB)
    model_inputs, loss_inputs = a_batch(VOCAB)
    with pytest.raises(RunError, match="bind_model was not called"):
        DistillationLoss(teacher()).prepare_model_inputs(model_inputs, loss_inputs)
    loss_fn = bound(model)
    with pytest.raises(RunError, match="prepare_model_inputs was not called"):
        loss_fn(model_output=model(model_inputs["input_ids"]), labels=loss_inputs["labels"])


def test_only_a_budget_chooses_the_chunk_size_or_the_recipe_does() -> None:
    with pytest.raises(ArgumentError, match="memory_budget_mib: a budget chooses the chunk size, which is 8 already"):
        DistillationLoss(teacher(), chunk_size=8, memory_budget_mib=1)


def test_the_budget_holds_the_buffers_of_both_models() -> None:
    # 97 classes in float64, four buffers.
    assert bound(TinyLM(Options(), VOCAB), memory_budget_mib=1)._bound.chunk_size == 2**20 // (97 * 8 * 4)


def test_a_z_loss_around_it_is_refused() -> None:
    target = inner("hp_plugins.losses.distillation.DistillationLoss", teacher=teacher())
    with pytest.raises(ArgumentError, match="returns no logits; use a loss of the logits"):
        ZLoss(target)
