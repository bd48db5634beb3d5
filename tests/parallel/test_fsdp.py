"""What FSDP2 is asked for: when parameters are gathered, and shards without padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from hp_core.config import load_recipe
from hp_core.config.models import FsdpConfig
from hp_core.errors import InputError
from hp_core.model.export import export_model
from hp_core.parallel.environment import ProcessEnvironment
from hp_core.parallel.sizes import check_sizes
from hp_core.testing.checks import whole
from hp_core.testing.models import tiny_config
from hp_core.testing.ranks import run_ranks
from hp_core.testing.setups import tiny_setup
from tests.e2e.runs import hp_train_here, recipe, steps, train
from tests.equivalence.layouts import Case, Layout, found_on
from tests.model.tiny import build

FOUR_LAYERS = {**tiny_config("llama"), "num_hidden_layers": 4}


def events(environment: ProcessEnvironment, fsdp: dict[str, Any]) -> list[str]:
    """What happens in a step, in order: `g2`, layer 2 is gathered, `f2` and `b2`, its passes begin."""
    found: list[str] = []
    gather = _fsdp_param_group.foreach_all_gather

    def heard(params: Any, *arguments: Any) -> Any:
        name = params[0]._module_info.module
        found.append(f"g{names[name]}")
        return gather(params, *arguments)

    _fsdp_param_group.foreach_all_gather = heard
    with tiny_setup(environment, fsdp=FsdpConfig(**fsdp)) as setup:
        model = build(setup, FOUR_LAYERS)
        layers = model.model.layers
        names = {module: f"{index}" for index, layer in enumerate(layers) for module in layer.modules()}
        names |= {module: "-root" for module in model.modules() if module not in names}
        for index, layer in enumerate(layers):
            layer.self_attn.register_forward_pre_hook(lambda *_, index=index: found.append(f"f{index}"))
            layer.mlp.register_full_backward_pre_hook(lambda *_, index=index: found.append(f"b{index}"))
        model(torch.arange(8)[None]).logits.sum().backward()
    return found


@pytest.mark.parametrize(
    ("fsdp", "wanted"),
    [
        ({}, "g-root g0 f0 g1 f1 g2 f2 g3 f3 g3 g2 b3 g1 b2 g0 b1 b0"),
        ({"forward_prefetch": 1}, "g-root g0 g1 f0 g2 f1 g3 f2 f3 g3 g2 b3 g1 b2 g0 b1 b0"),
        ({"forward_prefetch": 3}, "g-root g0 g1 g2 g3 f0 f1 f2 f3 g3 g2 b3 g1 b2 g0 b1 b0"),
        ({"backward_prefetch": 2}, "g-root g0 f0 g1 f1 g2 f2 g3 f3 g3 g2 g1 b3 g0 b2 b1 b0"),
        ({"reshard_after_forward": False, "forward_prefetch": 2}, "g-root g0 g1 g2 f0 g3 f1 f2 f3 b3 b2 b1 b0"),
    ],
)
def test_layers_are_gathered_ahead(fsdp: dict[str, Any], wanted: str) -> None:
    for found in run_ranks(events, 2, fsdp):
        assert " ".join(found) == wanted


@pytest.mark.parametrize("accelerator", [{}, {"ep_size": 2}])
def test_gathering_ahead_changes_no_number(accelerator: dict[str, Any]) -> None:
    ahead = {"forward_prefetch": 2, "backward_prefetch": 2}
    found = found_on(Case("qwen3_moe"), Layout(2, accelerator, ahead, 2))
    wanted = found_on(Case("qwen3_moe"), Layout(2, accelerator, {}, 2))
    assert found.loss == wanted.loss
    assert [name for name, value in wanted.gradients.items() if not torch.equal(found.gradients[name], value)] == []


def refusal(environment: ProcessEnvironment, fsdp: dict[str, Any]) -> str:
    with tiny_setup(environment, fsdp=FsdpConfig(**fsdp)) as setup:
        try:
            build(setup, FOUR_LAYERS)
        except InputError as error:
            return str(error)
    raise AssertionError("nothing was refused")


def test_more_than_there_is_can_not_be_gathered_ahead() -> None:
    for found in run_ranks(refusal, 2, {"forward_prefetch": 5, "backward_prefetch": 6}):
        assert "fsdp_config.forward_prefetch: 5 layers can't be gathered ahead of another: the model has 4" in found
        assert "fsdp_config.backward_prefetch: 6 layers can't be gathered ahead" in found
        assert "use at most 4" in found


@pytest.mark.parametrize(
    ("overrides", "ranks", "message"),
    [
        (["forward_prefetch=1"], 1, "fsdp_config.forward_prefetch: each rank holds all of the parameters"),
        (["backward_prefetch=2"], 1, "fsdp_config.backward_prefetch: each rank holds all of the parameters"),
        (["forward_prefetch=1", "dp_replicate_size=2"], 2, "remove 'forward_prefetch', or start more data ranks"),
        (
            ["backward_prefetch=2", "reshard_after_forward=false"],
            2,
            "fsdp_config.backward_prefetch: nothing is gathered in the backward pass where reshard_after_forward is",
        ),
    ],
)
def test_gathering_ahead_where_nothing_is_gathered_is_refused(
    tmp_path: Path, overrides: list[str], ranks: int, message: str
) -> None:
    arguments = [f"--fsdp_config.{one}" for one in overrides]
    done = hp_train_here("check", str(recipe(tmp_path)), *arguments, f"--launch.nproc={ranks}")
    assert done.returncode == 2
    assert message in done.stderr


def test_context_ranks_gather_too(tmp_path: Path) -> None:
    overrides = ["--fsdp_config.forward_prefetch=1", "--accelerator.cp_size=2", "--fsdp_config.dp_shard_size=1"]
    check_sizes(load_recipe(str(recipe(tmp_path)), overrides).config, 2)


# Experts that are fewer than the ranks.

# With a size that four ranks can share, and one that they can't.
TWO = {**tiny_config("qwen3_moe"), "num_experts": 2, "moe_intermediate_size": 24}
ODD = {**TWO, "moe_intermediate_size": 22}


def experts_on(
    environment: ProcessEnvironment | None, config: dict[str, Any], pretrained: str | None
) -> tuple[dict[str, torch.Tensor], dict[str, tuple[int, int]]]:
    """The whole weights, and (elements that the rank holds, elements that FSDP2 allots it) of the last layer's."""
    with tiny_setup(environment) as setup:
        model = build(setup, None if pretrained else config, pretrained=pretrained)
        weights = {name: whole(value).detach().clone() for name, value in model.named_parameters()}
        if setup.world_size == 1:
            return weights, {}
        group = model.model.layers[1]._get_fsdp_state()._fsdp_param_group
        sizes = {
            one._module_info.param_name: (one.sharded_param.to_local().numel(), one._sharded_param_data.numel())
            for one in group.fsdp_params
            if one.sharded_param.ndim == 3
        }
        return weights, sizes


