"""Replacements through recipes: what a run says and records, where errors are, hooks, resuming, several ranks."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch

from hp_core.observe.trackers import read_metrics
from tests.e2e.runs import hp_train_here, manifest, recipe, steps, train

FACTORIES = "tests.model.replacement.factories"
NORMS = f"""\
plan_overrides:
  - match: "*norm"
    module_type: transformers.models.llama.modeling_llama.LlamaRMSNorm
    replace_module: {{_target_: {FACTORIES}.norm}}
  - match: "*.mlp"
    replace_module: {{_target_: {FACTORIES}.fused_mlp}}
"""
WATCH = """\
from hp_core import hookimpl

SEEN = []


@hookimpl(wrapper=True)
def replace_module(module, module_fqn, context):
    built = yield
    name = context.target.spelling.rpartition(".")[2]
    print(f"{module_fqn}: layer {context.layer_index}, {name}, {context.sizes['dp_shard']}")
    return built
"""


def test_the_losses_are_those_of_the_plain_model_and_the_run_says_what_it_replaced(tmp_path: Path) -> None:
    plain = train(recipe(tmp_path), out=tmp_path / "plain")
    done = hp_train_here(str(recipe(tmp_path, extra=NORMS)))
    assert done.returncode == 0, done.stderr
    replaced = read_metrics(tmp_path / "run")
    assert steps(replaced) == pytest.approx(steps(plain), rel=1e-5)
    assert steps(replaced, "grad_norm") == pytest.approx(steps(plain, "grad_norm"), rel=1e-4)
    assert f"plan_overrides[0]: {FACTORIES}.norm replaced 5 modules (LlamaRMSNorm -> Norm)" in done.stdout
    norms, mlps = manifest(tmp_path / "run")["replaced_modules"]
    assert norms["modules"] == [
        *(f"model.layers.{i}.{name}_layernorm" for i in (0, 1) for name in ("input", "post_attention")),
        "model.norm",
    ]
    assert mlps == {
        "rule": "plan_overrides[1]",
        "factory": f"{FACTORIES}.fused_mlp",
        "when": None,
        "modules": ["model.layers.0.mlp", "model.layers.1.mlp"],
        "types": ["LlamaMLP -> FusedMLP"],
    }


def test_ranks_agree_and_a_rule_for_several_ranks_applies_only_there(tmp_path: Path) -> None:
    path = recipe(tmp_path, extra=NORMS.replace('match: "*.mlp"', 'match: "*.mlp"\n    when: dp'))
    one, two = (train(path, nproc=n, out=tmp_path / f"run{n}") for n in (1, 2))
    assert steps(two) == pytest.approx(steps(one), rel=1e-5)
    assert [len(r["modules"]) for r in manifest(tmp_path / "run1")["replaced_modules"]] == [5, 0]
    assert [len(r["modules"]) for r in manifest(tmp_path / "run2")["replaced_modules"]] == [5, 2]


def test_a_rule_that_is_left_out_is_told(tmp_path: Path) -> None:
    extra = NORMS.replace('match: "*.mlp"', 'match: "*.mlp"\n    when: tp')
    done = hp_train_here(str(recipe(tmp_path, extra=extra)))
    assert f"plan_overrides[1]: {FACTORIES}.fused_mlp left out: when: tp, and that size is 1" in done.stdout


def test_every_error_has_its_line(tmp_path: Path) -> None:
    extra = f"""\
plan_overrides:
  - match: "*nrom"
    replace_module: {{_target_: {FACTORIES}.norm}}
  - match: ["*.mlp", "*_proj"]
    module_type: transformers.models.llama.modeling_llama.LlamaMLP
    replace_module: {{_target_: {FACTORIES}.fused_mlp}}
