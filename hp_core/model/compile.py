"""Modules that run as code which torch.compile made of their forward, each by itself."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor as inductor
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException
from torch._dynamo.types import GuardFilterEntry
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from hp_core.config.compile import RECORDING, CompileConfig, without_graphs
from hp_core.config.models import AcceleratorConfig
from hp_core.data.cache import cache_directory
from hp_core.errors import InputError, Problem, RunError
from hp_core.model.activation_checkpoint import Recomputed
from hp_core.model.activation_swap import Swapped
from hp_core.model.patterns import chosen_modules
from hp_core.parallel.expert.experts import holds_experts
from hp_core.parallel.pipeline.runner import members_of
from hp_core.parallel.pipeline.schedules import SCHEDULES
from hp_core.parallel.setup import DistributedSetup
from hp_core.parallel.tensor.random_numbers import OwnDropout
from hp_core.parallel.tensor.region import RowForward, SharedForward
from hp_core.spelling import did_you_mean

_PATH = "compile.modules"
_AROUND = "name the module around it"
_HINT = "write compile.on_failure: eager"
# So much torch allows each function.
_NUM_VERSIONS = 8
_CACHE = "TORCHINDUCTOR_CACHE_DIR"


@dataclass
class Compiler:
    """What compiles the modules of a model; all of them share one, so that equal modules share their code.

    `names` are the FQNs of the modules of this rank, `failures` what could not be compiled, each with the module that
    met it first, `num_graphs` how many graphs were, and `running` is the module that is being called. Until `is_on`,
    modules run as they are written: what is tried before training has other lengths than what is trained on.
    """

    config: CompileConfig
    names: list[str] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    num_graphs: int = 0
    running: str = ""
    is_on: bool = False

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Callable[..., Any]:
        """Compile a graph, or give the graph itself, which computes the same operator by operator.

        torch calls it when a module is run with something that it has no code for yet, before any of the graph ran. So
        a rank that falls back alone is only later than the others, and computes the same.
        """
        try:
            compiled = self._compiled(graph, inputs, **options)
        except Exception as error:
            if self.config.on_failure == "stop":
                raise
            self.failures.setdefault(_told(error), self.running)
            return graph.forward
        self.num_graphs += 1
        return compiled

    def _compiled(self, graph: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Callable[..., Any]:
        if self.config.backend != "inductor":
            return torch._dynamo.lookup_backend(self.config.backend)(graph, inputs, **options)
        # Dropout draws the numbers that it draws without compilation.
        settings = {**inductor.list_mode_options(self.config.mode, self.config.dynamic), "fallback_random": True}
        compiled: Callable[..., Any] = inductor.compile(graph, inputs, options=settings)
        return compiled


class Compiled:
    """A module's forward, compiled when it is first called; an object, so that a copy of the module runs its own."""

    def __init__(self, forward: Callable[..., Any], name: str, compiler: Compiler) -> None:
        self.__wrapped__ = forward
        self.name = name
        self.compiler = compiler
        options: dict[str, Any] = {"guard_filter_fn": _guards}
        self._function = torch.compile(forward, backend=compiler, dynamic=compiler.config.dynamic, options=options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What `forward` returns.

        Raises:
            RunError: it can't be compiled, and the recipe says to stop.
        """
        if not self.compiler.is_on:
            return self.__wrapped__(*args, **kwargs)
        self.compiler.running = self.name
        try:
            return self._function(*args, **kwargs)
        except TorchDynamoException as error:
            raise RunError(f"compile: {self.name} can't be compiled: {_told(error)}; {_HINT}") from error

    def __deepcopy__(self, memo: dict[int, Any]) -> Compiled:
        return Compiled(copy.deepcopy(self.__wrapped__, memo), self.name, self.compiler)

    def __reduce__(self) -> tuple[type[Compiled], tuple[Any, ...]]:
        return Compiled, (self.__wrapped__, self.name, self.compiler)


@dataclass(frozen=True)
class Compilation:
    """The modules of a model to compile, which are chosen while it is whole and compiled when it is finished."""

    compiler: Compiler
    chosen: Sequence[tuple[str, nn.Module]]

    @classmethod
    def of(cls, model: nn.Module, config: CompileConfig, setup: DistributedSetup) -> Compilation:
        """Choose the modules.

        Args:
            model: the whole model, before it is divided into pipeline stages; what is computed again and swapped is.
            config: which modules, and how.
            setup: the run's device and ranks.

        Raises:
            InputError: see `chosen_modules`; or with all problems: torch doesn't know the backend, the device or
                machine lacks what it needs, a module sends tokens to experts or is a part of one that keeps products.
        """
        chosen = chosen_modules(model, config.modules, _PATH)
        problems = [*_unusable(config, setup.device), *_in_selective(model, chosen)]
        if setup.expert_mesh is not None:
            problems += _exchanging(chosen)
        if problems:
            raise InputError(problems)
        return cls(Compiler(config), chosen)

    def install(self, model: nn.Module) -> None:
        """Have the chosen modules that this rank holds run as compiled code, in place; nothing is renamed.

        It wants `compile_settings` around it and around what is run. They do so once `start_compiling` is called. Hooks
        around a module, FSDP2's among them, stay outside, and what swaps. So does what runs a module again as a whole,
        as its code may be in pieces; what keeps products is a part of the graph, where products can be told.
        """
        held = set(members_of(model))
        own = [(name, module) for name, module in self.chosen if module in held]
        # torch counts by function, and the functions around their forward are those of all layers.
        kinds = {(type(module), *map(type, module.modules())) for _, module in own}
        limit = max(_NUM_VERSIONS * len(kinds), torch._dynamo.config.recompile_limit)
        torch._dynamo.config.recompile_limit = limit
        for name, module in own:
            holder: Any = module
            while isinstance(holder.forward, Swapped) or _runs_whole(holder.forward):
                holder = holder.forward
            holder.forward = Compiled(holder.forward, name, self.compiler)
            self.compiler.names.append(name)


def _runs_whole(forward: Any) -> bool:
    return isinstance(forward, Recomputed) and not forward.keeps_products


def _keeps_products(module: nn.Module) -> bool:
    forward: Any = module.forward
    while isinstance(forward, Swapped):
        forward = forward.forward
    return isinstance(forward, Recomputed) and forward.keeps_products


def _exchanging(modules: Sequence[tuple[str, nn.Module]]) -> Iterator[Problem]:
    for name, module in modules:
        if holds_experts(module):
            message = f"{name!r} sends tokens to experts on other ranks, how many only the tokens tell"
            yield Problem(message, path=_PATH, hint=_AROUND)


def _in_selective(model: nn.Module, modules: Sequence[tuple[str, nn.Module]]) -> Iterator[Problem]:
    around = [one for one in model.modules() if _keeps_products(one)]
    within = {inner for one in around for inner in one.modules() if inner is not one}
    for name, module in modules:
        if module in within:
            message = f"{name!r} is in a module of which selective keeps single results, which compiled code hasn't"
            yield Problem(message, path=_PATH, hint=_AROUND)


def start_compiling(model: nn.Module) -> Compiler | None:
    """Have a model's modules be compiled from now on, if they are to be: training begins."""
    compiler = compiler_of(model)
    if compiler is not None:
        compiler.is_on = True
    return compiler


@contextmanager
def as_written(model: nn.Module) -> Iterator[None]:
    """Have a model's modules run as they are written for a while: its lengths come once."""
    compiler = compiler_of(model)
    if compiler is None or not compiler.is_on:
        yield
        return
    compiler.is_on = False
    try:
        yield
    finally:
        compiler.is_on = True


def compiler_of(model: nn.Module) -> Compiler | None:
    """What compiles modules of a model, if anything does."""
    for module in members_of(model):
        forward: Any = module.forward
        while isinstance(forward, (Swapped, Recomputed)):
            forward = forward.forward
        if isinstance(forward, Compiled):
            return forward.compiler
    return None


def _unusable(config: CompileConfig, device: torch.device) -> Iterator[Problem]:
    """What the device or the machine lacks; a compiler alone may be missing, with `on_failure: eager`."""
    known = torch._dynamo.list_backends(None)
    if config.backend not in known:
        hint = did_you_mean(config.backend, known) or f"use one of {', '.join(known)}"
        yield Problem(f"torch.compile has no backend {config.backend!r}", path="compile.backend", hint=hint)
    if config.mode in RECORDING and device.type != "cuda":
        message = f"{config.mode} records CUDA graphs, which a {device.type} hasn't"
        yield Problem(message, path="compile.mode", hint=without_graphs(config.mode))
    if config.backend == "inductor" and device.type == "cpu" and config.on_failure == "stop":
        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            hint = f"install g++, let CXX name another, or {_HINT}"
            yield Problem(f"inductor needs a C++ compiler: {error}", path="compile.backend", hint=hint)


def _told(error: BaseException) -> str:
    """The first line of what went wrong first."""
    while isinstance(error, BackendCompilerFailed):
        error = error.inner_exception
    kind = "" if isinstance(error, TorchDynamoException) else f"{type(error).__name__}: "
    return kind + str(error).strip().partition("\n")[0]


def _guards(entries: Sequence[GuardFilterEntry]) -> list[bool]:
    """Which conditions code is used under: not that a module's forward is the very object that it was compiled with.

    Its type and what it holds are conditions of their own, or each layer would be compiled anew.
    """
    ours = (SharedForward, RowForward, OwnDropout, Recomputed)
    return [one.guard_type not in ("CLOSURE_MATCH", "ID_MATCH") or not isinstance(one.value, ours) for one in entries]


@contextmanager
def compile_settings(config: CompileConfig, accelerator: AcceleratorConfig) -> Iterator[None]:
    """Have torch compile as a recipe says, and keep code in the cache directory; afterwards torch is as it was.

    Where the user has chosen another directory for code, it is kept there.

    Args:
        config: the recipe's `compile`.
        accelerator: the recipe's `accelerator`.

    Raises:
        InputError: the directory can't be written.
    """
    if config.mode == "off":
        yield
        return
    settings = {
        # Running a layer again repeats no more than putting parts in the places of parameters, which is undone there.
        "skip_fwd_side_effects_in_bwd_under_checkpoint": True,
        "suppress_errors": config.on_failure == "eager",
        # For `Compilation.install` to raise.
        "recompile_limit": torch._dynamo.config.recompile_limit,
    }
    splits_backward = accelerator.pp_size != 1 and SCHEDULES[accelerator.pp_schedule].splits_backward
    backward_settings = {
        # Else it is compiled when it runs, where a failure ends the run.
        "force_non_lazy_backward_lowering": True,
        # What is kept is used twice.
        "donated_buffer": functorch_config.donated_buffer and not splits_backward,
    }
    before = os.environ.get(_CACHE)
    # torch writes its own choice there when it is imported.
    if before in (None, default_cache_dir()):
        os.environ[_CACHE] = str(_code_directory())
    try:
        with torch._dynamo.config.patch(settings), functorch_config.patch(backward_settings):
            yield
    finally:
        if before is None:
            os.environ.pop(_CACHE, None)
        else:
            os.environ[_CACHE] = before


def _code_directory() -> Path:
    directory = cache_directory() / "compiled"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"the cache {str(directory)!r} can't be written: {error.strerror or error}"
        raise InputError(Problem(message, path="compile", hint=f"set HP_CACHE_DIR or {_CACHE}")) from error
    return directory
