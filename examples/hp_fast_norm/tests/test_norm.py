"""The formula, what is refused, and the promises of every replacement."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from hp_core import ArgumentError
from hp_core.testing import replacement_checks
from hp_fast_norm.norm import FastRMSNorm, fast_norm


@replacement_checks(
    fast_norm,
    family="llama",
    match="*norm",
    module_type=LlamaRMSNorm,
    tolerance=1e-6,
    refuses=[GemmaRMSNorm(4), nn.LayerNorm(4), nn.Linear(4, 4)],
)
def test_the_promises_of_a_replacement(check):
    check()


@replacement_checks(
    fast_norm,
    family="qwen3",
    match="*norm",
    module_type=Qwen3RMSNorm,
    tolerance=1e-6,
    refuses=[GemmaRMSNorm(4)],
)
def test_the_promises_in_a_family_with_norms_inside_attention(check):
    check()


def test_a_value_worked_out_by_hand():
    # mean((3, 4)^2) = 12.5, and with 3.5 added the root is 4.
    norm = FastRMSNorm(nn.Parameter(torch.tensor([2.0, 0.5])), eps=3.5)
    assert norm(torch.tensor([[3.0, 4.0]])).tolist() == [[1.5, 0.5]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_norm_it_replaces(dtype):
    torch.manual_seed(0)
    norm = LlamaRMSNorm(48, eps=1e-5)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    norm = norm.to(dtype)
    fast = fast_norm(norm, "model.norm", None)
    assert fast.weight is norm.weight
    assert fast.eps == 1e-5
    states = torch.randn(4, 7, 48, dtype=dtype)
    assert fast(states).dtype == dtype
    # bf16 keeps 8 bits, and the two formulas round at different places.
    tolerance = 1e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(fast(states), norm(states), rtol=tolerance, atol=tolerance)


def test_another_epsilon():
    assert fast_norm(LlamaRMSNorm(4), "model.norm", None, eps=0.5).eps == 0.5


def test_on_the_meta_device_too():
    with torch.device("meta"):
        norm = LlamaRMSNorm(4)
        fast = fast_norm(norm, "model.norm", None)
    assert fast.weight is norm.weight
    assert norm.weight.device.type == "meta"


class Absolute(nn.Module):
    """Has a weight and an epsilon, and computes something else."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.eps = 1e-6

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.weight * states / (states.abs().mean(-1, keepdim=True) + self.eps)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (GemmaRMSNorm(4), "GemmaRMSNorm computes something else than RMSNorm; match only norms that"),
        (Absolute(), "Absolute computes something else"),
        (nn.LayerNorm(4), "LayerNorm is no RMSNorm"),
        (nn.Linear(4, 4), "Linear is no RMSNorm"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_it_doesn_t_fit_is_refused(module, message):
    with pytest.raises(ArgumentError, match=message):
        fast_norm(module, "model.norm", None)


def test_t5_calls_it_layer_norm_and_it_fits():
    assert isinstance(fast_norm(T5LayerNorm(4), "encoder.block.0.layer.0.layer_norm", None), FastRMSNorm)
