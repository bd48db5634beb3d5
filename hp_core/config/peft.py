"""The recipe's section on adapters: small weights that are trained while the model's own stay as they are."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from hp_core.config.base import Conflict, Section
from hp_core.config.plan_override import Patterns
from hp_core.errors import Problem

ALL_LINEAR = "all-linear"


class PeftConfig(Section):
    """Small weights to train in the place of the model's own, which stay as they are. The names are those of `peft`."""

    method: Literal["none", "lora"] = Field(
        "none", description="`lora` adds the product of two thin matrices to weights, and trains these alone."
    )
    r: int = Field(8, ge=1, description="The rank of what is added: the thin side of the two matrices.")
    lora_alpha: int = Field(8, ge=1, description="What is added is multiplied by `lora_alpha / r`.")
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout of the adapters' inputs.")
    target_modules: Patterns | None = Field(
        None,
        description="The linear layers and embeddings to adapt: ends of their names (`q_proj`), patterns of whole FQNs "
        "(`*` crosses dots), or `all-linear`, which is every linear layer but the head. Null is `all-linear`.",
    )
    exclude_modules: Patterns | None = Field(None, description="Those of them to leave out, named likewise.")
    modules_to_save: Patterns | None = Field(
        None, description="Modules to train whole beside the adapters, named likewise."
    )
    use_rslora: bool = Field(False, description="Multiply by `lora_alpha / sqrt(r)` instead (rsLoRA).")
    use_dora: bool = Field(False, description="Learn the lengths of the weights' rows separately (DoRA).")
    init_lora_weights: bool | Literal["gaussian"] = Field(
        True,
        description="True adds nothing at first: the first matrix is drawn as of a linear layer, the second is zero; "
        "`gaussian` draws the first from a normal distribution of deviation `1 / r`; false draws both as of linear "
        "layers.",
    )
    autocast_adapter_dtype: bool = Field(
        True, description="Keep adapters in float32 whatever `model.dtype` is; false keeps them in that."
    )

    LATER: ClassVar[tuple[str, ...]] = ("load_in_4bit",)

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> Iterator[Conflict]:
        """Yield one for each key without effect."""
        if values.get("method", "none") != "none":
            return
        for key, field in cls.model_fields.items():
            if values.get(key, field.default) != field.default:
                yield Conflict("has no effect with method none", key, f"write method: lora, or remove '{key}'")


def missing_library(config: PeftConfig) -> Problem | None:
    """What to say where the recipe asks for adapters and the library that makes them isn't installed."""
    if config.method == "none" or importlib.util.find_spec("peft") is not None:
        return None
    return Problem("the library peft is not installed", path="peft.method", hint="pip install 'hyperparallel[peft]'")
