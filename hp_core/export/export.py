"""Writes the model of a checkpoint as a Hugging Face directory, in one process and some tensors at a time."""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import PreTrainedModel

from hp_core.checkpoint.integrity import problems_of, records_of
from hp_core.checkpoint.layout import (
    CHECKPOINTS,
    FILES,
    Checkpoint,
    as_checkpoint,
    complete_checkpoints,
    hint_of_run,
    incomplete,
    is_step,
    search,
    step_directory,
)
from hp_core.checkpoint.reading import problem_of_shards
from hp_core.checkpoint.room import in_bytes
from hp_core.config import load_recipe
from hp_core.errors import InputError, Problem, RunError
from hp_core.export.adapter import Adapters
from hp_core.export.adapter_files import outputs_of, require_alone, write_adapter
from hp_core.export.assets import FACTS, Facts, with_dtype
from hp_core.export.layout import DiskLayout, Transformed, skeleton_of, transformed
from hp_core.export.reading import StoredModel
from hp_core.export.settings import settings_of_step
from hp_core.export.writing import ShardWriter
from hp_core.model.replacement.replacer import ModuleReplacer
from hp_core.observe.run_directory import ASSETS, EARLIER, RECIPE_FILE, write_json
from hp_core.parallel.sizes import ParallelSizes
from hp_core.plugins import Plugins, load_plugins, names_of, provenance
from hp_core.training.defaults import DefaultHooks

_CONFIG = "config.json"
# Only an export has it: a user's own model is never taken for one. It says nothing of when or where, so that exports of
# equal weights are equal.
_MARKER = "hp_export.json"
_ANOTHER = "export another one with --step"


@dataclass(frozen=True)
class Exported:
    """What was written."""

    directory: Path
    checkpoint: Checkpoint
    num_files: int
    num_bytes: int
    dtype: str
    remarks: tuple[str, ...] = ()
    is_adapter: bool = False


def export_checkpoint(
    run: Path,
    directory: Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = 5 * 10**9,
    overwrite: bool = False,
    adapter: bool = False,
) -> Exported:
    """Write what plain transformers loads: weights, configurations, tokenizer.

    Memory stays bounded by one file of weights, or the largest tensors that are converted together.

    Args:
        run: a run's directory, or one of its checkpoints.
        directory: where to; it has its name only once it is complete.
        step: the checkpoint after this step; None takes the newest complete one.
        dtype: `float32`, `bfloat16` or `float16`; None takes that of the files which the model was loaded from, or of
            the master weights.
        max_shard_bytes: the largest file, unless one tensor is larger.
        overwrite: replace an earlier export.
        adapter: write the adapters alone, as `peft` loads them on the model that the run began with.

    Raises:
        InputError: there is nothing to export, or `directory` is in use.
        RunError: it can't be written.
    """
    checkpoint, remarks = _checkpoint(run, step)
    home = checkpoint.path.absolute().parent.parent
    settings = settings_of_step(home, checkpoint.step)
    assets = settings / ASSETS
    facts = _facts(checkpoint, assets)
    _refuse_used(directory, home, overwrite)
    stored = StoredModel(checkpoint.path)
    kind: type[PreTrainedModel] = getattr(transformers, facts.kind)
    assert kind.config_class is not None
    config = kind.config_class.from_pretrained(assets)
    master = getattr(torch, facts.master_dtype)
    target: torch.dtype = getattr(torch, dtype or facts.dtype)
    transforms = _transforms(facts, checkpoint, settings, skeleton_of(kind, config, master))
    layout = DiskLayout(skeleton_of(kind, config, master), transforms, facts.adapters, target)
    _require_same(stored, layout, checkpoint)
    if adapter:
        require_alone(facts.adapters, skeleton_of(kind, config, master))
        written = None if dtype is None else target
        num_bytes = _write_adapter(directory, facts.adapters, stored, checkpoint, written)
        return Exported(directory, checkpoint, 1, num_bytes, dtype or "the run's own types", remarks, is_adapter=True)
    units = layout.units(stored.tensors)
    with _in_place(directory) as temporary:
        writer = ShardWriter(temporary, [unit.outputs for unit in units], max_shard_bytes)
        _require_space(temporary, writer.num_bytes)
        _copy_assets(assets, temporary, target)
        write_json(temporary / _MARKER, {"step": checkpoint.step, "dtype": _name_of(target)})
        for unit in units:
            writer.add(layout.convert(stored.read(unit.sources)))
        writer.finish()
    if not checkpoint.manifest()["export"]["tokenizer"]:
        remarks = (*remarks, "there is no tokenizer beside the weights: the recipe has no dataset.tokenizer")
    return Exported(directory, checkpoint, writer.num_files, writer.num_bytes, _name_of(target), remarks)


