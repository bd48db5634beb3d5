"""The recipe's sections, validated and frozen. The descriptions here are the reference's and the schema's text."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from hp_core.config.target import Target

Dtype = Literal["float32", "bfloat16"]
# pydantic's error type for a conflict.
CONFLICT = "conflict"


@dataclass(frozen=True)
class Conflict:
    """Values of a section that don't go together. `key` is the one to point at, empty for the section itself."""

    message: str
    key: str = ""
    hint: str = ""


class Section(BaseModel):
    """A group of recipe keys: frozen, strict about types, without unknown keys.

    `LATER` are keys of the recipe language that this version doesn't implement: any content is an error.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    LATER: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> Iterator[Conflict]:
        """Yield what is wrong with the values together. Keys may be absent, and values of a wrong type."""
        yield from ()

    @model_validator(mode="after")
    def _without_conflicts(self) -> Self:
        for conflict in type(self).conflicts(self.__dict__):
            raise PydanticCustomError(CONFLICT, "{message}", {"message": conflict.message})
        return self


def section_in(annotation: Any) -> tuple[type[Section] | None, bool]:
    """Return the section that values of a field are, or those in its list, and whether it is a list; None if none."""
    is_list = typing.get_origin(annotation) is list
    inner = typing.get_args(annotation)[0] if is_list else annotation
    return (inner if isinstance(inner, type) and issubclass(inner, Section) else None), is_list


class TrainingConfig(Section):
    """How long, how fast and how reproducibly to train. Exactly one of the three `train_` keys sets the length."""

    train_iters: int | None = Field(None, ge=1, description="Length of the run in optimizer steps.")
    train_samples: int | None = Field(None, ge=1, description="Length of the run in rows of the data set.")
    train_epochs: int | None = Field(None, ge=1, description="Length of the run in passes over the data set.")
    global_batch_size: int = Field(8, ge=1, description="Rows in one optimizer step, over all ranks.")
    micro_batch_size: int = Field(1, ge=1, description="Rows in one forward pass of one rank.")
    max_grad_norm: float | None = Field(1.0, gt=0, description="The gradient norm to clip to; null never clips.")
    seed: int = Field(42, ge=0, description="Seed of the initial weights, the data order and dropout.")
    enable_full_determinism: bool = Field(False, description="Use deterministic kernels only, at the cost of speed.")
    log_every: int = Field(1, ge=1, description="Steps between two lines of metrics.")
    backend: Literal["nccl", "gloo"] | None = Field(
        None, description="How ranks communicate; null takes what fits the device."
    )
    device: Literal["cpu", "cuda"] | None = Field(None, description="Where to train; null takes CUDA if there is any.")
    nonfinite: Literal["stop", "skip"] = Field(
        "stop", description="What to do when a loss or gradient is not finite: end the run, or leave the step out."
    )
    nonfinite_limit: int = Field(10, ge=1, description="Skipped steps in a row that end the run all the same.")
    stop_after: int | None = Field(
        None,
        ge=1,
        description="End the run, with a checkpoint, after this step; the schedule stays that of the full run.",
    )

    LENGTHS: ClassVar[tuple[str, ...]] = ("train_iters", "train_samples", "train_epochs")

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> Iterator[Conflict]:
        """Yield one unless exactly one length is given."""
        given = [key for key in cls.LENGTHS if values.get(key) is not None]
        if len(given) != 1:
            found = f"both {' and '.join(given)} are" if len(given) == 2 else "all three are" if given else "none is"
            yield Conflict(f"needs exactly one of train_iters, train_samples and train_epochs; {found} given")


class AcceleratorConfig(Section):
    """How one copy of the model is split over ranks. What is left of the ranks are data ranks."""

    tp_size: int = Field(1, ge=1, description="Ranks that share each matrix (tensor parallelism).")
    cp_size: int = Field(1, ge=1, description="Ranks that share each sequence (context parallelism).")
    cp_layout: Literal["head_tail", "contiguous"] = Field(
        "head_tail",
        description="What a rank holds of a sequence: a chunk from the front and its counterpart from the end, so that "
        "all have the same work, or one piece.",
    )
    cp_method: Literal["all_gather", "ulysses", "ring"] = Field(
        "all_gather",
        description="How a rank attends to the other parts of a sequence: it gathers all keys and values, trades parts "
        "of sequences for parts of the heads (Ulysses), or has keys and values pass by (ring attention).",
    )
    ep_size: int = Field(1, ge=1, description="Ranks that share the experts of a mixture (expert parallelism).")

    pp_size: int = Field(1, ge=1, description="Ranks that hold some layers each (pipeline parallelism).")
    pp_schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble"] = Field(
        "1f1b", description="The order in which the stages of a pipeline work on micro-batches."
    )
    pp_stages_per_rank: int | None = Field(
        None, ge=1, description="Stages that a rank holds; null is 1, or 2 with an interleaved or zero-bubble schedule."
    )
    pp_layers: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        None, description="Layers of each stage; null divides them so that the slowest stage is as fast as can be."
    )
    sequence_parallel: bool = Field(
        False,
        description="Share the sequences among the tensor ranks, too, where no matrix is shared: norms, residuals.",
    )
    loss_parallel: bool = Field(
        False,
        description="Compute the loss on each tensor rank's part of the vocabulary, so that no rank has all logits.",
    )

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> Iterator[Conflict]:
        """Yield one for each key that would have no effect."""
        for key in ("cp_layout", "cp_method"):
            value, default = values.get(key), cls.model_fields[key].default
            if values.get("cp_size", 1) == 1 and isinstance(value, str) and value != default:
                yield Conflict(f"{value!r} has no effect with cp_size 1", key, f"write cp_size, or remove '{key}'")
        for key in ("pp_schedule", "pp_stages_per_rank"):
            value, default = values.get(key), cls.model_fields[key].default
            if values.get("pp_size", 1) == 1 and value not in (None, default):
                yield Conflict(f"{value!r} has no effect with pp_size 1", key, f"write pp_size, or remove '{key}'")


class FsdpConfig(Section):
    """How parameters, gradients and optimizer states are split over the data ranks."""

    dp_shard_size: int | None = Field(
        None, ge=1, description="Ranks that share one copy; null shares it among all data ranks."
    )
    dp_replicate_size: int = Field(1, ge=1, description="Copies of the model.")
    reshard_after_forward: bool | None = Field(
        None,
        description="Free a layer's gathered parameters after its forward pass and gather them again for backward. "
        "Null does, except with pipeline ranks, whose many micro-batches would gather them again each time.",
    )
    forward_prefetch: int = Field(
        0, ge=0, description="Layers gathered ahead of the one that runs in the forward pass, at the cost of memory."
    )
    backward_prefetch: int = Field(
        1, ge=1, description="The same in the backward pass, where there is always one ahead."
    )

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> Iterator[Conflict]:
        """Yield one for a prefetch of what is never freed."""
        if values.get("reshard_after_forward") is False and values.get("backward_prefetch", 1) != 1:
            message = "nothing is gathered in the backward pass where reshard_after_forward is false"
            yield Conflict(message, "backward_prefetch", "remove 'backward_prefetch'")


class MixedPrecisionConfig(Section):
    """The types to compute in. Master weights and optimizer states keep the type of the model."""

    param_dtype: Dtype | None = Field(
        None, description="Type of parameters in forward and backward; null keeps their own."
    )
    reduce_dtype: Dtype | None = Field(
        None, description="Type in which gradients are summed over ranks; null is float32 where `param_dtype` is set."
    )


class SamplesConfig(Section):
    """Texts to generate from the trained model."""

    prompts: list[str] = Field([], description="What to continue; an empty list generates nothing.")
    max_new_tokens: int = Field(64, ge=1, description="Tokens to generate for a prompt.")
    temperature: float = Field(0.8, ge=0, description="Sampling temperature; 0 takes the likeliest token.")
    seed: int = Field(0, ge=0, description="Seed of the sampling.")


class EvaluationConfig(Section):
    """When to evaluate, and what to show."""

    every: int = Field(0, ge=0, description="Steps between two evaluations; 0 evaluates only at the end.")
    at_end: bool = Field(True, description="Evaluate after the last step.")
    samples: SamplesConfig = Field(SamplesConfig(), description="Texts to generate from the trained model.")


class CheckpointConfig(Section):
    """When to save, and where to start from."""

    save_every: int = Field(0, ge=0, description="Steps between two checkpoints; 0 saves none on the way.")
    save_last: bool = Field(True, description="Save after the last step.")
    resume: str | None = Field(
        None,
        min_length=1,
        description="Where to continue: `latest` (the newest complete checkpoint of `output_dir`, step 0 if there is "
        "none), or the path of a checkpoint or run.",
    )
    allow_plugin_changes: bool = Field(False, description="Resume although the plugins or their versions have changed.")


class LaunchConfig(Section):
    """How many processes to start when nothing else starts them."""

    nproc: int = Field(1, ge=1, description="Processes on this machine.")
    timeout: float = Field(1800.0, gt=0, description="Seconds a collective may take before the run ends.")


class DatasetConfig(Section):
    """The data set, a component, and the tokenizer it is read with."""

    source: Target
    tokenizer: Target | None = Field(None, description="The tokenizer component; null leaves it to the data set.")


class DataLoaderConfig(Section):
    """The loader, a component, and the function that makes rows a batch."""

    loader: Target
    collate_fn: Target | None = Field(None, description="The collator component; null takes the task trainer's.")


def _as_patterns(value: Any) -> Any:
    if not isinstance(value, (str, list, tuple)):
        raise PydanticCustomError("text_or_list_type", "expected text or a list of text")
    return (value,) if isinstance(value, str) else tuple(value)


Pattern: TypeAlias = Annotated[str, Field(min_length=1)]
Patterns: TypeAlias = Annotated[
    tuple[Pattern, ...],
    Field(min_length=1),
    BeforeValidator(_as_patterns, json_schema_input_type=Pattern | Annotated[list[Pattern], Field(min_length=1)]),
]


_PLACEMENT = re.compile(r"replicate|partial|shard\(-?\d{1,2}\)")
NONE = "none"


def _as_placement(value: Any) -> Any:
    if isinstance(value, str) and _PLACEMENT.fullmatch(value) is None:
        raise PydanticCustomError(
            "placement", "expected replicate, partial or shard(N), got {value}", {"value": repr(value)}
        )
    return value


PlacementText: TypeAlias = Annotated[str, BeforeValidator(_as_placement)]


class AxisPlacements(Section):
    """How a tensor lies on the ranks of each axis that shares the work on one data slice."""

    tp: PlacementText | None = Field(None, description="On the ranks of `tp_size`.")
    cp: PlacementText | None = Field(None, description="On the ranks of `cp_size`.")
    ep: PlacementText | None = Field(None, description="On the ranks of `ep_size`.")

    @property
    def is_written(self) -> bool:
        """Whether it says anything."""
        return any(one is not None for one in (self.tp, self.cp, self.ep))

    def on(self, axis: str) -> str | None:
        """What it says of `tp`, `cp` or `ep`."""
        return {"tp": self.tp, "cp": self.cp, "ep": self.ep}[axis]


def _none_clears(value: Any) -> Any:
    return {} if value == NONE else value


Placements: TypeAlias = Annotated[
    AxisPlacements, BeforeValidator(_none_clears, json_schema_input_type=AxisPlacements | Literal["none"])
]
NamedPlacements: TypeAlias = Annotated[
    dict[str, AxisPlacements],
    BeforeValidator(_none_clears, json_schema_input_type=dict[str, AxisPlacements] | Literal["none"]),
]


class PlanOverride(Section):
    """An entry is one change to every module of the model that its patterns match.

    `params`, `in_src`, `in_dst`, `out_src` and `out_dst` are its sharding contract: what is written takes the place of
    what the planner derived, `none` clears it, and what is left out stays. A placement is `replicate` (whole on every
    rank of the axis), `shard(N)` (cut along dimension N) or `partial` (summands); axes are `tp`, `cp` and `ep`, and
    those of size 1 change nothing.
    """

    match: Patterns = Field(
        description="A glob, or a list of globs, over the names of the model's modules. `*` crosses dots; each glob "
        "must match a module."
    )
    when: Literal["dp", "tp", "cp", "ep", "pp"] | None = Field(
        None, description="Apply the entry only where this parallel size is above 1; null applies it always."
    )
    module_type: str | None = Field(
        None, description="Dotted path of the `torch.nn.Module` class that every match must be an instance of."
    )
    exact_type: bool = Field(False, description="Every match must be of `module_type` itself, not of a subclass.")
    replace_module: Target | None = Field(None, description="The component that makes the replacement of each match.")
    params: NamedPlacements | None = Field(
        None, description="`{name within the module: {axis: placement}}` of parameters; those not named are whole."
    )
    in_src: NamedPlacements | None = Field(
        None, description="`{argument of forward: {axis: placement}}` of inputs, as what comes before gives them."
    )
    in_dst: NamedPlacements | None = Field(
        None, description="`{argument of forward: {axis: placement}}` of inputs, as the module computes with them."
    )
    out_src: Placements | None = Field(
        None, description="`{axis: placement}` of the output (the first, of several), as the module computes it."
    )
    out_dst: Placements | None = Field(
        None, description="`{axis: placement}` of the output, as what comes after takes it in."
    )
    inner_wrapper: Target | None = Field(
        None, description="The component that weaves code into the forward of each match, which is an attention."
    )
    local_compute_fn: Target | None = Field(
        None, description="The component that makes what each match, which holds experts, computes with its own part."
    )

    CONTRACT: ClassVar[tuple[str, ...]] = ("params", "in_src", "in_dst", "out_src", "out_dst")
    ACTIONS: ClassVar[tuple[str, ...]] = ("replace_module", *CONTRACT, "inner_wrapper", "local_compute_fn")

    @property
    def has_contract(self) -> bool:
        """Whether the entry says anything of placements."""
        return any(one is not None for one in (self.params, self.in_src, self.in_dst, self.out_src, self.out_dst))

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> Iterator[Conflict]:
        """Yield one for an entry without an action, and one for an exact type that isn't named."""
        if all(values.get(action) is None for action in cls.ACTIONS):
            yield Conflict("does nothing", hint=f"write {', '.join(cls.ACTIONS[:-1])} or {cls.ACTIONS[-1]}")
        if values.get("exact_type") is True and values.get("module_type") is None:
            yield Conflict("needs module_type, the type that is meant", "exact_type", "write it, or remove exact_type")


