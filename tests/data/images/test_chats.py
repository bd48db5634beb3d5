"""Chats with images: placeholders and pixels always fit, whatever the format, and nothing is cut inside an image."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from hp_core.data.images.pixels import ImageTransform
from hp_core.data.images.table import RECORD
from hp_core.data.layout import Layout
from hp_core.data.packing import PackedRows, plan_rows
from hp_core.data.pieces import kept_documents
from hp_core.data.protocols import Datasets
from hp_core.data.rows import WithEmptyRow
from hp_core.data.streaming import Cursor
from hp_core.data.survey import survey
from hp_core.errors import ArgumentError, InputError, RunError
from hp_plugins.collators.images import ImageRows
from hp_plugins.collators.rows import rows as stacked
from hp_plugins.datasets.chat import chat
from hp_plugins.datasets.text import text
from hp_plugins.tokenizers.pretrained import pretrained
from hp_plugins.tokenizers.processor import PretrainedProcessor, processor
from tests.pictures import IMAGE, TEMPLATE, as_base64, asked, other_family, picture, png, save_processor, write_rows


@pytest.fixture(scope="module")
def vl(tmp_path_factory: pytest.TempPathFactory) -> PretrainedProcessor:
    return processor(str(save_processor(tmp_path_factory.mktemp("processor"))))


def build(vl: PretrainedProcessor, path: Path, **arguments: Any) -> Datasets:
    given = {"max_seq_len": 96, "packing": "none", "cache_dir": str(path.parent / "cache"), "num_proc": 1, **arguments}
    return chat(files=str(path), tokenizer=vl, transform=ImageTransform(vl), **given)


def rows_of(datasets: Datasets) -> list[dict[str, Any]]:
    return [dict(datasets.train[number]) for number in range(len(datasets.train))]


def one(vl: PretrainedProcessor, tmp_path: Path, row: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    (found,) = rows_of(build(vl, write_rows(tmp_path / "rows.jsonl", [row]), **arguments))
    return found


def tokens_of(row: dict[str, Any]) -> int:
    return int((row["input_ids"] == IMAGE).sum())


# Sizes as given, and the tokens of 16 by 16 pixels that they come to.
SIZES = {(32, 32): 4, (64, 32): 8, (16, 48): 3, (300, 200): 12, (1, 1): 1}


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_an_image_has_as_many_tokens_as_features(number: int, vl: PretrainedProcessor, tmp_path: Path) -> None:
    sizes = list(SIZES)[:number]
    parts = [{"base64": as_base64(picture(*size))} for size in sizes]
    row = one(vl, tmp_path, {"messages": asked(*parts, "what?")})
    assert tokens_of(row) == sum(SIZES[size] for size in sizes)
    if not number:
        assert "images" not in row
        return
    images = row["images"]
    assert len(images["image_grid_thw"]) == number
    assert [int(grid.prod()) // 4 for grid in images["image_grid_thw"]] == [SIZES[size] for size in sizes]
    assert len(images["pixel_values"]) == 4 * tokens_of(row)


@pytest.mark.parametrize("size", SIZES)
def test_pictures_of_any_shape_are_resized_to_whole_tokens(
    size: tuple[int, int], vl: PretrainedProcessor, tmp_path: Path
) -> None:
    assert (
        tokens_of(one(vl, tmp_path, {"messages": asked({"base64": as_base64(picture(*size))}, "what?")})) == SIZES[size]
    )


def test_rows_are_what_transformers_makes_of_the_conversation(vl: PretrainedProcessor, tmp_path: Path) -> None:
    """Ids as its own template, expanded by hand; labels are the answer's tokens and its stop token."""
    images = [picture(32, 32), picture(64, 32, seed=1)]
    parts = [{"base64": as_base64(image)} for image in images]
    row = one(vl, tmp_path, {"messages": asked("first ", parts[0], " second ", parts[1], " what?", answer="a ring")})
    tokenizer = AutoTokenizer.from_pretrained(vl.name)
    text = (
        "<|im_start|>user\nfirst <|vision_start|>"
        + "<|image_pad|>" * 4
        + "<|vision_end|> second <|vision_start|>"
        + "<|image_pad|>" * 8
        + "<|vision_end|> what?<|im_end|>\n<|im_start|>assistant\n"
    )
    prompt = tokenizer(text)["input_ids"]
    answer = tokenizer("a ring<|im_end|>")["input_ids"]
    whole = [*prompt, *answer, *tokenizer("\n")["input_ids"]]
    assert row["input_ids"][: len(whole)].tolist() == whole
    wanted = np.full(96, -100)
    wanted[len(prompt) - 1 : len(prompt) - 1 + len(answer)] = answer
    assert row["labels"].tolist() == wanted.tolist()
    for number, image in enumerate(images):
        alone = vl.image_inputs(image)
        begin, end = (0, 16) if number == 0 else (16, 48)
        np.testing.assert_array_equal(row["images"]["pixel_values"][begin:end], alone["pixel_values"])


