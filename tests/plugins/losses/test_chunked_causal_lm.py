"""The chunked loss in a model's head: when it takes part, what it refuses, and how it chooses its chunks."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from hp_core.errors import ArgumentError, InputError, RunError
from hp_core.training.evaluation import evaluating
from hp_plugins.losses.causal_lm import CausalLMLoss
from hp_plugins.losses.chunked_causal_lm import ChunkedCausalLMLoss, fitting_chunk
from hp_plugins.losses.head import LossHead
from hp_plugins.losses.logits import LogitTransform
from tests.plugins.losses.plain import Options, TinyLM, a_batch, assert_same, gradients, run_loss

VOCAB = 97


def bound(model: nn.Module, component: Any = ChunkedCausalLMLoss, **arguments: Any) -> Any:
    loss_fn = component(**arguments)
    loss_fn.bind_model(model, None)
    return loss_fn


@pytest.fixture
def model() -> TinyLM:
    return TinyLM(Options(), VOCAB)


# When it takes part.


def test_labels_are_kept_from_the_model_and_the_logits_from_the_loss(model: TinyLM) -> None:
    loss_fn = bound(model)
    model_inputs, loss_inputs = a_batch(VOCAB)
    prepared = loss_fn.prepare_model_inputs(model_inputs, loss_inputs)
    assert prepared == {"input_ids": model_inputs["input_ids"], "use_cache": False}
    assert model(**prepared).logits.shape == (1, 1, 1)


def test_outside_of_a_step_the_head_is_as_before(model: TinyLM) -> None:
    ids = a_batch(VOCAB)[0]["input_ids"]
    before = model(ids).logits
    loss_fn = bound(model)
    assert torch.equal(model(ids).logits, before)
    run_loss(loss_fn, model, *a_batch(VOCAB))
    assert torch.equal(model(ids).logits, before)
    assert "forward" not in model.head.state_dict()


def test_a_step_that_was_begun_and_left_does_not_reach_the_next_call(model: TinyLM) -> None:
    loss_fn = bound(model)
    model_inputs, loss_inputs = a_batch(VOCAB)
    prepared = loss_fn.prepare_model_inputs(model_inputs, loss_inputs)
    with pytest.raises(TypeError):
        model(**prepared, unknown=1)
    assert model(**prepared).logits.shape == (2, 6, VOCAB)


def test_evaluation_has_the_loss_and_no_gradient(model: TinyLM) -> None:
    wanted = run_loss(bound(model, CausalLMLoss), model, *a_batch(VOCAB)).item()
    loss_fn = bound(model)
    with evaluating(model, loss_fn):
        loss = run_loss(loss_fn, model, *a_batch(VOCAB))
    assert loss.item() == pytest.approx(wanted, rel=1e-12)
    assert not loss.requires_grad


@pytest.mark.parametrize("frozen", ["head", "trunk"])
def test_a_frozen_part_has_no_gradient_and_the_other_its_own(model: TinyLM, frozen: str) -> None:
    model.head.requires_grad_(frozen != "head")
    for trunk in (model.embedding, model.layer):
        trunk.requires_grad_(frozen != "trunk")
    run_loss(bound(model, CausalLMLoss), model, *a_batch(VOCAB)).backward()
    wanted = gradients(model)
    assert set(wanted) == (
        {"head.weight"} if frozen == "trunk" else set(dict(model.named_parameters())) - {"head.weight"}
    )
    run_loss(bound(model, chunk_size=3), model, *a_batch(VOCAB)).backward()
    assert_same(gradients(model), wanted, 1e-12, frozen)


def test_several_losses_and_models_in_one_process(model: TinyLM) -> None:
    other = TinyLM(Options(scale=0.5, softcap=2.0), VOCAB)
    wanted = [run_loss(bound(one, CausalLMLoss), one, *a_batch(VOCAB)).item() for one in (model, other)]
    first, second, third = bound(model), bound(model, chunk_size=2), bound(other)
    for _ in range(2):
        for loss_fn, one, value in ((first, model, wanted[0]), (third, other, wanted[1]), (second, model, wanted[0])):
            assert run_loss(loss_fn, one, *a_batch(VOCAB)).item() == pytest.approx(value, rel=1e-12)
    assert LossHead.of(model) is model.head.forward
    assert len(model._forward_hooks) == 1


def test_a_copy_of_a_bound_model_is_a_model_of_its_own(model: TinyLM) -> None:
    bound(model)
    other = copy.deepcopy(model)
    nn.init.ones_(other.head.weight)
    ids = a_batch(VOCAB)[0]["input_ids"]
    assert torch.equal(other(ids).logits, other.hidden(ids) @ other.head.weight.T)
    found = run_loss(bound(other), other, *a_batch(VOCAB)).item()
    assert found == pytest.approx(run_loss(bound(other, CausalLMLoss), other, *a_batch(VOCAB)).item(), rel=1e-12)


def test_the_gradient_flows_through_what_the_model_returns(model: TinyLM) -> None:
    """FSDP2 starts the backward pass at the model's outputs."""
    loss_fn = bound(model)
    model_inputs, loss_inputs = a_batch(VOCAB)
    outputs = model(**loss_fn.prepare_model_inputs(model_inputs, loss_inputs))
    outputs.logits.register_hook(lambda gradient: gradient * 0)
    loss_fn(model_output=outputs, labels=loss_inputs["labels"]).backward()
    assert all(torch.equal(one, torch.zeros_like(one)) for one in gradients(model).values())


