"""Where numbers that aren't finite come from: the first module in the forward pass, the first operator in backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from hp_core.config.debug import DebugConfig
from hp_core.errors import RunError
from hp_core.hookspecs import hookimpl
from hp_core.training.run import Run


class Debugging:
    """The hook implementations of the section `debug`: one object for each run that asks for any of it."""

    def __init__(self, config: DebugConfig) -> None:
        self._config = config
        self._hooks: list[RemovableHandle] = []

    @hookimpl
    def on_train_start(self, run: Run) -> None:
        """Have outputs checked, and turn torch's anomaly detection on, which is a matter of the process."""
        assert run.model is not None
        if self._config.check_outputs:
            # Not those of the model itself: its loss is NaN where no token is a target, and counts nothing.
            inner = [(fqn, module) for fqn, module in run.model.named_modules() if fqn]
            self._hooks = [module.register_forward_hook(partial(_check, fqn)) for fqn, module in inner]
        if self._config.detect_anomaly:
            torch.autograd.set_detect_anomaly(True)

    @hookimpl
    def on_train_end(self) -> None:
        """Undo both."""
        self._end()

    @hookimpl
    def on_exception(self) -> None:
        """Undo both."""
        self._end()

    def _end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._config.detect_anomaly:
            torch.autograd.set_detect_anomaly(False)


def _check(fqn: str, module: nn.Module, arguments: Any, output: Any) -> None:
    """Raise `RunError` if a number in the output isn't finite.

    A module's hook comes after those of the modules inside it, whose faults it may pass on.
    """
    for path, tensor in _tensors(output):
        if tensor.is_floating_point() and not (finite := torch.isfinite(tensor)).all():
            faulty = tensor[~finite]
            kinds = [name for name, found in (("NaN", faulty.isnan()), ("infinite", faulty.isinf())) if found.any()]
            raise RunError(
                f"{fqn} ({type(module).__name__}): its output{path} is not finite: {faulty.numel():,} of "
                f"{tensor.numel():,} numbers are {' or '.join(kinds)}; it is the first module in the forward pass "
                "that has any"
            )


def _tensors(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in what a module returns, and where they are: `[0]`, `['logits']`."""
    if isinstance(value, torch.Tensor):
        local = value.to_local() if isinstance(value, DTensor) else value
        yield path, local.detach()
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _tensors(one, f"{path}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        for index, one in enumerate(value):
            yield from _tensors(one, f"{path}[{index}]")
