"""Which parameter gets which learning rate and weight decay; every trainable one exactly once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from torch import nn
from transformers import PreTrainedModel

from hp_core.errors import ArgumentError
from hp_core.parallel.pipeline.runner import pipeline_of
from hp_core.spelling import did_you_mean

# The decay of a moment's running average.
Beta = Annotated[float, Field(ge=0, lt=1)]


class ParameterGroup(BaseModel):
    """Settings for the parameters whose names match."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    match: Annotated[str | list[str], Field(description="Glob over parameter names, or a list; `*` crosses dots.")]
    lr: Annotated[float | None, Field(ge=0, description="Learning rate; default: the optimizer's.")] = None
    weight_decay: Annotated[
        float | None, Field(ge=0, description="Weight decay, also for norms, biases and embeddings.")
    ] = None
    frozen: Annotated[bool, Field(description="Leave these parameters as they are.")] = False

    def patterns(self) -> list[str]:
        """The globs."""
        return [self.match] if isinstance(self.match, str) else list(self.match)


def embeddings_and_head(model: nn.Module) -> set[nn.Parameter]:
    """The parameters of input embeddings and of the output head, whatever the family calls them."""
    modules = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if isinstance(model, PreTrainedModel):
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        modules += [module for module in ends if module is not None]
    return {parameter for module in modules for parameter in module.parameters()}


def not_decayed(model: nn.Module) -> set[nn.Parameter]:
    """Norms, biases and embeddings: vectors, whatever class holds them, and everything of an embedding or norm.

    A head of its own is a matrix like any other and is decayed; one tied to the embedding is not. The biases of fused
    experts are stacked to matrices, so a bias is known by its name as well.
    """
    exempt = {p for name, p in model.named_parameters() if p.ndim <= 1 or name.endswith("bias")}
    for module in model.modules():
        if isinstance(module, nn.Embedding) or "Norm" in type(module).__name__:
            exempt.update(module.parameters(recurse=False))
    return exempt


def parameter_groups(
    model: nn.Module,
    parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    lr: float,
    weight_decay: float,
    groups: Sequence[ParameterGroup],
) -> list[dict[str, Any]]:
    """torch parameter groups for the trainable ones of `parameters`, without empty groups but those of other stages.

    Call `freeze` first: what is frozen is left out here.
    """
    exempt = not_decayed(model)
    claims = _claims(model, groups)
    buckets: dict[tuple[float, float], list[nn.Parameter]] = {}
    first: dict[tuple[float, float], str] = {}
    for name, parameter in parameters:
        if not parameter.requires_grad:
            continue
        rate, decay = lr, 0.0 if parameter in exempt else weight_decay
        if name in claims:
            group = groups[claims[name]]
            rate = rate if group.lr is None else group.lr
            decay = decay if group.weight_decay is None else group.weight_decay
        buckets.setdefault((rate, decay), []).append(parameter)
        first.setdefault((rate, decay), name)
    kinds = _in_order(model, first)
    return [{"params": buckets.get((rate, decay), []), "lr": rate, "weight_decay": decay} for rate, decay in kinds]


def _in_order(model: nn.Module, first: Mapping[tuple[float, float], str]) -> list[tuple[float, float]]:
    """The kinds of groups by their first parameter in the whole model.

    A schedule knows groups by their number, so all stages of a pipeline have the same in one order.
    """
    pipeline = pipeline_of(model)
    if pipeline is None:
        return list(first)
    places = {name: place for place, name in enumerate(pipeline.parameter_names)}
    found = pipeline.agreed((places[name], kind) for kind, name in first.items())
    return list(dict.fromkeys(kind for _, kind in sorted(found)))


def freeze(model: nn.Module, groups: Sequence[ParameterGroup]) -> None:
    """Check every pattern and take the gradients off the parameters of frozen groups.

    Raises:
        ArgumentError: a pattern matches nothing, two groups match one parameter, a group is for parameters that are
            frozen without it, or nothing is left to train.
    """
    claims = _claims(model, groups)
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    for index, group in enumerate(groups):
        for pattern in group.patterns():
            if not anywhere(model, any(fnmatchcase(name, pattern) for name in trainable)) and not group.frozen:
                message = f"{pattern!r} matches nothing that is trained, so it does nothing"
                raise ArgumentError(f"groups[{index}].match", message, "drop it, or what freezes these before")
    for name, parameter in model.named_parameters():
        if name in claims and groups[claims[name]].frozen:
            parameter.requires_grad_(False)
    if not anywhere(model, any(parameter.requires_grad for parameter in model.parameters())):
        raise ArgumentError(
            "groups", "every parameter is frozen: nothing is left to train", "drop `frozen: true` from a group"
        )


def anywhere(model: nn.Module, holds: bool) -> bool:
    """Whether something holds for this rank's part of the model, or for another stage's. Every rank calls it."""
    pipeline = pipeline_of(model)
    return holds if pipeline is None else any(pipeline.agreed([holds]))


def _claims(model: nn.Module, groups: Sequence[ParameterGroup]) -> dict[str, int]:
    pipeline = pipeline_of(model)
    names = [name for name, _ in model.named_parameters()] if pipeline is None else pipeline.parameter_names
    claims: dict[str, int] = {}
    for index, group in enumerate(groups):
        for pattern in group.patterns():
            matched = [name for name in names if fnmatchcase(name, pattern)]
            if not matched:
                hint = did_you_mean(pattern, names) or f"the parameters are named like {names[0]!r}"
                raise ArgumentError(f"groups[{index}].match", f"{pattern!r} matches no parameter", hint)
            for name in matched:
                if claims.setdefault(name, index) != index:
                    raise ArgumentError(
                        f"groups[{index}].match",
                        f"{pattern!r} matches {name!r}, which groups[{claims[name]}] matches too",
                        "a parameter belongs to one group",
                    )
    return claims
