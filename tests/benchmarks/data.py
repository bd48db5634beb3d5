"""Packing of a million lengths, tokenisation by two processes against one, and how long steps wait for data.

The lengths are log-normal with a median of 245 tokens and a standard deviation of 1 in the logarithm (mean 400, one in
a hundred above 2,500), about as conversations of instruction sets are; rows hold 2,048 and longer documents are
dropped. Tokenised are the sources and docstrings of the standard library, several times over, from a JSON-lines file to
a finished token cache, by turns so that a busy machine hits both alike; the ratio is that of the fastest runs, process
starts included. The wait is that of the quickstart's own steps.
"""

from __future__ import annotations

import json
import os
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from hp_core.data.fields import RowText
from hp_core.data.packing import Layout, plan_rows
from hp_core.data.reading import Reading
from hp_core.data.records import Row
from hp_core.data.sources import FileSource
from hp_core.data.text import TextEncoder
from hp_core.data.tokens import TokenStore, build_tokens

ROOT = Path(__file__).resolve().parents[2]
NUM_LENGTHS, MAX_SEQ_LEN = 1_000_000, 2048
NUM_COPIES = 5
NUM_TURNS = 2
NUM_STEPS, NUM_WARM_UP = 30, 5
GOALS = {"packing_seconds": 2.0, "fill": 0.99, "tokens_per_second_ratio_processes": 1.6, "data_wait_share": 0.02}


def measure() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="hp-data-") as name:
        folder = Path(name)
        os.environ["HP_CACHE_DIR"] = str(folder / "cache")
        found = {**_packing(), **_tokenisation(folder), **_wait(folder)}
    reached = {
        name: found[name] >= goal if name in ("fill", "tokens_per_second_ratio_processes") else found[name] <= goal
        for name, goal in GOALS.items()
    }
    return {**found, "goals": GOALS, "reached": reached}


def _packing() -> dict[str, Any]:
    lengths = np.random.default_rng(0).lognormal(5.5, 1.0, NUM_LENGTHS).astype(np.int64)
    layout = Layout(MAX_SEQ_LEN, "best_fit", "drop")
    seconds: list[float] = []
    for _ in range(3):
        started = time.perf_counter()
        report = plan_rows(lengths, layout).report
        seconds.append(time.perf_counter() - started)
    return {"packing_seconds": round(min(seconds), 3), "fill": round(report.fill, 5), "rows": report.rows}


def _tokenisation(folder: Path) -> dict[str, Any]:
    from hp_plugins.datasets.python_docs import PythonDocs
    from hp_plugins.tokenizers.bpe import bpe

    rows = PythonDocs(Path(sysconfig.get_path("stdlib")), "both").rows(["text"])
    texts = [str(row.fields["text"]) for row in rows if isinstance(row, Row)]
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for _ in range(NUM_COPIES) for text in texts))
    tokenizer = bpe(vocab_size=4096, sample_bytes=2_000_000).train(
        texts, data_fingerprint="benchmark", cache_dir=folder / "tokenizer"
    )
    encoder = TextEncoder(tokenizer, RowText.of())
    seconds: dict[int, list[float]] = {1: [], 2: []}
    stores: dict[int, TokenStore] = {}
    for turn in range(NUM_TURNS):
        for number, taken in seconds.items():
            reading = Reading(folder / f"{turn}-{number}", num_proc=number)
            started = time.perf_counter()
            stores[number] = build_tokens(FileSource([path]), encoder, reading)
            taken.append(time.perf_counter() - started)
    if not np.array_equal(stores[1].tokens, stores[2].tokens):
        raise SystemExit("two processes gave other tokens than one")
    tokens = len(stores[1].tokens)
    best = {number: min(taken) for number, taken in seconds.items()}
    return {
        "tokens_per_second_ratio_processes": round(best[1] / best[2], 3),
        "tokens_per_second": {number: round(tokens / taken) for number, taken in best.items()},
        "tokenised_tokens": tokens,
        "tokenised_megabytes": round(path.stat().st_size / 1e6, 1),
        "usable_cpus": len(os.sched_getaffinity(0)),
    }


def _wait(folder: Path) -> dict[str, Any]:
    from hp_core.cli.main import main

    run = folder / "run"
    overrides = [f"--training.train_iters={NUM_STEPS}", "--evaluation={every: 0, at_end: false}", f"--output_dir={run}"]
    overrides.append("--checkpoint={save_every: 0, save_last: false}")
    if main([str(ROOT / "examples/quickstart/recipe.yaml"), *overrides]) != 0:
        raise SystemExit("the quickstart failed")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "data_time_s" in row][NUM_WARM_UP:]
    waited, taken = (sum(row[name] for row in steps) for name in ("data_time_s", "step_time_s"))
    return {"data_wait_share": round(waited / taken, 5), "step_ms": round(1000 * taken / len(steps), 1)}
