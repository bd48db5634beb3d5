"""One process's whole run: processes, plugins, directory, trackers, then the trainer."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hp_core.allocator import keep_freed_memory
from hp_core.checkpoint.retention import prune
from hp_core.checkpoint.room import require_room
from hp_core.checkpoint.tensors import model_tensors, optimizer_tensors
from hp_core.components import OPTIMIZERS
from hp_core.config import Recipe, TrainerConfig
from hp_core.config.digest import digests
from hp_core.config.render import resolved_yaml
from hp_core.config.resolved import resolved_tree, to_shown_data
from hp_core.entry_points import describe
from hp_core.errors import HpError, InputError, Problem
from hp_core.export.check import prepare_export
from hp_core.export.settings import write_settings
from hp_core.model.compile import compile_settings
from hp_core.model.replacement.replacer import ModuleReplacer
from hp_core.observe.console import Console
from hp_core.observe.delivery import Delivery
from hp_core.observe.run_directory import (
    PLAN_FILE,
    RunDirectory,
    clear,
    closed_to_others,
    lock,
    make,
    read_manifest,
    release,
    versions,
    write_json,
)
from hp_core.observe.trackers import JsonlTracker, RunNames
from hp_core.parallel.agreement import require_same_everywhere
from hp_core.parallel.attempts import RUN_DIRECTORY
from hp_core.parallel.environment import ProcessEnvironment
from hp_core.parallel.plan.planner import Planner
from hp_core.parallel.setup import DistributedSetup, default_threads, distributed
from hp_core.plugins import load_plugins, names_of, provenance
from hp_core.training.base import BaseTrainer
from hp_core.training.beginning import Beginning, unheeded
from hp_core.training.compiling import CompileWatch
from hp_core.training.debugging import Debugging
from hp_core.training.defaults import DefaultHooks
from hp_core.training.profiling import Profiling, require_profile
from hp_core.training.protocols import parts_of
from hp_core.training.run import Report, Run, on_main


def train(
    recipe: Recipe,
    *,
    environment: ProcessEnvironment,
    extra_plugins: Sequence[str] = (),
    overwrite: bool = False,
    command: Sequence[str] = (),
) -> Report:
    """Train `recipe` in this process, which is one of `environment.world_size`.

    Raises:
        HpError: with the exit code and the text for the user.
    """
    # What the command line adds is part of the run: it is written down, and compared, with the rest of the recipe.
    recipe = recipe.with_plugins([*recipe.config.plugins, *extra_plugins])
    try:
        with closed_to_others(), compile_settings(recipe.config.compile, recipe.config.accelerator):
            return _train(recipe, environment, overwrite, command)
    except InputError as error:
        raise recipe.located(error) from error


def _train(
    recipe: Recipe,
    environment: ProcessEnvironment,
    overwrite: bool,
    command: Sequence[str],
) -> Report:
    config = recipe.config
    plugins = load_plugins(
        config.plugins,
        origins={f"plugins[{i}]": recipe.origin(f"plugins[{i}]") for i in range(len(config.plugins))},
        base_dir=Path(recipe.path).resolve().parent,
        defaults=(DefaultHooks(), *_of_the_run(config)),
    )
    if config.training.enable_full_determinism:
        _be_deterministic()
    if "OMP_NUM_THREADS" not in os.environ and environment.launcher == "none":
        torch.set_num_threads(default_threads(1))
    with distributed(environment, config, digests(config)) as setup:
        if setup.device.type == "cpu":
            keep_freed_memory()
        replacer = ModuleReplacer(config.plan_overrides, plugins.hook.replace_module)
        planner = Planner(config.plan_overrides, plugins.hook.on_plan)
        setup = dataclasses.replace(setup, replacer=replacer, planner=planner)
        components = [target.component for target in config.targets() if target.component is not None]
        facts = {**provenance(plugins, components), "targets": _import_paths(config)}
        require_same_everywhere("plugins and their versions", sorted(names_of(facts)), setup)
        kept = setup.attempts.recall(RUN_DIRECTORY)
        # An earlier attempt has cleared the directory, and what is there now is its own.
        overwrite = overwrite and kept is None
        beginning = Beginning(Path(recipe.path), config.output_dir, config.checkpoint.resume, overwrite, kept)
        directory = beginning.directory(setup)
        _check_plugins_of_checkpoint(directory, facts, config.checkpoint.allow_plugin_changes)
        console = Console(enabled=setup.environment.is_main)
        note = unheeded(config.output_dir, directory, setup)
        for message in (*directory.messages, *([note] if note is not None else [])):
            console.say(message)
        run = Run(recipe, plugins, setup, directory, console, _manifest(recipe, setup, facts, directory, command))
        with ExitStack() as at_end:
            if setup.environment.is_main:
                at_end.callback(release, directory)
            at_end.callback(_release_lock, run)
            at_end.push(partial(_close_trackers, run))
            return _fit(config.trainer.build(config=config), run, beginning)


def _of_the_run(config: TrainerConfig) -> Iterator[object]:
    """What follows the run because its recipe asks for it."""
    if config.profiler.start_step is not None:
        yield Profiling(config.profiler)
    if config.compile.mode != "off":
        yield CompileWatch()
    if config.debug.is_on:
        yield Debugging(config.debug)


def _release_lock(run: Run) -> None:
    if run.lock is not None:
        run.lock.release()


def _close_trackers(run: Run, kind: type[BaseException] | None, *_: object) -> None:
    """Close every tracker; they know if the run has failed.

    Raises:
        Exception: the run's own file can't be closed, and the run hasn't failed already.
    """
    first: Exception | None = None
    for tracker in run.trackers:
        if kind is not None and isinstance(tracker, Delivery):
            tracker.fail()
        try:
            tracker.close()
        except Exception as error:
            run.console.say(f"{type(tracker).__name__} can't be closed: {describe(error)}")
            first = first or error
    if first is not None and kind is None:
        raise first


def _add_trackers(run: Run) -> None:
    """Build the recipe's trackers; those that are there when another can't be built are closed with the run."""
    recipe = {**to_shown_data(resolved_tree(run.recipe)), "output_dir": str(run.directory.path)}
    names = RunNames(run.directory.path, continues=run.directory.continues)
    for target in run.config.trackers:
        tracker = target.build(
            run_dir=run.directory.path,
            config=run.config,
            first_step=run.state.step + 1,
            recipe=recipe,
            run_names=names,
        )
        run.trackers.append(
            Delivery(tracker, f"{target.section} ({target.spelling})", partial(_report_tracker, run, target.section))
        )
    names.write()


def _report_tracker(run: Run, section: str, line: str, facts: Mapping[str, Any]) -> None:
    run.console.say(line)
    run.record(trackers={**run.manifest.get("trackers", {}), section: facts})


def _fit(trainer: BaseTrainer, run: Run, beginning: Beginning) -> Report:
    try:
        trainer.build(run)
        prepare_export(run, trainer.model, trainer.tokenizer)
        require_profile(run.config.profiler, run.setup, trainer.last_step)
        # Not before everything is built: a recipe that can't be built leaves no directory in the way of the next try.
        _open(run, beginning)
        return trainer.train()
    except Exception as error:
        try:
            run.plugins.hook.on_exception(run=run, error=error)
        except HpError as second:
            # What ended the run matters more than what a plugin made of it.
            run.console.say(f"while the run was ending: {second}")
        raise


def _be_deterministic() -> None:
    # Read by cuBLAS when its first handle is made, which is after this.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def _manifest(
    recipe: Recipe,
    setup: DistributedSetup,
    facts: Mapping[str, Any],
    directory: RunDirectory,
    command: Sequence[str],
) -> dict[str, Any]:
    return {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(command),
        "recipe": str(recipe.path),
        "seed": recipe.config.training.seed,
        "world": {
            "size": setup.world_size,
            "launcher": setup.environment.launcher,
            "device": setup.device.type,
            "backend": setup.backend,
            **setup.sizes.all,
            "threads": torch.get_num_threads(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        },
        "versions": versions(),
        "trust_remote_code": _trusted_code(recipe.config),
        **facts,
        **_finished(directory),
    }


def _finished(directory: RunDirectory) -> dict[str, int]:
    """The last step of the run before this one in the directory, if it came to its end."""
    before = read_manifest(directory.path) if directory.continues else {}
    return {"finished": before["finished"]} if "finished" in before else {}


def _open(run: Run, beginning: Beginning) -> None:
    """Make the run's directory and its trackers, on the main rank; every rank hears of it when that fails."""
    on_main(partial(_open_here, run, beginning), run.setup)
    run.is_open = True
    run.record()


