"""Rules made without a recipe, and a setup that applies them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hp_core.config.plan_override import PlanOverride
from hp_core.config.target import Target
from hp_core.model.replacement.replacer import ModuleReplacer
from tests.model.tiny import a_setup, build

FACTORIES = "tests.model.replacement.factories"
IDS = torch.arange(24).reshape(2, 12) * 7 % 96
LLAMA = "transformers.models.llama.modeling_llama"


def rule(
    match: str | tuple[str, ...],
    factory: str,
    *,
    index: int = 0,
    module_type: str | None = None,
    exact_type: bool = False,
    when: Any = None,
    **arguments: Any,
) -> PlanOverride:
    """One entry; `factory` is a name in tests/model/replacement/factories.py, or a dotted path."""
    path = factory if "." in factory else f"{FACTORIES}.{factory}"
    target = Target(
        f"plan_overrides[{index}].replace_module", "hp.module_replacements", import_path=path, arguments=arguments
    )
    patterns = (match,) if isinstance(match, str) else match
    return PlanOverride(
        match=patterns, module_type=module_type, exact_type=exact_type, when=when, replace_module=target
    )


def call_factory(module: Any, module_fqn: str, context: Any) -> Any:
    """What the core's own hook does."""
    return context.target.build(module=module, module_fqn=module_fqn, context=context)


@contextmanager
def replacing(*rules: PlanOverride, environment: Any = None, **arguments: Any) -> Iterator[Any]:
    """A setup whose models are built with these rules."""
    with a_setup(environment, **arguments) as setup:
        yield dataclasses.replace(setup, replacer=ModuleReplacer(rules, call_factory))


def skeleton(config: dict[str, Any]) -> Any:
    """The plain model on the meta device."""
    values = dict(config)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))


def apply(model: Any, *rules: PlanOverride) -> Any:
    """Apply rules to a skeleton alone; returns what was replaced."""
    with replacing(*rules) as setup:
        return setup.replacer.apply(model, setup)


def checkpoint(config: dict[str, Any], directory: Path) -> Any:
    """A plain model with weights that differ from any initial ones, saved; returns it."""
    with a_setup() as setup:
        plain = build(setup, config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    plain.save_pretrained(directory)
    return plain.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits
