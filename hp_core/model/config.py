"""A model's transformers configuration, from a directory, a hub id or the recipe; no key is taken on trust."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from hp_core.errors import ArgumentError
from hp_core.spelling import did_you_mean

# Read by transformers while it normalises a config, declared by no class.
_NORMALISED_KEYS = frozenset({"rope_theta", "rope_scaling", "torch_dtype"})


def model_config(
    values: Mapping[str, Any],
    *,
    pretrained: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    model_types: Collection[str] | None = None,
    kind: str = "model",
) -> PreTrainedConfig:
    """The configuration of `pretrained` with `values` on top, or one made from `values` alone; for model builders.

    One made from `values` names a first and a last token only if they do: its class would give it those of the
    vocabulary that the family was published with. An export takes those that are not named from the tokenizer.

    Args:
        values: what the recipe writes under the component's argument `config`.
        pretrained: a directory or hub id; None makes the configuration of the `model_type` in `values`.
        revision: that of the hub's.
        trust_remote_code: let code of the repository run.
        model_types: the values of `model_type` that the builder has a model for; None takes all of transformers'. Where
            code of a repository may run, that of `pretrained` may be another.
        kind: what errors call such a model.

    Raises:
        ArgumentError: a directory that is none, a `model_type` that is unknown or none of `model_types`, an unknown
            key, or a value transformers refuses. The path says which key of `config` it is.
    """
    values = dict(values)
    if pretrained is not None:
        config = _load_config(pretrained, revision, trust_remote_code)
        if model_types is not None and config.model_type not in model_types and not trust_remote_code:
            message = f"holds a {config.model_type!r}, which is no {kind}"
            raise ArgumentError("pretrained", message, "use another component")
        _refuse_unknown_keys(type(config), values)
        for key, value in values.items():
            _set(config, key, value)
        return config
    model_type = values.pop("model_type", None)
    if not isinstance(model_type, str):
        raise ArgumentError("config", "model_type is missing", "write pretrained: DIRECTORY, or config.model_type")
    model_types = CONFIG_MAPPING if model_types is None else model_types
    if model_type not in model_types:
        raise ArgumentError(
            "config.model_type",
            f"{model_type!r} is no {kind} of the installed transformers",
            did_you_mean(model_type, model_types),
        )
    config_class = CONFIG_MAPPING[model_type]
    _refuse_unknown_keys(config_class, values)
    try:
        config = config_class(**values)
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise ArgumentError(_guilty_path(error), _first_sentence(error)) from error
    _forget_unnamed_tokens(config, values)
    return config


def _load_config(pretrained: str, revision: str | None, trust_remote_code: bool) -> PreTrainedConfig:
    if pretrained.startswith((".", "/", "~")) and not Path(pretrained).expanduser().is_dir():
        raise ArgumentError("pretrained", f"no such directory: {pretrained!r}")
    if revision is not None and Path(pretrained).expanduser().is_dir():
        raise ArgumentError("revision", "a directory has no revisions", "leave revision out")
    try:
        return AutoConfig.from_pretrained(  # type: ignore[no-any-return]
            str(Path(pretrained).expanduser()) if Path(pretrained).expanduser().is_dir() else pretrained,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
    except (OSError, ValueError) as error:
        raise ArgumentError("pretrained", f"can't read a model configuration from {pretrained!r}: {error}") from error


def _forget_unnamed_tokens(config: PreTrainedConfig, values: Mapping[str, Any]) -> None:
    text = config.get_text_config(decoder=True)
    named = {*values, *(values.get("text_config") or {})}
    for part in (config, text):
        for key in ("bos_token_id", "eos_token_id"):
            if key not in named and getattr(part, key, None) is not None:
                _set(part, key, None)


def _set(config: PreTrainedConfig, key: str, value: Any) -> None:
    try:
        setattr(config, key, value)
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise ArgumentError(f"config.{key}", _first_sentence(error)) from error


def _refuse_unknown_keys(config_class: type[PreTrainedConfig], values: Mapping[str, Any]) -> None:
    known = known_keys(config_class)
    for key in values:
        if key not in known:
            raise ArgumentError(
                f"config.{key}", f"unknown key: {config_class.__name__} has none like it", did_you_mean(key, known)
            )


def known_keys(config_class: type[PreTrainedConfig]) -> frozenset[str]:
    """The keys that act: those the class declares, and those the family's own code reads from its config.

    The second set is needed because some families read keys that their class never declares (`head_dim` of
    Qwen3-MoE), and transformers keeps any key it is given, also a misspelt one.
    """
    keys = (
        {field.name for field in dataclasses.fields(config_class)} if dataclasses.is_dataclass(config_class) else set()
    )
    keys |= set(inspect.signature(config_class.__init__).parameters) - {"self", "kwargs", "args"}
    keys |= set(config_class.attribute_map) | _NORMALISED_KEYS
    package = config_class.__module__.rpartition(".")[0]
    folder = Path(inspect.getfile(config_class)).parent
    for path in (Path(inspect.getfile(config_class)), *sorted(folder.glob("modeling_*.py"))):
        if package in sys.modules:
            text = path.read_text(encoding="utf-8")
            keys |= set(re.findall(r"\bconfig\.([a-z_][a-z0-9_]*)\b", text))
            keys |= set(re.findall(r"getattr\(\s*(?:self\.)?config,\s*\"([a-z_][a-z0-9_]*)\"", text))
    return frozenset(key for key in keys if not key.startswith("_"))


def _guilty_path(error: Exception) -> str:
    match = re.search(r"[Ff]ield '(\w+)'", str(error))
    return f"config.{match.group(1)}" if match else "config"


def _first_sentence(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
