"""Several named sources in one data set, tokens of Megatron among them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_core.data.mixed import MixedRows
from hp_core.data.protocols import Datasets
from hp_core.errors import ArgumentError
from hp_plugins.datasets.sources import TextSource
from hp_plugins.datasets.text import text
from hp_plugins.tokenizers.bpe import bpe
from hp_plugins.tokenizers.byte_level import byte_tokenizer
from tests.data.megatron_files import write as write_megatron


def write(path: Path, texts: list[str], field: str = "text") -> str:
    path.write_text("".join(json.dumps({field: one}) + "\n" for one in texts))
    return str(path)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Documents of 7 bytes and EOS, of which each fills a row of 8."""
    numbers = {"web": range(12), "books": range(100, 104)}
    return {name: write(tmp_path / f"{name}.jsonl", [f"{one:07d}" for one in of]) for name, of in numbers.items()}


def build(sources: dict[str, dict[str, Any]] | None, tmp_path: Path, **settings: Any) -> Datasets:
    specs = None if sources is None else {name: TextSource(**spec) for name, spec in sources.items()}
    settings = {"tokenizer": byte_tokenizer(), "max_seq_len": 8, "cache_dir": str(tmp_path / "cache"), **settings}
    return text(sources=specs, **settings)


def mixed(datasets: Datasets) -> MixedRows:
    assert isinstance(datasets.train.dataset, MixedRows)
    return datasets.train.dataset


def decoded(rows: Any) -> list[str]:
    return [byte_tokenizer().decode(rows[index]["input_ids"]) for index in range(len(rows))]


def test_rows_of_sources_follow_one_another_and_are_packed_apart(files: dict[str, str], tmp_path: Path) -> None:
    sources = {name: {"files": path} for name, path in files.items()}
    rows = mixed(build(sources, tmp_path))
    assert decoded(rows) == [f"{number:07d}" for number in (*range(12), *range(100, 104))]
    assert (rows.names, rows.sizes, rows.epoch_rows, rows.mixture) == (("web", "books"), (12, 4), (12, 4), None)
    # In longer rows, the last row of a source is not filled up with the next one's documents.
    rows = mixed(build(sources, tmp_path, max_seq_len=64))
    assert [len(part) for part in rows.parts] == [2, 1]
    assert [rows[index]["index"] for index in range(3)] == [0, 1, 2]


def test_weights_and_temperature_deal_an_epoch(files: dict[str, str], tmp_path: Path) -> None:
    sources = {name: {"files": path, "weight": 1.0} for name, path in files.items()}
    rows = mixed(build(sources, tmp_path))
    assert rows.epoch_rows == (8, 8)
    without = {name: {"files": path} for name, path in files.items()}
    # Square roots of 12 and 4 are in proportion 1.73 to 1: of 16 rows 10.14 and 5.86.
    by_temperature = mixed(build(without, tmp_path, temperature=2.0))
    assert by_temperature.epoch_rows == (10, 6)
    assert len({one.fingerprint for one in (rows, by_temperature, mixed(build(without, tmp_path)))}) == 3


def test_counts_of_rows_are_by_source(files: dict[str, str], tmp_path: Path) -> None:
    sources = {"web": {"files": files["web"]}, "books": {"files": files["books"]}}
    rows = mixed(build(sources, tmp_path))
    taken = np.array([15, 0, 0, 3])
    assert rows.amounts(taken) == {"web": (3, 21), "books": (1, 7)}
    assert rows.amounts(np.array([], dtype=np.int64)) == {"web": (0, 0), "books": (0, 0)}


def test_validation_takes_every_source_and_any_row_once(files: dict[str, str], tmp_path: Path) -> None:
    sources = {name: {"files": path, "weight": 1.0} for name, path in files.items()}
    datasets = build(sources, tmp_path, validation_fraction=0.3)
    held = decoded(datasets.validation)
    assert sorted(held + decoded(mixed(datasets))) == sorted(f"{n:07d}" for n in (*range(12), *range(100, 104)))
    assert datasets.validation.mixed is None or datasets.validation.mixed.mixture is None


def test_each_source_has_its_own_field_or_template(tmp_path: Path) -> None:
    one, two = write(tmp_path / "a.jsonl", ["aaa"], "body"), write(tmp_path / "b.jsonl", ["bbb"], "text")
    sources = {"one": {"files": one, "field": "body"}, "two": {"files": two, "template": "{text}!"}}
    assert decoded(mixed(build(sources, tmp_path))) == ["aaa", "bbb!"]


def test_weights_of_sources_are_a_column_of_targets(files: dict[str, str], tmp_path: Path) -> None:
    sources = {"web": {"files": files["web"]}, "books": {"files": files["books"], "loss_weight": 0.5}}
    validation = write(tmp_path / "v.jsonl", ["valid"])
    datasets = build(sources, tmp_path, validation_files=validation)
    rows = datasets.train
    assert rows.columns == ("token_weights",)
    assert rows[0]["token_weights"].tolist() == [1.0] * 7 + [0.0]
    assert rows[12]["token_weights"].tolist() == [0.5] * 7 + [0.0]
    # A loss that takes the column takes it of the validation rows too.
    assert datasets.validation[0]["token_weights"].tolist() == [1.0] * 5 + [0.0] * 3
    assert rows[-1]["token_weights"].tolist() == [0.0] * 8
    assert build({"web": {"files": files["web"]}}, tmp_path).train.columns == ()


