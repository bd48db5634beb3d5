"""Where an image is: what a row says of it, and its bytes."""

from __future__ import annotations

import base64
import binascii
import http.client
import io
import os
import re
import stat
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes, urlsplit

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from hp_core.data.chat.conversation import ImagePart, RowError, describe, shortened

_TIMEOUT_SECONDS = 30.0
_MOST_BYTES = 256 << 20
_CHUNK_BYTES = 1 << 16
_LONGEST_NAME = 255
_KEYS = ("bytes", "path", "url", "image_url", "base64")
_FORMS = "a path, a URL, {bytes: …} or {base64: …}"
# Decoders of rarer formats are the ones where damage is found that does harm.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
_MOST_GREY = 65535
_GREY_STEP = _MOST_GREY // 255
_URL = re.compile(r"data:|[A-Za-z][A-Za-z0-9+.-]*://")


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
    place = part.path
    if isinstance(value, Mapping):
        given = {key: one for key, one in value.items() if one is not None}
        # Arrow's images have both, and the path is then that of a file on another machine.
        if "bytes" in given:
            given.pop("path", None)
        if len(given) != 1 or next(iter(given)) not in _KEYS:
            keys = shortened(", ".join(map(str, given))) or "nothing"
            raise RowError(place, f"gives {keys}, not {_FORMS}")
        ((key, inner),) = given.items()
        place = f"{place}.{key}"
        if key == "bytes" and isinstance(inner, (bytes, bytearray, memoryview)):
            return ImageSource("its bytes", held=bytes(inner))
        if key == "path" and isinstance(inner, str):
            return _file(inner, place, rules)
        if key in ("url", "image_url") and isinstance(inner, str):
            return _url(inner, place, rules)
        if key in ("bytes", "base64") and isinstance(inner, str):
            return ImageSource("its base64", held=_decoded(inner, place))
        raise RowError(place, f"{describe(inner)}, not {_FORMS}")
    if isinstance(value, (bytes, bytearray, memoryview)):
        return ImageSource("its bytes", held=bytes(value))
    if not isinstance(value, str):
        raise RowError(place, f"{describe(value)}, not {_FORMS}")
    return _url(value, place, rules) if _URL.match(value) else _file(value, place, rules)


