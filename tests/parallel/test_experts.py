"""Spread experts: their weights are one process's, each rank reads its own, and what can't be spread says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed.sharding_utils import DtensorShardOperation

from hp_core.checkpoint.layout import step_directory
from hp_core.config import load_recipe
from hp_core.config.models import AcceleratorConfig, FsdpConfig, MixedPrecisionConfig
from hp_core.errors import InputError
from hp_core.model.build import finish_model
from hp_core.model.export import export_model
from hp_core.model.load import weight_files
from hp_core.parallel.environment import ProcessEnvironment
from hp_core.parallel.expert.experts import experts_of
from hp_core.parallel.fsdp import shard_model
from hp_core.parallel.sizes import check_sizes
from hp_core.testing.checks import whole
from hp_core.testing.models import LLAMA, tiny_config, tiny_model, tiny_skeleton
from hp_core.testing.ranks import run_ranks
from hp_core.testing.setups import tiny_setup
from hp_core.training.gradients import clip, norm_and_count
from tests.e2e.runs import recipe, steps, train
from tests.equivalence.layouts import beyond
from tests.model.tiny import build

Tensors = dict[str, torch.Tensor]

MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
CONFIGS = {
    "qwen3_moe": tiny_config("qwen3_moe"),
    "deepseek_v3": tiny_config("deepseek_v3"),
    "mixtral": MIXTRAL,
    "three": {**tiny_config("qwen3_moe"), "num_experts": 6},
}
EXPERTS = "model.layers.1.mlp.experts.gate_up_proj"
# (ranks, ep_size, dp_replicate_size, tp_size)
LAYOUTS = [(2, 2, 1, 1), (4, 2, 1, 1), (4, 4, 1, 1), (4, 2, 2, 1), (4, 4, 1, 2), (4, 2, 1, 4)]
MOE = (
    "--model.config={model_type: qwen3_moe, vocab_size: 96, hidden_size: 32, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, num_experts: 4, num_experts_per_tok: 2, "
    "moe_intermediate_size: 16}",
    "--loss_fn=causal_lm",
)


def a_setup(
    environment: ProcessEnvironment, ep_size: int, replicate: int = 1, tp_size: int = 1, **sections: Any
) -> Any:
    accelerator = AcceleratorConfig(ep_size=ep_size, tp_size=tp_size)
    fsdp = FsdpConfig(dp_replicate_size=replicate)
    return tiny_setup(environment, accelerator=accelerator, fsdp=fsdp, **sections)


def weights(
    environment: ProcessEnvironment,
    name: str,
    ep_size: int,
    replicate: int,
    tp_size: int,
    pretrained: str | None,
    exported: str | None,
) -> tuple[Tensors, int, int]:
    """The whole weights; the elements of experts that the rank read from files, and those it holds."""
    read: list[int] = []
    shard_tensor = DtensorShardOperation.shard_tensor

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        part = shard_tensor(self, *args, **kwargs)
        if self.param_ndim == 3 and part is not None:
            read.append(part.numel())
        return part

    DtensorShardOperation.shard_tensor = counted
    try:
        with a_setup(environment, ep_size, replicate, tp_size) as setup:
            model = build(setup, None if pretrained else CONFIGS[name], pretrained=pretrained)
            if exported:
                export_model(model, exported)
            held = [p.to_local().numel() for p in model.parameters() if p.ndim == 3 and isinstance(p, DTensor)]
            return {fqn: whole(value) for fqn, value in model.state_dict().items()}, sum(read), sum(held)
    finally:
        DtensorShardOperation.shard_tensor = shard_tensor


def assert_equal(found: Tensors, wanted: Tensors) -> None:
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("name", ["qwen3_moe", "three"])
def test_initial_weights_are_those_of_one_process_and_are_written_as_such(tmp_path: Path, name: str) -> None:
    wanted, _, _ = run_ranks(weights, 1, name, 1, 1, 1, None, None)[0]
    for index, (ranks, ep_size, replicate, tp_size) in enumerate(LAYOUTS):
        if CONFIGS[name].get("num_experts", 4) % ep_size:
            continue
        exported = str(tmp_path / str(index))
        found, _, _ = run_ranks(weights, ranks, name, ep_size, replicate, tp_size, None, exported)[-1]
        assert_equal(found, wanted)
        assert_equal(AutoModelForCausalLM.from_pretrained(exported).state_dict(), wanted)


@pytest.mark.parametrize(
    "name", ["qwen3_moe", "three", *(pytest.param(name, marks=pytest.mark.slow) for name in ("deepseek_v3", "mixtral"))]
)
def test_each_rank_reads_its_own_experts_and_no_others(tmp_path: Path, name: str) -> None:
    directory = str(tmp_path / "model")
    wanted, _, _ = run_ranks(weights, 1, name, 1, 1, 1, None, directory)[0]
    all_experts = sum(value.numel() for value in wanted.values() if value.ndim == 3)
    for ranks, ep_size, replicate, tp_size in LAYOUTS:
        if CONFIGS[name].get("num_experts", 4) % ep_size:
            continue
        for found, read, held in run_ranks(weights, ranks, name, ep_size, replicate, tp_size, directory, None):
            assert_equal(found, wanted)
            assert read == held == all_experts // (ranks // replicate)


def vision_weights(environment: ProcessEnvironment, directory: str, ep_size: int) -> Tensors:
    with a_setup(environment, ep_size) as setup:
        with torch.device("meta"):
            model = tiny_skeleton("qwen3_vl_moe")
        finish_model(model, setup, weight_files(directory, None))
        return {fqn: whole(value) for fqn, value in model.state_dict().items()}


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_that_lie_transposed_on_disk_are_read_by_shards(tmp_path: Path, transposed: bool) -> None:
    """Qwen3-VL-MoE: its authors' files hold (experts, in, out), those that transformers writes (experts, out, in)."""
    model = tiny_model("qwen3_vl_moe")
    wanted = model.state_dict()
    written = {
        name: value.transpose(1, 2).contiguous() if transposed and ".experts." in name else value
        for name, value in wanted.items()
    }
    save_file(written, str(tmp_path / "model.safetensors"))
    for ranks, ep_size in ((1, 1), (2, 1), (4, 2)):
        assert_equal(run_ranks(vision_weights, ranks, str(tmp_path), ep_size)[-1], wanted)


