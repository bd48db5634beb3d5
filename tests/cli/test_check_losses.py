"""`hp-train check` tries the recipe's loss on a tiny model, and a run tries it on its own before the first step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hp_core.config import load_recipe
from hp_core.model.tiny import LLAMA
from hp_core.observe.trackers import read_metrics
from hp_core.testing.ranks import RankError
from hp_core.training.stand_in import StandIn
from tests.e2e.runs import hp_train_here, recipe, steps, train

LOSSES = """
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import nn

from hp_core import Target
from hp_core.config.nested import ComponentOf


def costs(model_output, labels):
    return F.cross_entropy(model_output.logits.flatten(0, 1), labels.flatten(), reduction="none")


class Sum(nn.Module):
    reduction = "sum"

    def forward(self, *, model_output, labels):
        return costs(model_output, labels).sum()


class Forgetful(nn.Module):
    columns = ("weights",)

    def forward(self, *, model_output, labels, weights):
        return costs(model_output, labels).mean()


class ByClass(nn.Module):
    reduction = "sum"

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.register_buffer("weights", torch.linspace(0.5, 1.5, num_classes))

    def forward(self, *, model_output, labels):
        logits = model_output.logits.flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), self.weights, reduction="sum")


class Needs(nn.Module):
    def forward(self, *, model_output, labels):
        return model_output["reward"].mean()


class Squared(nn.Module):
    def forward(self, *, model_output, labels):
        return (costs(model_output, labels).sum() / (labels != -100).sum()) ** 2


class Taught(nn.Module):
    reduction = "sum"

    def __init__(self, teacher: Annotated[Target, ComponentOf("hp.models")]) -> None:
        super().__init__()
        self.teacher = teacher

    def bind_model(self, model, distributed_setup):
        self.model = self.teacher.build(distributed_setup=distributed_setup).eval().requires_grad_(False)
        self.vocab_size = (self.model.config.vocab_size, model.config.vocab_size)

    def prepare_model_inputs(self, model_inputs, loss_inputs):
        self.wanted = self.model(input_ids=model_inputs["input_ids"]).logits.softmax(-1)
        return model_inputs

    def forward(self, *, model_output, labels):
        assert self.vocab_size == (300, 300)
        losses = F.cross_entropy(model_output.logits.flatten(0, 1), self.wanted.flatten(0, 1), reduction="none")
        return {"kl_loss": losses[labels.flatten() != -100].sum(), "loss": costs(model_output, labels).sum()}


class Unbuildable(nn.Module):
    def __init__(self) -> None:
        raise KeyError("table")

    def forward(self, *, model_output, labels):
        return model_output.loss
"""

# A loss around the recipe's own, which hears of the model and of each pass by the plugin's hooks.
PLUGIN = """
from torch import nn
from hp_core import hookimpl


class Around(nn.Module):
    reduction = "sum"

    def __init__(self, inner):
        super().__init__()
        self.inner, self.scale, self.is_expecting = inner, 0.0, False

    def forward(self, *, model_output, labels):
        assert self.is_expecting
        self.is_expecting = False
        loss = self.inner(model_output=model_output, labels=labels)
        return loss * self.scale {after}


@hookimpl(wrapper=True)
def build_loss():
    inner = yield
    return Around(inner)


@hookimpl
def bind_model(loss_fn, model):
    loss_fn.scale = model.get_output_embeddings().in_features / 32


@hookimpl(wrapper=True)
def prepare_model_inputs(loss_fn):
    inputs = yield
    loss_fn.is_expecting = True
    return inputs
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe beside a module with losses."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_losses.py").write_text(LOSSES)
    return recipe(tmp_path)


def loss(name: str, arguments: str = "") -> str:
    return f"--loss_fn={{_target_: own_losses.{name}{arguments}}}"


