"""Experts of a mixture in two grouped products, by `torch.nn.functional.grouped_mm`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hp_core import ArgumentError, ReplacementContext, module_replacement
from hp_plugins.replacements.gated import is_silu, scaled_swiglu
from hp_plugins.replacements.probe import Facts, differs, failure, on_cpu, random
from hp_plugins.replacements.takeover import Behaviour, arguments, take_over

# A grouped product reads rows in pieces of 16 bytes, which is 8 numbers in half precision.
_ROW_MULTIPLE = 8
_PRODUCT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")
_HINT = "narrow match to the modules that hold gate_up_proj and down_proj of all experts"

Tensor = torch.Tensor


@dataclass(frozen=True)
class Layout:
    """How the experts' weights lie: `transposed` is (experts, in, out) rather than (experts, out, in)."""

    transposed: bool
    silu: bool


class GroupedExperts(Behaviour):
    """`sum over k of w[t, k] * down_e(act(gate_e(x[t])) * up_e(x[t]))` for the experts `e = index[t, k]`.

    `gate_up_proj` is (E, 2 I, size), gate first, `down_proj` (E, size, I), or both transposed. The pairs of token and
    expert are sorted by expert and multiplied in one grouped product each; experts without a token cost nothing. The
    weight `w` is applied to the I intermediate numbers, not the result, which is the same sum and keeps less for the
    backward pass.
    """

    layout: Layout
    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter
    act_fn: nn.Module

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """(T, size) tokens, (T, K) experts and their weights to (T, size), in the dtype of the tokens.

        An index of E or more, by which the expert-parallel router of transformers says that the expert is elsewhere,
        adds nothing.
        """
        last = self.down_proj.shape[0] - 1
        experts, order = top_k_index.flatten().sort(stable=True)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
        # Where each expert's rows end. Nothing here waits for the device.
        every = torch.arange(last + 1, device=experts.device)
        # A row in no group would be left uninitialised, so those of experts elsewhere go to the last, with no weight.
        ends = torch.searchsorted(experts.clamp(max=last), every, right=True, out_int32=True)
        places = order, back, top_k_index.shape[1]
        rows = _dispatch(hidden_states.to(self.gate_up_proj.dtype), *places)
        scale = top_k_weights.flatten()[order].masked_fill(experts > last, 0).unsqueeze(-1)
        gate, up = _product(rows, self._in_out(self.gate_up_proj), ends).chunk(2, dim=-1)
        hidden = scaled_swiglu(gate, up, scale) if self.layout.silu else self._scaled_gate(gate, up, scale)
        return _combine(_product(hidden, self._in_out(self.down_proj), ends), *places).to(hidden_states.dtype)

    def _scaled_gate(self, gate: Tensor, up: Tensor, scale: Tensor) -> Tensor:
        activated: Tensor = self.act_fn(gate)
        return (activated * up * scale).to(gate.dtype)

    def _in_out(self, weight: Tensor) -> Tensor:
        return weight if self.layout.transposed else weight.transpose(1, 2)