FORMATS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "messages": ({}, {"messages": asked({"path": "a.png"}, "what?")}),
    "url parts": (
        {},
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + as_base64(picture())}},
                        {"type": "text", "text": "what?"},
                    ],
                },
                {"role": "assistant", "content": "yes"},
            ]
        },
    ),
    "own images": ({}, {"messages": asked({}, "what?"), "images": ["a.png"]}),
    "own image": ({}, {"messages": asked({}, "what?"), "image": {"path": "a.png"}}),
    "marks": (
        {},
        {
            "messages": [{"role": "user", "content": "<image>what?"}, {"role": "assistant", "content": "yes"}],
            "images": ["a.png"],
        },
    ),
    "sharegpt": (
        {"format": "sharegpt"},
        {
            "conversations": [{"from": "human", "value": "<image>what?"}, {"from": "gpt", "value": "yes"}],
            "image": "a.png",
        },
    ),
    "alpaca": ({"format": "alpaca"}, {"instruction": "<image>what?", "output": "yes", "images": ["a.png"]}),
    "prompt_completion": (
        {"format": "prompt_completion"},
        {"prompt": "<image>what?", "completion": "yes", "images": ["a.png"]},
    ),
    "mapping": (
        {"mapping": {"user": "ask", "assistant": "say"}},
        {"ask": "<image>what?", "say": "yes", "images": ["a.png"]},
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_takes_images(name: str, vl: PretrainedProcessor, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(picture()))
    arguments, row = FORMATS[name]
    found = one(vl, tmp_path, row, **arguments)
    wanted = one(vl, tmp_path, {"messages": asked({"base64": as_base64(picture())}, "what?")})
    for key in ("input_ids", "labels"):
        np.testing.assert_array_equal(found[key], wanted[key])
    np.testing.assert_array_equal(found["images"]["pixel_values"], wanted["images"]["pixel_values"])


def test_images_of_a_parquet_file(vl: PretrainedProcessor, tmp_path: Path) -> None:
    """As `datasets` writes its Image feature: bytes, and the path of another machine."""
    images = [[{"bytes": png(picture(seed=seed)), "path": "/gone/a.png"}] for seed in range(3)]
    chats = [[{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": f"{n}"}] for n in range(3)]
    pq.write_table(pa.table({"messages": chats, "images": images}), tmp_path / "rows.parquet")
    rows = rows_of(build(vl, tmp_path / "rows.parquet"))
    for seed, row in enumerate(rows):
        np.testing.assert_array_equal(
            row["images"]["pixel_values"], vl.image_inputs(picture(seed=seed))["pixel_values"]
        )


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "none of its own": (
        {"messages": asked({}, "?")},
        r"messages\[0\].content\[0\]: is image 1 of the row's own, and the row has no column images or image",
    ),
    "one too few": (
        {"messages": asked({}, {}, "?"), "images": ["a.png"]},
        r"messages\[0\].content\[1\]: is image 2 of the row's own, and the row has 1 in 'images'",
    ),
    "two for one mark": (
        {
            "messages": [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "y"}],
            "images": ["a.png"] * 2,
        },
        r"images\[1\]: no turn refers to it: 2 images, 1 places; write {type: image} or <image> where it belongs",
    ),
    "a mark without an image": (
        {
            "messages": [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "y"}],
            "images": [],
        },
        r"messages\[0\]: <image>: is image 1 of the row's own, and the row has 0 in 'images'",
    ),
    "two columns": (
        {
            "messages": [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "y"}],
            "images": [],
            "image": "a.png",
        },
        r"image: the row has images in 'images', too; leave one of them out, or null",
    ),
    "mark in plain text": (
        {"messages": asked({"path": "a.png"}, "a <|image_pad|> mark")},
        r"messages\[0\].content: its text spells '<\|image_pad\|>', which stands for images or videos; take it out",
    ),
    "mark of a video": (
        {"messages": asked({"path": "a.png"}, "a <|video_pad|> mark")},
        r"messages\[0\].content: its text spells '<\|video_pad\|>'",
    ),
    "begin of an image": ({"messages": asked("a <|vision_start|>")}, r"its text spells '<\|vision_start\|>'"),
    "end of an image in an answer": (
        {"messages": asked({"path": "a.png"}, "?", answer="a<|vision_end|>")},
        r"messages\[1\].content: its text spells '<\|vision_end\|>'",
    ),
    "mark in a call": (
        {
            "messages": [
                {"role": "user", "content": "?"},
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": "<|video_pad|>"}}}]},
            ]
        },
        r"messages\[1\].tool_calls: its text spells '<\|video_pad\|>'",
    ),
    "in an answer": (
        {
            "messages": [
                {"role": "user", "content": "?"},
                {"role": "assistant", "content": [{"type": "image", "path": "a.png"}]},
            ]
        },
        r"messages\[1\].content: an answer can't hold an image",
    ),
    "truncated": ({"messages": asked({"path": "half.png"}, "?")}, r"half.png can't be decoded: .*truncated"),
    "absent": (
        {"messages": asked({"path": "none.png"}, "?")},
        r"messages\[0\].content\[0\].path: there is no file '.*none.png'",
    ),
    "a number": ({"messages": asked({"path": 3}, "?")}, r"messages\[0\].content\[0\].path: is a number"),
    "a path for a URL": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": "a.png"}]},
                {"role": "assistant", "content": "y"},
            ]
        },
        r"messages\[0\].content\[0\].image_url: 'a.png' is no URL; write a file as `path`",
    ),
    "a path for a nested URL": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png", "detail": "low"}}]},
                {"role": "assistant", "content": "y"},
            ]
        },
        r"messages\[0\].content\[0\].image_url.url: 'a.png' is no URL; write a file as `path`",
    ),
    "zero bytes": ({"messages": asked({"path": "zero.png"}, "?")}, r"zero.png is empty"),
    "too narrow": (
        {"messages": asked({"base64": as_base64(picture(2, 600))}, "?")},
        "its base64: absolute aspect ratio must be smaller than 200",
    ),
    "unknown key": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image", "file": "a.png"}]},
                {"role": "assistant", "content": "y"},
            ]
        },
        r"messages\[0\].content\[0\].file: is unknown in a part of type 'image'",
    ),
    "several values": (
        {"messages": asked({"path": "a.png", "base64": "aa"}, "?")},
        r"messages\[0\].content\[0\]: gives its image in several ways: path, base64",
    ),
    "unknown type": (
        {"messages": [{"role": "user", "content": [{"type": "video"}]}, {"role": "assistant", "content": "y"}]},
        r"is 'video'; parts of these types can be trained on: text, image, image_url",
    ),
}


