"""The z-loss by hand, around losses of every shape, and over hooks."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig

from hp_core import InputError, ModelOutputLoss, RunError
from hp_core.testing import hook_checks
from hp_plugins.losses.causal_lm import CausalLMLoss
from hp_zloss import plugin
from hp_zloss.loss import ZLoss

IGNORED = -100


@hook_checks("hp_zloss.plugin")
def test_the_promises_of_a_plugin(check):
    check()


class Constant(nn.Module):
    """Gives what it was told to, however it is asked."""

    def __init__(self, value: object, reduction: str | None = None, columns: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.value = value
        self.columns = columns
        if reduction is not None:
            self.reduction = reduction

    def forward(self, *, model_output: object, labels: torch.Tensor, **columns: object) -> object:
        return self.value(**columns) if callable(self.value) else self.value


def heard(loss: ZLoss, logits: torch.Tensor) -> ZLoss:
    """Let the loss hear the logits from a head."""
    head = nn.Identity()
    loss.listen_to(head)
    loss.expect_logits()
    head(logits)
    return loss


# Two tokens with normalisers log 2 and log 4 = 2 log 2, and one that is left out.
LOGITS = torch.tensor([[[0.0, 0.0], [math.log(2.0), math.log(2.0)], [9.0, 9.0]]])
LABELS = torch.tensor([[0, 1, IGNORED]])
SQUARES = math.log(2.0) ** 2 * (1 + 4)


@pytest.mark.parametrize(("reduction", "expected"), [(None, SQUARES / 2), ("mean", SQUARES / 2), ("sum", SQUARES)])
def test_values_worked_out_by_hand(reduction, expected):
    loss = heard(ZLoss(Constant(torch.tensor(3.0), reduction), weight=0.5), LOGITS)
    assert loss.reduction == (reduction or "mean")
    entries = loss(model_output=None, labels=LABELS)
    assert sorted(entries) == ["task_loss", "z_loss"]
    assert entries["task_loss"].item() == 3.0
    assert entries["z_loss"].item() == pytest.approx(0.5 * expected, rel=1e-6)


def test_a_dict_of_losses_keeps_its_entries():
    inner = {"first_loss": torch.tensor(1.0), "second_loss": torch.tensor(2.0)}
    entries = heard(ZLoss(Constant(inner)), LOGITS)(model_output=None, labels=LABELS)
    assert {name: entries[name] for name in inner} == inner
    assert set(entries) - set(inner) == {"z_loss"}
    assert "z_loss" not in inner
    with pytest.raises(RunError, match="Constant has an entry 'z_loss' already"):
        heard(ZLoss(Constant({"z_loss": torch.tensor(1.0)})), LOGITS)(model_output=None, labels=LABELS)


def test_nothing_supervised_is_zero_with_zero_gradients():
    logits = LOGITS.clone().requires_grad_()
    for reduction in ("mean", "sum"):
        loss = heard(ZLoss(Constant(torch.tensor(0.0), reduction)), logits)
        (slope,) = torch.autograd.grad(
            loss(model_output=None, labels=torch.full_like(LABELS, IGNORED))["z_loss"], logits
        )
        assert torch.equal(slope, torch.zeros_like(slope))


def test_the_gradient_is_that_of_the_formula():
    logits = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[1, IGNORED, 2], [0, 4, IGNORED]])
    entries = heard(ZLoss(Constant(torch.tensor(0.0), "sum"), weight=0.25), logits)(model_output=None, labels=labels)
    (found,) = torch.autograd.grad(entries["z_loss"], logits)
    # d/dz_j log(sum exp z)^2 = 2 log(sum exp z) * softmax(z)_j
    normaliser = logits.detach().exp().sum(-1, keepdim=True)
    expected = 0.25 * 2 * normaliser.log() * logits.detach().exp() / normaliser
    torch.testing.assert_close(found, expected * (labels != IGNORED)[..., None], rtol=1e-12, atol=1e-14)


def test_columns_reach_the_loss_inside():
    loss = heard(ZLoss(Constant(lambda weights: weights * 2, columns=("weights",))), LOGITS)
    assert loss(model_output=None, labels=LABELS, weights=torch.tensor(1.5))["task_loss"].item() == 3.0


def test_what_the_loss_inside_does_with_the_model_is_done():
    moe = AutoModelForCausalLM.from_config(tiny(LlamaConfig))
    inner = CausalLMLoss()
    seen = []
    inner.bind_model = lambda model, distributed_setup: seen.append((model, distributed_setup))
    loss = ZLoss(inner)
    loss.bind_model(moe, "setup")
    assert seen == [(moe, "setup")]
    assert loss.prepare_model_inputs({"input_ids": 1, "labels": 2}, {}) == {"input_ids": 1}
    plain = ZLoss(ModelOutputLoss())
    plain.bind_model(moe, None)
    assert plain.prepare_model_inputs({"labels": 2}, {}) == {"labels": 2}


def test_logits_of_another_pass_are_not_taken():
    loss = ZLoss(Constant(torch.tensor(0.0)))
    head = nn.Identity()
    loss.listen_to(head)
    head(LOGITS)
    with pytest.raises(RunError, match=r"labels of shape \(1, 3\) need the head's logits, got none"):
        loss(model_output=None, labels=LABELS)
    loss.expect_logits()
    head(LOGITS[:, :2])
    with pytest.raises(RunError, match=r"got logits of shape \(1, 2, 2\)"):
        loss(model_output=None, labels=LABELS)
    loss.expect_logits()
    head(LOGITS)
    head(LOGITS[:, :1])
    loss(model_output=None, labels=LABELS)
    with pytest.raises(RunError, match="got none"):
        loss(model_output=None, labels=LABELS)


# In a model.


def tiny(config: type, **extra: object) -> object:
    return config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        **extra,
    )


def result(of: object) -> object:
    """Let a wrapper's generator run around a call that gives `of`."""

    def around(generator):
        next(generator)
        try:
            generator.send(of)
        except StopIteration as stop:
            return stop.value
        raise AssertionError("it yields once")

    return around