class TrainerConfig(Section):
    """A whole recipe."""

    base: str | None = Field(
        None,
        description="Another recipe to start from, relative to this file. Maps merge, lists and scalars replace. A "
        "component section that names another component drops the base's arguments.",
    )
    plugins: list[str] = Field(
        [], description="Plugins to activate: a name, `package:name`, or the path of a one-file plugin."
    )
    output_dir: str | None = Field(
        None, min_length=1, description="Where the run writes; null is `runs/<recipe name>-<date-time>`."
    )
    trainer: Target = Field(description="The task trainer.")
    model: Target = Field(description="What to train.")
    loss_fn: Target | None = Field(None, description="The loss; null takes the model's own.")
    optimizer: Target = Field(description="The optimizer.")
    lr_scheduler: Target | None = Field(None, description="The learning-rate schedule; null keeps the rate constant.")
    dataset: DatasetConfig = Field(description="The data set and its tokenizer.")
    dataloader: DataLoaderConfig = Field(description="How batches are made.")
    training: TrainingConfig = Field(description="How long, how fast and how reproducibly to train.")
    accelerator: AcceleratorConfig = Field(
        AcceleratorConfig(), description="How one copy of the model is split over ranks."
    )
    fsdp_config: FsdpConfig = Field(FsdpConfig(), description="How the model is split over the data ranks.")
    mixed_precision: MixedPrecisionConfig = Field(MixedPrecisionConfig(), description="The types to compute in.")
    plan_overrides: list[PlanOverride] = Field([], description="Changes to modules inside the model.")
    evaluation: EvaluationConfig = Field(EvaluationConfig(), description="When to evaluate, and what to show.")
    checkpoint: CheckpointConfig = Field(CheckpointConfig(), description="When to save, and where to start from.")
    trackers: list[Target] = Field([], description="Where metrics go besides the run's own files.")
    launch: LaunchConfig = Field(LaunchConfig(), description="Processes to start when nothing else starts them.")

    LATER: ClassVar[tuple[str, ...]] = (
        "peft",
        "activation_checkpoint",
        "activation_swap",
        "compile",
        "profiler",
        "debug",
    )

    def targets(self) -> tuple[Target, ...]:
        """Return every component that the recipe names, those among the arguments of others last."""
        data = (self.dataset.source, self.dataset.tokenizer, self.dataloader.loader, self.dataloader.collate_fn)
        changes = (
            target
            for one in self.plan_overrides
            for target in (one.replace_module, one.inner_wrapper, one.local_compute_fn)
        )
        named = (self.trainer, self.model, self.loss_fn, self.optimizer, self.lr_scheduler, *data, *self.trackers)
        outer = tuple(target for target in (*named, *changes) if target is not None)
        return (*outer, *(inner for target in outer for inner in target.nested()))