def test_tokens_of_megatron_alone_or_among_others(files: dict[str, str], tmp_path: Path) -> None:
    ids = [byte_tokenizer().encode_batch([f"{number:07d}"])[0] + [byte_tokenizer().eos_id] for number in (7, 8)]
    path = str(write_megatron(tmp_path / "m", [[one] for one in ids]))
    alone = build(None, tmp_path, megatron=path).train
    assert decoded(alone) == ["0000007", "0000008"]
    as_text = build(None, tmp_path, files=write(tmp_path / "t.jsonl", ["0000007", "0000008"])).train
    for index in range(2):
        for name in ("input_ids", "labels", "position_ids"):
            np.testing.assert_array_equal(alone[index][name], as_text[index][name])
    sources = {"web": {"files": files["web"], "weight": 1.0}, "ready": {"megatron": path, "weight": 3.0}}
    rows = mixed(build(sources, tmp_path))
    assert rows.epoch_rows == (4, 10)
    assert decoded(rows)[-1] == "0000008"


def test_documents_of_megatron_that_are_not_closed_stay_so(tmp_path: Path) -> None:
    rows = build(None, tmp_path, megatron=str(write_megatron(tmp_path / "m", [[[5, 6, 7]], [[8, 9]]]))).train
    assert rows[0]["input_ids"][:5].tolist() == [5, 6, 7, 8, 9]
    assert rows[0]["labels"][:5].tolist() == [6, 7, -100, 9, -100]


@pytest.mark.parametrize(
    ("sources", "settings", "path", "said"),
    [
        ({}, {}, "sources", "names no source"),
        ({"a/b": {"files": "{web}"}}, {}, "sources", "'a/b' is no name of a source"),
        ({"a": {}}, {}, "sources.a.files", "give either files or hub_id"),
        ({"a": {"files": "{web}", "hub_id": "x"}}, {}, "sources.a.files", "give either"),
        ({"a": {"files": "{web}", "split": "x"}}, {}, "sources.a.split", "has no effect on files"),
        ({"a": {"files": "{web}", "megatron": "x"}}, {}, "sources.a.megatron", "give one of files, hub_id and"),
        ({"a": {"megatron": "x", "field": "y"}}, {}, "sources.a.field", "has no effect on tokens of megatron"),
        ({"a": {"megatron": "none"}}, {}, "sources.a.megatron", "there is no file 'none.bin'"),
        ({"a": {"files": ["{web}", "none"]}}, {}, "sources.a.files[1]", "no file or directory"),
        ({"a": {"files": "{web}", "field": "x", "template": "{{y}}"}}, {}, "sources.a.template", "both given"),
        ({"a": {"files": "{web}"}, "b": {"files": "{books}", "weight": 1.0}}, {}, "sources.a", "has no weight"),
        ({"a": {"files": "{web}", "weight": 1.0}}, {"temperature": 2.0}, "temperature", "has a weight; drop either"),
        ({"a": {"files": "{web}"}}, {"files": "{web}"}, "files", "has no effect beside sources"),
        ({"a": {"files": "{web}"}}, {"template": "{{x}}"}, "template", "has no effect beside sources"),
        (None, {"files": "{web}", "temperature": 2.0}, "temperature", "has no effect without sources"),
        (
            {"a": {"files": "{web}", "weight": 1.0}, "b": {"files": "{books}", "weight": 1e-9}},
            {},
            "sources.b",
            "an epoch of 16 rows would take none of it",
        ),
        (
            {"a": {"files": "{web}"}, "b": {"files": "{books}", "field": "body"}},
            {"validation_files": "{web}"},
            "validation_files",
            "that of the sources differs",
        ),
        ({"a": {"files": "{web}", "loss_weight": 1e39}}, {}, "sources.a.loss_weight", "beyond the range of float32"),
        ({"a": {"files": "{web}", "loss_weight": 1e-50}}, {}, "sources.a.loss_weight", "float32 would round to 0"),
        ({"a": {"megatron": "{m}"}}, {"columns": ["score"]}, "columns", "have no fields to take numbers from"),
        ({"a": {"megatron": "{m}"}}, {"tokenizer": bpe(vocab_size=280)}, "tokenizer", "can't be learned from 'a'"),
    ],
)
def test_sources_that_can_not_be_are_refused(
    files: dict[str, str], tmp_path: Path, sources: Any, settings: dict[str, Any], path: str, said: str
) -> None:
    places = {**files, "m": str(write_megatron(tmp_path / "m", [[[1, 2]]]))}

    def filled(value: Any) -> Any:
        if isinstance(value, str):
            return value.format(**places)
        if isinstance(value, list):
            return [filled(one) for one in value]
        return {key: filled(one) for key, one in value.items()} if isinstance(value, dict) else value

    with pytest.raises(ArgumentError) as caught:
        build(filled(sources), tmp_path, **filled(settings))
    assert caught.value.path == path
    assert said in str(caught.value)