@pytest.mark.parametrize("config", [LlamaConfig, Gemma2Config])
def test_the_logits_are_the_head_s_own(config):
    torch.manual_seed(0)
    extra = {"final_logit_softcapping": 0.5} if config is Gemma2Config else {}
    model = AutoModelForCausalLM.from_config(tiny(config, **extra)).double()
    loss = result(CausalLMLoss())(plugin.build_loss())
    plugin.bind_model(loss, model)
    ids = torch.randint(32, (2, 6))
    labels = ids.roll(-1, 1)
    inputs = {"input_ids": ids, "use_cache": False}
    assert result(inputs)(plugin.prepare_model_inputs(loss)) is inputs
    model_output = model(**inputs)
    entries = loss(model_output=model_output, labels=labels)
    states = model.model(**inputs).last_hidden_state
    raw = states @ model.get_output_embeddings().weight.T
    expected = 1e-4 * raw.exp().sum(-1).log().square().sum()
    assert entries["z_loss"].item() == pytest.approx(expected.item(), rel=1e-10)
    capped = 1e-4 * model_output.logits.logsumexp(-1).square().sum()
    assert (capped.item() == pytest.approx(expected.item(), rel=1e-10)) == (config is LlamaConfig)


def test_a_model_without_a_head_is_refused():
    with pytest.raises(InputError, match="hp-zloss: Linear has no output head"):
        plugin.bind_model(ZLoss(ModelOutputLoss()), nn.Linear(2, 2))
    base = AutoModelForCausalLM.from_config(tiny(LlamaConfig)).model
    with pytest.raises(InputError, match="hp-zloss: LlamaModel has no output head"):
        plugin.bind_model(ZLoss(ModelOutputLoss()), base)


def test_it_is_found_inside_another_wrapper_and_missed_where_it_is_gone():
    model = AutoModelForCausalLM.from_config(tiny(LlamaConfig))
    own = ZLoss(ModelOutputLoss())
    around = nn.ModuleDict({"other": own})
    plugin.bind_model(around, model)
    result({})(plugin.prepare_model_inputs(around))
    model(input_ids=torch.arange(3)[None], use_cache=False)
    assert own(model_output=SimpleNamespace(loss=torch.tensor(1.0)), labels=torch.zeros(1, 3, dtype=torch.long))
    with pytest.raises(InputError, match="another plugin dropped the z-loss"):
        plugin.bind_model(ModelOutputLoss(), model)


# In a run.

PACKAGE = Path(__file__).parents[1]
RECIPE = (PACKAGE / "recipe.yaml").read_text(encoding="utf-8")
TINY = (
    "model.config.hidden_size=32",
    "dataset.max_files=3",
    "dataset.max_seq_len=32",
    "dataset.validation_fraction=0",
    "lr_scheduler=null",
    "training.train_iters=2",
    "training.log_every=1",
    "training.global_batch_size=4",
)


def test_the_numbers_don_t_depend_on_how_the_work_is_cut_or_the_loss_reduces(hp_run):
    def numbers(loss_fn: str, micro_batch_size: int, nproc: int = 1) -> list[float]:
        size = f"training.micro_batch_size={micro_batch_size}"
        rows = hp_run(RECIPE, *TINY, f"loss_fn={loss_fn}", size, nproc=nproc).rows
        return [row[name] for row in rows for name in ("loss", "task_loss", "z_loss", "grad_norm")]

    whole = numbers("causal_lm", micro_batch_size=4)
    assert len(whole) == 8
    assert numbers("causal_lm", micro_batch_size=1) == pytest.approx(whole, rel=1e-5)
    # The model's own loss is a mean.
    assert numbers("model_output", micro_batch_size=4) == pytest.approx(whole, rel=1e-5)
    assert numbers("model_output", micro_batch_size=1, nproc=2) == pytest.approx(whole, rel=1e-5)


def test_the_readme_s_plugin_of_one_file_has_another_weight(hp_run, tmp_path):
    readme = (PACKAGE / "README.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    (tmp_path / "stronger.py").write_text(source, encoding="utf-8")
    tiny = (*TINY, "training.micro_batch_size=4")
    weak = hp_run(RECIPE, *tiny).rows[0]
    strong = hp_run(RECIPE, *tiny, "plugins=[stronger.py]").rows[0]
    assert strong["z_loss"] == pytest.approx(10 * weak["z_loss"], rel=1e-5)
