"""Keeping what the routers of a model give in the one forward pass that a loss asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hp_core.errors import RunError
from hp_core.parallel.pipeline.runner import Pipeline
from hp_plugins.losses.router_probe import Router, Routing


@dataclass(frozen=True)
class _Record:
    routing: Routing
    with_gradients: bool


class RouterRecording:
    """Listens to routers from `arm` to `take`, and to nothing else.

    A checkpointed layer runs again in the backward pass, which would count its tokens twice.
    """

    def __init__(self, routers: list[Router], pipeline: Pipeline | None = None) -> None:
        """Listen to `routers`, of which a pass calls those of one stage alone in a `pipeline`."""
        self._routers = routers
        self._pipeline = pipeline
        self._records: list[list[_Record]] | None = None
        self._handles = [self._listen(number, router) for number, router in enumerate(routers)]

    def arm(self) -> None:
        """Keep what the routers give from now on; what they gave before is dropped."""
        self._records = [[] for _ in self._routers]

    def remove(self) -> None:
        """Leave the model alone for good."""
        self._records = None
        for handle in self._handles:
            handle.remove()

    def take(self, num_tokens: int) -> list[Routing]:
        """What each router gave since `arm`, by layer; ends the recording.

        Raises:
            RunError: as `peek`.
        """
        routings = self.peek(num_tokens)
        self._records = None
        return routings

    def peek(self, num_tokens: int) -> list[Routing]:
        """What each router gave since `arm`, by layer; goes on recording.

        Raises:
            RunError: there was no `arm`, or a router did not see each of the tokens once, or was called without
                gradients while they are to be computed.
        """
        if self._records is None:
            raise RunError("loss_fn: prepare_model_inputs was not called before the model, so no router was heard")
        return [
            _only(router, records, num_tokens)
            for router, records in zip(self._routers, self._records, strict=True)
            if self._pipeline is None or self._pipeline.runs(router.module)
        ]

    def _listen(self, number: int, router: Router) -> RemovableHandle:
        def keep(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if self._records is None:
                return
            routing = Routing.of(output, router.index)
            if routing is None:
                raise RunError(f"loss_fn: the router {router.fqn} gives something else than when the loss was bound")
            self._records[number].append(_Record(routing, torch.is_grad_enabled()))

        return router.module.register_forward_hook(keep)


def _only(router: Router, records: list[_Record], num_tokens: int) -> Routing:
    if len(records) != 1:
        raise RunError(f"loss_fn: the router {router.fqn} was called {len(records)} times in a forward pass, not once")
    routing, with_gradients = records[0].routing, records[0].with_gradients
    if len(routing.logits) != num_tokens:
        seen = f"saw {len(routing.logits)} tokens of a micro-batch of {num_tokens}"
        raise RunError(f"loss_fn: the router {router.fqn} {seen}, so it is unknown which of them are padding")
    if torch.is_grad_enabled() and not with_gradients:
        raise RunError(
            f"loss_fn: the router {router.fqn} was called without gradients, as reentrant checkpointing does; "
            "set use_reentrant=False where checkpointing is enabled"
        )
    return routing
