"""The user's code inside a model: that it runs on each layout with the numbers of one process, and what is refused."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hp_core import inner_wrapper, local_compute
from hp_core.config.plan_override import PlanOverride
from hp_core.config.target import Target
from hp_core.errors import InputError
from hp_core.parallel.injection import inject
from hp_core.parallel.tiny import tiny_setup
from tests.equivalence.layouts import Case, Layout, assert_same, found_on
from tests.parallel.test_plan_contract import skeleton

WRAPPERS, COMPUTES = "hp.inner_wrappers", "hp.local_computes"


def target(function, kind="inner_wrapper", **arguments):
    group = WRAPPERS if kind == "inner_wrapper" else COMPUTES
    section = f"plan_overrides[0].{kind}"
    return Target(section, group, import_path=f"{__name__}.{function.__name__}", arguments=arguments)


def weaving(function, match="*.self_attn", **arguments):
    return PlanOverride(match=match, inner_wrapper=target(function, **arguments))


def computing(function, match="*.experts", **arguments):
    return PlanOverride(match=match, local_compute_fn=target(function, "local_compute_fn", **arguments))


@inner_wrapper
def scaled(target_module: nn.Module, factor: float = 2.0) -> None:
    forward = target_module.forward

    @functools.wraps(forward)
    def scaling(*args, **kwargs):
        output, weights = forward(*args, **kwargs)
        return output * factor, weights

    target_module.forward = scaling


@inner_wrapper
def over_context(target_module: nn.Module, cp_mesh, tp_mesh) -> None:
    """Scales by the ranks of each mesh: 2 x 3 wherever there is a context axis of 2."""
    scaled(target_module, cp_mesh.size() + tp_mesh.size() - 1)


@inner_wrapper
def idle(target_module: nn.Module) -> None:
    pass


@inner_wrapper
def talkative(target_module: nn.Module) -> nn.Module:
    return target_module


@inner_wrapper
def narrow(target_module: nn.Module) -> None:
    target_module.forward = lambda hidden_states: hidden_states


@local_compute
def all_ranks_for_all(module: nn.Module, ep_mesh=None):
    """Each rank's experts compute for the tokens of all ranks, and the results are added up: no all-to-all."""
    forward = module.forward

    def compute(hidden_states, top_k_index, top_k_weights):
        if ep_mesh is None:
            return forward(hidden_states, top_k_index, top_k_weights)
        group, own = ep_mesh.get_group(), module.num_experts
        first = ep_mesh.get_local_rank() * own
        tokens, index, weights = (Gathered.apply(one, group) for one in (hidden_states, top_k_index, top_k_weights))
        is_own = (index >= first) & (index < first + own)
        partial = forward(tokens, torch.where(is_own, index - first, 0), weights * is_own)
        return Scattered.apply(partial, group)

    return compute


class Gathered(torch.autograd.Function):
    """Rows of all ranks; gradients are summed over them."""

    @staticmethod
    def forward(ctx, rows, group):
        ctx.group = group
        parts = [torch.empty_like(rows) for _ in range(group.size())]
        dist.all_gather(parts, rows.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        summed = gradient.contiguous().clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed.chunk(ctx.group.size())[ctx.group.rank()], None


class Scattered(torch.autograd.Function):
    """A rank's own rows of the sum; gradients come from all ranks."""

    @staticmethod
    def forward(ctx, rows, group):
        ctx.group = group
        summed = rows.contiguous().clone()
        dist.all_reduce(summed, group=group)
        return summed.chunk(group.size())[group.rank()].clone()

    @staticmethod
    def backward(ctx, gradient):
        parts = [torch.empty_like(gradient) for _ in range(ctx.group.size())]
        dist.all_gather(parts, gradient.contiguous(), group=ctx.group)
        return torch.cat(parts), None


@local_compute
def of_two(module: nn.Module):
    return lambda hidden_states, weights: hidden_states


@local_compute
def nothing():
    return None


def test_a_wrapper_is_in_the_model_on_every_layout():
    """Context ranks, tensor ranks and one process agree about a model whose attentions give twice as much."""
    plain, doubled = (found_on(Case(overrides=one), Layout()) for one in ((), (weaving(scaled),)))
    assert abs(plain.loss - doubled.loss) > 1e-4
    for accelerator in ({"cp_size": 2}, {"tp_size": 2}):
        assert_same(found_on(Case(overrides=(weaving(scaled),)), Layout(2, accelerator)), doubled)
    assert_same(found_on(Case(overrides=(weaving(over_context),)), Layout(2, {"cp_size": 2})), doubled)


def test_a_computation_of_experts_sends_tokens_its_own_way():
    case = Case("qwen3_moe", overrides=(computing(all_ranks_for_all),))
    assert_same(found_on(case, Layout(2, {"ep_size": 2})), found_on(Case("qwen3_moe"), Layout()))
    assert_same(found_on(case, Layout()), found_on(Case("qwen3_moe"), Layout()))


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            weaving(scaled, "*.mlp"),
            "plan_overrides[0].match: model.layers.0.mlp (and 1 more): Qwen3MoeSparseMoeBlock is no attention",
        ),
        (
            weaving(idle),
            f"plan_overrides[0].inner_wrapper: model.layers.0.self_attn (and 1 more): {__name__}.idle leaves",
        ),
        (
            weaving(talkative, "*.0.self_attn"),
            f"plan_overrides[0].inner_wrapper: model.layers.0.self_attn: {__name__}.talkative returns a Qwen3Moe",
        ),
        (
            weaving(narrow, "*.0.self_attn"),
            f"plan_overrides[0].inner_wrapper: model.layers.0.self_attn: the function of {__name__}.narrow ",
        ),
        (
            computing(of_two, "*.0.mlp"),
            "plan_overrides[0].match: model.layers.0.mlp: Qwen3MoeSparseMoeBlock holds no experts",
        ),
        (
            computing(of_two, "*.0.mlp.experts"),
            f"plan_overrides[0].local_compute_fn: model.layers.0.mlp.experts: the function of {__name__}.of_two "
            "doesn't take top_k_index, top_k_weights; declare (hidden_states, top_k_index, top_k_weights)",
        ),
        (
            computing(nothing, "*.0.mlp.experts"),
            f"plan_overrides[0].local_compute_fn: model.layers.0.mlp.experts: {__name__}.nothing returns a NoneType",
        ),
    ],
)
def test_what_is_refused(override, line):
    with tiny_setup() as setup, pytest.raises(InputError) as caught:
        inject(skeleton("qwen3_moe"), [override], setup)
    (problem,) = caught.value.problems
    assert str(problem).startswith(line), str(problem)


def test_a_decorator_refuses_what_can_not_be_called():
    with pytest.raises(TypeError, match="must declare target_module"):
        inner_wrapper(lambda module: None)
    with pytest.raises(TypeError, match=r"without \*\*kwargs"):
        local_compute(lambda **meshes: None)
