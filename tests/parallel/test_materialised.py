"""What a model is made of after its build on the meta device: tied weights, buffers, master weights, shards."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from hp_core.config.models import AcceleratorConfig, MixedPrecisionConfig
from hp_core.model import build as build_module
from hp_core.model.export import export_model
from hp_core.parallel.environment import ProcessEnvironment
from hp_core.parallel.fsdp import shard_model
from hp_core.testing.checks import whole
from hp_core.testing.models import tiny_config
from hp_core.testing.ranks import run_ranks
from hp_core.testing.setups import tiny_setup
from hp_plugins.optimizers.adamw import AdamW
from tests.model.tiny import build

STAGES = ("apply_plan", "shard_model", "initialize_weights", "load_weights")
IDS = torch.arange(40).reshape(2, 20)


def is_tied(model: PreTrainedModel) -> bool:
    """One parameter in both places, hence one storage."""
    head, embedding = model.lm_head.weight, model.model.embed_tokens.weight
    return head is embedding and "lm_head.weight" not in dict(model.named_parameters())


def tied_on(environment: ProcessEnvironment | None, tp_size: int, pretrained: str | None) -> dict[str, Any]:
    """Whether the weights are tied around each stage; the gradient; and how often the optimizer has the weight."""
    seen: dict[str, bool] = {}

    def watched(name: str) -> Any:
        original = getattr(build_module, name)

        def stage(model: PreTrainedModel, *arguments: Any, **keywords: Any) -> Any:
            seen[f"before {name}"] = is_tied(model)
            result = original(model, *arguments, **keywords)
            seen[f"after {name}"] = is_tied(model)
            return result

        return stage

    for name in STAGES:
        setattr(build_module, name, watched(name))
    with tiny_setup(environment, accelerator=AcceleratorConfig(tp_size=tp_size)) as setup:
        model = build(setup, None if pretrained else tiny_config("llama_tied"), pretrained=pretrained)
        seen["built"] = is_tied(model)
        optimizer = AdamW(lr=0.1, model=model).get_optimizer()
        entries = [p for group in optimizer.param_groups for p in group["params"]]
        model(IDS).logits.square().mean().backward()
        gradient = whole(model.lm_head.weight.grad) / (setup.world_size // tp_size)
        optimizer.step()
        seen["after a step"] = is_tied(model)
        return {
            "seen": seen,
            "gradient": gradient,
            "entries": sum(one is model.lm_head.weight for one in entries),
            "weight": whole(model.lm_head.weight).detach().clone(),
        }


def by_hand(tmp_path: Any) -> tuple[torch.Tensor, str]:
    """The gradient as the sum of those of an input and an output that are two parameters; a directory of weights."""
    with tiny_setup() as setup:
        tied = build(setup, tiny_config("llama_tied"))
        export_model(tied, tmp_path / "tied")
        apart = AutoModelForCausalLM.from_pretrained(tmp_path / "tied")
        apart.lm_head.weight = nn.Parameter(apart.lm_head.weight.detach().clone())
        apart(IDS).logits.square().mean().backward()
        return apart.lm_head.weight.grad + apart.model.embed_tokens.weight.grad, str(tmp_path / "tied")


def test_tied_weights_are_one_through_every_stage(tmp_path: Any) -> None:
    wanted, directory = by_hand(tmp_path)
    for num_ranks, tp_size, pretrained in ((2, 1, None), (2, 1, directory), (2, 2, None)):
        for found in run_ranks(tied_on, num_ranks, tp_size, pretrained):
            stages = ["shard_model", "load_weights" if pretrained else "initialize_weights"]
            stages += ["apply_plan"] if tp_size > 1 else []
            names = {f"{when} {stage}" for stage in stages for when in ("before", "after")}
            assert found["seen"] == dict.fromkeys({*names, "built", "after a step"}, True)
            assert found["entries"] == 1
            torch.testing.assert_close(found["gradient"], wanted, rtol=1e-5, atol=1e-8)


def junk() -> None:
    """Leave numbers that nobody wrote in the memory that is given out next."""
    held = [torch.full((size,), 1e30) for size in (4, 8, 16, 32, 64, 128, 1024) for _ in range(200)]
    del held


def buffers_on(environment: ProcessEnvironment, family: str, pretrained: str) -> list[dict[str, torch.Tensor]]:
    to_empty = nn.Module.to_empty

    def filled(self: nn.Module, **keywords: Any) -> nn.Module:
        to_empty(self, **keywords)
        with torch.no_grad():
            for tensor in (*self.parameters(), *self.buffers()):
                tensor.fill_(7)
        return self

    nn.Module.to_empty = filled  # type: ignore[method-assign]
    with tiny_setup(environment) as setup:
        found = []
        for arguments in ({"config": tiny_config(family)}, {"pretrained": pretrained}):
            junk()
            model = build(setup, **arguments)
            found.append({name: buffer.clone() for name, buffer in model.named_buffers()})
        return found


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_buffers_are_computed_anew_over_what_memory_held(tmp_path: Any, family: str) -> None:
    with tiny_setup() as setup:
        model = build(setup, tiny_config(family))
        export_model(model, tmp_path / "model")
    wanted = dict(AutoModelForCausalLM.from_config(model.config).named_buffers())
    assert any("inv_freq" in name for name in wanted)
    for rank in run_ranks(buffers_on, 2, family, str(tmp_path / "model")):
        for found in rank:
            assert set(found) == set(wanted)
            assert [name for name, buffer in wanted.items() if not torch.equal(found[name], buffer)] == []


class OneWeight(nn.Module):
    """y = w x, whose gradient is x."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, dtype=dtype))
        self.seen: torch.dtype | None = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen = self.weight.dtype
        return self.weight * inputs


