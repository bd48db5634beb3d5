"""The blocks a model is made of: what FSDP2 gathers together and what is initialised together."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The outermost members of the model's `ModuleList`s, with their FQNs: decoder layers, vision blocks.

    They depend on the model alone, never on the number of ranks.
    """
    found: list[tuple[str, nn.Module]] = []

    def walk(module: nn.Module, fqn: str) -> None:
        for name, child in module.named_children():
            child_fqn = f"{fqn}.{name}" if fqn else name
            if isinstance(module, nn.ModuleList) and any(True for _ in child.parameters()):
                found.append((child_fqn, child))
            else:
                walk(child, child_fqn)

    walk(model, "")
    return found


def modules_bottom_up(module: nn.Module, fqn: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module below and including `module`, children before parents."""
    for name, child in module.named_children():
        yield from modules_bottom_up(child, f"{fqn}.{name}" if fqn else name)
    yield fqn, module