def on(sizes: str) -> str:
    """An override of one size, or of several."""
    return f"--accelerator={sizes}" if sizes.startswith("{") else f"--accelerator.{sizes}"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((2, "ep_size=2"), (1, "ep_size=1")),
        ((4, "{ep_size: 4, tp_size: 2}"), (2, "ep_size=2")),
        pytest.param((1, "ep_size=1"), (2, "ep_size=2"), marks=pytest.mark.slow),
        pytest.param((4, "ep_size=2"), (2, "ep_size=2"), marks=pytest.mark.slow),
        pytest.param((2, "ep_size=2"), (4, "{ep_size: 2, tp_size: 4}"), marks=pytest.mark.slow),
    ],
)
def test_another_spread_goes_on_with_the_same_run(tmp_path: Path, first: Any, second: Any) -> None:
    path = recipe(tmp_path)
    unbroken = train(path, *MOE, out=tmp_path / "unbroken")
    out = tmp_path / "broken"
    train(path, *MOE, on(first[1]), "--training.stop_after=3", nproc=first[0], out=out)
    rows = train(path, *MOE, on(second[1]), "--checkpoint.resume=latest", nproc=second[0], out=out)
    assert steps(rows) == pytest.approx(steps(unbroken), abs=2e-6)
    assert steps(rows, "grad_norm") == pytest.approx(steps(unbroken, "grad_norm"), rel=1e-5)


ONE_FOR_ALL = """\
from hp_core import hookimpl


@hookimpl
def on_train_start(run):
    for name, module in run.model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda _, args, output: (*output[:2], output[2] * 0))
    run.model.set_experts_implementation("eager")
"""


def test_experts_that_no_token_reaches_have_a_state_that_is_saved(tmp_path: Path) -> None:
    (tmp_path / "one_for_all.py").write_text(ONE_FOR_ALL)
    path = recipe(tmp_path, extra="plugins: [./one_for_all.py]\n")
    unbroken = train(path, *MOE, out=tmp_path / "unbroken")
    out = tmp_path / "broken"
    train(path, *MOE, on("{ep_size: 4, tp_size: 2}"), "--training.stop_after=3", nproc=4, out=out)
    held = FileSystemReader(step_directory(out, 3)).read_metadata().state_dict_metadata
    (moments,) = (held[name] for name in held if EXPERTS in name and name.endswith("exp_avg"))
    assert tuple(moments.size) == (4, 32, 32)
    rows = train(path, *MOE, on("ep_size=2"), "--checkpoint.resume=latest", nproc=2, out=out)
    assert steps(rows) == pytest.approx(steps(unbroken), abs=2e-6)


