"""Instruction tuning of SmolLM2: the recipe as written on a tiny stand-in, and (marked) on the real model."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hp_core.observe.trackers import read_metrics
from tests.conftest import ROOT
from tests.e2e.runs import hp_train_here

EXAMPLE = ROOT / "examples" / "smollm2_sft"
RECIPE = EXAMPLE / "recipe.yaml"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def prepare() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prepare", EXAMPLE / "prepare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def chats(prepare: ModuleType) -> list[list[dict[str, str]]]:
    made: list[list[dict[str, str]]] = list(prepare.python_chats())
    return made


def test_chats_are_questions_and_answers(chats: list[list[dict[str, str]]]) -> None:
    assert len(chats) > 500
    for chat in chats:
        assert [message["role"] for message in chat] == ["user", "assistant"] * 2
        assert all(message["content"].strip() for message in chat)
    (about_dumps,) = (chat for chat in chats if chat[0]["content"] == "What does json.dumps do in Python?")
    assert about_dumps[1]["content"].startswith("Serialize ``obj`` to a JSON formatted ``str``.")
    assert about_dumps[3]["content"].startswith("json.dumps(obj, *, skipkeys=False, ensure_ascii=True,")


def test_the_recipe_trains_a_stand_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chats: list[list[dict[str, str]]]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "smollm2_sft"
    folder.mkdir()
    lines = [json.dumps({"messages": chat}) + "\n" for chat in chats[:200]]
    (folder / "chats.jsonl").write_text("".join(lines), encoding="utf-8")
    _save_stand_in(folder / "model", [message["content"] for chat in chats[:200] for message in chat])
    options = ["--output_dir=run", "--optimizer.lr=1e-2"]
    done = hp_train_here(str(RECIPE), *options)
    assert done.returncode == 0, done.stderr
    losses = _eval_losses(tmp_path / "run")
    assert len(losses) == 3
    assert losses[2] < losses[1] < losses[0] < 6.91  # ln of the vocabulary
    adapted = hp_train_here(str(EXAMPLE / "lora.yaml"), "--output_dir=adapted")
    assert adapted.returncode == 0, adapted.stderr
    # Of each of 2 layers: queries and outputs are 32 by 32, keys and values 16 by 32.
    assert f"peft: trains {2 * 8 * (2 * 64 + 2 * 48):,} of " in adapted.stdout
    # A random stand-in learns next to nothing through its attention alone, and it does change.
    assert len(set(_eval_losses(tmp_path / "adapted"))) == 3
    found = json.loads(hp_train_here("data", str(RECIPE), "--json", "--rows=1").stdout)
    segments = found["rows"][0]["documents"][0]["segments"]
    assert [one["trained"] for one in segments] == [False, True, False, True, False]
    assert all(one["text"].endswith("<|im_end|>") for one in segments if one["trained"])


def _save_stand_in(folder: Path, texts: list[str]) -> None:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=[AddedToken(one, special=True) for one in special],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", bos_token="<|im_start|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def _eval_losses(run: Path) -> list[float]:
    return [row["eval_loss"] for row in read_metrics(run) if "eval_loss" in row]


@pytest.mark.demo
def test_the_real_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = subprocess.run([sys.executable, str(EXAMPLE / "prepare.py")], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    done = hp_train_here(str(RECIPE), "--output_dir=run")
    assert done.returncode == 0, done.stderr
    losses = _eval_losses(tmp_path / "run")
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 3
    shutil.rmtree(tmp_path / "run")
