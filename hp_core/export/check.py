"""Whether plain transformers will load what a run trains, found out before the first step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from hp_core.errors import InputError, Problem
from hp_core.export.adapter import Adapters, MergeError, inner_model
from hp_core.export.assets import Assets, Facts, assets_of
from hp_core.export.layout import plain_class, skeleton_of, ties_of, to_plain, transformed
from hp_core.model.load import stored_dtype
from hp_core.parallel.agreement import gathered
from hp_core.parallel.pipeline.runner import pipeline_of
from hp_core.parallel.setup import DistributedSetup
from hp_core.training.run import Run, on_main

_NUM_SHOWN = 3


@dataclass(frozen=True)
class _Held:
    """What a rank has: shapes of the plain model's tensors, names that are one, transformed modules, adapters."""

    shapes: Mapping[str, torch.Size]
    shared: tuple[tuple[str, ...], ...]
    transformed: tuple[str, ...]
    adapters: Adapters


def prepare_export(run: Run, model: nn.Module, tokenizer: Any) -> None:
    """Make sure that what the run trains can be exported, or say why it can't. Every rank calls it.

    Raises:
        InputError: see `checked_export`.
    """
    run.assets = checked_export(model, tokenizer, run.setup)
    run.record(export=run.assets.as_record())
    if run.assets.why_not is not None:
        run.console.say(f"the trained model can't be exported: {run.assets.why_not}")


def checked_export(model: nn.Module, tokenizer: Any, setup: DistributedSetup) -> Assets:
    """What an export of `model` needs beside its weights. Every rank calls it; the main rank gets the files.

    Raises:
        InputError: it is a model of transformers, and its export would fail or be another model.
    """
    inner = inner_model(model)
    reason = why_not(inner)
    if reason is not None:
        return Assets(reason)
    assert isinstance(inner, PreTrainedModel)
    try:
        adapters = Adapters.of(model)
    except MergeError as error:
        return Assets(str(error))
    own = _held(model, adapters)
    parts, pipeline = [own], pipeline_of(model)
    if pipeline is not None:
        parts = [one for one in gathered(own if pipeline.is_stage_main else None, setup) if one is not None]
    return on_main(partial(_examined, inner, tokenizer, parts), setup)


def why_not(model: nn.Module) -> str | None:
    """Why plain transformers can't load a model of this class; None where it can."""
    kind = plain_class(model)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if not issubclass(kind, PreTrainedModel):
        return f"{name} is no model of transformers"
    if not kind.__module__.startswith("transformers.") or getattr(transformers, kind.__name__, None) is not kind:
        return f"the class {name} is not part of transformers, which loads its own classes only"
    return None


def _examined(inner: PreTrainedModel, tokenizer: Any, parts: list[_Held]) -> Assets:
    kind, adapters = plain_class(inner), Adapters.together([one.adapters for one in parts])
    skeleton = skeleton_of(kind, inner.config, inner.dtype)
    problems = list(_differences(skeleton, parts))
    problems += _wrong_ties(skeleton, adapters, parts)
    if problems:
        raise InputError(problems)
    facts = Facts(
        kind.__name__,
        _name(stored_dtype(inner) or inner.dtype),
        _name(inner.dtype),
        tuple(dict.fromkeys(name for part in parts for name in part.transformed)),
        adapters,
    )
    # Other models, such as classifiers, have no such attribute.
    generation = inner.generation_config if skeleton.can_generate() else None
    return assets_of(skeleton, generation, tokenizer, facts)


def _held(model: nn.Module, adapters: Adapters) -> _Held:
    transforms = [replace(one, dot=adapters.plain_dot(one.dot)) for one in transformed(model)]
    stored = model.state_dict(keep_vars=True)
    empty = {name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in stored.items()}
    shapes = {name: one.shape for name, one in to_plain(empty, transforms, adapters).items()}
    names: dict[int, list[str]] = {}
    for name, sources in adapters.sources(stored).items():
        names.setdefault(id(stored[sources[0]]), []).append(name)
    shared = tuple(tuple(group) for group in names.values() if len(group) > 1)
    return _Held(shapes, shared, tuple(dict.fromkeys(one.dot for one in transforms)), adapters)


def _differences(skeleton: PreTrainedModel, parts: Iterable[_Held]) -> Iterator[Problem]:
    """What plain transformers, which knows the configuration alone, would make otherwise."""
    wanted = {name: one.shape for name, one in skeleton.state_dict().items()}
    found = {name: shape for part in parts for name, shape in part.shapes.items()}
    kind = type(skeleton).__name__
    for names, message in (
        (sorted(wanted.keys() - found.keys()), f"{kind} has it by the configuration, the trained model has not"),
        (sorted(found.keys() - wanted.keys()), f"the trained model has it, {kind} has not by the configuration"),
        (
            sorted(name for name in wanted.keys() & found.keys() if wanted[name] != found[name]),
            f"its shape in the trained model is not that of {kind} by the configuration",
        ),
    ):
        if names:
            more = f" (and {len(names) - _NUM_SHOWN} more)" if len(names) > _NUM_SHOWN else ""
            shown = ", ".join(map(repr, names[:_NUM_SHOWN])) + more
            hint = "keep model.config in step with what the model builder changes"
            yield Problem(f"an export could not be loaded: {shown}: {message}", "model", hint=hint)


def _wrong_ties(skeleton: PreTrainedModel, adapters: Adapters, parts: list[_Held]) -> Iterator[Problem]:
    ties = ties_of(skeleton)
    for part in parts:
        for group in part.shared:
            kept = {ties.get(name, name) for name in group}
            if len(kept) > 1:
                shown = " and ".join(map(repr, sorted(kept)))
                message = f"{shown} are one tensor, which the configuration doesn't say; they would be loaded as two"
                yield Problem(message, "model", hint="set model.config.tie_word_embeddings: true, or don't share them")
        together = [set(group) for group in part.shared]
        for name, source in ties.items():
            is_held = name in part.shapes and source in part.shapes
            changed = any(one in adapters.merged and adapters.merged[one].added for one in (name, source))
            # Of two stages of a pipeline, each holds its own copy, kept the same.
            if changed or (is_held and len(parts) == 1 and not any({name, source} <= group for group in together)):
                message = f"the configuration ties {name!r} to {source!r}, and each is trained: one would be lost"
                yield Problem(message, "model", hint="set model.config.tie_word_embeddings: false")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
