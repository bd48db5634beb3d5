"""Losses against a plain float64 implementation, and labels that are shifted exactly once on the public path."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast

from hp_core.training.accounting import MicroBatch
from hp_core.training.loss import IGNORE_INDEX, ModelOutputLoss
from hp_plugins.collators.rows import rows
from hp_plugins.losses.causal_lm import CausalLMLoss
from hp_plugins.trainers.text import get_batch
from tests.data.helpers import CharTokenizer, ListSource, text_datasets
from tests.model.tiny import GPT2, LLAMA, QWEN3, QWEN3_MOE

IGNORED = IGNORE_INDEX


def a_batch(*, vocab: int = 7, scale: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 5, vocab, generator=generator, dtype=torch.float64) * scale
    labels = torch.randint(0, vocab, (2, 5), generator=generator)
    labels[0, 1:3] = IGNORED
    labels[1, 4] = IGNORED
    return logits, labels


def by_hand(logits: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.0, z: float = 0.0) -> float:
    """Token by token with python loops, in float64."""
    total = 0.0
    for row, target in zip(logits.double().flatten(0, 1), labels.flatten().tolist(), strict=True):
        if target == IGNORED:
            continue
        log_normaliser = row.exp().sum().log()
        log_p = row - log_normaliser
        loss = (1 - smoothing) * -log_p[target] + smoothing / len(row) * -log_p.sum() + z * log_normaliser**2
        total += loss.item()
    return total


def output(logits: torch.Tensor, **fields) -> CausalLMOutputWithPast:
    return CausalLMOutputWithPast(logits=logits, **fields)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("z", [0.0, 1e-4, 0.5])
def test_the_loss_is_its_formula_summed_over_supervised_tokens(smoothing, z):
    logits, labels = a_batch()
    loss = CausalLMLoss(label_smoothing=smoothing, z_loss=z)(model_output=output(logits), labels=labels)
    assert loss.dtype == torch.float64
    assert loss.item() == pytest.approx(by_hand(logits, labels, smoothing, z), rel=1e-12)


def test_every_option_changes_the_loss():
    logits, labels = a_batch()
    options = [{}, {"label_smoothing": 0.1}, {"z_loss": 1e-3}, {"label_smoothing": 0.1, "z_loss": 1e-3}]
    values = {CausalLMLoss(**option)(model_output=output(logits), labels=labels).item() for option in options}
    assert len(values) == len(options)


def test_a_token_by_hand():
    # p = (1/2, 1/4, 1/4), log-normaliser log 4: NLL log 2, sum of -log p is log 2 + 2 log 4.
    logits = torch.tensor([[[2.0, 1.0, 1.0]]]).log()
    labels = torch.tensor([[0]])
    log2, log4 = 0.6931471806, 1.3862943611
    plain = CausalLMLoss()(model_output=output(logits), labels=labels)
    assert plain.item() == pytest.approx(log2, rel=1e-6)
    smoothed = CausalLMLoss(label_smoothing=0.3)(model_output=output(logits), labels=labels)
    assert smoothed.item() == pytest.approx(0.7 * log2 + 0.1 * (log2 + 2 * log4), rel=1e-6)
    with_z = CausalLMLoss(z_loss=0.5)(model_output=output(logits), labels=labels)
    assert with_z.item() == pytest.approx(log2 + 0.5 * log4**2, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_options_it_is_plain_cross_entropy_bit_for_bit(dtype):
    """Added up in float64: a sum of fp32 depends on which tokens are added up together."""
    logits, labels = a_batch()
    logits = logits.to(dtype).requires_grad_()
    each = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="none")
    expected = each.sum(dtype=torch.float64).float()
    (wanted,) = torch.autograd.grad(expected, logits)
    loss = CausalLMLoss(label_smoothing=0.0, z_loss=0.0)(model_output=output(logits), labels=labels)
    (found,) = torch.autograd.grad(loss, logits)
    assert torch.equal(loss, expected)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("arguments", [{}, {"label_smoothing": 0.1}, {"z_loss": 1e-3}])
def test_nothing_supervised_gives_exactly_zero(arguments):
    logits, labels = a_batch()
    logits.requires_grad_()
    loss_fn = CausalLMLoss(**arguments)
    loss_fn._router_coefficient = 0.5
    model_output = MoeCausalLMOutputWithPast(logits=logits, aux_loss=torch.tensor(3.0))
    loss = loss_fn(model_output=model_output, labels=torch.full_like(labels, IGNORED))
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


@pytest.mark.parametrize("arguments", [{}, {"label_smoothing": 0.1}, {"z_loss": 1e-3}])
def test_the_sum_of_parts_is_the_sum_of_the_whole(arguments):
    logits, labels = a_batch()
    loss_fn = CausalLMLoss(**arguments)
    whole = loss_fn(model_output=output(logits), labels=labels)
    parts = [loss_fn(model_output=output(logits[:, [t]]), labels=labels[:, [t]]).item() for t in range(labels.shape[1])]
    assert sum(parts) == pytest.approx(whole.item(), rel=1e-6)


def test_labels_are_kept_from_the_model_and_nothing_else():
    inputs = {"input_ids": 1, "position_ids": 2, "labels": 3, "shift_labels": 4, "use_cache": False}
    kept = CausalLMLoss().prepare_model_inputs(inputs, {"labels": 3})
    assert kept == {"input_ids": 1, "position_ids": 2, "use_cache": False}
    assert "labels" in inputs


def tiny(config: dict, dtype: torch.dtype = torch.float64, **extra):
    torch.manual_seed(0)
    values = {**config, **extra}
    settings = AutoConfig.for_model(values.pop("model_type"), **values)
    # Grouped matrix products have no float64.
    return AutoModelForCausalLM.from_config(settings, experts_implementation="eager").to(dtype).eval()


def test_a_model_of_any_make_will_do():
    logits, labels = a_batch()
    loss_fn = CausalLMLoss()
    loss_fn.bind_model(torch.nn.Linear(1, 1), None)
    loss = loss_fn(model_output=SimpleNamespace(logits=logits), labels=labels)
    assert loss.item() == pytest.approx(by_hand(logits, labels), rel=1e-6)


def test_the_model_s_own_loss_is_passed_on_or_missed():
    loss = torch.tensor(2.5)
    assert ModelOutputLoss()(model_output=output(None, loss=loss), labels=None) is loss
    with pytest.raises(ValueError, match=r"model_output\.loss is None: .* the recipe needs a loss_fn"):
        ModelOutputLoss()(model_output=output(torch.zeros(1)), labels=None)


# The public path: documents, rows, collator, get_batch, model, loss.


def a_public_batch(texts: list[str], max_seq_len: int, cache_dir) -> tuple[dict, dict]:
    """All rows of the packed documents as one batch, as a text trainer gets it."""
    dataset = text_datasets(
        ListSource(texts), tokenizer=CharTokenizer(), max_seq_len=max_seq_len, cache_dir=cache_dir
    ).train
    return get_batch(iter([rows()([dataset[index] for index in range(len(dataset))])]))


def text_of(ids: range) -> str:
    return "".join(map(chr, ids))


@pytest.mark.parametrize("config", [LLAMA, QWEN3, QWEN3_MOE, GPT2], ids=lambda config: config["model_type"])
def test_five_tokens_are_four_targets(tmp_path, config):
    model = tiny(config)
    ids = torch.tensor([[5, 9, 2, 7, 0]])
    model_inputs, loss_inputs = a_public_batch([text_of(ids[0, :4].tolist())], 5, tmp_path)
    assert model_inputs["input_ids"].tolist() == ids.tolist()
    assert loss_inputs["labels"].tolist() == [[9, 2, 7, 0, IGNORED]]
    assert MicroBatch.of({}, loss_inputs).targets == {"labels": 4}
    plain = model(input_ids=ids, labels=ids).loss.item()
    own = ModelOutputLoss()(model_output=model(**model_inputs), labels=loss_inputs["labels"])
    assert own.item() == pytest.approx(plain, rel=1e-6)
    loss_fn = CausalLMLoss()
    prepared = loss_fn.prepare_model_inputs(model_inputs, loss_inputs)
    summed = loss_fn(model_output=model(**prepared), labels=loss_inputs["labels"])
    assert summed.item() / 4 == pytest.approx(plain, rel=1e-6)


def test_the_first_token_of_a_packed_document_is_no_target(tmp_path):
    # Documents of 5 and 7 tokens with their ends: 4 + 6 targets, not 11.
    _, loss_inputs = a_public_batch(["abcd", "ABCDEF"], 12, tmp_path)
    expected = [*map(ord, "bcd"), 0, IGNORED, *map(ord, "BCDEF"), 0, IGNORED]
    assert loss_inputs["labels"].tolist() == [expected]
    assert MicroBatch.of({}, loss_inputs).targets == {"labels": 10}


class CountingUp(torch.nn.Module):
    """Predicts the token after `previous` to be `previous + 1`, and after the last of a document its end."""

    def __init__(self, vocab: int, last: int) -> None:
        super().__init__()
        self.vocab, self.last = vocab, last

    def forward(self, *, input_ids: torch.Tensor, **others) -> CausalLMOutputWithPast:
        following = torch.where(input_ids == self.last, 0, input_ids + 1)
        logits = F.one_hot(following, self.vocab).float() * 100
        loss = None
        if "labels" in others:
            from transformers.loss.loss_utils import ForCausalLMLoss

            loss = ForCausalLMLoss(
                logits, others["labels"], vocab_size=self.vocab, shift_labels=others.get("shift_labels")
            )
        return CausalLMOutputWithPast(loss=loss, logits=logits)


@pytest.mark.parametrize("max_seq_len", [4, 9, 20])
def test_a_model_that_counts_up_has_no_loss_on_counted_rows(tmp_path, max_seq_len):
    model = CountingUp(64, last=20)
    model_inputs, loss_inputs = a_public_batch([text_of(range(1, 21)), text_of(range(15, 21))], max_seq_len, tmp_path)
    own = ModelOutputLoss()(model_output=model(**model_inputs), labels=loss_inputs["labels"])
    assert own.item() == pytest.approx(0.0, abs=1e-6)
    loss_fn = CausalLMLoss()
    model_output = model(**loss_fn.prepare_model_inputs(model_inputs, loss_inputs))
    assert model_output.loss is None
    assert loss_fn(model_output=model_output, labels=loss_inputs["labels"]).item() == pytest.approx(0.0, abs=1e-6)
    twice = loss_inputs["labels"].roll(-1, 1)
    assert loss_fn(model_output=model_output, labels=twice).item() > 100
