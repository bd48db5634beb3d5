"""The recipe's sections, validated and frozen. The descriptions here are the reference's and the schema's text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from hp_core.config.target import Target

Dtype = Literal["float32", "bfloat16"]


class Section(BaseModel):
    """A group of recipe keys: frozen, strict about types, without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @classmethod
    def cross_check(cls, values: Mapping[str, Any]) -> str | None:
        """Return what is wrong with the values together, None if nothing is. Absent keys have their default."""
        return None

    @model_validator(mode="after")
    def _cross_check(self) -> Self:
        message = type(self).cross_check(self.__dict__)
        if message is not None:
            raise PydanticCustomError("cross_check", "{message}", {"message": message})
        return self


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
    def cross_check(cls, values: Mapping[str, Any]) -> str | None:
        """Return a message unless exactly one length is given."""
        given = [key for key in cls.LENGTHS if values.get(key) is not None]
        if len(given) == 1:
            return None
        found = f"both {' and '.join(given)} are" if len(given) == 2 else "all three are" if given else "none is"
        return f"needs exactly one of train_iters, train_samples and train_epochs; {found} given"


class FsdpConfig(Section):
    """How parameters, gradients and optimizer states are split over the data ranks."""

    dp_shard_size: int | None = Field(
        None, ge=1, description="Ranks that share one copy; null shares it among all data ranks."
    )
    dp_replicate_size: int = Field(1, ge=1, description="Copies of the model.")
    reshard_after_forward: bool = Field(
        True,
        description="Free a layer's gathered parameters after its forward pass and gather them again for backward.",
    )


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


class PlanOverride(Section):
    """One change to the modules that its patterns match."""

    match: tuple[str, ...] = Field(description="Globs over module names; `*` crosses dots.")
    when: Literal["dp", "tp", "cp", "ep", "pp"] | None = Field(
        None, description="Apply only where this parallel size is above 1; null applies always."
    )
    module_type: str | None = Field(None, description="The class that every match must be an instance of.")
    exact_type: bool = Field(False, description="Every match must be of `module_type` itself, not of a subclass.")
    replace_module: Target | None = Field(None, description="The factory of the replacement.")


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
    fsdp_config: FsdpConfig = Field(FsdpConfig(), description="How the model is split over the data ranks.")
    mixed_precision: MixedPrecisionConfig = Field(MixedPrecisionConfig(), description="The types to compute in.")
    plan_overrides: list[PlanOverride] = Field([], description="Changes to modules inside the model.")
    evaluation: EvaluationConfig = Field(EvaluationConfig(), description="When to evaluate, and what to show.")
    checkpoint: CheckpointConfig = Field(CheckpointConfig(), description="When to save, and where to start from.")
    trackers: list[Target] = Field([], description="Where metrics go besides the run's own files.")
    launch: LaunchConfig = Field(LaunchConfig(), description="Processes to start when nothing else starts them.")

    def targets(self) -> tuple[Target, ...]:
        """Return every component that the recipe names."""
        data = (self.dataset.source, self.dataset.tokenizer, self.dataloader.loader, self.dataloader.collate_fn)
        named = (self.trainer, self.model, self.loss_fn, self.optimizer, self.lr_scheduler, *data, *self.trackers)
        return tuple(target for target in named if target is not None)


# Root keys of the recipe language that this version doesn't implement: any content is an error.
RESERVED_KEYS = (
    "peft",
    "accelerator",
    "plan_overrides",
    "activation_checkpoint",
    "activation_swap",
    "compile",
    "profiler",
    "debug",
)
