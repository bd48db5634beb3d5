"""Run one benchmark by name, or list them."""

from __future__ import annotations

import argparse
import json
import os
import sys
from importlib import import_module

# A benchmark is a module with a docstring and `measure() -> dict`.
NAMES = (
    "bf16",
    "checkpoint",
    "chunked_loss",
    "compile",
    "data",
    "gpu",
    "memory",
    "overhead",
    "peers",
    "plan",
    "replacement",
    "scaling",
    "sft_vs_trl",
    "startup",
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("name", nargs="?", choices=NAMES, help="the benchmark to run")
    parser.add_argument("--list", action="store_true", help="print the names and what they measure")
    args = parser.parse_args()
    if args.list:
        for name in NAMES:
            print(f"{name}: {(import_module(f'tests.benchmarks.{name}').__doc__ or '').splitlines()[0]}")
        return 0
    if args.name is None:
        parser.error("name a benchmark, or give --list")
    os.environ["HF_HUB_OFFLINE"] = "1"
    result = import_module(f"tests.benchmarks.{args.name}").measure()
    print(json.dumps({"benchmark": args.name, **result}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
