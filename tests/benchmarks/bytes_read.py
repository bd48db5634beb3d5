"""Bytes of weight files that the ranks touch while they load a model, of those that there are."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers.modeling_utils
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from hp_core.config.models import FsdpConfig
from hp_core.parallel.environment import ProcessEnvironment
from hp_core.testing.ranks import run_ranks
from tests.model.tiny import a_setup, build

NUM_RANKS = 2
# About 130 MB, so that the pages at the edges of the ranks' parts don't matter.
CONFIG = {
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 3,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}


def bytes_read(copies: int = 1) -> dict[str, Any]:
    """Load a model on two ranks that shard it with FSDP2, or hold two copies, and add up what both have read.

    Weights are mapped into memory, so calls to read() tell nothing, and neither do resident pages: the kernel maps many
    around each that is touched. So each rank loads twice through the same mappings. The first time every page is
    touched; then the processor's marks of access are taken off, and those that the second load leaves are counted.
    """
    with tempfile.TemporaryDirectory() as name:
        size = _write(Path(name, "model"))
        by_rank = run_ranks(_loaded, NUM_RANKS, f"{name}/model", copies)
    return {
        "bytes_read_ratio": round(sum(map(sum, by_rank)) / size, 4),
        "bytes_read_ratio_largest_rank": round(max(map(sum, by_rank)) / size, 4),
        "file_bytes": size,
        "num_ranks": NUM_RANKS,
    }


def _write(directory: Path) -> int:
    values = dict(CONFIG)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def _loaded(environment: ProcessEnvironment, directory: str, copies: int) -> tuple[int, int]:
    """Bytes of the files' pages that a load has accessed in this process, and of its other reads."""
    # Each has a copy: the kernel keeps marks of access for a page of a file, whoever maps it.
    directory = shutil.copytree(directory, f"{directory}-{environment.rank}")
    fsdp = FsdpConfig(dp_replicate_size=copies)
    with a_setup(environment, fsdp=fsdp) as setup, _one_mapping() as files:
        _use(build(setup, pretrained=directory))
        for file in files.values():
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                file.get_tensor(name).view(torch.uint8).max()
        Path("/proc/self/clear_refs").write_text("1")
        before = _read_by_calls()
        _use(build(setup, pretrained=directory))
        return _accessed(directory), _read_by_calls() - before


def _use(model: nn.Module) -> None:
    """Read this rank's part of each weight: on the CPU some are views of their file, which nobody has read yet."""
    for parameter in model.parameters():
        own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        own.detach().sum()


@contextmanager
def _one_mapping() -> Iterator[dict[str, Any]]:
    """Let transformers open each file once; gives the open files by path."""
    files: dict[str, Any] = {}
    original = transformers.modeling_utils.safe_open

    class Kept:
        def __init__(self, path: str, *arguments: Any, **options: Any) -> None:
            self._file = files.setdefault(path, None) or original(path, *arguments, **options)
            files[path] = self._file

        def __exit__(self, *error: object) -> None:
            pass

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    with patch("transformers.modeling_utils.safe_open", Kept):
        yield files


def _accessed(directory: str) -> int:
    """Bytes of the pages of mappings of files in `directory` that carry the mark of an access."""
    text = Path("/proc/self/smaps").read_text()
    path = rf"{re.escape(directory)}/[^\n]*\.safetensors"
    found = re.findall(rf"^[0-9a-f]+-[0-9a-f]+ [^\n]*{path}\n.*?^Referenced:\s+(\d+) kB", text, re.M | re.S)
    assert found, "the weight files are not mapped"
    return sum(1024 * int(size) for size in found)


def _read_by_calls() -> int:
    found = re.search(r"^rchar: (\d+)", Path("/proc/self/io").read_text(), re.MULTILINE)
    assert found is not None
    return int(found.group(1))


if __name__ == "__main__":
    print(bytes_read())
