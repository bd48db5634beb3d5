"""`hp-train export`: a run's model as a directory that plain transformers loads."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `hp-train`."""
    parser = subparsers.add_parser(
        "export",
        help="write a run's model as a Hugging Face directory",
        description="Write the model of a run's checkpoint as plain transformers loads it: safetensors, configuration, "
        "generation configuration, tokenizer and chat template. Takes one process and the memory of about one file of "
        "weights, whatever the ranks of the run.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's directory, or one of its checkpoints")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="where to write")
    parser.add_argument(
        "--step", type=int, metavar="N", help="the checkpoint after step N (default: the newest complete one)"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="dtype of the weights (default: that of the files the model was loaded from, else of the master weights)",
    )
    parser.add_argument("--max-shard-size", metavar="SIZE", help="the largest file of weights (default 5GB)")
    parser.add_argument(
        "--adapter", action="store_true", help="write the adapters alone, as peft loads them on the model of before"
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace an earlier export: all that is in its directory goes, also files that you have put there",
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Export; raises `InputError` or `RunError` with the reason why not."""
    from hp_core.checkpoint.room import in_bytes
    from hp_core.errors import InputError, Problem
    from hp_core.export.export import export_checkpoint
    from hp_core.export.writing import as_bytes

    if args.adapter and args.max_shard_size is not None:
        raise InputError(Problem("--max-shard-size: adapters are one file", hint="leave it out"))
    done = export_checkpoint(
        args.run,
        args.to,
        step=args.step,
        dtype=args.dtype,
        max_shard_bytes=as_bytes(args.max_shard_size or "5GB"),
        overwrite=args.overwrite,
        adapter=args.adapter,
    )
    for remark in done.remarks:
        print(remark)
    files = "1 file" if done.num_files == 1 else f"{done.num_files} files"
    what = "adapters" if done.is_adapter else "model"
    told = f"the {what} after step {done.checkpoint.step}, {files}, {in_bytes(done.num_bytes)} in {done.dtype}"
    print(f"wrote {done.directory}: {told}")
    return 0