def test_experts_that_are_fewer_than_the_ranks_are_not_padded(tmp_path: Path) -> None:
    wanted, _ = experts_on(None, TWO, None)
    with tiny_setup() as setup:
        export_model(build(setup, TWO), tmp_path / "model")
    gate_up, down = 2 * 48 * 32 // 4, 2 * 32 * 24 // 4
    for pretrained in (None, str(tmp_path / "model")):
        for found, sizes in run_ranks(experts_on, 4, TWO, pretrained):
            assert sizes == {"gate_up_proj": (gate_up, gate_up), "down_proj": (down, down)}
            assert [name for name, value in wanted.items() if not torch.equal(found[name], value)] == []


def test_experts_of_a_size_that_does_not_divide_are_padded() -> None:
    wanted, _ = experts_on(None, ODD, None)
    for rank, (found, sizes) in enumerate(run_ranks(experts_on, 4, ODD, None)):
        one = 32 * 22
        assert sizes == {"gate_up_proj": (2 * 44 * 32 // 4,) * 2, "down_proj": (one if rank < 2 else 0, one)}
        assert [name for name, value in wanted.items() if not torch.equal(found[name], value)] == []


def test_steps_and_checkpoints_of_experts_shared_by_size_are_those_of_one_process(tmp_path: Path) -> None:
    path = recipe(tmp_path)
    common = [f"--model.config={TWO}", "--loss_fn=causal_lm"]
    alone = train(path, *common, out=tmp_path / "alone")
    out = tmp_path / "broken"
    train(path, *common, "--training.stop_after=3", nproc=4, out=out)
    rows = train(path, *common, "--checkpoint.resume=latest", nproc=1, out=out)
    assert steps(rows) == pytest.approx(steps(alone), abs=2e-6)
    assert steps(rows, "grad_norm") == pytest.approx(steps(alone, "grad_norm"), rel=1e-5)
