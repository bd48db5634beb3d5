"""Packed documents never see each other on the path that training takes."""

from __future__ import annotations

import pytest
import torch

from hp_core.training.loss import IGNORE_INDEX
from hp_plugins.collators.rows import rows
from hp_plugins.losses.causal_lm import CausalLMLoss
from hp_plugins.trainers.text import get_batch
from tests.data.helpers import CharTokenizer, ListSource, text_datasets
from tests.model.tiny import GPT2, LLAMA, QWEN3, QWEN3_MOE, a_setup, build

FAMILIES = {"llama": LLAMA, "qwen3": QWEN3, "qwen3_moe": QWEN3_MOE, "gpt2": GPT2}
CASES = [(family, attention) for family in FAMILIES for attention in ("sdpa", "eager")]
FIRST, OTHER, SECOND = "qwertyu", "ASDFGHJ", "zxcvbnmkl"
LENGTH = len(FIRST) + len(SECOND) + 2


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def model(request):
    family, attention = request.param
    # Ids are code points, below 128.
    with a_setup() as setup:
        model = build(setup, {**FAMILIES[family], "vocab_size": 128}, attn_implementation=attention).eval()
        if family == "qwen3_moe":
            # Grouped matrix products have no float64.
            model.set_experts_implementation("eager")
        yield model


def packed(texts: list[str], max_seq_len: int, cache_dir) -> tuple[dict, dict]:
    tokenizer = CharTokenizer(vocab_size=128)
    dataset = text_datasets(ListSource(texts), tokenizer=tokenizer, max_seq_len=max_seq_len, cache_dir=cache_dir).train
    return get_batch(iter([rows()([dataset[index] for index in range(len(dataset))])]))


def logits_of(model, model_inputs: dict) -> torch.Tensor:
    return model(**CausalLMLoss().prepare_model_inputs(model_inputs, {})).logits


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("batch_size", [1, 3])
@torch.no_grad()
def test_the_first_document_of_a_row_changes_nothing_in_the_second(model, tmp_path, dtype, tolerance, batch_size):
    model = model.to(dtype)
    one, _ = packed([FIRST, SECOND] * batch_size, LENGTH, tmp_path)
    two, _ = packed([OTHER, SECOND] * batch_size, LENGTH, tmp_path)
    assert one["input_ids"].shape == (batch_size, LENGTH)
    begin = len(FIRST) + 1
    assert torch.equal(one["input_ids"][:, begin:], two["input_ids"][:, begin:])
    difference = (logits_of(model, one) - logits_of(model, two)).abs()
    assert difference[:, :begin].max() > 1e-3
    assert difference[:, begin:].max() <= tolerance


@torch.no_grad()
def test_rows_of_a_batch_may_be_packed_differently(model, tmp_path):
    model = model.double()
    texts = ["qwe", "rty" * 3, "uio", "asdfghjkl" * 2, "zxc", "vb" * 9]
    model_inputs, _ = packed(texts, 16, tmp_path)
    assert len(model_inputs["input_ids"]) == 4
    together = logits_of(model, model_inputs)
    tensors = {name: value for name, value in model_inputs.items() if isinstance(value, torch.Tensor)}
    for index in range(4):
        alone = logits_of(model, {**{name: value[[index]] for name, value in tensors.items()}, "use_cache": False})
        torch.testing.assert_close(together[[index]], alone, rtol=0, atol=1e-12)


@torch.no_grad()
def test_the_summed_loss_of_packed_documents_is_that_of_separate_runs(model, tmp_path):
    model = model.double()
    # A document of one character and its end lies in the middle; the last row is padded.
    texts = [FIRST, "a", SECOND, OTHER]
    loss_fn = CausalLMLoss()

    def summed(documents: list[str], max_seq_len: int) -> tuple[float, int]:
        model_inputs, loss_inputs = packed(documents, max_seq_len, tmp_path)
        loss = loss_fn(model_output=_output(model, loss_fn, model_inputs), labels=loss_inputs["labels"])
        return loss.item(), int((loss_inputs["labels"] != IGNORE_INDEX).sum())

    apart = [summed([text], len(text) + 1) for text in texts]
    total, targets = sum(loss for loss, _ in apart), sum(count for _, count in apart)
    assert targets == sum(map(len, texts))
    for length in (sum(len(text) + 1 for text in texts), 40):
        loss, count = summed(texts, length)
        assert count == targets
        assert loss == pytest.approx(total, rel=1e-6)


def _output(model, loss_fn, model_inputs):
    return model(**loss_fn.prepare_model_inputs(model_inputs, {}))


@torch.no_grad()
def test_the_model_s_own_loss_sees_the_same_targets(model, tmp_path):
    model = model.double()
    model_inputs, loss_inputs = packed([FIRST, SECOND, OTHER], 13, tmp_path)
    loss_fn = CausalLMLoss()
    summed = loss_fn(model_output=_output(model, loss_fn, model_inputs), labels=loss_inputs["labels"])
    targets = int((loss_inputs["labels"] != IGNORE_INDEX).sum())
    assert targets == len(FIRST + SECOND + OTHER)
    assert model(**model_inputs).loss.item() == pytest.approx(summed.item() / targets, rel=1e-6)