def _write_adapter(
    directory: Path, adapters: Adapters, stored: StoredModel, checkpoint: Checkpoint, dtype: torch.dtype | None
) -> int:
    num_bytes = sum(one.numel() * one.element_size() for one in outputs_of(adapters, stored, dtype).values())
    with _in_place(directory) as temporary:
        _require_space(temporary, num_bytes)
        write_json(temporary / _MARKER, {"step": checkpoint.step, "dtype": None if dtype is None else _name_of(dtype)})
        write_adapter(temporary, adapters, stored, dtype)
    return num_bytes


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _checkpoint(run: Path, step: int | None) -> tuple[Checkpoint, tuple[str, ...]]:
    checkpoint = as_checkpoint(run.resolve())
    if checkpoint is not None:
        if step not in (None, checkpoint.step):
            raise InputError(Problem(f"--step {step}: {str(run)!r} is the checkpoint of step {checkpoint.step}"))
        return _intact(checkpoint), ()
    if is_step(run.resolve()):
        hint = f"export another one, of {run.resolve().parent.parent}"
        raise InputError(Problem(f"{run}: {incomplete(run.resolve())}", hint=hint))
    if not run.is_dir():
        raise InputError(Problem(f"no such directory: {str(run)!r}", hint="name a run's directory"))
    if step is not None:
        path = step_directory(run, step)
        checkpoint = as_checkpoint(path)
        if checkpoint is None:
            there = [one.step for one in complete_checkpoints(run)]
            hint = f"there are steps {', '.join(map(str, there))}" if there else "it has none"
            message = f"--step {step}: no complete checkpoint of that step in {str(run)!r}"
            lacks = f"; {path}: {incomplete(path)}" if is_step(path) else ""
            raise InputError(Problem(message + lacks, hint=hint))
        return _intact(checkpoint), ()
    found = search(run)
    if found.newest is None:
        hint = hint_of_run(run) or "name the directory of a run that has saved one"
        reasons = "; ".join((f"no complete checkpoint in {str(run)!r}", *map(str, found.passed_over)))
        raise InputError(Problem(reasons, hint=hint))
    return _intact(found.newest), tuple(map(str, found.passed_over))