def thousand_updates(environment: ProcessEnvironment, dtype: torch.dtype, compute: str | None) -> dict[str, Any]:
    precision = MixedPrecisionConfig(param_dtype=compute)
    with tiny_setup(environment, precision=precision) as setup:
        model = OneWeight(dtype)
        shard_model(model, setup)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(1000):
            # Halves, which the two ranks add up to one.
            model(torch.full((2,), 0.5)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        adam = AdamW(lr=1e-3, model=model).get_optimizer()
        model(torch.ones(2)).sum().backward()
        adam.step()
        moments = {value.dtype for state in adam.state.values() for name, value in state.items() if name != "step"}
        return {
            "weight": whole(model.weight).tolist(),
            "dtypes": (model.weight.dtype, model.seen, *moments),
        }


def test_small_updates_reach_the_master_weights() -> None:
    """A weight of 1 in bf16 stays there: half the distance to the next number is 2e-3."""
    for found in run_ranks(thousand_updates, 2, torch.float32, "bfloat16"):
        assert found["weight"] == pytest.approx([-1e-3] * 2, abs=1e-4)
        assert found["dtypes"] == (torch.float32, torch.bfloat16, torch.float32)
    for found in run_ranks(thousand_updates, 2, torch.bfloat16, None):
        assert found["weight"] == [1.0, 1.0]
        assert found["dtypes"] == (torch.bfloat16, torch.bfloat16, torch.bfloat16)


def shards_on(environment: ProcessEnvironment, accelerator: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """For each random parameter, which part of it the rank holds and a digest of the numbers."""
    with tiny_setup(environment, accelerator=AcceleratorConfig(**accelerator)) as setup:
        model = build(setup, tiny_config("qwen3_moe"))
        found = {}
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                continue
            assert isinstance(parameter, DTensor)
            local = parameter.to_local().detach().contiguous()
            place = [
                coordinate if not placement.is_replicate() else None
                for coordinate, placement in zip(
                    parameter.device_mesh.get_coordinate() or [], parameter.placements, strict=True
                )
            ]
            found[name] = str(place), hashlib.sha256(local.view(torch.uint8).numpy().tobytes()).hexdigest()
        return found


@pytest.mark.parametrize(
    ("num_ranks", "accelerator"), [(4, {}), (4, {"tp_size": 2}), (4, {"ep_size": 2}), (2, {"cp_size": 2})]
)
def test_no_two_shards_are_alike(num_ranks: int, accelerator: dict[str, Any]) -> None:
    """Drawn on each rank from one seed, every shard of a parameter would have the same numbers."""
    by_rank = run_ranks(shards_on, num_ranks, accelerator)
    for name in by_rank[0]:
        parts = {rank[name] for rank in by_rank}
        places, digests = {place for place, _ in parts}, {digest for _, digest in parts}
        assert len(parts) == len(places) == len(digests) > 1, name