"""
    path = recipe(tmp_path, extra=extra)
    done = hp_train_here(str(path))
    lines = path.read_text().splitlines()
    first = next(i for i, line in enumerate(lines, 1) if "nrom" in line)
    kind = next(i for i, line in enumerate(lines, 1) if "module_type" in line)
    errors = [line for line in done.stderr.splitlines() if line.strip()]
    assert done.returncode == 2
    assert errors[0].startswith(f"{path}:{first}:12: plan_overrides[0].match: '*nrom' matches no module")
    assert errors[1].startswith(f"{path}:{kind}:18: plan_overrides[1].module_type: 14 of the 16 modules that match")
    assert any("inside a module that plan_overrides[1] replaces" in line for line in errors)
    assert not (tmp_path / "run").exists()


def test_a_broken_replacement_is_told_at_its_entry(tmp_path: Path) -> None:
    extra = f'plan_overrides:\n  - match: "*norm"\n    replace_module: {{_target_: {FACTORIES}.lost_parameter}}\n'
    path = recipe(tmp_path, extra=extra)
    done = hp_train_here(str(path))
    line = path.read_text().splitlines().index(f"    replace_module: {{_target_: {FACTORIES}.lost_parameter}}") + 1
    assert done.returncode == 2
    assert done.stderr.startswith(f"{path}:{line}:21: plan_overrides[0].replace_module: model.layers.0.input_layernorm")
    assert "(and 4 more)" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_plugin_stands_between_the_recipe_and_the_factories(tmp_path: Path) -> None:
    (tmp_path / "watch.py").write_text(WATCH)
    done = hp_train_here(str(recipe(tmp_path, extra=NORMS + "plugins: [watch.py]\n")))
    assert done.returncode == 0, done.stderr
    assert "model.layers.1.mlp: layer 1, fused_mlp, 1" in done.stdout
    assert "model.norm: layer None, norm, 1" in done.stdout
    assert done.stdout.count(": layer ") == 7


def test_a_plugin_s_own_replacement_is_checked_like_a_factory_s(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\nfrom hp_core import hookimpl\n\n\n"
        "@hookimpl\ndef replace_module(module):\n    return torch.nn.Identity()\n"
    )
    done = hp_train_here(str(recipe(tmp_path, extra=NORMS + "plugins: [own.py]\n")))
    assert done.returncode == 2
    assert "loses the parameter 'weight'" in done.stderr


def test_a_builder_that_leaves_the_rules_aside_is_refused(tmp_path: Path) -> None:
    path = recipe(tmp_path, extra=NORMS)
    path.write_text(path.read_text().replace("name: causal_lm", "_target_: tests.e2e.test_replacement.plain_model", 1))
    done = hp_train_here(str(path))
    assert done.returncode == 2
    assert (
        "plan_overrides: the model was built without its replacements; a model builder finishes its skeleton with"
        in done.stderr
    )


def plain_model(config: dict[str, object], distributed_setup: object) -> torch.nn.Module:
    """A builder that knows nothing of replacements."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(config)
    model: torch.nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    return model


def test_a_stopped_run_goes_on_bit_for_bit_with_another_layout(tmp_path: Path) -> None:
    path = recipe(tmp_path, extra=NORMS)
    whole = train(path, out=tmp_path / "whole")
    train(path, "--training.stop_after=3", out=tmp_path / "parts")
    train(path, "--checkpoint.resume=latest", out=tmp_path / "parts")
    assert steps(read_metrics(tmp_path / "parts")) == steps(whole)
    shards = json.dumps(sorted(one.name for one in (tmp_path / "parts" / "checkpoints").iterdir()))
    assert "step_00000006" in shards


def test_a_checkpoint_of_another_layout_is_refused(tmp_path: Path) -> None:
    train(recipe(tmp_path, extra=NORMS), "--training.stop_after=3", out=tmp_path / "run")
    resume = (str(recipe(tmp_path)), "--checkpoint.resume=latest")
    assert "made with other plugins or components" in hp_train_here(*resume).stderr
    done = hp_train_here(*resume, "--checkpoint.allow_plugin_changes=true")
    assert done.returncode == 2
    assert "made with another model" in done.stderr


def test_norms_are_not_decayed_after_they_are_replaced(tmp_path: Path) -> None:
    """With all gradients zero, weights shrink by lr times decay and norms keep every bit."""
    overrides = ("--loss_fn={_target_: tests.e2e.parts.ZeroLoss}", "--training.train_iters=1")
    decay = "--optimizer={name: adamw, lr: 1e-3, weight_decay: 0.1}"
    train(recipe(tmp_path, extra=NORMS), *overrides, decay, out=tmp_path / "run")
    moved = _weights(tmp_path / "run")
    train(recipe(tmp_path, extra=NORMS), *overrides, decay.replace("0.1", "0.0"), out=tmp_path / "still")
    before = _weights(tmp_path / "still")
    for name, weight in moved.items():
        exempt = name.endswith("norm.weight") or "embed_tokens" in name
        factor = 1.0 if exempt else 1 - 1e-4
        assert torch.equal(weight, before[name] * factor), name


def _weights(run: Path) -> dict[str, torch.Tensor]:
    import torch.distributed.checkpoint as dcp

    folder = run / "checkpoints" / "step_00000001"
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(one.size) for name, one in metadata.items() if name.startswith("model/")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it loads in a single process
        dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    return tensors


def test_other_import_paths_than_before_are_told_on_resume(tmp_path: Path) -> None:
    path = recipe(tmp_path, extra=NORMS)
    train(path, "--training.stop_after=3", out=tmp_path / "run")
    other = recipe(tmp_path, extra=NORMS.replace(f"{FACTORIES}.norm", f"{FACTORIES}.ClassNorm"))
    done = hp_train_here(str(other), "--checkpoint.resume=latest")
    assert done.returncode == 2
    assert f"hp.module_replacements {FACTORIES}.norm is gone" in done.stderr
    assert f"hp.module_replacements {FACTORIES}.ClassNorm is new" in done.stderr
