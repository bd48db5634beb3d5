"""A tokenizer with its image processor, from a Hugging Face directory or the Hub."""

from __future__ import annotations

import copy
import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field
from transformers import AutoImageProcessor
from transformers.models.auto.processing_auto import processor_class_from_name
from transformers.utils import cached_file

from hp_core.data.fingerprint import fingerprint
from hp_core.data.images.pixels import joined
from hp_core.data.images.protocol import ImageInputs
from hp_core.errors import ArgumentError
from hp_plugins.tokenizers.pretrained import PretrainedTokenizer, pretrained, template_text

# What a directory says of its processor; transformers reads all of them.
_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
# Arguments of a processor's class that are processors themselves.
_PARTS = frozenset({"image_processor", "tokenizer", "video_processor", "feature_extractor", "chat_template"})
_OF_IMAGES = re.compile("image|video|vision")
# What bounds of pixels are called among the edges of a processor's size.
_EDGES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
_PROBES = ((96, 64), (64, 160))


@dataclass(frozen=True, eq=False)
class _Parts:
    """What a processor of transformers is made of; its class may want video code that isn't installed."""

    kind: Any
    images: Any
    tokenizer: Any
    settings: Mapping[str, Any]

    def make(self) -> Any:
        """The processor, for text and images alone."""

        def check(made: Any, name: str, argument: Any) -> Any:
            return None if argument is None else self.kind.check_argument_for_proper_class(made, name, argument)

        kind = type(self.kind.__name__, (self.kind,), {"check_argument_for_proper_class": check})
        accepted = inspect.signature(self.kind.__init__).parameters
        settings = {key: value for key, value in self.settings.items() if key in accepted and key not in _PARTS}
        made = kind(image_processor=self.images, tokenizer=self.tokenizer, **settings)
        # transformers' fallback for a class that doesn't say: it knows the text of no image.
        if made.image_token is None:
            raise ValueError(f"{self.kind.__name__} has no token for an image")
        return made


