"""Where an image is: what a row says of it, and its bytes."""

from __future__ import annotations

import base64
import binascii
import io
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

from PIL import Image, ImageOps

from hp_core.data.chat.conversation import ImagePart, RowError, describe

_TIMEOUT_SECONDS = 30.0
_MOST_BYTES = 256 << 20
_FORMS = "a path, bytes, base64 text or a URL"


@dataclass(frozen=True)
class ImageRules:
    """Where images may come from: paths are relative to `directory`, and URLs are only read if `urls` says so."""

    directory: Path | None = None
    urls: bool = False


@dataclass(frozen=True)
class ImageSource:
    """An image that was found: its file, or its bytes where a row holds them; `name` is for messages."""

    name: str
    path: Path | None = None
    held: bytes | None = None

    def read(self) -> bytes:
        """The bytes. Raises `ImageError`."""
        if self.held is not None:
            return self.held
        assert self.path is not None
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise ImageError(f"{self.path} can't be read: {error.strerror or error}") from error


class ImageError(Exception):
    """An image can't be used; the text is the reason, with the image's name."""


def source_of(part: ImagePart, value: Any, rules: ImageRules) -> ImageSource:
    """The image that a row's value means. Raises `RowError` at the part."""
    if isinstance(value, Mapping):
        given = {key: one for key, one in value.items() if one is not None}
        # Arrow's images have both, and the path is then that of a file on another machine.
        if "bytes" in given:
            given.pop("path", None)
        if len(given) != 1 or next(iter(given)) not in ("bytes", "path", "url", "base64"):
            raise RowError(part.path, f"gives {', '.join(map(str, given)) or 'nothing'}, not {_FORMS}")
        ((key, inner),) = given.items()
        if key == "bytes" and isinstance(inner, (bytes, bytearray, memoryview)):
            return ImageSource("its bytes", held=bytes(inner))
        if key == "path" and isinstance(inner, str):
            return _file(inner, part, rules)
        if key == "url" and isinstance(inner, str):
            return _url(inner, part, rules)
        if key in ("bytes", "base64") and isinstance(inner, str):
            return ImageSource("its base64", held=_decoded(inner, part.path))
        raise RowError(f"{part.path}.{key}", f"{describe(inner)}, not {_FORMS}")
    if isinstance(value, (bytes, bytearray, memoryview)):
        return ImageSource("its bytes", held=bytes(value))
    if not isinstance(value, str) or not value:
        raise RowError(part.path, f"{describe(value) if value != '' else 'is empty'}, not {_FORMS}")
    if urlsplit(value).scheme in ("http", "https", "data", "file"):
        return _url(value, part, rules)
    return _file(value, part, rules)


def _file(value: str, part: ImagePart, rules: ImageRules) -> ImageSource:
    path = Path(value).expanduser()
    if not path.is_absolute():
        if rules.directory is None:
            raise RowError(part.path, f"is the relative path {value!r}; say with image_dir what it is relative to")
        path = rules.directory / path
    if not path.is_file():
        raise RowError(part.path, f"there is no file {str(path)!r}")
    return ImageSource(str(path), path=path)


def _url(value: str, part: ImagePart, rules: ImageRules) -> ImageSource:
    scheme = urlsplit(value).scheme
    if scheme == "data":
        head, comma, data = value.partition(",")
        if not comma:
            raise RowError(part.path, "is a data URL without data")
        held = _decoded(data, part.path) if head.endswith(";base64") else unquote_to_bytes(data)
        return ImageSource("its data URL", held=held)
    if scheme == "file":
        return _file(urlsplit(value).path, part, rules)
    if scheme not in ("http", "https"):
        raise RowError(part.path, f"is a URL of the scheme {scheme!r}; known are http, https, file and data")
    if not rules.urls:
        raise RowError(part.path, f"is the URL {value!r}, and none is read unless image_urls: true says so")
    try:
        with urllib.request.urlopen(value, timeout=_TIMEOUT_SECONDS) as reply:
            held = reply.read(_MOST_BYTES + 1)
    except (OSError, ValueError, urllib.error.URLError) as error:
        raise RowError(part.path, f"{value!r} can't be read: {error}") from error
    if len(held) > _MOST_BYTES:
        raise RowError(part.path, f"{value!r} holds more than {_MOST_BYTES >> 20} MiB")
    return ImageSource(value, held=held)


def _decoded(text: str, path: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RowError(path, f"is no base64 text: {error}") from error


def decoded(data: bytes, name: str) -> Image.Image:
    """The image as a viewer shows it: turned as its EXIF data says, in RGB. Raises `ImageError`."""
    if not data:
        raise ImageError(f"{name} is empty")
    try:
        with Image.open(io.BytesIO(data)) as opened:
            opened.load()
            return ImageOps.exif_transpose(opened).convert("RGB")
    # Damaged files make the decoders of many formats fail, each in its way.
    except Exception as error:
        reason = " ".join(str(error).split()).replace(f"<_io.BytesIO object at {id(data):#x}>", "it")
        if type(error).__name__ == "UnidentifiedImageError":
            reason = "it is no image of a known format"
        raise ImageError(f"{name} can't be decoded: {reason}") from error
