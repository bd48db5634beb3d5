"""Every hook in call order; these docstrings are the plugin manual (`hp-train plugins --hooks` prints it)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pluggy

PROJECT = "hp"

hookimpl = pluggy.HookimplMarker(PROJECT)
_hookspec = pluggy.HookspecMarker(PROJECT)


@_hookspec(firstresult=True)
def build_model(
    config: Any,
    distributed_setup: Any,
    peft_config: Any,
    activation_checkpoint: Any,
    activation_swap: Any,
    compile_config: Any,
) -> Any:
    """Build the model, finished: replaced, sharded, loaded and in its final dtype.

    When: once in a run, after the process group and the meshes exist, before the loss.
    Ranks: every rank; all must build the same parameters in the same order.

    Args:
        config: the resolved recipe, a frozen `TrainerConfig`.
        distributed_setup: the process group, device and meshes of this run.
        peft_config: the recipe's `peft` section, or None.
        activation_checkpoint: the recipe's `activation_checkpoint` section, or None.
        activation_swap: the recipe's `activation_swap` section, or None.
        compile_config: the recipe's `compile` section, or None.

    Returns:
        A `torch.nn.Module`. None passes the work on; core then builds the recipe's `model` component.

    Example:
        @hookimpl(wrapper=True)
        def build_model():
            model = yield
            model.requires_grad_(False)
            model.get_output_embeddings().requires_grad_(True)
            return model
    """


@_hookspec(firstresult=True)
def replace_module(module: Any, module_fqn: str, context: Any) -> Any:
    """Give the replacement of one module inside the model.

    When: during `build_model`, before sharding and weights, for each match of an entry with `replace_module`.
    Ranks: every rank; all must replace the same modules.

    Args:
        module: the `torch.nn.Module` found in the model, its tensors on the meta device.
        module_fqn: its dotted name in the model, `model.layers.0.mlp`.
        context: a `ReplacementContext`: layer index, model config, mesh and parallel sizes, device, dtype, and
            `target`, the entry's factory with its arguments. Read-only.

    Returns:
        The `torch.nn.Module` to install. None passes the work on; core then calls the entry's factory.

    Example:
        @hookimpl(wrapper=True)
        def replace_module(module_fqn):
            replacement = yield
            print(f"{module_fqn}: {type(replacement).__name__}")
            return replacement
    """


@_hookspec
def on_plan(plan: Any) -> None:
    """Look at how the model will lie on the ranks, before anything is sharded.

    When: during `build_model`, once the modules are replaced, and before the model is sharded or has weights.
    Ranks: every rank, with equal plans.

    Args:
        plan: the `ModelPlan`: `sizes`, `explain()`, `total_parameters`, `local_parameters(rank)`. Read-only.

    Returns:
        Nothing; a value is ignored. Raise `hp_core.errors.InputError` to refuse the plan.

    Example:
        @hookimpl
        def on_plan(plan):
            print(plan.explain())
    """


@_hookspec(firstresult=True)
def build_loss(config: Any) -> Any:
    """Build the module that computes the loss.

    When: once in a run, after `build_model`.
    Ranks: every rank.

    Args:
        config: the resolved recipe, a frozen `TrainerConfig`.

    Returns:
        A `torch.nn.Module` whose `forward(*, model_output, labels)` gives a tensor or a dict of tensors. None
        passes the work on; core then builds the recipe's `loss_fn` component, or `ModelOutputLoss` without one.

    Example:
        @hookimpl(wrapper=True)
        def build_loss():
            loss = yield
            return PenaltyLoss(loss, weight=0.1)
    """


@_hookspec
def bind_model(loss_fn: Any, model: Any, distributed_setup: Any) -> None:
    """Let a loss take hold of the model it will work with.

    When: once in a run (with pipeline ranks first with a tiny model, to try the loss), when the model is final.
    Ranks: every rank.

    Args:
        loss_fn: the `torch.nn.Module` from `build_loss`.
        model: the final `torch.nn.Module`, sharded where the recipe shards.
        distributed_setup: the process group, device and meshes of this run.

    Returns:
        Nothing; a value is ignored. Every plugin is called, and core calls `loss_fn.bind_model` if there is one.

    Example:
        @hookimpl
        def bind_model(loss_fn, model):
            loss_fn.head = model.get_output_embeddings()
    """


@_hookspec(firstresult=True)
def build_dataset(config: Any, transform: Any, tokenizer: Any, mesh_context: Any, training_config: Any) -> Any:
    """Build the training data, with its validation and test parts if it has any.

    When: once in a run, after `bind_model`.
    Ranks: every rank; all must see the same rows under the same numbers.

    Args:
        config: the resolved recipe, a frozen `TrainerConfig`.
        transform: the trainer's callable from one raw sample to one model sample, or None.
        tokenizer: the tokenizer built from `dataset.tokenizer`, or None.
        mesh_context: the data-parallel rank and size, and the other parallel sizes.
        training_config: the recipe's `training` section.

    Returns:
        A dataset, or a tuple (train, valid, test) in which the last two may be None. None passes the work on;
        core then builds the recipe's `dataset` component.

    Example:
        @hookimpl(wrapper=True)
        def build_dataset():
            dataset = yield
            print(f"{len(dataset)} rows")
            return dataset
    """


@_hookspec(firstresult=True)
def build_dataloader(
    config: Any,
    dataset: Any,
    collate_fn: Any,
    batch_sampler: Any,
    batch_size: int,
    dp_world_size: int,
    max_seq_len: int | None,
    seed: int,
) -> Any:
    """Build the iterable that gives this rank its micro-batches.

    When: for each part of the data that is used, after `build_dataset`.
    Ranks: every rank.

    Args:
        config: the resolved recipe, a frozen `TrainerConfig`.
        dataset: one dataset from `build_dataset`.
        collate_fn: a callable from a list of rows to one micro-batch (a dict of tensors).
        batch_sampler: an iterable over lists of row numbers for this rank; it holds the global order, so a
            loader that ignores it breaks resume.
        batch_size: rows in a micro-batch of one rank.
        dp_world_size: the number of data-parallel ranks.
        max_seq_len: the longest row in tokens, or None when the data has no limit.
        seed: the seed of anything random in loading.

    Returns:
        An iterable over micro-batches. None passes the work on; core then builds the recipe's `dataloader`
        component.

    Example:
        @hookimpl
        def build_dataloader(dataset, collate_fn, batch_sampler):
            return DataLoader(dataset, batch_sampler=batch_sampler, collate_fn=collate_fn, num_workers=4)
    """


@_hookspec(firstresult=True)
def build_optimizer(config: Any, model: Any) -> Any:
    """Build the optimizer.

    When: once in a run, after the data.
    Ranks: every rank.

    Args:
        config: the resolved recipe, a frozen `TrainerConfig`.
        model: the final `torch.nn.Module`; each parameter that requires a gradient belongs in exactly one group.

    Returns:
        A `torch.optim.Optimizer`, or an object whose `get_optimizer()` gives one. None passes the work on; core
        then builds the recipe's `optimizer` component.

    Example:
        @hookimpl
        def build_optimizer(config, model):
            return torch.optim.Adagrad(model.parameters(), lr=0.01)
    """


@_hookspec(firstresult=True)
def build_lr_scheduler(config: Any, optimizer: Any, train_iters: int) -> Any:
    """Build the learning-rate schedule.

    When: once in a run, after `build_optimizer`.
    Ranks: every rank.

    Args:
        config: the resolved recipe, a frozen `TrainerConfig`.
        optimizer: the `torch.optim.Optimizer` from `build_optimizer`.
        train_iters: the optimizer steps of the whole run; the schedule advances once in each.

    Returns:
        A torch learning-rate scheduler, or an object whose `get_lr_scheduler()` gives one. None passes the work
        on; core then builds the recipe's `lr_scheduler` component, or a constant rate without one.

    Example:
        @hookimpl
        def build_lr_scheduler(optimizer, train_iters):
            return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=train_iters)
    """


@_hookspec
def load_state(run: Any, state: Any) -> None:
    """Take back what `save_state` gave.

    When: once in a process that resumes, when everything is built and loaded, before `on_train_start`; not if there
        is nothing to take back. A checkpoint that lacks the state of an active plugin, or has that of one which isn't,
        is refused unless `checkpoint.allow_plugin_changes` is true.
    Ranks: every rank, with what its counterpart saved: on other ranks than before, that of the rank which computes the
        loss on the same tokens, or else of the first.

    Args:
        run: the run, with its `config`, `directory`, `model`, `optimizer` and `state` (counters). Read-only.
        state: the dict that this plugin gave, with tensors on the CPU and tuples as they were.

    Returns:
        Nothing; a value is ignored. Raise `hp_core.errors.InputError` to refuse the state.

    Example:
        @hookimpl
        def save_state():
            return {"seen": dict(SEEN)}


        @hookimpl
        def load_state(state):
            SEEN.update(state["seen"])
    """


@_hookspec
def on_train_start(run: Any) -> None:
    """Prepare for the first step.

    When: once in a process, when everything is built and a resumed state is loaded, before the first step.
    Ranks: every rank.

    Args:
        run: the run, with its `config`, `directory`, `model`, `optimizer` and `state` (counters). Read-only.

    Returns:
        Nothing; a value is ignored.

    Example:
        @hookimpl
        def on_train_start(run):
            print(f"from step {run.state.step} in {run.directory.path}")
    """


@_hookspec(firstresult=True)
def prepare_model_inputs(loss_fn: Any, model_inputs: Any, loss_inputs: Any) -> Any:
    """Turn a micro-batch into the keyword arguments of the model's forward call.

    When: before the forward pass of every micro-batch, so it must be quick.
    Ranks: every rank that computes a forward pass.

    Args:
        loss_fn: the `torch.nn.Module` from `build_loss`.
        model_inputs: a dict of the model's inputs, `input_ids` of shape (rows, tokens) among them.
        loss_inputs: a dict of what only the loss needs, `labels` of shape (rows, tokens) among them.

    Returns:
        The dict to call the model with. None passes the work on; core then calls the loss's own
        `prepare_model_inputs` if it has one, and else takes `model_inputs` as it is. To add to what others
        return, be a wrapper.

    Example:
        @hookimpl(wrapper=True)
        def prepare_model_inputs():
            inputs = yield
            return {**inputs, "output_hidden_states": True}
    """


@_hookspec
def on_step_end(run: Any, step: int) -> None:
    """Look at a finished optimizer step.

    When: after every optimizer step, before a checkpoint or an evaluation of it; it must be quick.
    Ranks: every rank.

    Args:
        run: the run. Its `metrics` are the last logged row of `metrics.jsonl`. Read-only.
        step: the number of steps taken, 1 after the first; a resumed run counts on.

    Returns:
        Nothing; a value is ignored.

    Example:
        @hookimpl
        def on_step_end(run, step):
            if step % 100 == 0:
                print(f"{step}: {torch.cuda.max_memory_allocated()} bytes")
    """


@_hookspec
def on_evaluate(run: Any, evaluation: Mapping[str, Any]) -> None:
    """Look at the result of an evaluation.

    When: after each evaluation over the whole validation set.
    Ranks: every rank, with equal numbers.

    Args:
        run: the run. Read-only.
        evaluation: a dict with `step`, `eval_loss` (the mean over all tokens) and `eval_tokens`. Read-only.

    Returns:
        Nothing; a value is ignored.

    Example:
        @hookimpl
        def on_evaluate(evaluation):
            print(f"perplexity {math.exp(evaluation['eval_loss']):.1f}")
    """


@_hookspec
def save_state(run: Any) -> Any:
    """Give what the plugin has to find again when the run resumes.

    When: when a checkpoint is made, at the end of its step; it must be quick. The checkpoint holds a copy, so what is
        given may change afterwards. A plugin that has this hook has `load_state` too, and neither can be a wrapper.
    Ranks: every rank; each keeps its own.

    Args:
        run: the run. Read-only.

    Returns:
        A dict of what JSON can hold (dicts with string keys, lists, numbers, strings, booleans, None) and plain
        tensors. None if there is nothing to find again.

    Example:
        @hookimpl
        def save_state():
            return {"seen": dict(SEEN)}


        @hookimpl
        def load_state(state):
            SEEN.update(state["seen"])
    """


@_hookspec
def on_checkpoint(run: Any, path: Path) -> None:
    """Do something with a checkpoint, such as copying it away.

    When: after each checkpoint, when the directory is complete under its final name; of one that is written in the
        background, before a later step.
    Ranks: every rank.

    Args:
        run: the run. Read-only.
        path: the checkpoint's directory, a `pathlib.Path`.

    Returns:
        Nothing; a value is ignored.

    Example:
        @hookimpl
        def on_checkpoint(path):
            if int(os.environ.get("RANK", "0")) == 0:
                shutil.copytree(path, BACKUP / path.name)
    """


@_hookspec
def on_train_end(run: Any, report: Any) -> None:
    """Look at the finished training.

    When: once, after the last step, evaluation and checkpoint, or when the run has stopped on request; not after a
        failure.
    Ranks: every rank.

    Args:
        run: the run. Read-only.
        report: how the run ended: `steps`, the last logged `metrics` and the last `evaluation`, and whether it was
            `stopped` before its end. Read-only.

    Returns:
        Nothing; a value is ignored.

    Example:
        @hookimpl
        def on_train_end(report):
            print(f"done after {report.steps} steps")
    """


@_hookspec
def on_exception(run: Any, error: BaseException) -> None:
    """Learn that the run fails.

    When: once, when building or training raises; other ranks may be gone, so start no collective.
    Ranks: the ranks that fail.

    Args:
        run: the run. Read-only.
        error: the exception that ends the run; it is raised again afterwards.

    Returns:
        Nothing; a value is ignored.

    Example:
        @hookimpl
        def on_exception(run, error):
            print(f"step {run.state.step}: {error}")
    """
