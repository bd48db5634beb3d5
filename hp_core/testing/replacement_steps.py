"""A replacement under test: models built with and without it from the same weights, and both in one layout."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from hp_core.config.plan_override import PlanOverride
from hp_core.config.target import Target
from hp_core.model.build import finish_model
from hp_core.model.export import original_tensors
from hp_core.model.load import weight_files
from hp_core.model.replacement.contract import ReplacementContext, transforms_of
from hp_core.model.replacement.replacer import ModuleReplacer, context_of, layer_index_of
from hp_core.model.replacement.transforms import names_of
from hp_core.parallel.setup import DistributedSetup
from hp_core.testing.checks import whole
from hp_core.testing.loss_steps import Step, engine_step, micro_batch
from hp_core.testing.models import auto_class, tiny_model, tiny_skeleton
from hp_core.training.loss import LossContract, ModelOutputLoss


@dataclass(frozen=True)
class ReplacementCase:
    """A replacement under test: the factory with its recipe arguments, and which modules of a tiny model it takes."""

    factory: Callable[..., nn.Module]
    family: str
    match: tuple[str, ...]
    module_type: str | None = None
    exact_type: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)
    refuses: tuple[nn.Module, ...] = ()
    tolerance: float = 1e-6
    files: str = ""
    directory: str = ""

    @property
    def target(self) -> Target:
        """What a recipe would say under `replace_module`."""
        path = f"{self.factory.__module__}.{self.factory.__qualname__}"
        section = "plan_overrides[0].replace_module"
        return Target(section, "hp.module_replacements", import_path=path, arguments=self.arguments)

    def rule(self) -> PlanOverride:
        """What a recipe would say under `plan_overrides`."""
        return PlanOverride(
            match=self.match, module_type=self.module_type, exact_type=self.exact_type, replace_module=self.target
        )

    def build(
        self, setup: DistributedSetup, *, replaced: bool = True, files: str | None = None
    ) -> tuple[PreTrainedModel, list[str]]:
        """The model as a run builds it, in evaluation mode, and the names of what was replaced.

        Args:
            setup: the devices; the model is sharded over its ranks.
            replaced: apply the rule.
            files: the directory of the weights; None draws them from the setup's seed.
        """
        with torch.device("meta"):
            model = tiny_skeleton(self.family)
        replacer = ModuleReplacer([self.rule()] if replaced else [], _call_factory)
        setup = dataclasses.replace(setup, replacer=replacer)
        finish_model(model, setup, weight_files(files, None) if files else None)
        model.eval()
        return model, [name for summary in replacer.summaries for name in summary["modules"]]

    def on_ranks(self, setup: DistributedSetup, *, replaced: bool) -> PreTrainedModel:
        """The model from `files`, where several ranks can read them; the same for any number of ranks."""
        files = None if self.family in _READ_WHOLE_ONLY else self.files
        return self.build(setup, replaced=replaced, files=files)[0]

    def context(self, model: PreTrainedModel, fqn: str, setup: DistributedSetup) -> ReplacementContext:
        """What the engine tells the factory about the module of this name."""
        context = context_of(model, setup.sizes.all, setup)
        return dataclasses.replace(context, layer_index=layer_index_of(fqn), target=self.target)


def _call_factory(module: nn.Module, module_fqn: str, context: ReplacementContext) -> Any:
    assert context.target is not None
    return context.target.build(module=module, module_fqn=module_fqn, context=context)


# transformers can't read the experts of these families into shards, so ranks start from initial weights.
_READ_WHOLE_ONLY = frozenset({"qwen3_vl_moe"})


@contextmanager
def checkpoint_of(family: str) -> Iterator[str]:
    """A directory with a model of transformers whose weights are all different, norms and biases too."""
    model = tiny_model(family)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        yield directory


@contextmanager
def junk_in_memory() -> Iterator[None]:
    """Memory that nobody has written holds NaN (the largest number in integers), where it might hold zeros by luck."""
    before = torch.are_deterministic_algorithms_enabled()
    filling = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = filling  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Numbers:
    """What a model computes of a batch: logits, and loss and whole gradients by the original modules' names."""

    logits: torch.Tensor
    step: Step


def numbers_of(
    model: PreTrainedModel, batch: Mapping[str, torch.Tensor], setup: DistributedSetup, *, seed: int
) -> Numbers:
    """The logits of this rank's rows, and a step of the engine with the model's own loss, each from the seed."""
    torch.manual_seed(seed)
    with torch.no_grad():
        logits = model(**batch, shift_labels=batch["labels"], use_cache=False).logits
    torch.manual_seed(seed)
    return Numbers(logits, step_of(model, batch, setup))


