"""Another document changes no logit of its neighbours, whatever computes the attention and shares the rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from hp_core.config.models import AcceleratorConfig
from hp_core.config.plan_override import PlanOverride
from hp_core.config.target import Target
from hp_core.model.replacement.replacer import ModuleReplacer
from hp_core.parallel.context.sequence import SLICE, own_part
from hp_core.parallel.environment import ProcessEnvironment
from hp_core.testing.ranks import RankError, run_ranks
from hp_core.testing.setups import tiny_setup
from hp_plugins.replacements.sdpa_attention import SdpaAttention, sdpa_attention
from tests.model.tiny import LLAMA, build

# Documents of 7, 1 and 8 tokens.
POSITIONS = torch.cat([torch.arange(7), torch.arange(1), torch.arange(8)])[None]
LENGTH = POSITIONS.shape[1]
ALONE = [(attention, 1, None) for attention in ("sdpa", "eager", "sdpa_attention")]
SHARED = [("sdpa", 2, method) for method in ("all_gather", "ulysses", "ring")]


def rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A row, the same with another first document, and with another document of one token."""
    generator = torch.Generator().manual_seed(5)
    one = torch.randint(LLAMA["vocab_size"], (1, LENGTH), generator=generator)
    first, middle = one.clone(), one.clone()
    first[0, :7] = (one[0, :7] + 1) % LLAMA["vocab_size"]
    middle[0, 7] = (one[0, 7] + 1) % LLAMA["vocab_size"]
    return one, first, middle


def differences(environment: ProcessEnvironment, attention: str, cp: int, method: str | None) -> list[list[float]]:
    """By changed document, the largest change of any logit in each of the documents, over this rank's tokens."""
    accelerator = AcceleratorConfig(cp_size=cp, **({"cp_method": method} if method else {}))
    with tiny_setup(environment, accelerator=accelerator) as setup:
        if attention == "sdpa_attention":
            target = Target("plan_overrides[0].replace_module", "hp.module_replacements", name=attention)
            rule = PlanOverride(match="*.self_attn", replace_module=target)
            replacer = ModuleReplacer([rule], replaced)
            setup = dataclasses.replace(setup, replacer=replacer)
        implementation = "sdpa" if attention == "sdpa_attention" else attention
        model = build(setup, LLAMA, attn_implementation=implementation).eval()
        is_replaced = any(isinstance(module, SdpaAttention) for module in model.modules())
        assert is_replaced == (attention == "sdpa_attention"), [type(m).__name__ for m in model.modules()]
        one, first, middle = (logits_of(model, ids, setup) for ids in rows())
        found = []
        for other in (first, middle):
            change = (other[0] - one[0]).abs().amax((0, 2))
            documents = (one[1] >= 7).long() + (one[1] >= 8).long()
            found.append(
                [
                    float(change[documents == number].amax()) if (documents == number).any() else 0.0
                    for number in range(3)
                ]
            )
        return found


def replaced(module: Any, module_fqn: str, context: Any) -> Any:
    return sdpa_attention(module, module_fqn, context)


@torch.no_grad()
def logits_of(model: Any, ids: torch.Tensor, setup: Any) -> tuple[torch.Tensor, torch.Tensor]:
    inputs: dict[str, Any] = {"input_ids": ids, "position_ids": POSITIONS, "use_cache": False}
    positions = torch.arange(LENGTH)
    if setup.sizes.cp > 1:
        inputs, _ = own_part(inputs, {"labels": torch.zeros_like(ids)}, setup)
        positions = inputs[SLICE].positions
    return model(**inputs).logits, positions


@pytest.mark.parametrize(("attention", "cp", "method"), [*ALONE, *SHARED])
def test_documents_never_see_each_other(attention: str, cp: int, method: str | None) -> None:
    by_rank = run_ranks(differences, cp, attention, cp, method)
    first, middle = ([max(of) for of in zip(*(rank[number] for rank in by_rank), strict=True)] for number in (0, 1))
    assert first[0] > 1e-3
    assert max(first[1:]) <= 1e-6
    assert middle[1] > 1e-3
    assert max(middle[0], middle[2]) <= 1e-6


@pytest.mark.parametrize(
    ("attention", "said"),
    [
        ("eager", "context parallelism needs the attention of torch, and the model uses 'eager'"),
        ("sdpa_attention", "llama: 2 of 2 layers don't use transformers' attention functions"),
    ],
)
def test_attention_that_would_see_a_part_of_a_sequence_is_refused(attention: str, said: str) -> None:
    with pytest.raises(RankError, match=f"accelerator.cp_size: {said}"):
        run_ranks(differences, 2, attention, 2, "ring")
