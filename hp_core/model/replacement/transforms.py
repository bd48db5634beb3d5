"""Weight transforms, checked before the model has weights and applied once it has."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import nn

from hp_core.model.replacement.contract import Tensors, WeightTransform
from hp_core.model.replacement.structure import Held, Structure

# Up to so many elements a round trip is tried with random numbers before anything is built; larger modules are
# checked on their real weights, which needs no memory that the conversion doesn't.
TRIAL_ELEMENTS = 2**22


class TransformError(Exception):
    """A weight transform that is not what it declares; the message says how."""


def names_of(transforms: Sequence[WeightTransform]) -> tuple[list[str], list[str]]:
    """Return all names that transforms account for: the original ones and the replacement's."""
    originals = [name for one in transforms for name in one.originals]
    return originals, [name for one in transforms for name in one.replacements]


def to_replaced(transforms: Sequence[WeightTransform], tensors: Tensors) -> dict[str, torch.Tensor]:
    """Convert whole tensors to the replacement's layout.

    Raises:
        TransformError: converting back doesn't give the same bits.
    """
    converted = _forward(transforms, tensors)
    back = to_original(transforms, converted)
    changed = sorted(name for name in names_of(transforms)[0] if not _equal(tensors[name], back.get(name)))
    if changed:
        raise TransformError(f"the round trip changes {', '.join(map(repr, changed))}")
    return converted


def _forward(transforms: Sequence[WeightTransform], tensors: Tensors) -> dict[str, torch.Tensor]:
    return {name: value for one in transforms for name, value in one.to_replaced(tensors).items()}


def to_original(transforms: Sequence[WeightTransform], tensors: Tensors) -> dict[str, torch.Tensor]:
    """Convert whole tensors to the original layout."""
    return {name: value for one in transforms for name, value in one.to_original(tensors).items()}


def misnamed(transforms: Sequence[WeightTransform], before: Structure, after: Structure) -> Iterator[str]:
    """Yield the names in transforms that are none, or are there twice."""
    originals, replaced = names_of(transforms)
    yield from _misnamed(originals, before, "the original module")
    yield from _misnamed(replaced, after, "the replacement")


def inherit_requires_grad(transforms: Sequence[WeightTransform], original: nn.Module, replacement: nn.Module) -> None:
    """Make what is converted trainable where the original is: new parameters always start as trainable."""
    parameters, made = dict(original.named_parameters()), dict(replacement.named_parameters())
    for one in transforms:
        if one.originals[0] in parameters:
            for name in one.replacements:
                made[name].requires_grad_(parameters[one.originals[0]].requires_grad)


def wrong_transforms(
    transforms: Sequence[WeightTransform],
    before: Structure,
    after: Structure,
    shared: Collection[int],
    tried: dict[object, tuple[str, ...]],
) -> Iterator[str]:
    """Yield what is wrong with a replacement's transforms, whose names are right.

    Args:
        transforms: what it declares.
        before: the structure of the original module.
        after: the structure of the module that declares them.
        shared: the ids of parameters that other modules of the model hold as well.
        tried: what trials with random numbers have found; one of many equal layers is enough.
    """
    originals, replaced = names_of(transforms)
    old = {name: before.tensors[name] for name in originals}
    new = {name: after.tensors[name] for name in replaced}
    for name, held in old.items():
        if id(held.tensor) in shared:
            yield f"transforms the tied parameter {name!r}, which another module holds too"
    for one in transforms:
        kinds = {old[name].kind for name in one.originals} | {new[name].kind for name in one.replacements}
        if len(kinds) > 1:
            yield f"turns a {' into a '.join(sorted(kinds))}: {', '.join(one.replacements)}"
        if len({old[name].requires_grad for name in one.originals}) > 1:
            yield f"joins frozen and trainable tensors: {', '.join(one.originals)}"
    yield from _trial(transforms, old, new, tried)


def _misnamed(names: Sequence[str], structure: Structure, where: str) -> Iterator[str]:
    for name in dict.fromkeys(names):
        held = structure.tensors.get(name)
        if held is None:
            yield f"transforms {name!r}, which {where} has not"
        elif held.kind == "non-persistent buffer":
            yield f"transforms the non-persistent buffer {name!r}, which no checkpoint holds"
        elif names.count(name) > 1:
            yield f"transforms {name!r} twice"


def _trial(
    transforms: Sequence[WeightTransform],
    old: Mapping[str, Held],
    new: Mapping[str, Held],
    tried: dict[object, tuple[str, ...]],
) -> tuple[str, ...]:
    key = tuple((name, one.shape, one.dtype) for side in (old, new) for name, one in side.items())
    if key not in tried:
        try:
            tried[key] = tuple(_try(transforms, old, new))
        except TransformError as error:
            tried[key] = (str(error),)
        except Exception as error:
            tried[key] = (f"weight_transforms raises {type(error).__name__}: {error}",)
    return tried[key]


def _try(transforms: Sequence[WeightTransform], old: Mapping[str, Held], new: Mapping[str, Held]) -> Iterator[str]:
    small = sum(one.shape.numel() for one in old.values()) <= TRIAL_ELEMENTS
    generator = torch.Generator().manual_seed(0)
    values = {name: _numbers(one, generator if small else None) for name, one in old.items()}
    converted = _forward(transforms, values)
    problems = [*_differences("forward", converted, new)]
    if not problems:
        problems = [*_differences("backward", to_original(transforms, converted), old)]
    yield from problems
    if small and not problems:
        to_replaced(transforms, values)


def _numbers(held: Held, generator: torch.Generator | None) -> torch.Tensor:
    """Random numbers on the CPU, or nothing but a shape."""
    if generator is None:
        return torch.empty(held.shape, dtype=held.dtype, device="meta")
    if held.dtype.is_floating_point:
        return torch.randn(held.shape, generator=generator).to(held.dtype)
    return torch.randint(0, 2 if held.dtype == torch.bool else 127, held.shape, generator=generator).to(held.dtype)


def _differences(way: str, found: Tensors, wanted: Mapping[str, Held]) -> Iterator[str]:
    if found.keys() != wanted.keys():
        yield f"{way} gives {sorted(found)}, declared are {sorted(wanted)}"
        return
    for name, held in wanted.items():
        tensor = found[name]
        if tensor.shape != held.shape:
            yield f"{way} gives {name!r} the shape {tuple(tensor.shape)}, the module has {tuple(held.shape)}"
        elif tensor.dtype != held.dtype:
            yield f"{way} gives {name!r} the dtype {tensor.dtype}, the module has {held.dtype}"


def _equal(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    # NaN is a value like any other here, and -0.0 is not 0.0.
    if other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.contiguous().flatten().view(torch.uint8), other.contiguous().flatten().view(torch.uint8))
