from __future__ import annotations

from typing import Any

import pluggy
import pytest

from hp_core import hookspecs
from hp_core.hooks import Hook, hook_manual, hooks
from hp_core.hookspecs import hookimpl

FIRSTRESULT = {
    "build_model",
    "replace_module",
    "build_loss",
    "build_dataset",
    "build_dataloader",
    "build_optimizer",
    "build_lr_scheduler",
    "prepare_model_inputs",
}


def test_the_hooks_are_those_of_the_design_with_its_arguments() -> None:
    assert [hook.signature for hook in hooks().values()] == [
        "build_model(config, distributed_setup, peft_config, activation_checkpoint, activation_swap, compile_config)",
        "replace_module(module, module_fqn, context)",
        "on_plan(plan)",
        "build_loss(config)",
        "bind_model(loss_fn, model, distributed_setup)",
        "build_dataset(config, transform, tokenizer, mesh_context, training_config)",
        "build_dataloader(config, dataset, collate_fn, batch_sampler, batch_size, dp_world_size, max_seq_len, seed)",
        "build_optimizer(config, model)",
        "build_lr_scheduler(config, optimizer, train_iters)",
        "load_state(run, state)",
        "on_train_start(run)",
        "prepare_model_inputs(loss_fn, model_inputs, loss_inputs)",
        "on_step_end(run, step)",
        "on_evaluate(run, evaluation)",
        "save_state(run)",
        "on_checkpoint(run, path)",
        "on_train_end(run, report)",
        "on_exception(run, error)",
    ]
    assert {hook.name for hook in hooks().values() if hook.firstresult} == FIRSTRESULT


def test_the_marker_is_pluggys_for_the_project_hp() -> None:
    @hookimpl(wrapper=True)
    def build_loss() -> Any:
        return (yield)

    assert isinstance(hookimpl, pluggy.HookimplMarker)
    assert build_loss.hp_impl["wrapper"] is True


def test_pluggy_itself_accepts_the_specifications() -> None:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    assert {name for name in vars(manager.hook) if not name.startswith("_")} == set(hooks())


@pytest.mark.parametrize("hook", hooks().values(), ids=lambda hook: hook.name)
def test_the_manual_keeps_each_sentence_and_argument(hook: Hook) -> None:
    manual = hook_manual()
    entry = manual[manual.index(f"### `{hook.signature}`\n") :].split("\n### ")[0]
    assert " ".join(hook.doc.split("\n\n")[0].split()) in " ".join(entry.split())
    assert [line.split("`")[1] for line in entry.splitlines() if line.startswith("- `")] == list(hook.arguments)
    assert entry.count("```python\n") == 1
    assert entry.rstrip().endswith("```")
