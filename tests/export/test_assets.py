"""What lies beside the weights: configurations of the source, tokenizers with their templates, and no foreign code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.contract.texts import write_texts
from tests.e2e.runs import hp_train_here, manifest

RUN = "optimizer: {name: sgd, lr: 0.1}\ntraining: {train_iters: 1, global_batch_size: 2}\noutput_dir: OUT\n"
CONFIG = {
    "model_type": "llama",
    "vocab_size": 400,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: Any) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts"))


def run_and_export(folder: Path, model: str, dataset: str, *options: str) -> Path:
    path = folder / "r.yaml"
    path.write_text(f"model: {model}\ndataset: {dataset}\n{RUN.replace('OUT', str(folder / 'run'))}")
    done = hp_train_here(str(path))
    assert done.returncode == 0, done.stderr
    done = hp_train_here("export", str(folder / "run"), "--to", str(folder / "out"), *options)
    assert done.returncode == 0, done.stderr
    return folder / "out"


def test_a_learned_tokenizer_gives_the_ids_that_were_trained(texts: Path, tmp_path: Path) -> None:
    dataset = f"{{name: text, files: '{texts}/some/*.txt', max_seq_len: 32, tokenizer: {{name: bpe, vocab_size: 350}}}}"
    out = run_and_export(tmp_path, f"{{name: causal_lm, config: {json.dumps(CONFIG)}}}", dataset)
    tokenizer = AutoTokenizer.from_pretrained(out)
    text = "text 7 is about 259 things"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) < len(text) / 2
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token == "<|endoftext|>"
    # The family's own vocabulary begins texts with 1 and ends them with 2.
    config, generation = (json.loads((out / f"{name}.json").read_text()) for name in ("config", "generation_config"))
    assert config["eos_token_id"] == generation["eos_token_id"] == tokenizer.eos_token_id == 0
    assert config.get("bos_token_id") is generation.get("bos_token_id") is tokenizer.bos_token_id is None


def test_tokens_that_the_recipe_names_end_texts(texts: Path, tmp_path: Path) -> None:
    dataset = f"{{name: text, files: '{texts}/some/*.txt', max_seq_len: 32, tokenizer: {{name: bytes}}}}"
    model = {"name": "causal_lm", "config": {**CONFIG, "eos_token_id": 7}, "generation_config": {"max_length": 99}}
    out = run_and_export(tmp_path, json.dumps(model), dataset)
    config, generation = (json.loads((out / f"{name}.json").read_text()) for name in ("config", "generation_config"))
    assert config["eos_token_id"] == generation["eos_token_id"] == 7
    assert generation["max_length"] == 99


def test_the_chat_template_that_was_trained_is_the_export_s(texts: Path, tmp_path: Path) -> None:
    template = "'{texts}/loud.jinja'".replace("{texts}", str(texts))
    dataset = (
        f"{{name: chat, files: '{texts}/chats.jsonl', max_seq_len: 256, chat_template: {template}, "
        f"tokenizer: {{name: pretrained, path: '{texts}/chat_tokenizer'}}}}"
    )
    out = run_and_export(tmp_path, f"{{name: causal_lm, config: {json.dumps(CONFIG)}}}", dataset)
    assert AutoTokenizer.from_pretrained(out).chat_template == (texts / "loud.jinja").read_text()


def test_weights_come_out_in_the_dtype_in_which_they_came_and_no_code_is_named(texts: Path, tmp_path: Path) -> None:
    config = AutoConfig.for_model(**CONFIG)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "hf")
    stored = json.loads((tmp_path / "hf" / "config.json").read_text())
    stored["auto_map"] = {"AutoModelForCausalLM": "someone/else--modeling.Model"}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(stored))
    dataset = f"{{name: text, files: '{texts}/some/*.txt', max_seq_len: 32, tokenizer: {{name: bytes}}}}"
    out = run_and_export(tmp_path, f"{{name: causal_lm, pretrained: '{tmp_path}/hf'}}", dataset)
    assert {one.dtype for one in load_file(out / "model.safetensors").values()} == {torch.bfloat16}
    written = json.loads((out / "config.json").read_text())
    assert written["dtype"] == "bfloat16"
    assert written["architectures"] == ["LlamaForCausalLM"]
    assert "auto_map" not in written
    assert manifest(tmp_path / "run")["trust_remote_code"] == []
    options = ("export", str(tmp_path / "run"), "--to", str(tmp_path / "masters"), "--dtype", "float32")
    assert hp_train_here(*options).returncode == 0
    masters, rounded = (load_file(one / "model.safetensors") for one in (tmp_path / "masters", out))
    assert all(torch.equal(masters[name].bfloat16(), rounded[name]) for name in rounded)
    assert not all(torch.equal(masters[name], rounded[name].float()) for name in rounded)


def test_code_of_a_repository_is_trusted_only_where_the_recipe_says_so_and_the_manifest_does(
    texts: Path, tmp_path: Path
) -> None:
    path = tmp_path / "r.yaml"
    model = f"{{name: causal_lm, pretrained: '{texts}/remote', trust_remote_code: true}}"
    dataset = f"{{name: text, files: '{texts}/some/*.txt', max_seq_len: 32, tokenizer: {{name: bytes}}}}"
    path.write_text(f"model: {model}\ndataset: {dataset}\n{RUN.replace('OUT', str(tmp_path / 'run'))}")
    checked = hp_train_here("check", str(path))
    assert f"the trained model can't be exported: its code is that of {texts}/remote" in checked.stdout
    done = hp_train_here(str(path))
    assert done.returncode == 0, done.stderr
    record = manifest(tmp_path / "run")
    source = {"section": "model", "component": "causal_lm", "source": f"{texts}/remote"}
    assert record["trust_remote_code"] == [source]
    assert not record["export"]["possible"]
    assert "MyModel is not part of transformers" in record["export"]["why"]
    assert hp_train_here(str(path), "--model.trust_remote_code=false", "--overwrite").returncode == 2
