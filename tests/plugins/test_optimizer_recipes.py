"""Optimizers as recipes name them, with errors that point into the recipe."""

from __future__ import annotations

import pytest
import torch

from hp_core.config import load_recipe
from hp_core.errors import InputError
from hp_plugins.optimizers.chained import ChainedOptimizer
from tests.model.tiny import LLAMA, a_setup, build


@pytest.fixture
def llama():
    with a_setup() as setup:
        return build(setup, LLAMA)


RECIPE = """\
model: {{name: causal_lm, config: {{model_type: llama}}}}
dataset: {{name: python_docs, max_seq_len: 8}}
training: {{train_iters: 1}}
optimizer:
{optimizer}
"""


def recipe(tmp_path, optimizer: str):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(optimizer="\n".join(f"  {line}" for line in optimizer.strip().splitlines())))
    return path


GROUPS = """
groups:
- {match: "*norm*", lr: 1e-4, weight_decay: 0.5}
- match: [lm_head.weight, "*.k_proj.*"]
  frozen: true
"""


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("name: adamw\nlr: 1e-3\nbetas: [0.9, 0.99]", torch.optim.AdamW),
        ("name: muon\nlr: 0.02\nadamw_lr: 1e-3", ChainedOptimizer),
        ("name: hyperparallel:sgd\nlr: 1\nmomentum: 0.9\nnesterov: true", torch.optim.SGD),
        ("_target_: hp_plugins.optimizers.adamw.AdamW\nlr: 1e-3", torch.optim.AdamW),
    ],
)
def test_recipes_build_them_with_groups(tmp_path, llama, text, kind):
    loaded = load_recipe(recipe(tmp_path, text + GROUPS))
    optimizer = loaded.config.optimizer.build(model=llama).get_optimizer()
    assert type(optimizer) is kind
    frozen_names = {"lm_head.weight", *(f"model.layers.{i}.self_attn.k_proj.weight" for i in range(2))}
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    assert {name for name, p in llama.named_parameters() if p not in held} == frozen_names
    settings = {p: (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    assert settings[llama.model.norm.weight] == (1e-4, 0.5)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("name: adamw", ":4:1: optimizer: 'adamw' needs the argument 'lr'"),
        ("name: adamw\nlr: 0", ":6:7: optimizer.lr: "),
        ("name: adamw\nlr: 1e-3\nbetas: [0.9, 1.0]", ":7:16: optimizer.betas[1]: "),
        ("name: muon\nlr: 0.1\nadamw_lr: 0.1\nns_steps: 100", ":8:13: optimizer.ns_steps: "),
        ("name: adamw\nlr: 1e-3\ngroups: [{match: a, weight_decy: 0}]", ":7:23: optimizer.groups[0].weight_decy: "),
        ("name: adamw\nlr: 1e-3\ngroups: [{match: a, frozen: 1}]", ":7:31: optimizer.groups[0].frozen: "),
        ("name: adamw\nlr: 1e-3\ngroups: [{lr: 1e-4}]", "optimizer.groups[0].match: "),
        ("name: adamw\nlr: 1e-3\nmodel: 3", "optimizer.model: "),
    ],
)
def test_wrong_values_are_found_without_a_model(tmp_path, text, problem):
    with pytest.raises(InputError) as caught:
        load_recipe(recipe(tmp_path, text))
    assert problem in str(caught.value)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            'name: adamw\nlr: 1e-3\ngroups:\n- match: "*norm*"\n- match:\n  - lm_head.wieght\n',
            ":10:5: optimizer.groups[1].match: 'lm_head.wieght' matches no parameter; did you mean 'lm_head.weight'?",
        ),
        (
            'name: sgd\nlr: 1\ngroups: [{match: "*", frozen: true}]',
            ":7:11: optimizer.groups: every parameter is frozen",
        ),
        ("name: sgd\nlr: 1\nnesterov: true", ":7:13: optimizer.nesterov: there is no momentum"),
    ],
)
def test_what_only_the_model_shows_is_located_too(tmp_path, llama, text, problem):
    path = recipe(tmp_path, text)
    loaded = load_recipe(path)
    with pytest.raises(InputError) as caught:
        loaded.config.optimizer.build(model=llama)
    assert f"{path.name}{problem}" in str(caught.value)