def test_every_fault_of_a_loss_is_told_at_its_place(tmp_path: Path, project: Path) -> None:
    with project.open("a") as file:
        file.write("loss_fn:\n  _target_: own_losses.Forgetful\n")
    line = project.read_text().splitlines().index("loss_fn:") + 2
    done = hp_train_here("check", str(project))
    assert (done.returncode, done.stdout) == (2, "")
    first, second = done.stderr.splitlines()
    assert f"{project}:{line}:3: loss_fn: Forgetful declares the column 'weights', but other numbers in it" in first
    assert f"{project}:{line}:3: loss_fn: Forgetful divides by all positions or rows, not by those that have" in second


def test_a_good_loss_adds_nothing(project: Path) -> None:
    done = hp_train_here("check", str(project), loss("Sum"))
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == f"{project}: ok"
    assert ", loss own_losses.Sum, " in second


def test_a_loss_made_for_the_recipe_s_vocabulary_is_called_with_that(project: Path) -> None:
    done = hp_train_here("check", str(project), loss("ByClass", ", num_classes: 300"), "--model.config.vocab_size=300")
    assert done.returncode == 0, done.stderr
    done = hp_train_here("check", str(project), loss("ByClass", ", num_classes: 300"))
    assert done.returncode == 2
    assert "loss_fn: ByClass raises on a tiny llama: RuntimeError: weight tensor" in done.stderr


def test_a_teacher_has_a_stand_in_as_well(project: Path) -> None:
    """Neither its weights nor its size are needed, and its vocabulary is the recipe's."""
    teacher = ", teacher: {name: causal_lm, pretrained: somebody/much-too-large}"
    done = hp_train_here("check", str(project), loss("Taught", teacher), "--model.config.vocab_size=300")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2


def test_what_may_be_right_is_a_line_of_its_own(project: Path) -> None:
    done = hp_train_here("check", str(project), loss("Squared"))
    assert done.returncode == 0
    assert done.stdout.splitlines()[0] == f"{project}: ok"
    assert done.stdout.splitlines()[2].startswith("loss_fn: Squared is not made of its rows' losses, so it depends on ")


def test_an_error_is_the_loss_s_only_on_its_own_family(project: Path) -> None:
    done = hp_train_here("check", str(project), loss("Needs"))
    assert done.returncode == 2
    assert "loss_fn: Needs raises on a tiny llama: KeyError: 'reward'" in done.stderr
    done = hp_train_here("check", str(project), loss("Needs"), "--model.config.model_type=mistral")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[2] == (
        "loss_fn: not tried: on a tiny llama, which stands in for the recipe's model, it raises KeyError: 'reward'"
    )


def test_a_loss_of_batches_of_another_kind_is_built_and_not_called(tmp_path: Path, project: Path) -> None:
    (tmp_path / "own_trainers.py").write_text(
        "from hp_core import BaseTrainer\nfrom hp_plugins.trainers.text import TextTrainer\n\n\n"
        "class Images(BaseTrainer):\n    pass\n\n\nclass Poems(TextTrainer):\n    pass\n"
    )
    images = "--trainer={_target_: own_trainers.Images}"
    # On rows of text it would be wrong.
    done = hp_train_here("check", str(project), loss("Forgetful"), images)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[2] == (
        "loss_fn: not tried: the batches of trainer own_trainers.Images are its own, and there are only rows of text "
        "here; a run is the first to call it"
    )
    assert hp_train_here("check", str(project), loss("Unbuildable"), images).returncode == 2
    done = hp_train_here("check", str(project), loss("Forgetful"), "--trainer={_target_: own_trainers.Poems}")
    assert done.returncode == 2
    assert "loss_fn: Forgetful declares the column 'weights'" in done.stderr


def test_a_loss_that_cannot_be_built_is_told(project: Path) -> None:
    done = hp_train_here("check", str(project), loss("Unbuildable"))
    assert done.returncode == 2
    assert "loss_fn: can't be built: KeyError: 'table'" in done.stderr


