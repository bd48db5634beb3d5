"""Which children of a module are cut by columns and by rows: transformers' own plan, and rules where it has none."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import nn

# Families without a plan of their own, or with one that leaves their attention out, name these as all others do.
_ATTENTION = (frozenset({"q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj"}), "o_proj")
_MLP = (frozenset({"gate_proj", "up_proj"}), "down_proj")
KV_PROJECTIONS = frozenset({"k_proj", "v_proj"})
# Every rank computes the latent vectors, and its own heads of them.
LATENT_PARTS = frozenset({"q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"})


@runtime_checkable
class GroupedAttention(Protocol):
    """An attention of transformers that shapes heads by their size, so that it computes with those it is given."""

    head_dim: int
    num_key_value_groups: int


@runtime_checkable
class LatentAttention(Protocol):
    """Multi-head latent attention: keys and values of all heads are expanded from one latent vector."""

    kv_lora_rank: int
    num_heads: int


@runtime_checkable
class SparseMLP(Protocol):
    """An MLP that keeps the largest of its features (Gemma 3n), and so has to see them all."""

    activation_sparsity: float


@dataclass(frozen=True)
class Roles:
    """The linear children of a module by role: outputs of `columns` are cut, and so are the inputs of `row`."""

    columns: Mapping[str, nn.Linear]
    row: str
    row_linear: nn.Linear


def roles_of(fqn: str, module: nn.Module, tp_plan: Mapping[str, str]) -> Roles | None:
    """The roles of a module's children, or None where it has none to cut between.

    Args:
        fqn: the module's name in the model.
        module: the module.
        tp_plan: transformers' plan, a style by pattern.
    """
    linears = {name: child for name, child in module.named_children() if isinstance(child, nn.Linear)}
    styles = {name: _style(f"{fqn}.{name}", tp_plan) for name in linears}
    columns = frozenset(name for name, style in styles.items() if style == "colwise")
    rows = [name for name, style in styles.items() if style == "rowwise"]
    if not (columns and len(rows) == 1):
        is_attention = isinstance(module, (GroupedAttention, LatentAttention))
        known, row = _ATTENTION if is_attention else _MLP
        columns, rows = known & set(linears), [row] if row in linears else []
    if not columns or not rows:
        return None
    return Roles({name: linears[name] for name in linears if name in columns}, rows[0], linears[rows[0]])


def is_plain(module: nn.Linear | nn.Embedding, plain: type[nn.Linear] | type[nn.Embedding]) -> bool:
    """Whether a module computes just as torch's class does, so that it does so on a part of its weight, too."""
    is_own = type(module).forward is not plain.forward or "forward" in vars(module)
    named = {name for name, _ in module.named_parameters()}
    return not is_own and named <= {"weight", "bias"} and not list(module.children())


def _style(fqn: str, tp_plan: Mapping[str, str]) -> str | None:
    for pattern, style in tp_plan.items():
        if pattern.count(".") == fqn.count(".") and fnmatch.fnmatchcase(fqn, pattern):
            return style
    return None
