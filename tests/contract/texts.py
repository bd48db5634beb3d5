"""Files and components that the key tests name in their recipes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hp_core import inner_wrapper, local_compute
from hp_plugins.collators.rows import rows
from hp_plugins.tokenizers.byte_level import byte_tokenizer
from tests.contract.chats import write_chats
from tests.data.megatron_files import write as write_megatron

LOOK = """\
from hp_core import hookimpl


@hookimpl
def on_train_start(run):
    print("fused:", run.optimizer.defaults.get("fused"))


@hookimpl(wrapper=True)
def build_dataloader(config, dataset, collate_fn, batch_sampler, batch_size, dp_world_size, max_seq_len, seed):
    loader = yield
    print("workers:", loader.num_workers, "prefetch:", loader.prefetch_factor, "ahead:", loader.ahead)
    return loader
"""

REMOTE_CONFIG = """\
from transformers import LlamaConfig


class MyConfig(LlamaConfig):
    model_type = "my_llama"
"""
REMOTE_MODEL = """\
from transformers import LlamaForCausalLM

from .my_config import MyConfig


class MyModel(LlamaForCausalLM):
    config_class = MyConfig
"""


def write_texts(folder: Path) -> Path:
    """Text files, a JSONL file, a tokenizer, a model with code of its own and a plugin that looks at a run."""
    (folder / "some").mkdir(parents=True)
    for index in range(24):
        (folder / "some" / f"{index:02d}.txt").write_text(
            f"text {index} is about {index * 37} things, and that is all\n"
        )
    other = [
        {"title": f"title {index}", "text": f"another text, number {index} of many" * 3, "two": 2, "weight": index + 1}
        for index in range(12)
    ]
    (folder / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in other))
    (folder / "look.py").write_text(LOOK)
    write_megatron(folder / "tokens", [[[number % 256 for number in range(first, first + 40)]] for first in range(9)])
    (folder / "tokenizer").mkdir()
    byte_tokenizer().save(folder / "tokenizer")
    write_chats(folder)
    _write_remote(folder / "remote")
    return folder


def _write_remote(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    written["model_type"] = "my_llama"
    written["auto_map"] = {"AutoConfig": "my_config.MyConfig", "AutoModelForCausalLM": "my_model.MyModel"}
    (folder / "config.json").write_text(json.dumps(written))
    (folder / "my_config.py").write_text(REMOTE_CONFIG)
    (folder / "my_model.py").write_text(REMOTE_MODEL)


def loud_rows() -> Any:
    """The ordinary collator, which says that it was built."""
    print("the collator was built")
    return rows()


class ColumnLoss(nn.Module):
    """The model's own loss, times the mean of a column."""

    def __init__(self, column: str) -> None:
        super().__init__()
        self.columns = (column,)

    def forward(self, *, model_output: Any, labels: torch.Tensor, **columns: torch.Tensor) -> torch.Tensor:
        (column,) = columns.values()
        return model_output.loss * column[labels != -100].mean()


class HangingLoss(nn.Module):
    """Never returns on rank 1."""

    def forward(self, *, model_output: Any, labels: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1:
            time.sleep(30)
        return model_output.loss


@inner_wrapper
def halved(target_module: nn.Module) -> None:
    """Attentions that give half of what they did."""
    forward = target_module.forward

    def half(*args: Any, **kwargs: Any) -> Any:
        output, weights = forward(*args, **kwargs)
        return output / 2, weights

    target_module.forward = half


@local_compute
def silent_experts() -> Any:
    """Experts that add nothing."""
    return lambda hidden_states, top_k_index, top_k_weights: hidden_states * 0
