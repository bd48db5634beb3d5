"""Computing in float64 what was written for float32, so that a numeric derivative can be compared with a gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class InFloat64(TorchFunctionMode):
    """While it is active, whatever asks torch for float32 gets float64: `x.float()`, `dtype=torch.float32`.

    Losses compute in fp32 by a cast of their own, which would hide a derivative under rounding.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Replace float32 in the call."""
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        named = {name: _double(value) for name, value in (kwargs or {}).items()}
        return func(*(_double(value) for value in args), **named)


def _double(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