def step_of(model: PreTrainedModel, batch: Mapping[str, torch.Tensor], setup: DistributedSetup) -> Step:
    """A step of the engine; gradients of a changed layout are taken back to the original one."""
    step = engine_step(model, ModelOutputLoss(), [micro_batch(batch, LossContract())], setup)
    return Step(step.loss, _in_original_layout(model, step.gradients))


def _in_original_layout(model: nn.Module, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gradients of the original tensors: transforms are functions of these, so the chain rule leads back."""
    for fqn, module in model.named_modules():
        for transform in transforms_of(module):
            dot = f"{fqn}." if fqn else ""
            replaced = {name: whole(module.get_parameter(name).detach()) for name in transform.replacements}
            originals = {
                name: value.detach().clone().requires_grad_() for name, value in transform.to_original(replaced).items()
            }
            with torch.enable_grad():
                converted = transform.to_replaced(originals)
            own = {name: gradients.pop(dot + name) for name in transform.replacements if dot + name in gradients}
            found = torch.autograd.grad([converted[name] for name in own], list(originals.values()), list(own.values()))
            gradients |= {dot + name: gradient for name, gradient in zip(originals, found, strict=True)}
    return gradients


def reloaded(directory: str) -> PreTrainedModel:
    """What plain transformers makes of a directory, in evaluation mode."""
    config = AutoConfig.from_pretrained(directory)
    auto = auto_class(config.model_type)
    model: PreTrainedModel = auto.from_pretrained(directory, dtype=torch.float32, experts_implementation="eager")
    model.eval()
    return model


@torch.no_grad()
def logits_of(model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The logits, without a loss."""
    logits: torch.Tensor = model(**{name: batch[name] for name in batch if name != "labels"}, use_cache=False).logits
    return logits


# What a model holds.


def state_of(model: PreTrainedModel, buffers: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """Parameters and buffers in the original layout, with those buffers that no checkpoint holds (or some of them)."""
    state = original_tensors(model)
    others = {name: buffer for name, buffer in model.named_buffers() if name not in state}
    chosen = {name: buffer for name, buffer in others.items() if buffers is None or name in buffers}
    return {name: tensor.detach().clone() for name, tensor in {**state, **chosen}.items()}


def flags_of(model: nn.Module) -> dict[str, Any]:
    """What is true of each tensor that no replacement makes of others: `requires_grad`, its kind, its ties."""
    made = {
        f"{fqn}.{name}"
        for fqn, module in model.named_modules(remove_duplicate=False)
        for name in names_of(transforms_of(module))[1]
    }
    tensors: list[tuple[str, Any]] = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    names: dict[int, list[str]] = {}
    for name, tensor in tensors:
        names.setdefault(id(tensor), []).append(name)
    flags: dict[str, Any] = {}
    for name, tensor in tensors:
        if name not in made:
            flags[f"requires_grad of {name}"] = tensor.requires_grad
            flags[f"the kind of {name}"] = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            flags[f"what is tied to {name}"] = sorted(names[id(tensor)])
    return flags


def definitions_of(model: nn.Module) -> dict[str, Any]:
    """The functions and classes that every model of this kind shares, by where they are defined."""
    kinds = {base for module in model.modules() for base in type(module).__mro__ if base is not object}
    found: dict[str, Any] = {}
    for kind in kinds:
        path = f"{kind.__module__}.{kind.__qualname__}"
        found |= {f"{path}.{name}": value for name, value in vars(kind).items() if _is_definition(value)}
    for name in {kind.__module__ for kind in kinds} | {"torch.nn.functional"}:
        module = sys.modules[name]
        found |= {f"{name}.{key}": value for key, value in vars(module).items() if _is_definition(value)}
    return found


def _is_definition(value: object) -> bool:
    return callable(value) or isinstance(value, (property, classmethod, staticmethod))


def note_dtypes(into: dict[str, Any], name: str, module: nn.Module, arguments: Any, output: Any) -> None:
    """A forward hook, once its first two arguments are bound: the dtypes of the tensors that a module returns."""
    del module, arguments
    values = [output] if isinstance(output, torch.Tensor) else list(output)
    into[name] = [value.dtype for value in values if isinstance(value, torch.Tensor)]


def dotted(kind: type | str | None) -> str | None:
    """The dotted path of a class, as a recipe writes it."""
    return f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else kind