RUNS = {
    "adamw": (["--dataset.validation_rows=6", "--evaluation.every=2"], 1e-6),
    # Its iteration runs in bf16, where gradients that differ in the last fp32 bit soon round apart.
    "muon": (["--optimizer={name: muon, lr: 0.02, adamw_lr: 1e-2}"], 2e-4),
    "routers": (["--loss_fn={name: causal_lm, router_balance: 0.3, router_z_loss: 0.05}"], 1e-6),
    "replaced": (["--plan_overrides=[{match: '*.experts', replace_module: {name: grouped_experts}}]"], 1e-6),
    "bf16": (["--mixed_precision.param_dtype=bfloat16"], 3e-3),
}


ON_TENSORS = "{ep_size: 4, tp_size: 2}"


@pytest.mark.parametrize(
    "run",
    [
        *((name, "ep_size=2") for name in RUNS),
        # Without those that make much of how sums round.
        *beyond(((name, ON_TENSORS) for name in ("adamw", "routers", "replaced")), ("routers", ON_TENSORS)),
    ],
)
def test_whole_runs_are_those_of_one_process(tmp_path: Path, run: tuple[str, str]) -> None:
    name, sizes = run
    overrides, tolerance = RUNS[name]
    common = [*MOE, *overrides, "--training.train_iters=4"]
    path = recipe(tmp_path)
    alone = train(path, *common, out=tmp_path / "alone")
    rows = train(path, *common, on(sizes), nproc=4, out=tmp_path / "spread")
    assert len(rows) == len(alone) == (6 if name == "adamw" else 4)
    for found, wanted in zip(rows, alone, strict=True):
        losses = [key for key in wanted if key.endswith("loss")]
        assert len(losses) == (3 if name == "routers" else 1)
        assert [found[key] for key in losses] == pytest.approx([wanted[key] for key in losses], abs=tolerance)
    assert steps(rows, "grad_norm") == pytest.approx(steps(alone, "grad_norm"), rel=10 * tolerance)


def clipped(environment: ProcessEnvironment, ep_size: int, replicate: int, tp_size: int) -> tuple[float, float, float]:
    """The norm of gradients that are the weights, by the engine and by hand, and the one after clipping to a half."""
    with a_setup(environment, ep_size, replicate, tp_size) as setup:
        model = build(setup, CONFIGS["qwen3_moe"])
        parameters = list(model.parameters())
        for parameter in parameters:
            parameter.grad = parameter.detach().clone()
        by_hand = float(torch.stack([whole(one.grad).double().square().sum() for one in parameters]).sum()) ** 0.5
        norm, _ = norm_and_count(parameters, torch.zeros(()), setup)
        clip(parameters, norm, 0.5)
        return norm, by_hand, norm_and_count(parameters, torch.zeros(()), setup)[0]


@pytest.mark.parametrize(("ranks", "ep_size", "replicate", "tp_size"), LAYOUTS)
def test_the_norm_counts_each_expert_once_and_clipping_is_exact(
    ranks: int, ep_size: int, replicate: int, tp_size: int
) -> None:
    norm, by_hand, after = run_ranks(clipped, ranks, ep_size, replicate, tp_size)[0]
    assert norm == pytest.approx(by_hand, rel=1e-6)
    assert after == pytest.approx(0.5, rel=1e-6)


def dtypes(environment: ProcessEnvironment) -> dict[str, Any]:
    """What experts are computed in where the recipe says bf16 and the router weighs in fp32."""
    seen: dict[str, Any] = {}
    precision = MixedPrecisionConfig(param_dtype="bfloat16")
    with a_setup(environment, 2, precision=precision) as setup:
        model = build(setup, CONFIGS["deepseek_v3"])
        experts = model.model.layers[1].mlp.experts

        def look(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            seen["inputs"] = args[0].dtype, args[2].dtype
            seen["weights"] = module.down_proj.dtype

        experts.register_forward_pre_hook(look)
        experts.register_forward_hook(lambda _, args, output: seen.update(output=output.dtype))
        model(input_ids=torch.arange(8)[None]).logits.float().sum().backward()
        seen["gradient"] = experts.down_proj.grad.dtype
        seen["master"] = experts.down_proj.dtype
    return seen


def test_experts_compute_in_the_dtype_of_the_rest_and_are_weighed_in_the_routers() -> None:
    assert run_ranks(dtypes, 2)[0] == {
        "inputs": (torch.bfloat16, torch.float32),
        "output": torch.bfloat16,
        "weights": torch.bfloat16,
        "gradient": torch.float32,
        "master": torch.float32,
    }


@pytest.mark.parametrize(
    ("ranks", "overrides", "message", "hint"),
    [
        (
            2,
            ["--accelerator.ep_size=4"],
            "4 does not divide dp_shard_size 2 x cp_size 1, the ranks that experts can be spread over",
            "ep_size that would: 1, 2",
        ),
        (
            4,
            ["--accelerator.ep_size=4", "--fsdp_config.dp_replicate_size=2"],
            "4 does not divide dp_shard_size 2 x cp_size 1, the ranks that experts can be spread over",
            "ep_size that would: 1, 2",
        ),
        (
            3,
            ["--accelerator.ep_size=3", "--training.global_batch_size=3"],
            "4 experts can't be divided among 3 ranks",
            "ep_size that would: 1, 2, 4",
        ),
        (
            4,
            ["--accelerator={ep_size: 4, tp_size: 2}", "--fsdp_config.dp_replicate_size=2"],
            "4 does not divide dp_shard_size 1 x cp_size 1 x tp_size 2, the ranks that experts can be spread over",
            "ep_size that would: 1, 2",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused_before_a_process_starts(
    tmp_path: Path, ranks: int, overrides: list[str], message: str, hint: str
) -> None:
    config = load_recipe(str(recipe(tmp_path)), [*MOE, *overrides]).config
    with pytest.raises(InputError) as caught:
        check_sizes(config, ranks)
    (problem,) = caught.value.problems
    assert (problem.path, problem.message, problem.hint) == ("accelerator.ep_size", message, hint)


def test_the_number_of_experts_of_a_directory_is_known_before_a_process_starts(tmp_path: Path) -> None:
    tiny_model("deepseek_v3").config.save_pretrained(tmp_path)
    overrides = [f"--model={{name: causal_lm, pretrained: {tmp_path}}}", "--accelerator.ep_size=3"]
    config = load_recipe(str(recipe(tmp_path)), [*overrides, "--training.global_batch_size=3"]).config
    with pytest.raises(InputError, match="4 experts can't be divided among 3 ranks"):
        check_sizes(config, 3)


class OtherForward(nn.Module):
    """Experts that want to know how many rows each gets."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.weight = nn.Parameter(torch.ones(4, 8, 8))

    def forward(self, inputs: torch.Tensor, expert_size: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class WithShared(nn.Module):
    """Experts with a norm that belongs to all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.down_proj = nn.Parameter(torch.ones(4, 8, 8))
        self.norm = nn.LayerNorm(8)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        raise NotImplementedError


def refusal(environment: ProcessEnvironment, module: type[nn.Module], layers: int) -> tuple[str, str, str]:
    with a_setup(environment, 2) as setup:
        model = nn.Sequential(*(module() for _ in range(layers)), nn.Linear(8, 8))
        try:
            shard_model(model, setup)
        except InputError as error:
            (problem,) = error.problems
            return problem.path, problem.message, str(problem.hint)
    raise AssertionError("nothing was refused")


@pytest.mark.parametrize(
    ("module", "layers", "message"),
    [
        (OtherForward, 0, "Sequential holds no experts in fused parameters"),
        (
            OtherForward,
            1,
            "0: OtherForward can't be spread: its forward takes (inputs, expert_size), not (hidden_states, top_k_index,"
            " top_k_weights)",
        ),
        (WithShared, 2, "0: WithShared can't be spread: 'norm.weight' belongs to no single expert"),
    ],
)
def test_other_layouts_of_experts_are_refused_by_name(module: type[nn.Module], layers: int, message: str) -> None:
    for found in run_ranks(refusal, 2, module, layers):
        assert found == ("accelerator.ep_size", message, "remove 'ep_size'")


def test_each_kind_of_refusal_is_told_once() -> None:
    with pytest.raises(InputError) as caught:
        experts_of(nn.Sequential(OtherForward(), WithShared(), WithShared()), 2)
    assert [one.message.partition(" can't")[0] for one in caught.value.problems] == ["0: OtherForward", "1: WithShared"]
