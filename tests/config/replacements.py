"""Module replacements for the recipe tests."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from hp_core import ArgumentError, ReplacementContext, module_replacement


@module_replacement
def fast_norm(
    module: nn.Module,
    module_fqn: str,
    context: ReplacementContext,
    *,
    eps: float | None = None,
    mode: Literal["plain", "fused"] = "plain",
) -> nn.Module:
    if eps == 0.5:
        raise ArgumentError("eps", "is too large", "write 1e-5")
    return nn.Identity()


@module_replacement
class Wrapped(nn.Module):
    def __init__(self, module: nn.Module, module_fqn: str, context: ReplacementContext, width: int) -> None:
        super().__init__()
        self.made_from = (module_fqn, width)


class Unmarked(Wrapped):
    """The mark of its base isn't its own."""


class Factories:
    @classmethod
    @module_replacement
    def made(cls, module: Any, module_fqn: Any, context: Any) -> nn.Module:
        return nn.Identity()


def plain_function(module: Any, module_fqn: Any, context: Any) -> nn.Module:
    return nn.Identity()