def _open_here(run: Run, beginning: Beginning) -> None:
    directory, config = run.directory, run.config
    make(directory)
    run.lock = lock(directory)
    beginning.require_unchanged(directory)
    # A tracker that can't be built must not cost the run that is to be replaced.
    _add_trackers(run)
    clear(directory, overwrite=beginning.overwrite)
    if directory.continues:
        # A run that was killed may have been about to.
        for problem in prune(directory.path, config.checkpoint):
            run.console.say(problem)
    _require_room(run)
    run.setup.attempts.remember(RUN_DIRECTORY, str(directory.path.absolute()))
    resume_step = None
    if directory.continues:
        resume_step = directory.checkpoint.step if directory.checkpoint else 0
    for line in run.assets.changes(directory.path) if directory.continues else ():
        run.console.say(line)
    write_settings(directory.path, resolved_yaml(_as_found_anywhere(run)), run.assets.files, resume_step or None)
    planner = run.setup.planner
    if planner is not None and planner.plan is not None:
        write_json(directory.path / PLAN_FILE, planner.plan.as_dict())
    run.trackers.insert(0, JsonlTracker(directory.path, resume_step))
    run.console.say(f"run directory: {directory.path}")


def _as_found_anywhere(run: Run) -> Recipe:
    """The recipe with one-file plugins by their full paths: the copy in the run's directory lies elsewhere."""
    pairs = zip(run.config.plugins, run.plugins.records, strict=True)
    return run.recipe.with_plugins([name if record.is_installed else record.source for name, record in pairs])


