"""What a replacement must keep of the module it takes the place of, and what it lost."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from hp_core.model.replacement.contract import ResetsBuffers

# Recorded for whoever looks at them; the trainer never asks for them, and fused attention has none to give.
_RECORDED_FOR_SHOW = frozenset({"attentions", "cross_attentions"})
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_hooks_of = itemgetter(*_HOOKS)


class Held(NamedTuple):
    """A parameter or buffer, and what it was like when it was looked at."""

    tensor: torch.Tensor
    kind: str
    dtype: torch.dtype
    requires_grad: bool
    shape: torch.Size


@dataclass(frozen=True)
class Structure:
    """The tensors of a module by their names inside it, and its hooks by (submodule, kind of hook).

    `saves_its_own_way` says that some part of it has a `state_dict` which is not just its tensors.
    """

    tensors: Mapping[str, Held]
    hooks: Mapping[tuple[str, str], tuple[Any, ...]]
    saves_its_own_way: bool

    @classmethod
    def of(cls, module: nn.Module) -> Structure:
        """Look at a module as it is now. A tensor held under two names appears twice."""
        tensors: dict[str, Held] = {}
        hooks: dict[tuple[str, str], tuple[Any, ...]] = {}
        own_way = False
        for dot, part in _parts(module, ""):
            own_way = own_way or _saves_its_own_way(type(part))
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    tensors[dot + name] = _held(parameter, "parameter")
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    temporary = name in part._non_persistent_buffers_set
                    tensors[dot + name] = _held(buffer, "non-persistent buffer" if temporary else "buffer")
            found = _hooks_of(vars(part))
            if any(found):
                hooks |= {
                    (dot.removesuffix("."), kind): tuple(one.values())
                    for kind, one in zip(_HOOKS, found, strict=True)
                    if one
                }
        return cls(tensors, hooks, own_way)

    def is_still_that_of(self, module: nn.Module) -> bool:
        """Whether the module holds the same tensors, unchanged, as when it was looked at."""
        names = set()
        for dot, part in _parts(module, ""):
            for name, tensor in (*part._parameters.items(), *part._buffers.items()):
                if tensor is None:
                    continue
                held = self.tensors.get(dot + name)
                if held is None or held.tensor is not tensor or held.requires_grad != tensor.requires_grad:
                    return False
                if held.dtype != tensor.dtype or held.shape != tensor.shape:
                    return False
                names.add(dot + name)
        return len(names) == len(self.tensors)


def _parts(module: nn.Module, dot: str, above: tuple[nn.Module, ...] = ()) -> Iterator[tuple[str, nn.Module]]:
    yield dot, module
    for name, child in module._modules.items():
        if child is None:
            continue
        if child is module or child in above:
            raise ValueError(f"{dot}{name} is the module itself or one around it")
        yield from _parts(child, f"{dot}{name}.", (*above, module))


def _held(tensor: torch.Tensor, kind: str) -> Held:
    return Held(tensor, kind, tensor.dtype, tensor.requires_grad, tensor.shape)


def lost_structure(
    source: nn.Module,
    before: Structure,
    replacement: nn.Module,
    after: Structure,
    transformed: tuple[Collection[str], Collection[str]],
) -> Iterator[str]:
    """Yield what `replacement` lost or changed of `source`.

    Args:
        source: the module to be replaced.
        before: its structure before the replacement was built.
        replacement: what was built.
        after: its structure.
        transformed: the names that weight transforms account for, in the source and in the replacement.
    """
    gone, new = transformed
    if not before.is_still_that_of(source):
        yield "changed the module it was given; build another one and leave that as it is"
        return
    for name, old in before.tensors.items():
        if name not in gone:
            yield from _changes(name, old, after.tensors.get(name))
    for name, held in after.tensors.items():
        if name in new or (name in before.tensors and name not in gone):
            continue
        if name in gone:
            yield f"still holds the {held.kind} {name!r}, which its weight_transforms convert"
        elif held.kind != "non-persistent buffer":
            yield f"adds the {held.kind} {name!r}"
        elif not isinstance(replacement, ResetsBuffers):
            yield f"adds the {held.kind} {name!r} without a method reset_buffers() that fills it"
    yield from _loose_tensors(source, replacement)
    for place, functions in before.hooks.items():
        kept = after.hooks.get(place, ())
        if any(one not in kept for one in functions):
            where = f" of {place[0]!r}" if place[0] else ""
            yield f"loses the {place[1].strip('_').replace('_', ' ')}{where}"
    if not gone and (before.saves_its_own_way or after.saves_its_own_way):
        keys, others = source.state_dict().keys(), replacement.state_dict().keys()
        if keys != others:
            yield f"changes the keys of state_dict: {sorted(keys ^ others)}"


def _loose_tensors(source: nn.Module | None, replacement: nn.Module, dot: str = "") -> Iterator[str]:
    """Tensors that are plain attributes: nothing moves them off the meta device."""
    attributes = vars(source) if source is not None else {}
    for name, value in vars(replacement).items():
        if isinstance(value, torch.Tensor) and value.is_meta and attributes.get(name) is not value:
            yield (
                f"holds the tensor {dot + name!r} outside of parameters and buffers, where nothing fills it; "
                "write register_buffer(…, persistent=False) and a method reset_buffers()"
            )
    own = source._modules if source is not None else {}
    for name, child in replacement._modules.items():
        if child is not None and child is not own.get(name):
            yield from _loose_tensors(own.get(name), child, f"{dot}{name}.")


def _changes(name: str, old: Held, new: Held | None) -> Iterator[str]:
    what = f"{old.kind} {name!r}"
    if new is None:
        yield f"loses the {what}"
    elif new.kind != old.kind:
        yield f"makes the {what} a {new.kind}"
    elif new.dtype != old.dtype:
        yield f"changes the dtype of the {what} from {_short(old.dtype)} to {_short(new.dtype)}"
    elif new.shape != old.shape:
        yield f"changes the shape of the {what} from {tuple(old.shape)} to {tuple(new.shape)}"
    elif new.requires_grad != old.requires_grad:
        yield f"changes requires_grad of the {what} to {new.requires_grad}"
    elif new.tensor is not old.tensor:
        yield f"holds a copy of the {what}, not the {old.kind} itself: ties and loaded values would be lost"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _saves_its_own_way(kind: type[nn.Module]) -> bool:
    return (
        kind.state_dict is not nn.Module.state_dict
        or kind._save_to_state_dict is not nn.Module._save_to_state_dict
        or kind.get_extra_state is not nn.Module.get_extra_state
    )


def lost_call(source: Callable[..., Any], replacement: Callable[..., Any]) -> str | None:
    """Return why a call of the `source` function could fail on `replacement`, None if none can."""
    try:
        old, new = inspect.signature(source), inspect.signature(replacement)
    except (TypeError, ValueError):
        return None  # a compiled function tells nothing
    positional, theirs = _by_kind(old, *_POSITIONAL), _by_kind(new, *_POSITIONAL)
    named = _by_kind(old, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    for kind, stars in ((inspect.Parameter.VAR_POSITIONAL, "*"), (inspect.Parameter.VAR_KEYWORD, "**")):
        if _by_kind(old, kind) and not _by_kind(new, kind):
            return f"forward drops {stars}{_by_kind(old, kind)[0]}"
    if theirs[: len(positional)] != positional[: len(theirs)]:
        return f"forward takes ({', '.join(theirs)}) where ({', '.join(positional)}) are given in this order"
    unnamed = _by_kind(old, inspect.Parameter.POSITIONAL_ONLY)
    required = [name for name, one in old.parameters.items() if one.default is one.empty]
    try:
        new.bind(*positional, **{name: None for name in named if name in required and name not in positional})
        new.bind(*unnamed, **dict.fromkeys(named))
        new.bind(*unnamed, **{name: None for name in named if name in required})
    except TypeError as error:
        return f"forward can't be called as the original's: {error}"
    return None


def _by_kind(signature: inspect.Signature, *kinds: Any) -> list[str]:
    return [name for name, one in signature.parameters.items() if one.kind in kinds]


def recorded_types(model: nn.Module) -> dict[str, tuple[type, ...]]:
    """Return the classes by which transformers finds the modules whose outputs it collects, by the outputs' name."""
    found: dict[str, dict[type, None]] = {}
    for part in model.modules():
        if not isinstance(part, PreTrainedModel):
            continue
        for name, specs in (part._can_record_outputs or {}).items():
            if name in _RECORDED_FOR_SHOW:
                continue
            for one in specs if isinstance(specs, list) else [specs]:
                kind = one if isinstance(one, type) else one.target_class if isinstance(one, OutputRecorder) else None
                if isinstance(kind, type):
                    found.setdefault(name, {})[kind] = None
    return {name: tuple(kinds) for name, kinds in found.items()}


def lost_records(source: nn.Module, replacement: nn.Module, recorded: Mapping[str, tuple[type, ...]]) -> Iterator[str]:
    """Yield the outputs that transformers would no longer collect, because it finds fewer modules of their class."""
    for output, kinds in recorded.items():
        before = sum(isinstance(part, kinds) for _, part in _parts(source, ""))
        if before and sum(isinstance(part, kinds) for _, part in _parts(replacement, "")) < before:
            wanted = " or ".join(kind.__name__ for kind in kinds)
            yield f"would lose the model's {output}: transformers collects them from instances of {wanted}; subclass it"