def _intact(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint, whose files are as they were written as far as can be told."""
    if not checkpoint.is_listed:
        problem = problem_of_shards(checkpoint.path)
    elif not (checkpoint.path / FILES).exists():
        raise InputError(Problem(f"{checkpoint.path}: {incomplete(checkpoint.path)}", hint=_ANOTHER))
    else:
        records = records_of(checkpoint)
        problem = next(iter(problems_of(checkpoint.path, records, list(records))), None)
    if problem is not None:
        raise InputError(Problem(f"{checkpoint.path}: is not what was written: {problem}", hint=_ANOTHER))
    return checkpoint


def _facts(checkpoint: Checkpoint, assets: Path) -> Facts:
    record: Mapping[str, Any] | None = checkpoint.manifest().get("export")
    if record is not None and not record["possible"]:
        raise InputError(f"{checkpoint.path}: its model can't be exported: {record['why']}")
    if record is None or not (assets / FACTS).is_file():
        hint = "export from the run's own directory, or resume the run, which writes them"
        raise InputError(Problem(f"{str(assets)!r}: the files that the run keeps for exports are not there", hint=hint))
    facts = Facts.read(assets)
    if not issubclass(getattr(transformers, facts.kind, object), PreTrainedModel):
        raise InputError(f"{assets / FACTS}: the installed transformers has no model {facts.kind!r}")
    return facts


def _transforms(facts: Facts, checkpoint: Checkpoint, home: Path, skeleton: PreTrainedModel) -> tuple[Transformed, ...]:
    """The weight transforms of the run's replaced modules, which only the code of their factories knows."""
    if not facts.transformed:
        return ()
    manifest = checkpoint.manifest()
    recipe = load_recipe(home / RECIPE_FILE)
    plugins = load_plugins(recipe.config.plugins, base_dir=home, defaults=(DefaultHooks(),))
    _require_plugins(manifest, plugins)
    sizes = {axis: manifest["world"][axis] for axis in ParallelSizes().all}
    try:
        ModuleReplacer(recipe.config.plan_overrides, plugins.hook.replace_module).apply_alone(skeleton, sizes)
    except InputError as error:
        raise recipe.located(error) from error
    found = tuple(transformed(skeleton))
    names = {one.dot for one in found}
    if names != set(facts.transformed):
        first = min(names ^ set(facts.transformed)).removesuffix(".")
        hint = "install what the run was trained with, see versions and components in its manifest.json"
        raise InputError(Problem(f"{first}: replaced otherwise than when the run was trained", hint=hint))
    return found


def _require_plugins(manifest: Mapping[str, Any], plugins: Plugins) -> None:
    """Refuse plugins whose code isn't that of the run: they would convert the weights otherwise, unnoticed."""
    before = names_of({"plugins": manifest["plugins"], "components": ()})
    now = names_of(provenance(plugins, ()))
    if before != now:
        changed = ", ".join(sorted(before ^ now))
        hint = "give the plugin the code that the run had"
        raise InputError(Problem(f"the plugins are not those that the run was trained with: {changed}", hint=hint))


def _require_same(stored: StoredModel, layout: DiskLayout, checkpoint: Checkpoint) -> None:
    """A checkpoint of the run before last may be of another model than the run's assets."""
    needed = set(layout.adapters.sources(stored.tensors))
    for one in layout.transforms:
        needed = needed - set(one.replacements) | set(one.originals)
    wanted = set(layout.skeleton.state_dict())
    sources = {name for one in layout.adapters.merged.values() for name in one.sources}
    if wrong := sorted((wanted ^ needed) | (sources - set(stored.tensors))):
        raise InputError(f"{checkpoint.path}: made with another model than the run's files say: {wrong[0]!r}")


def _refuse_used(directory: Path, home: Path, overwrite: bool) -> None:
    shown = str(directory)
    if directory.exists() and not directory.is_dir():
        raise InputError(Problem(f"--to {shown}: is a file", hint="name a directory"))
    place = directory.resolve()
    own = home.resolve()
    of_run = (own / CHECKPOINTS, own / ASSETS, own / EARLIER)
    if place == own or place in own.parents or any(one in (place, *place.parents) for one in of_run):
        raise InputError(Problem(f"--to {shown}: holds the run itself", hint="name another directory"))
    if not directory.is_dir() or not any(directory.iterdir()):
        return
    if not overwrite:
        hint = "give --overwrite, or name another directory"
        raise InputError(Problem(f"--to {shown}: is not empty", hint=hint))
    if not (directory / _MARKER).is_file():
        message = f"--to {shown}: --overwrite replaces earlier exports, and this directory is none: it has no {_MARKER}"
        raise InputError(Problem(message, hint="name another directory"))


@contextmanager
def _in_place(directory: Path) -> Iterator[Path]:
    """A directory beside the final one, which takes its name when the block ends well and is gone otherwise."""
    final = directory.resolve()
    beside: Path | None = None
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        # A name of its own: a user's directory may have any that could be made up here.
        beside = Path(tempfile.mkdtemp(dir=final.parent, prefix=f".{final.name}-"))
        new, old = beside / "new", beside / "old"
        new.mkdir()
        yield new
        if final.exists():
            final.rename(old)
        try:
            new.rename(final)
        except OSError:
            if old.exists():
                old.rename(final)
            raise
    except (OSError, SafetensorError) as error:
        raise RunError(f"can't write {directory}: {_reason(error)}") from error
    finally:
        if beside is not None:
            shutil.rmtree(beside, ignore_errors=True)


def _require_space(directory: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        raise OSError(errno.ENOSPC, f"it takes {in_bytes(num_bytes)}, and {in_bytes(free)} are free")


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) and error.strerror else str(error)).splitlines()[0]


def _copy_assets(assets: Path, directory: Path, dtype: torch.dtype) -> None:
    for path in sorted(assets.rglob("*")):
        name = path.relative_to(assets)
        if path.is_dir() or name.as_posix() == FACTS:
            continue
        content = path.read_bytes()
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(with_dtype(content, dtype) if name.as_posix() == _CONFIG else content)