def _require_room(run: Run) -> None:
    assert run.model is not None
    assert run.optimizer is not None
    held = {**model_tensors(run.model), **optimizer_tensors(run.model, parts_of(run.optimizer))}
    require_room(run.directory.path, held)


def _check_plugins_of_checkpoint(directory: RunDirectory, facts: Mapping[str, Any], allowed: bool) -> None:
    """Refuse to go on with other plugins than those the checkpoint was made with.

    Raises:
        InputError: names what differs.
    """
    if directory.checkpoint is None or allowed:
        return
    before, now = (names_of(side) for side in (directory.checkpoint.manifest(), facts))
    if before != now:
        changes = [f"{one} is gone" for one in sorted(before - now)] + [f"{one} is new" for one in sorted(now - before)]
        message = f"{directory.checkpoint.path}: made with other plugins or components: {'; '.join(changes)}"
        old, new = (_optimizers(side) for side in (directory.checkpoint.manifest(), facts))
        hint = "--checkpoint.allow_plugin_changes=true goes on all the same"
        if old != new:
            # Its state is of no use to another, which is refused whatever else may change.
            hint = f"the optimizer's state can't be carried over: write the one of before, {', '.join(sorted(old))}"
        raise InputError(Problem(message, hint=hint))


def _optimizers(facts: Mapping[str, Any]) -> set[str]:
    """The optimizers that a recipe names, of whatever version."""
    components = {str(one["name"]) for one in facts["components"] if one["group"] == OPTIMIZERS}
    return components | {str(one["import_path"]) for one in facts.get("targets", ()) if one["group"] == OPTIMIZERS}


def _import_paths(config: TrainerConfig) -> list[dict[str, str]]:
    """The components that the recipe names by `_target_`, which have no package and version to compare."""
    named = {(one.group, one.import_path) for one in config.targets() if one.import_path is not None}
    return [{"group": group, "import_path": path} for group, path in sorted(named)]


def _trusted_code(config: TrainerConfig) -> list[dict[str, Any]]:
    """The components whose foreign code the recipe lets run, and where that code comes from; mostly none."""
    return [
        {"section": one.section, "component": one.spelling, "source": one.arguments.get("pretrained")}
        for one in config.targets()
        if one.arguments.get("trust_remote_code") is True
    ]
