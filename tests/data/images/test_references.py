"""Where images come from, what is wrong with them, and what they look like when they are read."""

from __future__ import annotations

import base64
import io
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
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


@pytest.mark.parametrize("value", ["../a.png", "sub/../../a.png", {"path": "./../data/../../a.png"}, ".."])
def test_a_relative_path_stays_in_its_folder(value: Any, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(picture()))
    (tmp_path / "data" / "sub").mkdir(parents=True)
    with pytest.raises(RowError, match=r" in '.*data' leaves that folder; set image_dir to one that holds all images"):
        read(value, directory=tmp_path / "data")


def test_paths_inside_and_absolute_ones_are_read(tmp_path: Path) -> None:
    """Links are followed: whoever may write the folder decides what is in it."""
    outside, folder = tmp_path / "a.png", tmp_path / "data"
    outside.write_bytes(png(picture()))
    (folder / "sub").mkdir(parents=True)
    (folder / "..b.png").write_bytes(png(picture(seed=1)))
    (folder / "link.png").symlink_to(outside)
    assert read("sub/../..b.png", directory=folder) == png(picture(seed=1))
    assert read("link.png", directory=folder) == png(picture())
    assert read(str(outside), directory=folder) == png(picture())


def test_a_relative_path_needs_a_folder() -> None:
    with pytest.raises(RowError, match=r"is the relative path 'a.png'; say with image_dir what it is relative to"):
        read("a.png")


@contextmanager
def serving(handler: Any) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

    with serving(partial(Quiet, directory=str(tmp_path))) as found:
        yield found


def test_urls_are_fetched_where_the_recipe_says_so(tmp_path: Path, address: str) -> None:
    (tmp_path / "a.png").write_bytes(png(picture()))
    assert read(f"{address}/a.png", urls=True) == png(picture())
    with pytest.raises(RowError, match="none is read unless"):
        read(f"{address}/a.png")
    with pytest.raises(RowError, match=r"can't be read: HTTP Error 404"):
        read({"url": f"{address}/b.png"}, urls=True)


class Dribbling(BaseHTTPRequestHandler):
    """Sends two bytes at once and says that there are ten: one by one for `/slow.png`, or no more."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "10")
        self.end_headers()
        self.wfile.write(b"ab")
        for _ in range(6 if self.path == "/slow.png" else 0):
            time.sleep(0.1)
            self.wfile.write(b"c")
            self.wfile.flush()

    def log_message(self, *args: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("name", "reason"),
    [("slow.png", "[3-7] bytes came in 0.3 seconds, and not all"), ("short.png", "2 of 10 bytes came")],
)
def test_a_server_has_one_time_for_everything(name: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hp_core.data.images.references._TIMEOUT_SECONDS", 0.3)
    with serving(Dribbling) as address, pytest.raises(RowError, match=f"{name}' can't be read: {reason}"):
        read(f"{address}/{name}", urls=True)


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


def saved(image: Image.Image, kind: str, **settings: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **settings)
    return file.getvalue()


@pytest.mark.parametrize("mode", ["CMYK", "L", "RGBA", "P", "1"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    source = picture(8, 8).convert(mode)
    found = decoded(saved(source, "TIFF"), "it")
    assert (found.mode, found.size) == ("RGB", (8, 8))
    np.testing.assert_array_equal(np.asarray(found), np.asarray(source.convert("RGB")))


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [("<u2", "TIFF"), (">u2", "TIFF"), ("<u2", "PNG"), ("<i4", "TIFF"), ("<u2", "PPM")],
)
def test_sixteen_bits_are_scaled_to_eight(dtype: str, kind: str) -> None:
    values = np.array([[0, 128, 129, 255], [256, 300, 25700, 32768], [65406, 65407, 65534, 65535]], dtype)
    found = np.asarray(decoded(saved(Image.fromarray(values), kind), "it"))
    wanted = [[0, 0, 1, 1], [1, 1, 100, 128], [254, 255, 255, 255]]
    for channel in range(3):
        assert found[..., channel].tolist() == wanted


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (np.full((2, 2), 0.5, np.float32), "its values are floating-point numbers, whose white is not known; save it"),
        (np.array([[0, 65536]], np.int32), "its values are from 0 to 65536, not of 16 bits; save it with 8"),
        (np.array([[-1, 7]], np.int32), "its values are from -1 to 7, not of 16 bits"),
    ],
)
def test_values_whose_white_is_unknown_are_refused(values: Any, reason: str) -> None:
    with pytest.raises(ImageError, match=f"it.tiff can't be decoded: {reason}"):
        decoded(saved(Image.fromarray(values), "TIFF"), "it.tiff")


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_keeps_its_colour(mode: str, recwarn: pytest.WarningsRecorder) -> None:
    source = Image.new("RGBA", (2, 1), (102, 102, 102, 0))
    source.putpixel((1, 0), (51, 51, 51, 255))
    settings = {"transparency": b"\0\xff"} if mode == "P" else {}
    found = decoded(saved(source.convert("RGB" if mode == "P" else mode).convert(mode), "PNG", **settings), "it")
    assert np.asarray(found)[0, :, 0].tolist() == [102, 51]
    assert not recwarn.list


def test_of_an_animation_the_first_frame_is_read() -> None:
    first, second = Image.new("RGB", (4, 4), (255, 0, 0)), Image.new("RGB", (4, 4), (0, 0, 255))
    found = decoded(saved(first, "GIF", save_all=True, append_images=[second]), "it")
    assert found.getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "MPO"])
def test_the_usual_formats_are_read(kind: str) -> None:
    image = Image.new("RGB", (16, 16), (10, 200, 30))
    more = {"save_all": True, "append_images": [image]} if kind == "MPO" else {}
    found = decoded(saved(image, kind, **more), "it").getpixel((4, 4))
    assert np.abs(np.array(found) - (10, 200, 30)).max() < 12


@pytest.mark.parametrize("kind", ["ICO", "TGA", "EPS", "JPEG2000"])
def test_rare_formats_are_refused(kind: str) -> None:
    with pytest.raises(ImageError, match=r"no image of a known format \(PNG, JPEG, WEBP, GIF, BMP, TIFF, PPM\)"):
        decoded(saved(picture(16, 16), kind), "it")


def test_one_pixel_is_a_picture() -> None:
    assert decoded(png(picture(1, 1)), "it").size == (1, 1)


def truncated() -> bytes:
    content = png(picture(64, 64))
    return content[: len(content) // 2]


def bomb(size: int) -> bytes:
    """A PNG that says it is so many pixels wide and high."""
    content = bytearray(png(picture(4, 4)))
    content[16:24] = struct.pack(">II", size, size)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    return bytes(content)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it.png is empty"),
        (b"\0" * 400, "it.png can't be decoded: it is no image of a known format"),
        (b"text", "it.png can't be decoded: it is no image of a known format"),
        (truncated(), "it.png can't be decoded: .*truncated"),
        (bomb(60000), "it.png can't be decoded: it has more than 89,478,485 pixels; reduce it"),
        (bomb(10000), "it.png can't be decoded: it has more than 89,478,485 pixels; reduce it"),
    ],
)
def test_damaged_pictures_are_told_with_their_name(content: bytes, reason: str) -> None:
    with pytest.raises(ImageError, match=reason):
        decoded(content, "it.png")


def test_base64_of_the_helpers_is_a_picture() -> None:
    assert decoded(base64.b64decode(as_base64(picture())), "it").size == (32, 32)