@pytest.mark.parametrize(("after", "code"), [("", 0), ("/ (labels != -100).sum()", 2)])
def test_a_loss_around_another_is_tried_as_a_whole(tmp_path: Path, project: Path, after: str, code: int) -> None:
    (tmp_path / "around.py").write_text(PLUGIN.replace("{after}", after))
    done = hp_train_here("check", str(project), loss("Sum"), "-p", "./around.py")
    assert done.returncode == code, done.stderr
    assert ("loss_fn: Around is a mean over the supervised tokens, but declares" in done.stderr) == bool(code)


def test_the_stand_in_is_of_the_model_s_family(tmp_path: Path, project: Path) -> None:
    def of(*overrides: str) -> StandIn:
        return StandIn.of(load_recipe(project, overrides).config)

    assert of() == StandIn("llama", is_own_family=True, vocab_size=96)
    assert of("--model.config.model_type=qwen3") == StandIn("qwen3", is_own_family=True, vocab_size=96)
    assert of("--model.config.model_type=mistral") == StandIn("llama", is_own_family=False, vocab_size=96)
    (tmp_path / "stored").mkdir()
    (tmp_path / "stored" / "config.json").write_text(json.dumps({**LLAMA, "model_type": "gemma2", "vocab_size": 200}))
    stored = f"--model={{name: causal_lm, pretrained: {tmp_path / 'stored'}}}"
    assert of(stored) == StandIn("gemma2", is_own_family=True, vocab_size=200)
    hub = "--model={name: causal_lm, pretrained: someone/something}"
    assert of(hub) == StandIn("llama", is_own_family=False, vocab_size=None)


# At the start of a run.


def test_a_run_refuses_the_loss_before_its_first_step(tmp_path: Path, project: Path) -> None:
    done = hp_train_here(
        str(project), loss("Forgetful"), "--dataset={_target_: hp_core.testing.parts.numbered_rows, columns: [weights]}"
    )
    assert done.returncode == 2
    first, second = done.stderr.splitlines()
    assert "loss_fn: Forgetful declares the column 'weights'" in first
    assert "loss_fn: Forgetful divides by all positions or rows" in second
    assert not (tmp_path / "run").exists()


def test_a_run_says_what_may_be_right_and_goes_on(tmp_path: Path, project: Path) -> None:
    done = hp_train_here(str(project), loss("Squared"), "--training.train_iters=1")
    assert done.returncode == 0, done.stderr
    assert "loss_fn: Squared is not made of its rows' losses" in done.stdout + done.stderr


@pytest.mark.parametrize("name", ["tests.testing.broken_losses.Remembering", "tests.e2e.parts.TwoPartLoss"])
def test_trying_the_loss_changes_no_number_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """With dropout and a loss that counts its calls; the rows are those of a run that never tried."""
    path = recipe(tmp_path)
    settings = [f"--loss_fn={{_target_: {name}}}", "--model.config.attention_dropout=0.2", "--training.train_iters=3"]
    losses = []
    for out in ("tried", "untried"):
        if out == "untried":
            monkeypatch.setattr("hp_plugins.trainers.text.check_loss", lambda *_: ())
        done = hp_train_here(str(path), *settings, f"--output_dir={tmp_path / out}")
        assert done.returncode == 0, done.stderr
        losses.append(steps(read_metrics(tmp_path / out)) + steps(read_metrics(tmp_path / out), "grad_norm"))
    assert losses[0] == losses[1]


def test_two_ranks_refuse_alike_and_go_on_alike(tmp_path: Path) -> None:
    """With sharded weights in bfloat16, where rows alone and together are rounded differently."""
    path = recipe(tmp_path)
    settings = ["--mixed_precision={param_dtype: bfloat16}", "--training.train_iters=1"]
    with pytest.raises(RankError, match="MeanOfRowMeans averages the tokens of each row first"):
        train(path, "--loss_fn={_target_: tests.testing.broken_losses.MeanOfRowMeans}", *settings, nproc=2)
    rows = train(path, "--loss_fn=chunked_causal_lm", *settings, nproc=2)
    assert steps(rows)[0] == pytest.approx(torch.tensor(96.0).log().item(), rel=0.02)
