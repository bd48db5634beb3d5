"""The recipe's sections, validated and frozen. The descriptions here are the reference's and the schema's text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from hp_core.config.base import Conflict, Section
from hp_core.config.checkpoint import CheckpointConfig, metric_conflicts
from hp_core.config.compile import CompileConfig, compile_conflicts
from hp_core.config.debug import DebugConfig, debug_conflicts
from hp_core.config.launch import LaunchConfig
from hp_core.config.memory import ActivationCheckpointConfig, ActivationSwapConfig, checkpoint_conflicts
from hp_core.config.peft import PeftConfig
from hp_core.config.plan_override import PlanOverride
from hp_core.config.profiler import ProfilerConfig, profiler_conflicts
from hp_core.config.target import Target

Dtype = Literal["float32", "bfloat16"]


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
    device_peak_tflops: float | None = Field(
        None,
        gt=0,
        description="What a device can do, in 10^12 operations a second, for `mfu`; null measures products of matrices "
        "after the first logged step.",
    )
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
        "Null does, except with pipeline ranks, whose many micro-batches would gather them again each time, and where "
        "a rank holds all parameters.",
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
    """The types to compute in. Master weights and optimizer states keep the type of the model, `model.dtype`.

    The word `bf16` stands for bfloat16 with sums in float32, `fp32` for no mixed precision.
    """

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
    at_end: bool | None = Field(
        None, description="Evaluate after the last step; null does if there is a validation split."
    )
    samples: SamplesConfig = Field(SamplesConfig(), description="Texts to generate from the trained model.")


class DatasetConfig(Section):
    """The data set, a component, and the tokenizer it is read with."""

    source: Target
    tokenizer: Target | None = Field(None, description="The tokenizer component; null leaves it to the data set.")


class DataLoaderConfig(Section):
    """The loader, a component, and the function that makes rows a batch."""

    loader: Target
    collate_fn: Target | None = Field(None, description="The collator component; null takes the task trainer's.")


class TrainerConfig(Section):
    """A whole recipe."""

    base: str | None = Field(
        None,
        description="Another recipe to start from, relative to this file. Maps merge, lists and scalars replace. A "
        "component section that names another component drops the base's arguments, as `--SECTION.name=…` does.",
    )
    plugins: list[str] = Field(
        [], description="Plugins to activate: a name, `package:name`, or the path of a one-file plugin."
    )
    output_dir: str | None = Field(
        None, min_length=1, description="Where the run writes; null is `runs/<recipe name>-<date-time>`."
    )
    trainer: Target = Field(description="The task trainer.")
    model: Target = Field(description="What to train.")
    peft: PeftConfig = Field(PeftConfig(), description="What to train of the model, where not all of it.")
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
    mixed_precision: MixedPrecisionConfig = Field(
        MixedPrecisionConfig(), description="The types to compute in: `bf16`, `fp32`, or keys."
    )
    activation_checkpoint: ActivationCheckpointConfig = Field(
        ActivationCheckpointConfig(), description="What the forward pass keeps for the backward pass."
    )
    activation_swap: ActivationSwapConfig = Field(ActivationSwapConfig(), description="Where that waits meanwhile.")
    compile: CompileConfig = Field(CompileConfig(), description="Whether layers run as compiled code.")
    plan_overrides: list[PlanOverride] = Field([], description="Changes to modules inside the model.")
    evaluation: EvaluationConfig = Field(EvaluationConfig(), description="When to evaluate, and what to show.")
    checkpoint: CheckpointConfig = Field(CheckpointConfig(), description="When to save, and where to start from.")
    trackers: list[Target] = Field([], description="Where metrics go besides the run's own files.")
    profiler: ProfilerConfig = Field(ProfilerConfig(), description="Steps of which a trace is written.")
    debug: DebugConfig = Field(DebugConfig(), description="Checks that find faults, at the cost of speed.")
    launch: LaunchConfig = Field(LaunchConfig(), description="Processes to start when nothing else starts them.")

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> Iterator[Conflict]:
        """Yield one for each pair of settings in two sections that don't go together."""
        yield from metric_conflicts(values)
        yield from checkpoint_conflicts(values)
        yield from profiler_conflicts(values)
        yield from compile_conflicts(values)
        yield from debug_conflicts(values)

    def model_features(self) -> dict[str, Section | None]:
        """Return what a model builder is asked for beside the model, by the name of its argument; None is nothing."""
        recomputed = self.activation_checkpoint
        return {
            "peft_config": None if self.peft.method == "none" else self.peft,
            "activation_checkpoint": None if recomputed.mode == "off" else recomputed,
            "activation_swap": None if self.activation_swap.mode == "off" else self.activation_swap,
            "compile_config": None if self.compile.mode == "off" else self.compile,
        }

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