def write_files(folder: Path) -> None:
    content = png(picture(64, 64))
    (folder / "a.png").write_bytes(png(picture()))
    (folder / "half.png").write_bytes(content[: len(content) // 2])
    (folder / "zero.png").write_bytes(b"")


@pytest.mark.parametrize("columns", [{}, {"images": None}, {"images": None, "image": None}])
def test_a_mark_is_text_where_the_row_has_no_images(
    columns: dict[str, Any], vl: PretrainedProcessor, tmp_path: Path
) -> None:
    chat_of = [{"role": "user", "content": "an <image> tag"}, {"role": "assistant", "content": "y"}]
    row = one(vl, tmp_path, {"messages": chat_of, **columns})
    assert vl.spell(row["input_ids"].tolist()).startswith("<|im_start|>user\nan <image> tag<|im_end|>")


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_row_is_told_with_its_place(name: str, vl: PretrainedProcessor, tmp_path: Path) -> None:
    write_files(tmp_path)
    row, reason = BROKEN[name]
    good = {"messages": asked({"path": "a.png"}, "?")}
    path = write_rows(tmp_path / "rows.jsonl", [good, row])
    with pytest.raises(InputError, match=rf"rows.jsonl:2: .*{reason}"):
        build(vl, path)


@pytest.mark.parametrize("streaming", [False, True])
def test_broken_images_are_left_out_and_counted_up_to_a_limit(
    streaming: bool, vl: PretrainedProcessor, tmp_path: Path
) -> None:
    write_files(tmp_path)
    good = [{"messages": asked({"base64": as_base64(picture(seed=n))}, "?", answer=str(n))} for n in range(4)]
    bad = [BROKEN[name][0] for name in ("truncated", "absent", "zero bytes")]
    path = write_rows(tmp_path / "rows.jsonl", [good[0], bad[0], good[1], bad[1], bad[2], good[2], good[3]])
    if streaming:
        datasets = chat(
            files=str(path),
            tokenizer=vl,
            transform=ImageTransform(vl),
            max_seq_len=96,
            packing="none",
            on_error="skip",
            max_errors=3,
            streaming=True,
        )
        assert isinstance(datasets.train, WithEmptyRow)
        assert datasets.train.streamed is not None
        block = next(datasets.train.streamed.stream.blocks(Cursor()))
        packed: Any = datasets.train.streamed.packed(block)
        assert block.num_faults == 3
        rows = [dict(packed[number]) for number in range(len(packed))]
    else:
        datasets = build(vl, path, on_error="skip", max_errors=3)
        report = datasets.train.report
        assert report is not None
        assert (report.faulty_rows, report.documents, report.images) == (3, 4, 4)
        rows = rows_of(datasets)
    for number, row in enumerate(rows):
        np.testing.assert_array_equal(
            row["images"]["pixel_values"], vl.image_inputs(picture(seed=number))["pixel_values"]
        )
    if not streaming:
        with pytest.raises(InputError, match="more faulty rows than the 2 of max_errors"):
            build(vl, path, on_error="skip", max_errors=2)


def test_a_changed_picture_is_encoded_again_and_never_trained_on_unseen(
    vl: PretrainedProcessor, tmp_path: Path
) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(png(picture(32, 32)))
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": asked({"path": "a.png"}, "?")}])
    first = build(vl, path)
    file.write_bytes(png(picture(64, 32)))
    with pytest.raises(RunError, match=r"rows.jsonl:1: .*a.png has changed since its row was encoded; start again"):
        first.train[0]
    again = build(vl, path)
    assert tokens_of(rows_of(again)[0]) == 8
    assert again.train.fingerprint != first.train.fingerprint
    file.unlink()
    with pytest.raises(RunError, match=r"a.png can't be read: No such file"):
        again.train[0]


@pytest.mark.parametrize("is_writable", [True, False])
def test_a_change_that_sizes_and_times_hide_is_encoded_again_once_it_is_found(
    is_writable: bool, vl: PretrainedProcessor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.bmp"
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": asked({"path": "a.bmp"}, "?")}])
    picture(seed=1).save(file)
    os.utime(file, (1, 1))
    first = build(vl, path)
    picture(seed=2).save(file)
    os.utime(file, (1, 1))
    assert build(vl, path).train.fingerprint == first.train.fingerprint
    if not is_writable:

        def refused(*_: object) -> None:
            raise PermissionError

        monkeypatch.setattr(Path, "touch", refused)
        with pytest.raises(RunError, match=r"has changed since .*; delete '.*cache/[0-9a-f]+', then start again"):
            first.train[0]
        return
    with pytest.raises(RunError, match=r"a.bmp has changed since its row was encoded; start again"):
        first.train[0]
    for _ in range(2):
        again = build(vl, path)
        (row,) = rows_of(again)
        np.testing.assert_array_equal(row["images"]["pixel_values"], vl.image_inputs(picture(seed=2))["pixel_values"])
    assert not list((tmp_path / "cache").glob("*/outdated"))


@pytest.mark.parametrize("policy", ["truncate", "truncate_eos"])
@pytest.mark.parametrize(
    ("train_on", "length"), [*(("assistant", n) for n in range(14, 40)), *(("all", n) for n in range(5, 40))]
)
def test_no_cut_falls_inside_an_image(
    length: int, policy: str, train_on: str, vl: PretrainedProcessor, tmp_path: Path
) -> None:
    """Two images and an answer behind each: rows end before, between or behind the images, never within."""
    turns = [
        *asked({"base64": as_base64(picture())}, "a", answer="b"),
        *asked({"base64": as_base64(picture(64, 32))}, "c", answer="d"),
    ]
    short = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": turns}, {"messages": short}])
    datasets = build(vl, path, max_seq_len=length, length_policy=policy, train_on=train_on)
    images = 0
    for row in rows_of(datasets):
        grids = row["images"]["image_grid_thw"] if "images" in row else np.zeros((0, 3), dtype=int)
        assert tokens_of(row) == sum(int(grid.prod()) // 4 for grid in grids)
        images += len(grids)
        assert vl.image_token_id not in row["labels"]
    report = datasets.train.report
    assert report is not None
    assert report.images == images
    assert report.images + report.cut_images in (0, 2)


def test_an_image_that_ends_where_the_row_does_gives_way_to_the_end_token(
    vl: PretrainedProcessor, tmp_path: Path
) -> None:
    """Also where another ends where it begins."""
    ends = np.array([4, 8, 12])
    records = np.zeros(3, dtype=RECORD)
    records["start"], records["size"] = ends - 4, 4
    lengths = np.array([20])
    for length, policy, wanted in ((12, "truncate", 12), (12, "truncate_eos", 0), (13, "truncate_eos", 13)):
        layout = Layout(length, length_policy=policy)
        pieces, left_out = kept_documents(lengths, layout, None, None, records)
        assert pieces.sizes.tolist() == ([wanted] if wanted else [])
        assert not left_out.cut_images or wanted


def test_rows_are_the_same_wherever_their_pictures_lie(vl: PretrainedProcessor, tmp_path: Path) -> None:
    fingerprints = []
    for name in ("here", "there"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "a.png").write_bytes(png(picture(32, 32)))
        path = write_rows(folder / "rows.jsonl", [{"messages": asked({"path": "a.png"}, "?")}])
        datasets = build(vl, path, cache_dir=str(tmp_path / "cache"))
        fingerprints.append(datasets.train.fingerprint)
        # Read from where it lies now.
        assert tokens_of(rows_of(datasets)[0]) == 4
        shutil.rmtree(folder)
    assert fingerprints[0] == fingerprints[1]


def test_tokens_of_images_are_reserved_and_others_are_not(vl: PretrainedProcessor, tmp_path: Path) -> None:
    assert vl.reserved_tokens == ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
    other_family("llava", tmp_path)
    assert set(processor(str(tmp_path)).reserved_tokens) == set(vl.reserved_tokens)


@pytest.mark.parametrize("token", ["<|image_pad|>", "<|vision_start|>", "<|video_pad|>"])
def test_plain_text_that_spells_a_token_of_images_is_faulty(
    token: str, vl: PretrainedProcessor, tmp_path: Path
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"text": "good<|im_end|>"}, {"text": f"a {token} b"}])
    arguments: dict[str, Any] = {"files": str(path), "cache_dir": str(tmp_path / "cache"), "max_seq_len": 8}
    with pytest.raises(InputError, match=rf"rows.jsonl:2: its text spells '{re.escape(token)}', which stands for"):
        text(**arguments, tokenizer=vl)
    datasets = text(**arguments, tokenizer=vl, on_error="skip")
    assert vl.spell(datasets.train[0]["input_ids"].tolist()).startswith("good<|im_end|>")
    # A tokenizer alone has no images to mix them up with.
    assert text(**arguments, tokenizer=pretrained(vl.name)).train.report.faulty_rows == 0


def test_split_would_cut_images(vl: PretrainedProcessor, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": asked({"base64": as_base64(picture())}, "?")}])
    with pytest.raises(ArgumentError, match=r"length_policy: 'split' would cut images in two; write drop, or truncate"):
        build(vl, path, length_policy="split")


RECORDS = st.lists(st.tuples(st.integers(4, 30), st.lists(st.integers(1, 9), max_size=3)), min_size=1, max_size=12)


def of_documents(documents: list[tuple[int, list[int]]]) -> tuple[Any, Any]:
    """Documents of some text and images of so many tokens, a token being ten pixels."""
    lengths = np.array([text + sum(images) for text, images in documents])
    rows = []
    for number, (_, images) in enumerate(documents):
        begin = 1
        for size in images:
            rows.append((number, begin, size, 10 * size, number, 0, 0, 0, 0, False))
            begin += size
    return lengths, np.array(rows, dtype=RECORD)


@settings(max_examples=150, deadline=None)
@given(RECORDS, st.integers(20, 60), st.sampled_from(["best_fit", "sequential"]), st.integers(30, 200))
def test_rows_keep_to_their_tokens_and_pixels(
    documents: list[tuple[int, list[int]]], length: int, packing: Any, most: int
) -> None:
    lengths, records = of_documents(documents)
    pixels = np.bincount(records["document"], weights=records["pixels"], minlength=len(lengths))
    layout = Layout(length, packing, "drop", most)
    fits = (lengths <= length) & (pixels <= most)
    plan = plan_rows(lengths, layout, None, None, records)
    placed = [plan.row(number).documents for number in range(plan.num_rows)]
    assert sorted(np.concatenate([np.zeros(0, dtype=int), *placed]).tolist()) == np.flatnonzero(fits).tolist()
    for row in placed:
        assert lengths[row].sum() <= length
        assert pixels[row].sum() <= most


def test_a_row_has_no_more_pixels_than_asked_for(vl: PretrainedProcessor, tmp_path: Path) -> None:
    rows = [{"messages": asked({"base64": as_base64(picture(64, 32, seed=n))}, "?")} for n in range(6)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    free = build(vl, path, packing="best_fit", max_seq_len=200)
    bound = build(vl, path, packing="best_fit", max_seq_len=200, max_row_pixels=2 * 64 * 32)
    assert [len(row["images"]["image_grid_thw"]) for row in rows_of(bound)] == [2, 2, 2]
    assert len(free.train) < 3
    with pytest.raises(InputError, match=r"6 of more pixels than max_row_pixels 100, which are dropped"):
        build(vl, path, max_row_pixels=100)


@settings(max_examples=150, deadline=None)
@given(RECORDS, st.integers(20, 60), st.sampled_from(["truncate", "truncate_eos"]), st.integers(30, 200))
def test_what_has_too_many_pixels_ends_before_the_image_that_is_too_many(
    documents: list[tuple[int, list[int]]], length: int, policy: Any, most: int
) -> None:
    lengths, records = of_documents(documents)
    plan = plan_rows(lengths, Layout(length, "best_fit", policy, most), None, None, records)
    placed = plan.pieces
    found = dict(zip(placed.documents.tolist(), placed.sizes.tolist(), strict=True))
    for number, (_, images) in enumerate(documents):
        whole, ends = int(lengths[number]), np.cumsum([1, *images]).tolist()

        def fits(size: int, whole: int = whole, images: list[int] = images, ends: list[int] = ends) -> bool:
            """Whether images are whole and not too many, and the end token takes none's last place."""
            inside = sum(begin < size for begin in ends[:-1])
            room = size - (policy == "truncate_eos" and size < whole)
            return size <= length and ends[inside] <= max(room, 1) and 10 * sum(images[:inside]) <= most

        longest = max(size for size in range(1, whole + 1) if fits(size))
        # One token alone, which has no next one in a row that it ends, is no row.
        assert found.get(number, 1) == longest, number


def test_packed_rows_keep_the_order_of_their_images(vl: PretrainedProcessor, tmp_path: Path) -> None:
    rows = [
        {"messages": asked(*({"base64": as_base64(picture(seed=10 * n + i))} for i in range(n)), "?")} for n in range(4)
    ]
    datasets = build(vl, write_rows(tmp_path / "rows.jsonl", rows), packing="best_fit", max_seq_len=256)
    (row,) = rows_of(datasets)
    assert isinstance(datasets.train, WithEmptyRow)
    packed = datasets.train.dataset
    assert isinstance(packed, PackedRows)
    order = packed.plan.row(0).documents.tolist()
    wanted = [vl.image_inputs(picture(seed=10 * n + i))["pixel_values"] for n in order for i in range(n)]
    np.testing.assert_array_equal(row["images"]["pixel_values"], np.concatenate(wanted))
    assert "images" not in datasets.train[-1]


def test_the_same_text_about_other_pictures_is_no_duplicate(vl: PretrainedProcessor, tmp_path: Path) -> None:
    rows = [{"messages": asked({"base64": as_base64(picture(seed=seed))}, "?")} for seed in (0, 1, 0)]
    found = survey(build(vl, write_rows(tmp_path / "rows.jsonl", rows)), split="train", seed=0, num_rows=1)
    assert found.num_duplicates == 1
    assert "<|vision_start|><|image_pad|>×4<|vision_end|>?" in "".join(
        segment.text for segment in found.rows[0].documents[0].segments
    )


def test_images_stay_with_their_rows_whatever_order_a_collator_gives_them(
    vl: PretrainedProcessor, tmp_path: Path
) -> None:
    rows = [{"messages": asked({"base64": as_base64(picture(seed=seed))}, "?")} for seed in range(3)]
    samples = rows_of(build(vl, write_rows(tmp_path / "rows.jsonl", rows), packing="none", max_seq_len=32))
    stack = stacked()
    plain = ImageRows(vl, True)(samples[::-1])
    turned = ImageRows(vl, True, stack=lambda given: stack(given[::-1]))(samples)
    assert turned["sample_ids"].tolist() == plain["sample_ids"].tolist() == [2, 1, 0]
    assert torch.equal(turned["images"]["pixel_values"], plain["images"]["pixel_values"])
    assert not torch.equal(turned["images"]["pixel_values"], ImageRows(vl, True)(samples)["images"]["pixel_values"])
    with pytest.raises(RunError, match=r"gives the sample_ids \[0, 1\] for the rows \[0, 1, 2\], so their images"):
        ImageRows(vl, True, stack=lambda given: stack(given[:2]))(samples)


def test_a_tokenizer_without_images_refuses_them(vl: PretrainedProcessor, tmp_path: Path) -> None:
    plain = pretrained(vl.name)
    told = "is an image, which the tokenizer knows nothing of; write `tokenizer: {name: p"
    for place, row in {
        r"messages\[0\].content\[0\]": {"messages": asked({"path": "a.png"}, "?")},
        "images": {"messages": asked("<image>?"), "images": ["a.png"]},
        "image": {"messages": asked("?"), "image": "a.png"},
    }.items():
        path = write_rows(tmp_path / "rows.jsonl", [row])
        with pytest.raises(InputError, match=f"rows.jsonl:1: {place}: {told}"):
            chat(files=str(path), tokenizer=plain, cache_dir=str(tmp_path))
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": asked("?"), "image": None, "images": []}])
    assert len(chat(files=str(path), tokenizer=plain, cache_dir=str(tmp_path)).train) == 1
    for name, value in {"image_dir": str(tmp_path), "image_urls": True, "max_row_pixels": 5}.items():
        with pytest.raises(ArgumentError, match=f"{name}: has no effect with a tokenizer that knows no images"):
            chat(files=str(path), tokenizer=plain, **{name: value})


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", ""), r"writes '<\|image_pad\|>' 0 times"),
        (TEMPLATE.replace("<|vision_end|>", "<|image_pad|>"), r"writes '<\|image_pad\|>' 2 times for one image"),
        (TEMPLATE.replace("{{ part.text }}", ""), "for one image|renders no turns"),
    ],
)
def test_a_template_that_cannot_show_images_is_refused(template: str, reason: str, tmp_path: Path) -> None:
    made = processor(str(save_processor(tmp_path / "p", template)))
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": asked({"base64": as_base64(picture())}, "?")}])
    with pytest.raises(ArgumentError, match=f"chat_template: .*{reason}"):
        build(made, path)


def test_a_template_that_takes_nothing_but_parts(vl: PretrainedProcessor, tmp_path: Path) -> None:
    """As LLaVA's: a text must come as a part too; the rows are the same."""
    strict = TEMPLATE.replace("{% if message.content is string %}{{ message.content }}{% else %}", "").replace(
        "{% endfor %}{% endif %}<|im_end|>", "{% endfor %}<|im_end|>"
    )
    made = processor(str(save_processor(tmp_path / "p", strict)))
    rows = [
        {"messages": asked({"base64": as_base64(picture())}, "?")},
        {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "yes"}]},
    ]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    for found, wanted in zip(rows_of(build(made, path)), rows_of(build(vl, path)), strict=True):
        for key in ("input_ids", "labels"):
            np.testing.assert_array_equal(found[key], wanted[key])