# What it refuses.


class NoHead(TinyLM):
    def get_output_embeddings(self) -> nn.Module | None:
        return None


class OwnLinear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


class Adapted(nn.Module):
    """A head with an adapter beside it, as LoRA makes them."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.base_layer = head

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.base_layer(input)


class ShiftedLogits(TinyLM):
    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> SimpleNamespace:
        return SimpleNamespace(logits=super().forward(input_ids).logits + 1)


class NoCall(TinyLM):
    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> SimpleNamespace:
        return SimpleNamespace(logits=self.hidden(input_ids) @ self.head.weight.T)


class LastOnly(TinyLM):
    def forward(self, input_ids: torch.Tensor, use_cache: bool = False, keep: int = 0) -> SimpleNamespace:
        return SimpleNamespace(logits=self.head(self.hidden(input_ids)[:, -keep:]))


class TwoCalls(TinyLM):
    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> SimpleNamespace:
        hidden = self.hidden(input_ids)
        self.head(hidden)
        return SimpleNamespace(logits=self.head(hidden))


def refusal(model: nn.Module) -> str:
    with pytest.raises(InputError) as caught:
        bound(model)
    (problem,) = caught.value.problems
    assert problem.path == "loss_fn"
    assert "loss_fn: causal_lm" in problem.hint
    return problem.message


@pytest.mark.parametrize(
    ("component", "message"),
    [
        (NoHead, "NoHead has no output embeddings"),
        (ShiftedLogits, "what ShiftedLogits does to the output of its head is no scale and no soft cap"),
        (NoCall, "NoCall does not call its output embeddings"),
    ],
)
def test_models_whose_logits_are_something_else_are_refused(component: Any, message: str) -> None:
    assert message in refusal(component(Options(), VOCAB))


@pytest.mark.parametrize("keep", [1, 3])
def test_a_model_that_drops_positions_by_itself_is_refused(keep: int) -> None:
    class Dropping(LastOnly):
        def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> SimpleNamespace:
            return super().forward(input_ids, keep=keep)

    assert "is no scale and no soft cap" in refusal(Dropping(Options(), VOCAB))


def test_heads_of_another_kind_are_refused_by_name(model: TinyLM) -> None:
    plain = model.head
    model.head = OwnLinear(5, VOCAB, dtype=torch.float64)
    assert "is a OwnLinear, not a plain torch.nn.Linear" in refusal(model)
    model.head = Adapted(plain)
    assert "is a Adapted, not a plain torch.nn.Linear" in refusal(model)
    model.head = plain
    plain.forward = lambda input: input
    assert "is replaced by" in refusal(model)
    del plain.forward
    model.head = parametrizations.weight_norm(plain)
    assert "is computed from other parameters" in refusal(model)


def test_a_model_of_no_known_interface_is_refused() -> None:
    assert "Linear has no output embeddings" in refusal(nn.Linear(1, 1))


def test_a_head_that_is_called_twice_is_refused() -> None:
    with pytest.raises(RunError, match="calls its head more than once"):
        bound(TwoCalls(Options(), VOCAB))


def test_fewer_hidden_states_than_labels_are_refused() -> None:
    model = LastOnly(Options(), VOCAB)
    loss_fn = bound(model)
    model_inputs, loss_inputs = a_batch(VOCAB)
    prepared = loss_fn.prepare_model_inputs(model_inputs, loss_inputs)
    with pytest.raises(RunError, match=r"called for \(2, 1\) tokens, the labels are for \(2, 6\); logits_to_keep"):
        model(**prepared, keep=1)


@pytest.mark.parametrize("component", [CausalLMLoss, ChunkedCausalLMLoss])
@pytest.mark.parametrize("label", [VOCAB, VOCAB + 5, -1, -101])
def test_a_label_outside_the_vocabulary_is_refused_by_both(model: TinyLM, component: Any, label: int) -> None:
    model_inputs, loss_inputs = a_batch(VOCAB)
    loss_inputs["labels"][1, 2] = label
    with pytest.raises(
        RunError, match=rf"the label {label} is outside the vocabulary of {VOCAB}; set loss_fn\.ignore_"
    ):
        run_loss(bound(model, component), model, model_inputs, loss_inputs)
    assert run_loss(bound(model, component, ignore_index=label), model, model_inputs, loss_inputs).item() > 0


@pytest.mark.parametrize("component", [CausalLMLoss, ChunkedCausalLMLoss])
def test_weights_of_another_shape_are_refused_by_both(model: TinyLM, component: Any) -> None:
    model_inputs, loss_inputs = a_batch(VOCAB)
    loss_inputs["weights"] = loss_inputs["weights"][:, :1]
    with pytest.raises(RunError, match=r"'weights' has the shape \(2, 1\), the labels have \(2, 6\)"):
        run_loss(bound(model, component, token_weights="weights"), model, model_inputs, loss_inputs)


@pytest.mark.parametrize("component", [CausalLMLoss, ChunkedCausalLMLoss])
def test_what_a_loss_declares(component: Any) -> None:
    plain, weighted = component(), component(token_weights="weights", ignore_index=7)
    assert (plain.columns, plain.weight_column, plain.ignore_index) == ((), None, -100)
    assert (weighted.columns, weighted.weight_column, weighted.ignore_index) == (("weights",), "weights", 7)


def test_calls_out_of_order_are_refused(model: TinyLM) -> None:
    model_inputs, loss_inputs = a_batch(VOCAB)
    labels = loss_inputs["labels"]
    with pytest.raises(RunError, match="bind_model was not called"):
        ChunkedCausalLMLoss().prepare_model_inputs(model_inputs, loss_inputs)
    loss_fn = bound(model)
    outputs = model(**loss_fn.prepare_model_inputs(model_inputs, loss_inputs))
    with pytest.raises(RunError, match="the labels are not those"):
        loss_fn(model_output=outputs, labels=labels.roll(1))
    with pytest.raises(RunError, match="prepare_model_inputs was not called"):
        loss_fn(model_output=outputs, labels=labels)
    loss_fn.prepare_model_inputs(model_inputs, loss_inputs)
    with pytest.raises(RunError, match="did not call its head"):
        loss_fn(model_output=outputs, labels=labels)


def test_micro_batches_prepared_ahead_are_not_mixed_up(model: TinyLM) -> None:
    loss_fn = bound(model)
    model_inputs, first = a_batch(VOCAB)
    prepared = loss_fn.prepare_model_inputs(model_inputs, first)
    loss_fn.prepare_model_inputs(model_inputs, {**first, "labels": first["labels"].roll(1)})
    outputs = model(**prepared)
    with pytest.raises(RunError, match="the labels are not those that prepare_model_inputs was called with last"):
        loss_fn(model_output=outputs, labels=first["labels"])


# How it chooses its chunks.


def test_chunks_fill_the_budget() -> None:
    weight = torch.empty(152_000, 1)
    plain, capped = LogitTransform(), LogitTransform(softcap=30.0)
    assert fitting_chunk(weight, plain, 512) == 883
    assert fitting_chunk(weight, capped, 512) == 441
    assert fitting_chunk(weight.bfloat16(), plain, 512) == 883
    assert fitting_chunk(weight.double(), plain, 512) == 441
    assert fitting_chunk(torch.empty(152_000, 1, device="meta"), plain, 512) == 588


def test_the_default_budget_and_a_smaller_one(model: TinyLM) -> None:
    sizes = [bound(model, **one)._bound.loss.chunk_size for one in ({}, {"memory_budget_mib": 1}, {"chunk_size": 7})]
    assert sizes == [512 * 2**20 // (8 * VOCAB), 2**20 // (8 * VOCAB), 7]


def test_a_budget_below_one_token_says_what_it_needs() -> None:
    # 300,000 logits in float64 are 2.29 MiB.
    with pytest.raises(InputError) as caught:
        bound(TinyLM(Options(), 300_000), memory_budget_mib=2)
    (problem,) = caught.value.problems
    assert "the logits of one token take 3 MiB, more than the budget of 2" in problem.message
    assert problem.hint == "set loss_fn.memory_budget_mib=3"
    assert bound(TinyLM(Options(), 300_000), memory_budget_mib=3)._bound.loss.chunk_size == 1


def test_a_size_and_a_budget_contradict_each_other() -> None:
    with pytest.raises(ArgumentError, match="memory_budget_mib: a budget chooses the chunk size, which is 8 already"):
        ChunkedCausalLMLoss(chunk_size=8, memory_budget_mib=512)