def _file(value: str, place: str, rules: ImageRules) -> ImageSource:
    if not value:
        raise RowError(place, f"is empty, not {_FORMS}")
    shown = repr(shortened(value))
    if _URL.match(value):
        more = " and set image_urls: true" if value.startswith("http") and not rules.urls else ""
        raise RowError(place, f"{shown} is a URL, not a path; write it as `url`{more}")
    try:
        path = Path(value).expanduser()
        if not path.is_absolute():
            if rules.directory is None:
                raise RowError(place, f"is the relative path {shown}; say with image_dir what it is relative to")
            shown = f"{shown} in {str(rules.directory)!r}"
            path = Path(os.path.normpath(path))
            if path.parts[:1] == (os.pardir,):
                raise RowError(place, f"{shown} leaves that folder; set image_dir to one that holds all images")
            path = rules.directory / path
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        raise RowError(place, f"there is no file {shown}") from error
    # A home that isn't known, a name too long for the file system, a character that no name can have.
    except (OSError, RuntimeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else shortened(str(error), 120)
        hint = "; base64 is written as `base64`" if len(value) > _LONGEST_NAME else ""
        raise RowError(place, f"there is no file {shown}: {reason}{hint}") from error
    if stat.S_ISDIR(mode):
        raise RowError(place, f"{shown} is a folder, not an image")
    if not stat.S_ISREG(mode):
        raise RowError(place, f"{shown} is no regular file")
    return ImageSource(str(path), path=path)


def _url(value: str, place: str, rules: ImageRules) -> ImageSource:
    shown = repr(shortened(value))
    try:
        parts = urlsplit(value)
    except ValueError as error:
        raise RowError(place, f"{shown} is no URL: {shortened(str(error), 120)}") from error
    if parts.scheme == "data":
        head, comma, data = value.partition(",")
        if not comma:
            raise RowError(place, "is a data URL without data")
        held = _decoded(data, place) if head.endswith(";base64") else unquote_to_bytes(data)
        return ImageSource("its data URL", held=held)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise RowError(place, f"{shown} names the host {shortened(parts.netloc)!r}; write file:///… or a path")
        return _file(unquote(parts.path), place, rules)
    if not parts.scheme:
        raise RowError(place, f"{shown} is no URL; write a file as `path`")
    if parts.scheme not in ("http", "https"):
        scheme = shortened(parts.scheme)
        raise RowError(place, f"is a URL of the scheme {scheme!r}; known are http, https, file and data")
    if not rules.urls:
        raise RowError(place, f"is the URL {shown}, and none is read unless image_urls: true says so")
    try:
        held = _fetched(value)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise RowError(place, f"{shown} can't be read: {shortened(str(error), 120)}") from error
    return ImageSource(shortened(value), held=held)


def _fetched(url: str) -> bytes:
    """What a server sends, within a time for all of it. Raises what `urlopen` does, and `ValueError`."""
    end = time.monotonic() + _TIMEOUT_SECONDS
    held = bytearray()
    with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as reply:
        # One read of the socket each: the timeout is that of one, and a slow server could have any number.
        while chunk := reply.read1(_CHUNK_BYTES):
            held += chunk
            if len(held) > _MOST_BYTES:
                raise ValueError(f"it holds more than {_MOST_BYTES >> 20} MiB")
            if time.monotonic() > end:
                raise TimeoutError(f"{len(held):,} bytes came in {_TIMEOUT_SECONDS:g} seconds, and not all")
        declared = reply.headers.get("Content-Length", "")
    if declared.isdecimal() and len(held) < int(declared):
        raise ValueError(f"{len(held):,} of {int(declared):,} bytes came")
    return bytes(held)


def _decoded(text: str, place: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RowError(place, f"is no base64 text: {error}") from error


def decoded(data: bytes, name: str) -> Image.Image:
    """The image as a viewer shows it: turned as its EXIF data says, in RGB, its first frame. Raises `ImageError`."""
    if not data:
        raise ImageError(f"{name} is empty")
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as opened:
            most = Image.MAX_IMAGE_PIXELS
            if most is not None and opened.width * opened.height > most:
                raise Image.DecompressionBombError
            opened.load()
            return _in_rgb(ImageOps.exif_transpose(opened))
    # Damaged files make the decoders of many formats fail, each in its way.
    except Exception as error:
        raise ImageError(f"{name} can't be decoded: {_reason(error, data)}") from error


def _in_rgb(image: Image.Image) -> Image.Image:
    # Pillow cuts these at 255 instead of scaling them, which makes them white or black.
    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > _MOST_GREY:
            raise ValueError(f"its values are from {values.min()} to {values.max()}, not of 16 bits; save it with 8")
        eight = (values + _GREY_STEP // 2) // _GREY_STEP
        return Image.fromarray(eight.astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError("its values are floating-point numbers, whose white is not known; save it with 8 bits")
    # What is transparent keeps its colour, and Pillow warns of what it would convert of it.
    image.info.pop("transparency", None)
    return image.convert("RGB")


def _reason(error: Exception, data: bytes) -> str:
    if isinstance(error, UnidentifiedImageError):
        return f"it is no image of a known format ({', '.join(_FORMATS)})"
    if isinstance(error, (Image.DecompressionBombError, Image.DecompressionBombWarning)):
        return f"it has more than {Image.MAX_IMAGE_PIXELS:,} pixels; reduce it"
    return " ".join(str(error).split()).replace(f"<_io.BytesIO object at {id(data):#x}>", "it")