def test_images_are_encoded_alike_by_any_number_of_processes(
    vl: PretrainedProcessor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hp_core.data.parallel.PAYS_AFTER_SECONDS", 0.0)
    monkeypatch.setattr("hp_core.data.writing._BATCH_ROWS", 2)
    rows = [{"messages": asked({"base64": as_base64(picture(seed=n))}, str(n))} for n in range(9)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    found: Sequence[Datasets] = [
        build(vl, path, num_proc=number, cache_dir=str(tmp_path / f"cache{number}")) for number in (1, 2)
    ]
    assert found[0].train.fingerprint == found[1].train.fingerprint
    for one_row, other in zip(rows_of(found[0]), rows_of(found[1]), strict=True):
        np.testing.assert_array_equal(one_row["images"]["pixel_values"], other["images"]["pixel_values"])


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"min_pixels": 4096, "max_pixels": 1024}, "min_pixels: 4,096 is more than the max_pixels 1,024; lower min"),
        ({"min_pixels": 5000}, "min_pixels: 5,000 is more than the processor's own max_pixels 4,096; give max_pixels,"),
        ({"max_pixels": 100}, "max_pixels: 100 is less than the processor's own min_pixels 256; give min_pixels, too"),
    ],
)
def test_bounds_of_pixels_are_in_order(bounds: dict[str, int], message: str, vl: PretrainedProcessor) -> None:
    with pytest.raises(ArgumentError, match=message):
        processor(vl.name, **bounds)
    assert processor(vl.name, min_pixels=1024, max_pixels=1024).image_fingerprint != vl.image_fingerprint


def test_bounds_of_pixels_count_and_are_saved(vl: PretrainedProcessor, tmp_path: Path) -> None:
    small = processor(vl.name, max_pixels=1024)
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": asked({"base64": as_base64(picture(64, 64))}, "?")}])
    assert tokens_of(rows_of(build(vl, path))[0]) == 16
    assert tokens_of(rows_of(build(small, path))[0]) == 4
    large = processor(vl.name, min_pixels=64 * 64 * 4, max_pixels=64 * 64 * 4)
    assert tokens_of(rows_of(build(large, path, max_seq_len=256))[0]) == 64
    small.save(tmp_path)
    saved = json.loads((tmp_path / "processor_config.json").read_text())
    assert saved["image_processor"]["size"]["longest_edge"] == 1024
    assert processor(str(tmp_path)).image_fingerprint == small.image_fingerprint
