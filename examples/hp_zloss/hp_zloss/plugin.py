"""The plugin: puts the z-loss around whatever loss the recipe builds."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol, runtime_checkable

from torch import nn

from hp_core import InputError, hookimpl
from hp_zloss.loss import ZLoss


@hookimpl(wrapper=True)
def build_loss() -> Generator[None, nn.Module, ZLoss]:
    """Put the z-loss around the loss of the recipe, or of another plugin."""
    loss_fn = yield
    return ZLoss(loss_fn)


@hookimpl
def bind_model(loss_fn: nn.Module, model: nn.Module) -> None:
    """Let the z-loss listen to the model's head."""
    head = model.get_output_embeddings() if isinstance(model, _HasHead) else None
    if head is None:
        raise InputError(f"hp-zloss: {type(model).__name__} has no output head, whose logits the z-loss is made of")
    _own(loss_fn).listen_to(head)


@hookimpl(wrapper=True)
def prepare_model_inputs(loss_fn: nn.Module) -> Generator[None, dict[str, Any], dict[str, Any]]:
    """Tell the z-loss that the next pass through the model is one whose logits count; the inputs stay as they are."""
    inputs = yield
    _own(loss_fn).expect_logits()
    return inputs


@runtime_checkable
class _HasHead(Protocol):
    """A model that says where its logits come from, as those of transformers do."""

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the module whose output are the logits."""
        ...


def _own(loss_fn: nn.Module) -> ZLoss:
    # Another plugin's wrapper may be around it.
    for module in loss_fn.modules():
        if isinstance(module, ZLoss):
            return module
    raise InputError("hp-zloss: another plugin dropped the z-loss; list it in `plugins` after hp-zloss:zloss")