class PretrainedProcessor(PretrainedTokenizer):
    """A processor of transformers, for text and images. Images are resized and cut by its PIL code on any machine."""

    remade = (*PretrainedTokenizer.remade, "_processor", "reserved_tokens")

    def __init__(self, parts: _Parts, files: Mapping[str, bytes], *, name: str) -> None:
        super().__init__(parts.tokenizer, name=name)
        self._parts = parts
        self._files = dict(files)
        self.image_token: str = self._processor.image_token
        self.image_token_id: int = self._processor.image_token_id
        self.image_fingerprint = fingerprint("images", type(parts.images).__name__, parts.images.to_json_string())

    @cached_property
    def _processor(self) -> Any:
        return self._parts.make()

    @cached_property
    def reserved_tokens(self) -> tuple[str, ...]:
        """The special tokens of images and videos, which the processor knows, or else their names tell."""
        known = {value for name, value in vars(self._processor).items() if name.endswith("_token")}
        own = self._tokenizer
        # Some processors keep those of texts, too.
        known -= {own.eos_token, own.bos_token, own.pad_token, own.unk_token}
        special = [
            one.content
            for _, one in sorted(own.added_tokens_decoder.items())
            if one.content in known or (one.special and _OF_IMAGES.search(one.content))
        ]
        return tuple(dict.fromkeys((self.image_token, *special)))

    def image_inputs(self, image: Image.Image) -> ImageInputs:
        """What the model takes of an RGB image. Raises `ValueError` for a shape that the processor refuses."""
        return self._inputs([image])

    def _inputs(self, images: list[Image.Image]) -> ImageInputs:
        own = self._parts.images
        found = own(images=images, return_tensors="np")
        return {name: np.asarray(found[name]) for name in own.model_input_names if name in found}

    def image_text(self, inputs: ImageInputs) -> str:
        """The processor's own text for an image."""
        text: str = self._processor.replace_image_token(dict(inputs), 0)
        return text

    def image_pixels(self, inputs: ImageInputs) -> int:
        """The pixels of the resized image, of all its crops together."""
        if "image_grid_thw" in inputs:
            return int(inputs["image_grid_thw"].prod()) * int(self._parts.images.patch_size) ** 2
        values = inputs["pixel_values"]
        return int(values.size // values.shape[1]) if values.ndim == 4 else int(values.size // 3)

    def image_grids(self, inputs: ImageInputs) -> NDArray[np.int64]:
        """How many tokens each image has in time, height and width, by the processor's grids of patches."""
        if "image_grid_thw" not in inputs:
            raise ValueError(f"the processor {self.name!r} tells no grid of patches")
        merge = int(self._parts.images.merge_size)
        found: NDArray[np.int64] = inputs["image_grid_thw"].astype(np.int64) // (1, merge, merge)
        return found

    def with_chat_template(self, template: str) -> PretrainedProcessor:
        """The same processor, which is saved with the given chat template (text or a `.jinja` file)."""
        tokenizer = copy.copy(self._parts.tokenizer)
        tokenizer.chat_template = template_text(template)
        return PretrainedProcessor(replace(self._parts, tokenizer=tokenizer), self._files, name=self.name)

    def save(self, directory: Path) -> None:
        """Write the files of both, as `AutoProcessor` loads them; what videos need is kept."""
        super().save(directory)
        for name, content in self._files.items():
            (directory / name).write_bytes(content)

    def require_joinable(self) -> None:
        """Raise `ArgumentError` for a processor that makes something else of images together than of each alone."""
        images = [Image.new("RGB", size, (200, 30, 90)) for size in _PROBES]
        try:
            together, apart = self._inputs(images), joined([self._inputs([one]) for one in images])
            same = together.keys() == apart.keys() and all(
                together[name].shape == apart[name].shape and np.array_equal(together[name], apart[name])
                for name in together
            )
        except ValueError:
            same = False
        if not same:
            what = type(self._parts.images).__name__
            message = f"the images of {self.name!r} can't share a batch: {what} fits each to the others"
            raise ArgumentError("path", message, "use a family whose images keep their own sizes, or have all one")


def processor(
    path: Annotated[str, Field(description="Hugging Face directory or hub id.")],
    revision: Annotated[str | None, Field(description="Branch, tag or commit of a hub id.")] = None,
    eos_token: Annotated[str | None, Field(description="The token that ends a document; null is its own.")] = None,
    min_pixels: Annotated[
        Annotated[int, Field(ge=1)] | None, Field(description="Smaller images are enlarged to it; null is its own.")
    ] = None,
    max_pixels: Annotated[
        Annotated[int, Field(ge=1)] | None, Field(description="Larger images are reduced to it; null is its own.")
    ] = None,
) -> PretrainedProcessor:
    """The processor of a Hugging Face directory or Hub repository: its tokenizer, and what makes pixels of images.

    Images are resized by the processor's code for PIL, with or without torchvision, so that a recipe means the same
    pixels everywhere. Videos are not read.
    """
    tokenizer = pretrained(path, revision, eos_token)
    local = Path(path).expanduser()
    where, which = (str(local) if local.is_dir() else path), revision or "main"
    files = {name: content for name in _FILES if (content := _content(where, which, name)) is not None}
    settings = {**json.loads(files.get(_FILES[1], b"{}")), **json.loads(files.get(_FILES[0], b"{}"))}
    bounds = {"min_pixels": min_pixels, "max_pixels": max_pixels}
    given = {key: value for key, value in bounds.items() if value is not None}
    # Code of many families, which raises anything; the user needs its first line.
    try:
        images = AutoImageProcessor.from_pretrained(
            where, revision=which, backend="pil", trust_remote_code=False, **given
        )
        parts = _Parts(_kind(settings), images, _with_own_template(tokenizer.backend, where, which), settings)
        made = PretrainedProcessor(parts, _with_pixels(files, images) if given else files, name=path)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        message = f"no processor of text and images can be loaded from {path!r}: {reason}"
        raise ArgumentError("path", message, "tokenizers alone are read by `name: pretrained`") from error
    for key, value in given.items():
        if not _knows(images, key, value):
            raise ArgumentError(key, f"a {type(images).__name__} resizes all images alike", f"remove {key}")
    _require_order(images, given)
    made.require_joinable()
    return made


def _kind(settings: Mapping[str, Any]) -> Any:
    """The class of a processor. Raises `ValueError` for one that has no text for an image."""
    name = settings.get("processor_class")
    kind = processor_class_from_name(name) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(f"its processor_class {name!r} is none of transformers")
    return kind


def _content(where: str, revision: str, name: str) -> bytes | None:
    path = cached_file(
        where,
        name,
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if path is None else Path(path).read_bytes()


def _with_own_template(tokenizer: Any, where: str, revision: str) -> Any:
    """The tokenizer with the chat template that older directories keep apart, if it has none of its own."""
    content = _content(where, revision, "chat_template.json") if tokenizer.chat_template is None else None
    if content is not None:
        tokenizer.chat_template = json.loads(content)["chat_template"]
    return tokenizer


def _knows(images: Any, key: str, value: int) -> bool:
    """Whether an image processor took a bound of pixels over: under its name, or as an edge of its size."""
    settings = images.to_dict()
    return value in (settings.get(key), (settings.get("size") or {}).get(_EDGES[key]))


def _require_order(images: Any, given: Mapping[str, int]) -> None:
    """Raise `ArgumentError` for a lower bound of pixels above the upper one, of which the upper alone would act."""
    settings = images.to_dict()
    least, most = (given.get(key, settings.get(key) or (settings.get("size") or {}).get(_EDGES[key])) for key in _EDGES)
    if given and least is not None and most is not None and least > most:
        key, other = ("min_pixels", "max_pixels") if "min_pixels" in given else ("max_pixels", "min_pixels")
        own = "" if other in given else "processor's own "
        word = "more" if key == "min_pixels" else "less"
        message = f"{given[key]:,} is {word} than the {own}{other} {most if key == 'min_pixels' else least:,}"
        raise ArgumentError(key, message, f"give {other}, too" if own else f"lower {key}")


def _with_pixels(files: Mapping[str, bytes], images: Any) -> dict[str, bytes]:
    """The files as they would be if the directory had the bounds of pixels that the recipe gives."""
    changed = dict(files)
    own = images.to_dict()
    bounds = {key: own[key] for key in ("size", "min_pixels", "max_pixels") if own.get(key) is not None}
    for name in _FILES[:2]:
        if name in changed:
            settings = json.loads(changed[name])
            holder = settings.get("image_processor", {}) if name == _FILES[0] else settings
            if holder:
                holder.update(bounds)
                changed[name] = (json.dumps(settings, indent=2) + "\n").encode()
    return changed
