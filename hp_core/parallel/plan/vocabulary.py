"""The embedding and the head in a plan: cut by vocabulary, so that a rank holds some tokens' rows of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn
from transformers import PreTrainedModel

from hp_core.errors import InputError, Problem
from hp_core.parallel.plan.boundary import Boundary, ParameterPlan
from hp_core.parallel.plan.contract import Contract
from hp_core.parallel.plan.edge import PARTIAL, REPLICATE, Edge, shard
from hp_core.parallel.plan.roles import is_plain

_PATH = "accelerator.loss_parallel"


def with_vocabulary(
    model: PreTrainedModel,
    boundaries: Sequence[Boundary],
    tp_size: int,
    contracts: Sequence[Contract] = (),
    *,
    loss_parallel: bool,
) -> list[Boundary]:
    """The boundaries with the embedding and the head cut by vocabulary, as far as they are understood.

    One of which a contract speaks is left to it.

    Raises:
        InputError: the loss is to be computed on vocabulary shards, and the head has none.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {module: fqn for fqn, module in model.named_modules()}
    written = {
        module: one.path for one in contracts if one.is_of_tensors for module in model.get_submodule(one.fqn).modules()
    }
    why_embedding, why_head = (
        f"it is left to {written[module]}" if module in written else _why_whole(module, plain, tp_size)
        for module, plain in ((embedding, nn.Embedding), (head, nn.Linear))
    )
    if isinstance(embedding, nn.Embedding) and isinstance(head, nn.Linear) and head.weight is embedding.weight:
        why_embedding, why_head = (
            why_embedding or (why_head and f"its weight is that of a head that is whole: {why_head}"),
            why_head or (why_embedding and f"its weight is that of an embedding that is whole: {why_embedding}"),
        )
    if loss_parallel and (head is None or why_head):
        message = f"the head of {type(model).__name__} can't be cut by vocabulary: {why_head or 'it has none'}"
        raise InputError(Problem(message, path=_PATH, hint="remove 'loss_parallel'"))
    planned = list(boundaries)
    if embedding is not None and embedding not in written:
        _plan(planned, _embedding(names[embedding], embedding, why_embedding))
    if head is not None and head not in written:
        _plan(planned, _head(names[head], head, why_head, loss_parallel=loss_parallel))
    return planned


def _plan(boundaries: list[Boundary], found: Boundary) -> None:
    """Put the new boundary in the place of the old one, whose parameters it has; of tied weights there is none."""
    for index, one in enumerate(boundaries):
        if one.fqn == found.fqn:
            is_cut = found.kind != "replicated"
            parameters = tuple(_cut(plan) if is_cut else plan for plan in one.parameters)
            boundaries[index] = replace(found, parameters=parameters)
            return
    boundaries.append(found)


def _cut(plan: ParameterPlan) -> ParameterPlan:
    return replace(plan, shard_dim=0)


def _embedding(fqn: str, module: nn.Module, why: str) -> Boundary:
    name = type(module).__name__
    if why or not isinstance(module, nn.Embedding):
        return Boundary(fqn, "replicated", name, (), note=why)
    output = Edge("", PARTIAL, REPLICATE, module.embedding_dim, module.weight.itemsize)
    return Boundary(fqn, "embedding", name, (), output=output)


def _head(fqn: str, module: nn.Module, why: str, *, loss_parallel: bool) -> Boundary:
    name = type(module).__name__
    if why or not isinstance(module, nn.Linear):
        return Boundary(fqn, "replicated", name, (), note=why)
    itemsize = module.weight.itemsize
    hidden = Edge("input", REPLICATE, REPLICATE, module.in_features, itemsize, is_shared=True)
    logits = Edge("", shard(-1), shard(-1) if loss_parallel else REPLICATE, module.out_features, itemsize)
    return Boundary(fqn, "head", name, (), (hidden,), logits)


def _why_whole(module: nn.Module | None, plain: type[nn.Embedding] | type[nn.Linear], tp_size: int) -> str:
    """Why a module isn't cut by vocabulary; empty where it is."""
    if module is None:
        return ""
    if not isinstance(module, plain) or not is_plain(module, plain):
        return f"it is no plain torch.nn.{plain.__name__}"
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq or module.sparse):
        return "it changes its rows or their gradients by how often tokens come"
    num_rows = module.num_embeddings if isinstance(module, nn.Embedding) else module.out_features
    if num_rows <= (tp_size - 1) * -(-num_rows // tp_size):
        return f"its {num_rows} rows leave a rank without any"
    return ""
