"""The chunked loss of a head: which gradients it takes, in which precision, and how often."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hp_core.training.loss import IGNORE_INDEX
from hp_plugins.losses.chunked import ChunkedHeadLoss
from hp_plugins.losses.logits import LogitTransform
from hp_plugins.losses.objective import Objective
from hp_plugins.losses.targets import Targets

VOCAB, FEATURES, TOKENS = 31, 5, 11
LOSS = ChunkedHeadLoss(Objective(), LogitTransform(), 4)


def a_head(dtype: torch.dtype = torch.float64, *, tokens: int = TOKENS, vocab: int = VOCAB) -> list[torch.Tensor]:
    """Hidden states, weight and bias."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((tokens, FEATURES), (vocab, FEATURES), (vocab,))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def some_labels(tokens: int = TOKENS, vocab: int = VOCAB) -> torch.Tensor:
    labels = torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(1))
    labels[2::3] = IGNORE_INDEX
    return labels


def plain(head: list[torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    hidden, weight, bias = head
    return F.cross_entropy(hidden @ weight.T + bias, labels, ignore_index=IGNORE_INDEX, reduction="sum")


@pytest.mark.parametrize(
    "trainable", [(True, False, False), (False, True, False), (False, False, True), (True, True, False)]
)
def test_only_the_gradients_asked_for_are_taken(trainable: tuple[bool, ...]) -> None:
    head, labels = a_head(), some_labels()
    wanted = torch.autograd.grad(plain(head, labels), head)
    for one, is_trainable in zip(head, trainable, strict=True):
        one.requires_grad_(is_trainable)
    carrier, _ = LOSS(*head, Targets(labels, None))
    taken = carrier.grad_fn.gradients
    assert [one is not None for one in (taken.hidden, taken.weight, taken.bias)] == list(trainable)
    carrier.sum().backward()
    for one, gradient, is_trainable in zip(head, wanted, trainable, strict=True):
        assert (one.grad is not None) == is_trainable
        if is_trainable:
            torch.testing.assert_close(one.grad, gradient, rtol=1e-12, atol=1e-12)


def test_without_grad_mode_there_is_a_loss_and_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    head, labels = a_head(), some_labels()
    wanted = plain(head, labels).item()
    monkeypatch.setattr("hp_plugins.losses.chunked._add", None)
    with torch.no_grad():
        carrier, total = LOSS(*head, Targets(labels, None))
    assert total.item() == pytest.approx(wanted, rel=1e-12)
    assert not carrier.requires_grad


def test_what_it_returns_is_a_zero_with_the_gradient_and_a_sum_without() -> None:
    carrier, total = LOSS(*a_head(), Targets(some_labels(), None))
    assert carrier.shape == (1, 1, 1)
    assert carrier.item() == 0.0
    assert carrier.requires_grad
    assert not total.requires_grad


def test_the_outer_gradient_scales_all() -> None:
    head, labels = a_head(), some_labels()
    wanted = torch.autograd.grad(plain(head, labels) * 0.37, head)
    carrier, _ = LOSS(*head, Targets(labels, None))
    found = torch.autograd.grad((carrier * 0.37).sum(), head)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk_size", [1, 100])
def test_nothing_supervised_is_exactly_zero_everywhere(chunk_size: int) -> None:
    head = a_head()
    loss = ChunkedHeadLoss(Objective(0.1, 0.1), LogitTransform(softcap=2.0), chunk_size)
    carrier, total = loss(*head, Targets(torch.full((TOKENS,), IGNORE_INDEX), None))
    carrier.sum().backward()
    assert total.item() == 0.0
    for one in head:
        assert torch.equal(one.grad, torch.zeros_like(one))


def test_ignored_rows_are_never_looked_at() -> None:
    head, labels = a_head(), some_labels()
    wanted = torch.autograd.grad(plain(head, labels), head)
    with torch.no_grad():
        head[0][labels == IGNORE_INDEX] = float("inf")
    carrier, _ = LOSS(*head, Targets(labels, None))
    found = torch.autograd.grad(carrier.sum(), head)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_a_second_backward_pass_is_refused() -> None:
    carrier, _ = LOSS(*a_head(), Targets(some_labels(), None))
    carrier.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="gives its gradients once and frees them"):
        carrier.sum().backward()


@pytest.mark.parametrize("outer_has_gradient", [False, True])
def test_a_second_derivative_is_refused(outer_has_gradient: bool) -> None:
    head = a_head()
    carrier, _ = LOSS(*head, Targets(some_labels(), None))
    factor = torch.ones(1, 1, 1, dtype=torch.float64, requires_grad=outer_has_gradient)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad((carrier * factor).sum(), head, create_graph=True)


def test_the_gradients_are_freed_by_the_backward_pass() -> None:
    carrier, _ = LOSS(*a_head(), Targets(some_labels(), None))
    node = carrier.grad_fn
    carrier.sum().backward()
    assert node.gradients is None


# Precision.


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.double() - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("chunk_size", [16, 512])
def test_bf16_inputs_have_an_fp32_loss_and_gradients_as_good_as_one_pass(chunk_size: int) -> None:
    tokens, vocab = 2048, 503
    head, labels = a_head(torch.bfloat16, tokens=tokens, vocab=vocab), some_labels(tokens, vocab)
    exact = [one.detach().double().requires_grad_() for one in head]
    loss = plain(exact, labels)
    wanted = torch.autograd.grad(loss, exact)
    fp32_loss = plain([one.detach().float() for one in head], labels).item()
    hidden, weight, bias = head
    logits = F.linear(hidden, weight, bias).float()
    at_once = torch.autograd.grad(F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum"), head)
    chunked = ChunkedHeadLoss(Objective(), LogitTransform(), chunk_size)
    carrier, total = chunked(*head, Targets(labels, None))
    found = torch.autograd.grad(carrier.sum(), head)
    assert total.dtype == carrier.dtype == torch.float32
    assert total.item() == pytest.approx(fp32_loss, rel=2e-5)
    for one, other, exactly, given in zip(found, at_once, wanted, head, strict=True):
        assert one.dtype == given.dtype == torch.bfloat16
        assert relative(one, exactly) <= relative(other, exactly)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_add_up_in_fp32(dtype: torch.dtype) -> None:
    carrier, _ = LOSS(*a_head(dtype), Targets(some_labels(), None))
    taken: Any = carrier.grad_fn.gradients
    assert taken.hidden.dtype == taken.weight.dtype == taken.bias.dtype == torch.float32


def test_large_logits_neither_overflow_nor_lose_the_loss() -> None:
    logits = torch.tensor([[1000.0, 0.0, -1000.0], [-1e4, 1e4, 0.0]])
    total = Objective().total_and_gradient_(logits, torch.tensor([1, 0]))
    assert total.item() == 1000.0 + 2e4
    assert logits.tolist() == [[1.0, -1.0, 0.0], [-1.0, 1.0, 0.0]]