class _Dispatch(torch.autograd.Function):
    """A row for each pair from a row for each token; its transpose is `_Combine`, so neither adds by atomics."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, back: Tensor, chosen: int) -> Tensor:
        ctx.save_for_backward(order, back)
        ctx.chosen = chosen
        return tokens[order // chosen]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        order, back = ctx.saved_tensors
        return _combine(gradient, order, back, ctx.chosen), None, None, None


class _Combine(torch.autograd.Function):
    """The sum of each token's rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor, chosen: int) -> Tensor:
        ctx.save_for_backward(order, back)
        ctx.chosen = chosen
        return rows[back].view(rows.shape[0] // chosen, chosen, rows.shape[1]).sum(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        order, back = ctx.saved_tensors
        return _dispatch(gradient, order, back, ctx.chosen), None, None, None


def _dispatch(tokens: Tensor, order: Tensor, back: Tensor, chosen: int) -> Tensor:
    return _Dispatch.apply(tokens, order, back, chosen)  # type: ignore[no-any-return, no-untyped-call]


def _combine(rows: Tensor, order: Tensor, back: Tensor, chosen: int) -> Tensor:
    return _Combine.apply(rows, order, back, chosen)  # type: ignore[no-any-return, no-untyped-call]


def _product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply (pairs, in), sorted by expert, by (E, in, out); expert e's rows end before `ends[e]`."""
    if rows.dtype is torch.bfloat16:
        return F.grouped_mm(rows, weight, offs=ends)
    return _other_product(rows, weight, ends)


@torch.compiler.disable(reason="torch compiles grouped products of bf16 alone")
def _other_product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if rows.dtype in _PRODUCT_DTYPES:
        return F.grouped_mm(rows, weight, offs=ends)
    pieces = rows.tensor_split(ends.tolist())
    return torch.cat([piece @ one for piece, one in zip(pieces, weight, strict=False)])


@module_replacement
def grouped_experts(module: nn.Module, module_fqn: str, context: ReplacementContext) -> nn.Module:
    """Run a mixture's experts by grouped products, whatever experts_implementation the model has.

    For experts in two fused parameters with any activation. The original class's own loop is tried against it on a
    small input, which also tells how the weights lie. Dtypes that no grouped product takes (float64) are multiplied
    expert by expert.

    Raises:
        ArgumentError: the module holds experts in another way (biases, no gate, one module each), computes something
            else (clamps), or has sizes that no grouped product takes.
    """
    del module_fqn, context
    name = type(module).__name__
    held = {**module._parameters, **module._buffers}
    children = set(module._modules) - {"act_fn"}
    if (
        held.keys() != {"gate_up_proj", "down_proj"}
        or children
        or any(one is None or one.ndim != 3 for one in held.values())
    ):
        inside = ", ".join([*held, *sorted(children)]) or "nothing"
        raise ArgumentError("", f"{name} holds no experts in two fused parameters: it holds {inside}", _HINT)
    if (taken := arguments(module)) != _ARGUMENTS:
        raise ArgumentError("", f"{name} has another forward: ({', '.join(taken)})", _HINT)
    layout = _layout(Facts.of(module))
    if isinstance(layout, str):
        raise ArgumentError("", f"{name} {layout}", _HINT)
    _refuse_unaligned(module)
    experts = take_over(module, GroupedExperts)
    experts.layout = layout
    return experts


def _refuse_unaligned(module: nn.Module) -> None:
    sizes = sorted({size for one in module.parameters(recurse=False) for size in one.shape[1:]})
    odd = [str(size) for size in sizes if size % _ROW_MULTIPLE]
    if odd:
        raise ArgumentError(
            "",
            f"grouped products need sizes that are multiples of {_ROW_MULTIPLE}, and {type(module).__name__} has "
            + ", ".join(odd),
            "choose another hidden_size or moe_intermediate_size",
        )


@lru_cache(maxsize=256)
def _layout(facts: Facts) -> Layout | str:
    """How the weights lie, or why this is no such module: both ways are tried against the class's own loop."""
    experts, size, intermediate = facts.shape("down_proj")[0], 8, 24
    with on_cpu():
        why = ""
        for transposed in (False, True):
            up, down = (2 * intermediate, size), (size, intermediate)
            if transposed:
                up, down = up[::-1], down[::-1]
            original = facts.build({"gate_up_proj": (experts, *up), "down_proj": (experts, *down)})
            original.config = SimpleNamespace(_experts_implementation="eager")
            choices = torch.stack([torch.arange(4), torch.arange(1, 5)], dim=1) % experts
            inputs = random(4, size, seed=1), choices, random(4, 2, seed=2).softmax(-1)
            try:
                theirs = original(*inputs)
                ours = take_over(original, GroupedExperts)
                ours.layout = Layout(transposed, is_silu(original.act_fn))
                if not differs(ours(*inputs), theirs):
                    return ours.layout
            except Exception as error:
                why = why or failure(error)
            else:
                why = "computes something else than down(act(gate(x)) * up(x))"
    return why
