"""Where images come from, what is wrong with them, and what they look like when they are read."""

from __future__ import annotations

import base64
import io
import struct
import threading
import zlib
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from hp_core.data.chat.conversation import ImagePart, RowError
from hp_core.data.images.references import ImageError, ImageRules, decoded, source_of
from tests.pictures import as_base64, picture, png


def read(value: Any, **rules: Any) -> bytes:
    return source_of(ImagePart(value, "images[0]"), value, ImageRules(**rules)).read()


def test_every_form_gives_the_bytes(tmp_path: Path) -> None:
    content = png(picture())
    path = tmp_path / "one.png"
    spaced = tmp_path / "one two.png"
    spaced.write_bytes(content)
    path.write_bytes(content)
    text = base64.b64encode(content).decode()
    for value in (
        "one.png",
        str(path),
        {"path": "one.png"},
        {"path": "elsewhere.png", "bytes": content},
        {"bytes": content, "path": None},
        content,
        {"bytes": text},
        {"base64": text},
        {"base64": text[:20] + "\n" + text[20:]},
        f"data:image/png;base64,{text}",
        {"url": f"data:image/png;base64,{text}"},
        {"url": path.as_uri()},
        {"image_url": path.as_uri()},
        spaced.as_uri(),
    ):
        assert read(value, directory=tmp_path) == content, value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("none.png", r"there is no file '.*none.png'"),
        ("sub", r"images\[0\]: 'sub' in '.*' is a folder, not an image"),
        ("", "is empty, not a path"),
        ({"path": ""}, r"images\[0\].path: is empty, not a path"),
        (7, r"is a number, not a path, a URL, {bytes: …} or {base64: …}"),
        ({"path": 7}, r"images\[0\].path: is a number"),
        ({"path": "http://h/a.png"}, "is a URL, not a path; write it as `url` and set image_urls: true"),
        ({"path": "data:image/png;base64,aa"}, "is a URL, not a path; write it as `url`$"),
        ({"image_url": "img/a.png"}, r"images\[0\].image_url: 'img/a.png' is no URL; write a file as `path`"),
        ({"url": "img/a.png"}, r"images\[0\].url: 'img/a.png' is no URL; write a file as `path`"),
        ("s3://bucket/a.png", "is a URL of the scheme 's3'; known are http, https, file and data"),
        ("file://images/a.png", "names the host 'images'; write file:///… or a path"),
        ({"file": "a.png"}, "gives file, not a path"),
        ({}, "gives nothing, not a path"),
        ({"base64": "§§"}, "is no base64 text"),
        ("data:image/png;base64", "is a data URL without data"),
        ("http://127.0.0.1:9/a.png", "is the URL 'http://127.0.0.1:9/a.png', and none is read unless image_urls: true"),
        ({"url": "ftp://host/a.png"}, "is a URL of the scheme 'ftp'"),
    ],
)
def test_what_is_no_image_is_told_where_it_stands(value: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    with pytest.raises(RowError, match=message) as found:
        read(value, directory=tmp_path)
    assert found.value.path.startswith("images[0]")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("~nobody-of-that-name/x.png", "there is no file '~nobody-of-that-name/x.png': Could not determine home"),
        ("http://[x/a.png", r"'http://\[x/a.png' is no URL: Invalid IPv6 URL"),
        ("http://127.0.0.1:9/a b.png", "can't be read: URL can't contain control characters"),
        ("a" * 300, f"there is no file '{'a' * 29}…{'a' * 30}' in .*: File name too long; base64 is written as"),
        ("a\0b.png", "there is no file 'a.x00b.png'"),
        ("\ud800.png", "there is no file"),
        ({"x" * 90: "a.png"}, f"gives {'x' * 29}…{'x' * 30}, not"),
    ],
)
def test_values_that_nothing_can_read_are_faults_of_their_row(value: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(RowError, match=message) as found:
        read(value, directory=tmp_path, urls=True)
    assert found.value.path == "images[0]"
    assert len(str(found.value).replace(str(tmp_path), "")) < 250


def test_a_relative_path_needs_a_folder() -> None:
    with pytest.raises(RowError, match=r"is the relative path 'a.png'; say with image_dir what it is relative to"):
        read("a.png")


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_urls_are_fetched_where_the_recipe_says_so(tmp_path: Path, address: str) -> None:
    (tmp_path / "a.png").write_bytes(png(picture()))
    assert read(f"{address}/a.png", urls=True) == png(picture())
    with pytest.raises(RowError, match="none is read unless"):
        read(f"{address}/a.png")
    with pytest.raises(RowError, match=r"can't be read: HTTP Error 404"):
        read({"url": f"{address}/b.png"}, urls=True)


def jpeg(image: Image.Image, **settings: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=100, subsampling=0, **settings)
    return file.getvalue()


def test_a_turned_picture_is_shown_upright() -> None:
    """EXIF orientation 6: the camera's top is on the right."""
    image = Image.new("RGB", (32, 16), (0, 0, 0))
    image.paste((255, 255, 255), (0, 0, 16, 16))
    exif = Image.Exif()
    exif[0x0112] = 6
    found = decoded(jpeg(image, exif=exif), "it")
    assert found.size == (16, 32)
    assert found.getpixel((8, 4)) == (255, 255, 255)
    assert found.getpixel((8, 28)) == (0, 0, 0)


@pytest.mark.parametrize("mode", ["CMYK", "L", "RGBA", "P", "1", "I;16"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    file = io.BytesIO()
    source = Image.new("L", (8, 8), 200) if mode == "I;16" else picture(8, 8)
    source.convert("I;16" if mode == "I;16" else mode).save(file, "TIFF")
    found = decoded(file.getvalue(), "it")
    assert (found.mode, found.size) == ("RGB", (8, 8))


def test_one_pixel_is_a_picture() -> None:
    assert decoded(png(picture(1, 1)), "it").size == (1, 1)


def truncated() -> bytes:
    content = png(picture(64, 64))
    return content[: len(content) // 2]


def bomb() -> bytes:
    """A PNG that says it is 60,000 pixels wide and high."""
    content = bytearray(png(picture(4, 4)))
    content[16:24] = struct.pack(">II", 60000, 60000)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    return bytes(content)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it.png is empty"),
        (b"\0" * 400, "it.png can't be decoded: it is no image of a known format"),
        (b"text", "it.png can't be decoded: it is no image of a known format"),
        (truncated(), "it.png can't be decoded: .*truncated"),
        (bomb(), "it.png can't be decoded: .*decompression bomb"),
    ],
)
def test_damaged_pictures_are_told_with_their_name(content: bytes, reason: str) -> None:
    with pytest.raises(ImageError, match=reason):
        decoded(content, "it.png")


def test_base64_of_the_helpers_is_a_picture() -> None:
    assert decoded(base64.b64decode(as_base64(picture())), "it").size == (32, 32)
