"""What an export holds beside the weights, made and checked before the first step: the run's `assets/`."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel

from hp_core.entry_points import describe
from hp_core.errors import InputError, Problem
from hp_core.export.adapter import Adapters
from hp_core.model.generation import FILE as GENERATION_FILE
from hp_core.model.generation import refusal
from hp_core.observe.run_directory import ASSETS

FACTS = "export.json"
_CONFIG = "config.json"
REMOTE_CODE = "auto_map"
REFUSED = "an export of the model would fail, as transformers refuses to save its generation configuration"
GENERATION_HINT = "write do_sample: true in model.generation_config, or null for the value that is named"


@runtime_checkable
class _Saves(Protocol):
    """A tokenizer of ours."""

    def save(self, directory: Path) -> None: ...


@runtime_checkable
class _SavesPretrained(Protocol):
    """A tokenizer or processor of transformers."""

    def save_pretrained(self, save_directory: Path) -> Any: ...


@dataclass(frozen=True)
class Facts:
    """What an export has to know of the model: its class in transformers, dtypes, replaced modules and adapters.

    `dtype` is what weights are written in unless told otherwise, `master_dtype` that of the checkpoints.
    `transformed` are the modules with weight transforms.
    """

    kind: str
    dtype: str
    master_dtype: str
    transformed: tuple[str, ...] = ()
    adapters: Adapters = field(default_factory=Adapters)

    def as_dict(self) -> dict[str, Any]:
        """A form that JSON can hold."""
        return {
            "class": self.kind,
            "dtype": self.dtype,
            "master_dtype": self.master_dtype,
            "transformed": list(self.transformed),
            "adapters": self.adapters.as_dict(),
        }

    @classmethod
    def read(cls, directory: Path) -> Facts:
        """The facts in a run's assets.

        Raises:
            InputError: they can't be read.
        """
        path = directory / FACTS
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            adapters = Adapters.from_dict(values["adapters"])
            return cls(values["class"], values["dtype"], values["master_dtype"], tuple(values["transformed"]), adapters)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path}: can't be read: {describe(error)}") from error


@dataclass(frozen=True)
class Assets:
    """The files, by their path in the folder; or why the model can't be exported."""

    why_not: str | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    has_tokenizer: bool = False

    def changes(self, run_directory: Path) -> list[str]:
        """In what the model's configuration is another than that which the run's directory has; a line, or none."""
        path = run_directory / ASSETS / _CONFIG
        if _CONFIG not in self.files or not path.is_file():
            return []
        before, now = json.loads(path.read_text(encoding="utf-8")), json.loads(self.files[_CONFIG])
        names = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
        told = [f"{name} {before.get(name)} -> {now.get(name)}" for name in names if name != "transformers_version"]
        note = "exports of earlier steps keep theirs"
        return [f"the model's configuration has changed: {', '.join(told)}; {note}"] if told else []

    def as_record(self) -> dict[str, Any]:
        """What the manifest says."""
        if self.why_not is not None:
            return {"possible": False, "why": self.why_not}
        return {"possible": True, "why": None, "tokenizer": self.has_tokenizer}


def assets_of(skeleton: PreTrainedModel, generation: GenerationConfig | None, tokenizer: Any, facts: Facts) -> Assets:
    """Save everything but the weights as an export holds it.

    Raises:
        InputError: transformers, or the tokenizer, refuses.
    """
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        _save_config(skeleton, facts, directory)
        if generation is not None:
            _save_generation_config(generation, directory)
        has_tokenizer = _save_tokenizer(tokenizer, directory)
        _name_ends(directory)
        for file in ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json"):
            _forget_remote_code(directory / file)
        (directory / FACTS).write_text(json.dumps(facts.as_dict(), indent=2) + "\n", encoding="utf-8")
        paths = [path for path in directory.rglob("*") if path.is_file()]
        files = {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}
    return Assets(files=files, has_tokenizer=has_tokenizer)


def with_dtype(config: bytes, dtype: torch.dtype) -> bytes:
    """A `config.json` that says `dtype`, in its parts too."""

    def change(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        named = {"dtype": str(dtype).removeprefix("torch.")} if "dtype" in value else {}
        return {**{key: change(one) for key, one in value.items()}, **named}

    return (json.dumps(change(json.loads(config)), indent=2, sort_keys=True) + "\n").encode()


def _save_config(skeleton: PreTrainedModel, facts: Facts, directory: Path) -> None:
    config = copy.deepcopy(skeleton.config)
    config.architectures = [facts.kind]
    config.dtype = facts.dtype
    _attempt(lambda: config.save_pretrained(directory), "model", "its configuration")


def _save_generation_config(generation: GenerationConfig, directory: Path) -> None:
    reason = refusal(generation)
    if reason is not None:
        raise InputError(Problem(f"{REFUSED}: {reason}", "model", hint=GENERATION_HINT))
    _attempt(lambda: generation.save_pretrained(directory), "model", "its generation configuration")


def _save_tokenizer(tokenizer: Any, directory: Path) -> bool:
    """Save it as `AutoTokenizer` loads it, or a processor as `AutoProcessor` does; False where there is none."""
    path, what = "dataset.tokenizer", f"the tokenizer {getattr(tokenizer, 'name', type(tokenizer).__name__)}"
    before = set(directory.iterdir())
    if isinstance(tokenizer, _Saves):
        _attempt(lambda: tokenizer.save(directory), path, what)
    elif isinstance(tokenizer, _SavesPretrained):
        _attempt(lambda: tokenizer.save_pretrained(directory), path, what)
    else:
        return False
    if set(directory.iterdir()) == before:
        raise InputError(Problem(f"{what} saved no file, so an export of the model would have none", path))
    if (directory / "tokenizer_config.json").exists():
        load = lambda: AutoTokenizer.from_pretrained(directory, trust_remote_code=False)  # noqa: E731
        _attempt(load, path, what, doing="load what was saved of")
    return True


def _name_ends(directory: Path) -> None:
    """Where the configurations name no first or last token, write those of the tokenizer beside them."""
    if not (directory / "tokenizer_config.json").exists():
        return
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    for path in (directory / _CONFIG, directory / GENERATION_FILE):
        if path.exists():
            values = json.loads(path.read_text(encoding="utf-8"))
            for part in (values, *([values["text_config"]] if "text_config" in values else [])):
                part.update({key: ends[key] for key in ends if part.get(key) is None and ends[key] is not None})
            path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _attempt(action: Callable[[], Any], path: str, what: str, doing: str = "save") -> None:
    try:
        action()
    # Code of several libraries and of users; whatever it raises now it would raise when the training is done.
    except Exception as error:
        reason = " ".join(str(error).split())
        message = f"an export of the model would fail: can't {doing} {what}: {type(error).__name__}: {reason}"
        raise InputError(Problem(message, path)) from error


def _forget_remote_code(path: Path) -> None:
    """Take out where code for the model lies elsewhere: the weights are for a class of transformers itself."""
    if path.exists():
        values = json.loads(path.read_text(encoding="utf-8"))
        if values.pop(REMOTE_CODE, None) is not None:
            path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
