"""A plugin that stands in for another one during a run: it hands each call on, and notes what came and went."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hp_core.config import TrainerConfig
from hp_core.config.models import TrainingConfig
from hp_core.data.protocols import MeshContext, Tokenizer
from hp_core.data.rows import as_datasets
from hp_core.errors import HpError
from hp_core.hooks import Hook
from hp_core.model.replacement.contract import ReplacementContext
from hp_core.parallel.plan.model_plan import ModelPlan
from hp_core.parallel.setup import DistributedSetup
from hp_core.plugin_check import HookFunction
from hp_core.testing.checks import BrokenPromiseError
from hp_core.testing.watch import untouched
from hp_core.training.protocols import OffersLRScheduler, OffersOptimizer
from hp_core.training.run import Report, Run

# The file that a run loads in place of the plugin: the recording of this process gives it its functions.
SOURCE = """\
from hp_core.testing.recording import current

globals().update(current().functions())
"""

_current: ContextVar[Recording] = ContextVar("recording")

# What the manual says about each argument; those of sections that this version doesn't read may be anything.
_ARGUMENTS: Mapping[str, tuple[type, ...]] = {
    "config": (TrainerConfig,),
    "distributed_setup": (DistributedSetup,),
    "module": (nn.Module,),
    "module_fqn": (str,),
    "context": (ReplacementContext,),
    "plan": (ModelPlan,),
    "loss_fn": (nn.Module,),
    "model": (nn.Module,),
    "tokenizer": (Tokenizer, type(None)),
    "mesh_context": (MeshContext,),
    "training_config": (TrainingConfig,),
    "batch_sampler": (Iterable,),
    "batch_size": (int,),
    "dp_world_size": (int,),
    "max_seq_len": (int, type(None)),
    "seed": (int,),
    "optimizer": (Optimizer,),
    "train_iters": (int,),
    "run": (Run,),
    "state": (dict,),
    "model_inputs": (dict,),
    "loss_inputs": (dict,),
    "step": (int,),
    "evaluation": (Mapping,),
    "path": (Path,),
    "report": (Report,),
    "error": (BaseException,),
}
# What arguments that are mappings hold at the least.
_ENTRIES: Mapping[str, tuple[str, ...]] = {
    "model_inputs": ("input_ids",),
    "loss_inputs": ("labels",),
    "evaluation": ("step", "eval_loss", "eval_tokens"),
}


def current() -> Recording:
    """The recording under which a run has been started in this context."""
    return _current.get()


@dataclass
class Recording:
    """What happened to the hook implementations of one plugin, by hook.

    `calls` counts; `faults_given` are arguments that weren't as the manual has them, or were not left as they were;
    `faults_returned` are results of the wrong kind.
    """

    implementations: tuple[HookFunction, ...]
    requires: str | None = None
    calls: dict[str, int] = field(default_factory=dict)
    faults_given: list[str] = field(default_factory=list)
    faults_returned: list[str] = field(default_factory=list)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Give `SOURCE`, loaded inside the block, this recording's functions."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def functions(self) -> dict[str, Any]:
        """The module of the plugin that stands in: a function for each hook implementation."""
        found: dict[str, Any] = {one.hook.name: self._recorded(one) for one in self.implementations}
        if self.requires is not None:
            found["hp_requires"] = self.requires
        return found

    def _recorded(self, one: HookFunction) -> Callable[..., Any]:
        return self._recorded_wrapper(one) if one.wrapper else self._recorded_function(one)

    def _recorded_function(self, one: HookFunction) -> Callable[..., Any]:
        @functools.wraps(one.function)
        def recorded(*arguments: Any) -> Any:
            with self._watched(one, arguments):
                result = one.function(*arguments)
            self._note_result(one.hook, result, may_be_none=True)
            return result

        return recorded

    def _recorded_wrapper(self, one: HookFunction) -> Callable[..., Any]:
        @functools.wraps(one.function)
        def recorded(*arguments: Any) -> Generator[None, Any, Any]:
            with self._watched(one, arguments):
                result = yield from one.function(*arguments)
            self._note_result(one.hook, result, may_be_none=False)
            return result

        return recorded

    @contextmanager
    def _watched(self, one: HookFunction, arguments: tuple[Any, ...]) -> Iterator[None]:
        name = one.hook.name
        self.calls[name] = self.calls.get(name, 0) + 1
        given = dict(zip(inspect.signature(one.function).parameters, arguments, strict=True))
        self.faults_given += argument_faults(one.hook, given)
        before = _read_only(given)
        try:
            with untouched("", before.entries):
                yield
                changed = [what for what, value in _read_only(given).plain.items() if before.plain[what] != value]
        except BrokenPromiseError as fault:
            self.faults_given.append(f"{name}{fault}")
        else:
            self.faults_given += [f"{name}: it changes {what}, which is read-only" for what in changed]

    def _note_result(self, hook: Hook, result: Any, *, may_be_none: bool) -> None:
        if not hook.firstresult or (result is None and may_be_none):
            return
        fault = result_fault(hook.name, result)
        if fault is not None:
            self.faults_returned.append(f"{hook.name} returned {fault}")


@dataclass(frozen=True)
class _ReadOnly:
    entries: dict[str, Any]
    plain: dict[str, Any]


def _read_only(given: Mapping[str, Any]) -> _ReadOnly:
    """What a hook may look at and not change: entries of dicts, and the numbers and weights of the run."""
    entries = {name: given[name] for name in _ENTRIES if name in given}
    plain: dict[str, Any] = {}
    run = given.get("run")
    if isinstance(run, Run):
        plain["run.state"] = run.state.as_dict()
        plain["run.metrics"] = dict(run.metrics)
        if run.model is not None:
            plain |= _facts_of_model("run.model", run.model)
        if run.optimizer is not None:
            rates = [(group["lr"], group.get("weight_decay")) for group in run.optimizer.param_groups]
            plain["the rates of run.optimizer"] = rates
            plain["the state of run.optimizer"] = len(run.optimizer.state)
        plain["the random numbers of the run"] = torch.get_rng_state().numpy().tobytes()
    model = given.get("model")
    if isinstance(model, nn.Module):
        plain |= _facts_of_model("model", model)
    return _ReadOnly(entries, plain)


def _facts_of_model(name: str, model: nn.Module) -> dict[str, Any]:
    named = dict(model.named_parameters())
    return {
        **{f"the weight {fqn} of {name}": _digest(parameter) for fqn, parameter in named.items()},
        f"requires_grad in {name}": [parameter.requires_grad for parameter in named.values()],
        f"the training mode of {name}": model.training,
    }


def _digest(tensor: torch.Tensor) -> bytes:
    # Bit for bit: sums don't see two rows that change places.
    content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(content, digest_size=16).digest()


def argument_faults(hook: Hook, given: Mapping[str, Any]) -> list[str]:
    """What is not as the manual says about a hook's arguments."""
    faults = []
    for name, value in given.items():
        kinds = _ARGUMENTS.get(name)
        if kinds is not None and not isinstance(value, kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            faults.append(f"{hook.name}: {name} is a {type(value).__name__}; the manual says {wanted}")
        elif name in _ENTRIES and not set(_ENTRIES[name]) <= set(value):
            missing = sorted(set(_ENTRIES[name]) - set(value))
            faults.append(f"{hook.name}: {name} has no {missing[0]!r}, which the manual names")
    return faults


def result_fault(name: str, result: Any) -> str | None:
    """Why a result is not what the hook of this name must give, None if it is."""
    kind = type(result).__name__
    if name in ("build_model", "build_loss", "replace_module"):
        return None if isinstance(result, nn.Module) else f"a {kind}, not a torch.nn.Module"
    if name == "build_optimizer":
        wanted = "a torch.optim.Optimizer, or an object with get_optimizer()"
        return None if isinstance(result, (Optimizer, OffersOptimizer)) else f"a {kind}, not {wanted}"
    if name == "build_lr_scheduler":
        wanted = "a torch scheduler, or an object with get_lr_scheduler()"
        return None if isinstance(result, (LRScheduler, OffersLRScheduler)) else f"a {kind}, not {wanted}"
    if name == "build_dataset":
        try:
            as_datasets(result)
        except HpError as error:
            return f"no data set: {error}"
        return None
    if name == "build_dataloader":
        return None if isinstance(result, Iterable) else f"a {kind}, which is not iterable"
    if name == "prepare_model_inputs" and not (
        isinstance(result, dict) and all(isinstance(key, str) for key in result)
    ):
        return f"a {kind}, not the dict that the model is called with"
    return None
