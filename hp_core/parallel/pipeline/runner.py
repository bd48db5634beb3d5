"""Running micro-batches through the stages of a pipeline, forward alone or with torch's schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from hp_core.errors import InputError, Problem, RunError
from hp_core.parallel.agreement import gathered
from hp_core.parallel.dtypes import DTYPES
from hp_core.parallel.pipeline.schedules import SCHEDULES
from hp_core.parallel.pipeline.stages import PATH, Anatomy, Stage, embedding_of, keep_stages, trunk_of
from hp_core.parallel.pipeline.transport import Transport
from hp_core.parallel.setup import DistributedSetup

Job = TypeVar("Job")
Kind = TypeVar("Kind")
_MOST_SCHEDULES = 4
# What a stage makes of a micro-batch: its hidden states, or in the last stage what backward starts from.
Compute = Callable[[Stage, Any], torch.Tensor]


@runtime_checkable
class GathersRouterLogits(Protocol):
    """A configuration of a mixture of experts, whose model may return what its routers gave."""

    output_router_logits: bool


class Pipeline:
    """Takes the place of the forward of a rank's model, which holds the modules of its stages alone.

    Within a pass of a stage, the model's call is that stage's part of it: hidden states of the stage before take the
    place of tokens, and what it returns as `logits` are its own hidden states, or in the last stage the logits.
    Outside of any, a call without gradients runs through the stages of all ranks, and every rank gets the logits.
    """

    def __init__(self, model: PreTrainedModel, setup: DistributedSetup, split: Sequence[range]) -> None:
        """Leave `model`, which is whole and on meta, the stages of this rank; `split` holds the layers of each."""
        accelerator = setup.accelerator
        self.anatomy = Anatomy.of(model)
        self.schedule = SCHEDULES[accelerator.pp_schedule]
        self.num_stages = len(split)
        self.split = tuple(split)
        pp_rank = setup.axis_rank("pp")
        own = [one for one in range(self.num_stages) if self.schedule.rank_of(one, setup.sizes.pp) == pp_rank]
        ends = {self.schedule.rank_of(one, setup.sizes.pp) for one in (0, self.num_stages - 1)}
        if self.anatomy.is_tied and len(ends) == 1:
            message = (
                f"{accelerator.pp_schedule} has the first and the last stage on one rank, which ties their weights"
            )
            hint = "use another schedule for a model whose embedding is its head"
            raise InputError(Problem(message, path="accelerator.pp_schedule", hint=hint))
        self.parameter_names = [name for name, _ in model.named_parameters()]
        self._dtype = DTYPES[setup.precision.param_dtype] if setup.precision.param_dtype else model.dtype
        self.stages = keep_stages(model, self.anatomy, self.split, own)
        self._trunk = trunk_of(model, self.anatomy)
        # No stage has the routers of all layers, from which a model would make a loss of its own.
        self._options = {"output_router_logits": False} if isinstance(model.config, GathersRouterLogits) else {}
        self._model = model
        self._setup = setup
        self._group = setup.mesh["pp"].get_group()
        self._transport = Transport(self._group, setup.device)
        self._schedules: dict[tuple[int, torch.Size], Any] = {}
        self._jobs: Sequence[Any] = ()
        self._compute: Compute | None = None
        self._current: tuple[Stage, torch.Tensor] | None = None
        self._modules = {stage: frozenset(stage.view.modules()) for stage in self.stages}
        for stage in self.stages:
            stage.view.forward = partial(self._pass, stage)
        model.forward = self

    @property
    def has_last(self) -> bool:
        """Whether this rank gives the logits."""
        return self.stages[-1].is_last

    @property
    def is_stage_main(self) -> bool:
        """Whether this rank speaks for its stages: it is in the pipeline of the first rank."""
        return self._setup.rank % (self._setup.world_size // self._setup.sizes.pp) == 0

    def collected(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What the ranks that speak for their stages give, all on the first rank; nothing on the others."""
        return self._transport.collect(tensors)

    def agreed(self, values: Iterable[Kind]) -> list[Kind]:
        """The values of all ranks, each once, by stage. Every rank calls it."""
        by_rank: list[list[Kind]] = gathered(list(values), self._setup)
        return list(dict.fromkeys(value for one in by_rank for value in one))

    def __call__(self, input_ids: torch.Tensor | None = None, **inputs: Any) -> Any:
        """The current stage's part of the model's call, or all stages' where none is running.

        Raises:
            RunError: gradients are wanted outside of a step.
        """
        if self._current is None:
            return self._through_all({"input_ids": input_ids, **inputs})
        stage, hidden = self._current
        inputs |= {"input_ids": input_ids} if stage.is_first else {"inputs_embeds": hidden}
        if not stage.is_last:
            inputs = {name: value for name, value in inputs.items() if name not in ("labels", "shift_labels")}
        return stage.forward(**inputs, **self._options)

    def num_taken(self, num_jobs: int) -> int:
        """The number of jobs that the schedule takes, from `num_jobs` on."""
        return self.schedule.at_least(num_jobs, self._setup.sizes.pp)

    def train(self, jobs: Sequence[Any], tokens: torch.Size, compute: Compute) -> None:
        """Run every job forward and backward through all stages, in the order of the schedule. Every rank calls it.

        Args:
            jobs: micro-batches, as many as the schedule takes.
            tokens: the shape of each, (rows, tokens).
            compute: see `Compute`; it calls the model once.
        """
        shape, dtype = torch.Size((*tokens, self._model.config.get_text_config().hidden_size)), self._dtype
        runner = self._schedules.pop((len(jobs), shape), None) or self._scheduled(len(jobs), shape, dtype)
        self._schedules[len(jobs), shape] = runner
        if len(self._schedules) > _MOST_SCHEDULES:
            # Each holds a buffer for every micro-batch.
            del self._schedules[next(iter(self._schedules))]
        numbers = torch.arange(len(jobs))
        first = (numbers,) if self.stages[0].is_first else ()
        target = numbers if self.has_last else None
        self._jobs, self._compute = jobs, partial(_checked, shape, dtype, compute)
        try:
            runner.step(*first, target=target, losses=[], return_outputs=False, number=numbers)
        except RuntimeError as error:
            # torch wraps what went wrong in its own account of what the stage was given.
            raise error.__cause__ or error from None
        finally:
            self._jobs, self._compute = (), None
        self._sum_tied()

    def run_forward(self, jobs: Iterable[Job], compute: Callable[[Stage, Job], torch.Tensor]) -> None:
        """Run every job forward through all stages. Every rank of a pipeline gives as many."""
        for job in jobs:
            # What is on its way is held in memory, so at most one job is.
            self._transport.finish()
            for stage in self.stages:
                hidden = (
                    torch.zeros(1) if stage.is_first else self._transport.receive(stage.index, self._rank(stage, -1))
                )
                self._jobs, self._compute = (job,), compute
                try:
                    given = stage.view(hidden, number=torch.zeros(1, dtype=torch.int64))
                finally:
                    self._jobs, self._compute = (), None
                if not stage.is_last:
                    self._transport.send(stage.index + 1, given, self._rank(stage, 1))
        self._transport.finish()

    def require_passing(self) -> None:
        """Refuse a model that does something of its own between its layers, which each stage would do again.

        Raises:
            InputError: hidden states don't come out of it as they went in when all layers are passed by.
        """
        size = self._model.config.get_text_config().hidden_size
        hidden = torch.linspace(-3, 3, 4 * size, dtype=self._model.dtype, device=self._setup.device).view(1, 4, size)
        with torch.no_grad():
            positions = torch.arange(4, device=hidden.device)[None]
            passed = self._trunk.forward(inputs_embeds=hidden, position_ids=positions, **self._options).logits
        if not torch.equal(passed, hidden):
            message = f"{type(self._model).__name__} changes hidden states outside of its layers, so it has no stages"
            raise InputError(Problem(message, path=PATH, hint="remove 'pp_size'"))

    def _pass(self, stage: Stage, hidden: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        assert self._compute is not None
        self._current = stage, hidden
        try:
            return self._compute(stage, self._jobs[int(number)])
        finally:
            self._current = None

    def _scheduled(self, num_jobs: int, shape: torch.Size, dtype: torch.dtype) -> Any:
        """torch's schedule for so many jobs; the shapes are said beforehand, so that it does not try the model out."""
        hidden = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
        number, loss = torch.empty(1, dtype=torch.int64, device="meta"), torch.empty((), device="meta")
        stages = [
            PipelineStage(
                stage.view,
                stage.index,
                self.num_stages,
                self._setup.device,
                input_args=number if stage.is_first else hidden,
                output_args=loss if stage.is_last else hidden,
                group=self._group,
            )
            for stage in self.stages
        ]
        # With fewer micro-batches than stages 1F1B is GPipe, and torch refuses to call it otherwise.
        is_short = self.schedule.name == "1f1b" and num_jobs < self.num_stages
        kind = schedules.get_schedule_class("GPipe" if is_short else self.schedule.torch_name)
        of = stages if self.schedule.is_interleaved else stages[0]
        return kind(of, n_microbatches=num_jobs, loss_fn=lambda output, target: output, scale_grads=False)

    def runs(self, module: nn.Module) -> bool:
        """Whether a module is part of the stage that is running."""
        return self._current is not None and module in self._modules[self._current[0]]

    def _through_all(self, inputs: dict[str, Any]) -> CausalLMOutput:
        if torch.is_grad_enabled():
            raise RunError(
                "the model's stages are on several ranks, so it can be called without gradients alone; a step runs it"
            )
        found: dict[str, torch.Tensor] = {}

        def compute(stage: Stage, job: dict[str, Any]) -> torch.Tensor:
            # Not the model's own call, which is running already, and whose hooks are for it as a whole.
            outputs = self(**job)
            if stage.is_last:
                found.update({name: outputs[name] for name in ("logits", "loss") if outputs.get(name) is not None})
            hidden: torch.Tensor = outputs.logits
            return hidden

        self.run_forward([inputs], compute)
        last = self.schedule.rank_of(self.num_stages - 1, self._setup.sizes.pp)
        found = self._transport.broadcast(found, last)
        return CausalLMOutput(loss=found.get("loss"), logits=found["logits"])

    def share_tied(self) -> None:
        """Let the first stage have the weight of the last one's head, where it is its embedding's, too."""
        if not self.holds_tied:
            return
        weight = local_of(embedding_of(self._model).weight.detach())
        if self.has_last:
            self._transport.send(0, weight, self._other_end)
            self._transport.finish()
        else:
            weight.copy_(self._transport.receive(0, self._other_end))

    @property
    def holds_tied(self) -> bool:
        """Whether this rank has a weight that is the first stage's embedding and the last one's head."""
        return self.anatomy.is_tied and (self.stages[0].is_first or self.has_last)

    @property
    def counted_elsewhere(self) -> nn.Parameter | None:
        """The weight of this rank that the last stage has, too, and counts."""
        if not self.holds_tied or self.has_last:
            return None
        weight = embedding_of(self._model).weight
        assert isinstance(weight, nn.Parameter)
        return weight

    @property
    def _other_end(self) -> int:
        return self.schedule.rank_of(0 if self.has_last else self.num_stages - 1, self._setup.sizes.pp)

    def _sum_tied(self) -> None:
        gradient = embedding_of(self._model).weight.grad if self.holds_tied else None
        if gradient is not None:
            self._transport.add_of(local_of(gradient), self._other_end)

    def _rank(self, stage: Stage, step: int) -> int | None:
        """The rank of the next or the previous stage; None if it is this one."""
        rank = self.schedule.rank_of(stage.index + step, self._setup.sizes.pp)
        return None if rank == self._group.rank() else rank


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def pipeline_of(model: nn.Module) -> Pipeline | None:
    """The pipeline that a model is a part of."""
    return model.forward if isinstance(model.forward, Pipeline) else None


def counted_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The trainable parameters of a rank without one that another stage has, too, and counts."""
    pipeline = pipeline_of(model)
    twice = None if pipeline is None else pipeline.counted_elsewhere
    return [one for one in model.parameters() if one.requires_grad and one is not twice]


def members_of(model: nn.Module) -> Iterator[nn.Module]:
    """All modules of a model, and those that its stages have beside it."""
    yield from model.modules()
    pipeline = pipeline_of(model)
    if pipeline is not None:
        known = set(model.modules())
        for stage in pipeline.stages:
            yield from (one for one in stage.view.modules() if one not in known)


def _checked(shape: torch.Size, dtype: torch.dtype, compute: Compute, stage: Stage, job: Any) -> torch.Tensor:
    given = compute(stage, job)
    if not stage.is_last and (given.shape, given.dtype) != (shape, dtype):
        found, wanted = f"{given.dtype} {tuple(given.shape)}", f"{dtype} {tuple(shape)}"
        raise RunError(f"stage {stage.index} gives hidden states of {found}, and the next one expects {wanted}")
    return given
