"""Whole runs on pictures: any layout, rows without images, stops, refusals, and what plain transformers makes of it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from hp_plugins.tokenizers.processor import processor
from tests.e2e.runs import hp_train, hp_train_here, manifest, steps, train
from tests.pictures import asked, model_config, other_family, picture, png, save_processor, write_rows

RECIPE: dict[str, Any] = {
    "trainer": "vlm",
    "optimizer": {"name": "adamw", "lr": 1e-2},
    "training": {"train_iters": 5, "global_batch_size": 4, "seed": 3},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures, a processor, and rows of which some have one image, some two and some none."""
    made = tmp_path_factory.mktemp("pictures")
    save_processor(made / "processor")
    rows = []
    for number in range(16):
        images = []
        for place in range(number % 3):
            name = f"{number}-{place}.png"
            (made / name).write_bytes(png(picture(32 + 16 * place, 32, seed=number)))
            images.append({"path": name})
        rows.append({"messages": asked(*images, f"what is {number}?", answer=f"it is {number * 7}")})
    write_rows(made / "rows.jsonl", rows)
    write_rows(made / "text.jsonl", [row for number, row in enumerate(rows) if number % 3 == 0])
    return made


def recipe(folder: Path, out: Path, family: str = "qwen3_vl", **sections: Any) -> Path:
    """A recipe on the folder's rows, one conversation in a row; its run goes to `out / "run"`."""
    dataset = {
        "name": "chat",
        "files": str(folder / "rows.jsonl"),
        "max_seq_len": 64,
        "packing": "none",
        "cache_dir": str(out / "cache"),
        "num_proc": 1,
        "tokenizer": {"name": "processor", "path": str(folder / "processor")},
    }
    model = {"name": "image_text", "config": model_config(family)}
    content = {**RECIPE, "model": model, "dataset": dataset, "output_dir": str(out / "run"), **sections}
    path = out / "recipe.yaml"
    out.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))
    return path


LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "fsdp 2": (2, []),
    "fsdp 2, micro-batches of 2": (2, ["--training.micro_batch_size=2"]),
    "tp 2": (2, ["--accelerator.tp_size=2"]),
    "cp 2": (2, ["--accelerator.cp_size=2"]),
    "fsdp 2 x tp 2": (4, ["--accelerator.tp_size=2"]),
}


@pytest.fixture(scope="module")
def alone(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    out = tmp_path_factory.mktemp("alone")
    return {family: train(recipe(folder, out / family, family)) for family in ("qwen3_vl", "qwen3_vl_moe")}


@pytest.mark.parametrize(
    ("family", "layout"),
    [*(("qwen3_vl", layout) for layout in LAYOUTS), ("qwen3_vl_moe", "fsdp 2"), ("qwen3_vl_moe", "ep 2")],
)
def test_a_run_takes_the_steps_of_one_process(
    family: str, layout: str, folder: Path, alone: dict[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """Ranks have other numbers of images in every step, and some have none."""
    nproc, overrides = {**LAYOUTS, "ep 2": (2, ["--accelerator.ep_size=2"])}[layout]
    found = train(recipe(folder, tmp_path, family), *overrides, nproc=nproc)
    assert steps(found) == pytest.approx(steps(alone[family]), abs=1e-5)
    assert steps(found, "grad_norm") == pytest.approx(steps(alone[family], "grad_norm"), rel=1e-4)
    for name in ("tokens", "input_tokens", "image_tokens"):
        assert steps(found, name) == steps(alone[family], name)


def test_tokens_of_images_are_counted(alone: dict[str, list[dict[str, Any]]]) -> None:
    """In four steps every row comes once: an image has four tokens, a second one six."""
    rows = alone["qwen3_vl"][:4]
    assert sum(row["image_tokens"] for row in rows) == sum((0, 4, 10)[number % 3] for number in range(16))
    assert all(row["input_tokens"] > row["image_tokens"] + row["tokens"] for row in rows)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "llava"])
def test_other_families(name: str, folder: Path, tmp_path: Path) -> None:
    """Packed rows on two ranks take the steps of one, and conversations alone have the same loss."""
    config = other_family(name, tmp_path / "processor")
    settings = [f"--dataset.tokenizer.path={tmp_path / 'processor'}", "--dataset.max_seq_len=128"]
    packed = [*settings, "--dataset.packing=best_fit", "--training.global_batch_size=2"]
    runs = []
    for nproc in (1, 2):
        path = recipe(folder, tmp_path / str(nproc), model={"name": "image_text", "config": config})
        runs.append(train(path, *packed, nproc=nproc))
    assert steps(runs[1]) == pytest.approx(steps(runs[0]), abs=1e-5)
    assert steps(runs[1], "grad_norm") == pytest.approx(steps(runs[0], "grad_norm"), rel=1e-4)
    once = ["--training.train_iters=1", "--training.micro_batch_size=1"]
    path = recipe(folder, tmp_path / "apart", model={"name": "image_text", "config": config})
    (apart,) = train(path, *settings, *once, "--training.global_batch_size=16")
    path = recipe(folder, tmp_path / "together", model={"name": "image_text", "config": config})
    number = manifest(tmp_path / "1" / "run")["data"]["train"]["rows"]
    (together,) = train(path, *packed[:-1], *once, f"--training.global_batch_size={number}")
    assert together["loss"] == pytest.approx(apart["loss"], abs=1e-5)


@pytest.mark.parametrize("layout", ["fsdp 2", "tp 2", "ep 2"])
def test_a_mixture_is_loaded_on_ranks_as_on_one(layout: str, folder: Path, tmp_path: Path) -> None:
    """Fused experts lie transposed on disk, and each rank reads its part of them."""
    train(recipe(folder, tmp_path / "first", "qwen3_vl_moe"), "--training.train_iters=2")
    exported = tmp_path / "exported"
    assert hp_train_here("export", str(tmp_path / "first" / "run"), "--to", str(exported)).returncode == 0
    runs = []
    for nproc, overrides in ((1, []), {**LAYOUTS, "ep 2": (2, ["--accelerator.ep_size=2"])}[layout]):
        model = {"name": "image_text", "pretrained": str(exported)}
        runs.append(train(recipe(folder, tmp_path / str(nproc), model=model), *overrides, nproc=nproc))
    assert steps(runs[1]) == pytest.approx(steps(runs[0]), abs=1e-5)
    assert steps(runs[1], "grad_norm") == pytest.approx(steps(runs[0], "grad_norm"), rel=1e-4)


def test_packed_rows_give_the_loss_of_their_documents(folder: Path, tmp_path: Path) -> None:
    """The whole data in one step, packed and not, with images beside each other in a row."""
    once = ["--training.train_iters=1", "--training.global_batch_size=16", "--training.micro_batch_size=16"]
    (apart,) = train(recipe(folder, tmp_path / "apart"), *once)
    few = ["--training.train_iters=1", "--dataset.packing=best_fit", "--dataset.max_seq_len=256"]
    path = recipe(folder, tmp_path / "packed")
    rows = 3
    few += [f"--training.global_batch_size={rows}", f"--training.micro_batch_size={rows}"]
    (packed,) = train(path, *few)
    assert packed["tokens"] == apart["tokens"]
    assert packed["loss"] == pytest.approx(apart["loss"], abs=1e-5)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_that_is_interrupted_goes_on_bit_for_bit(workers: int, folder: Path, tmp_path: Path) -> None:
    overrides = [f"--dataloader.num_workers={workers}"]
    whole = train(recipe(folder, tmp_path / "whole"), *overrides)
    path = recipe(folder, tmp_path / "cut")
    train(path, *overrides, "--training.stop_after=2")
    cut = train(path, *overrides, "--checkpoint.resume=latest")
    assert steps(cut) == steps(whole)
    assert steps(cut, "grad_norm") == steps(whole, "grad_norm")


@pytest.mark.parametrize("trainer", ["vlm", "text"])
@pytest.mark.parametrize("nproc", [1, 2])
def test_without_any_image_the_tower_is_left_as_it_is(nproc: int, trainer: str, folder: Path, tmp_path: Path) -> None:
    """And said so; the language model takes the same steps on any number of ranks."""
    path = recipe(folder, tmp_path, trainer=trainer)
    done = hp_train(str(path), f"--dataset.files={folder / 'text.jsonl'}", "--nproc", str(nproc))
    assert done.returncode == 0, done.stderr
    why = "no row to train on has an image" if trainer == "vlm" else "a TextTrainer takes no images"
    assert f"{why}: what images go through is frozen" in done.stdout
    assert re.search(r"frozen: [0-9,]+ of [0-9,]+ parameters, in model.visual\n", done.stdout)
    first = train(recipe(folder, tmp_path / "one"), f"--dataset.files={folder / 'text.jsonl'}")
    assert steps(read(tmp_path / "run")) == pytest.approx(steps(first), abs=1e-5)


def test_settings_of_a_tower_that_nothing_trains_are_refused(folder: Path, tmp_path: Path) -> None:
    groups = [{"match": "model.visual.*", "lr": 1e-3}]
    path = recipe(folder, tmp_path, optimizer={"name": "adamw", "lr": 1e-2, "groups": groups})
    done = hp_train_here(str(path), f"--dataset.files={folder / 'text.jsonl'}")
    assert done.returncode == 2
    assert "optimizer.groups[0].match: 'model.visual.*' matches nothing that is trained" in done.stderr
    assert hp_train_here(str(path), "--training.train_iters=1").returncode == 0


def test_the_first_lines_say_how_many_images_there_are(folder: Path, tmp_path: Path) -> None:
    path = recipe(folder, tmp_path)
    done = hp_train_here(str(path), "--training.train_iters=1")
    assert "16 rows of 64 tokens" in done.stdout
    assert "from 16 documents with 15 images\n" in done.stdout
    done = hp_train_here("data", str(path), "--dataset.max_row_pixels=2500")
    assert "from 11 documents with 5 images; left out: 5 documents of more pixels than a row\n" in done.stdout


def test_images_to_evaluate_on_alone_leave_the_tower_as_it_is(folder: Path, tmp_path: Path) -> None:
    """Weight decay would change it, by nothing that was learned."""
    validation = f"--dataset.validation_files={folder / 'rows.jsonl'}"
    path = recipe(folder, tmp_path, optimizer={"name": "adamw", "lr": 1e-2, "weight_decay": 0.5})
    done = hp_train(str(path), f"--dataset.files={folder / 'text.jsonl'}", validation, "--nproc", "2")
    assert done.returncode == 0, done.stderr
    assert "what images go through is frozen" in done.stdout
    assert [row["eval_loss"] for row in read(tmp_path / "run") if "eval_loss" in row]


def test_a_users_own_rows_of_images_take_the_same_steps_on_two_ranks(folder: Path, tmp_path: Path) -> None:
    """Nothing is known of them before they are read, and in some steps one rank has images and the other none."""
    runs = [train(own_rows(folder, tmp_path / str(nproc)), nproc=nproc) for nproc in (1, 2)]
    assert steps(runs[1]) == pytest.approx(steps(runs[0]), abs=1e-5)
    assert "frozen" not in (tmp_path / "1" / "run" / "manifest.json").read_text()
    assert sum(steps(runs[1], "image_tokens")) > 0


def test_a_users_own_rows_of_images_are_refused_by_a_trainer_of_text(folder: Path, tmp_path: Path) -> None:
    done = hp_train_here(str(own_rows(folder, tmp_path)), "--trainer=text")
    assert done.returncode == 1
    assert re.search(r"rows \[.*\] have images, and only trainers of images take them", done.stderr), done.stderr


def test_streamed_rows_of_images_are_refused_by_a_trainer_of_text(folder: Path, tmp_path: Path) -> None:
    path = recipe(folder, tmp_path, trainer="text")
    content = json.loads(path.read_text())
    content["dataset"] = {
        name: one for name, one in content["dataset"].items() if name not in ("cache_dir", "num_proc")
    }
    path.write_text(json.dumps({**content, "dataset": {**content["dataset"], "streaming": True}}))
    done = hp_train_here(str(path))
    assert done.returncode == 1
    assert re.search(r"rows \[.*\] have images, and only trainers of images take them", done.stderr), done.stderr
    assert "no row to train on has an image" not in done.stdout
    assert "a TextTrainer takes no images: what images go through is frozen" in done.stdout


def own_rows(folder: Path, out: Path) -> Path:
    path = recipe(folder, out)
    content = json.loads(path.read_text())
    of_chat = content["dataset"]
    own = {"_target_": "tests.e2e.own_images.own_images", "files": of_chat["files"], "cache_dir": of_chat["cache_dir"]}
    path.write_text(json.dumps({**content, "dataset": {**own, "tokenizer": of_chat["tokenizer"]}}))
    return path


def read(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("pattern", ["model.visual.*", "model.visual.blocks.*"])
def test_a_frozen_tower_keeps_its_weights_on_any_number_of_ranks(pattern: str, folder: Path, tmp_path: Path) -> None:
    optimizer = {"name": "adamw", "lr": 1e-2, "groups": [{"match": pattern, "frozen": True}]}
    runs = []
    for nproc in (1, 2):
        path = recipe(folder, tmp_path / str(nproc), optimizer=optimizer)
        done = hp_train(str(path), "--nproc", str(nproc))
        assert done.returncode == 0, done.stderr
        assert "frozen: " in done.stdout
        assert "model.visual" in done.stdout
        runs.append(steps(read(tmp_path / str(nproc) / "run")))
    assert runs[1] == pytest.approx(runs[0], abs=1e-5)
    free = train(recipe(folder, tmp_path / "free"))
    assert steps(free) != pytest.approx(runs[0], abs=1e-5)
    exported = tmp_path / "exported"
    assert hp_train_here("export", str(tmp_path / "1" / "run"), "--to", str(exported)).returncode == 0
    initial = tmp_path / "initial"
    stopped = recipe(folder, tmp_path / "none", optimizer={**optimizer, "lr": 1e-30, "weight_decay": 0.0})
    assert hp_train_here(str(stopped), "--training.train_iters=1").returncode == 0
    assert hp_train_here("export", str(tmp_path / "none" / "run"), "--to", str(initial)).returncode == 0
    after, before = (AutoModelForImageTextToText.from_pretrained(where).state_dict() for where in (exported, initial))
    prefix = pattern.removesuffix("*")
    same = {name for name, value in before.items() if torch.equal(value, after[name])}
    assert {name for name in before if name.startswith(prefix)} <= same
    assert not {name for name in same if not name.startswith(prefix)}


def test_what_is_exported_answers_as_the_model_that_was_trained(folder: Path, tmp_path: Path) -> None:
    """transformers' own model and positions, on each conversation alone, have the loss of the evaluation."""
    path = recipe(folder, tmp_path, evaluation={"every": 0, "at_end": True})
    rows = train(path, f"--dataset.validation_files={folder / 'rows.jsonl'}")
    wanted = rows[-1]["eval_loss"]
    exported = tmp_path / "exported"
    done = hp_train_here("export", str(tmp_path / "run"), "--to", str(exported))
    assert done.returncode == 0, done.stderr
    assert {"config.json", "processor_config.json", "tokenizer.json", "chat_template.jinja"} <= {
        one.name for one in exported.iterdir()
    }
    model, vl = AutoModelForImageTextToText.from_pretrained(exported).eval(), processor(str(exported))
    total, targets = 0.0, 0
    for line in (folder / "rows.jsonl").read_text().splitlines():
        question, answer = json.loads(line)["messages"]
        images = [Image.open(folder / part["path"]) for part in question["content"] if part["type"] == "image"]
        text = "<|im_start|>user\n"
        for image in images:
            text += "<|vision_start|>" + vl.image_text(vl.image_inputs(image)) + "<|vision_end|>"
        text += question["content"][-1]["text"] + "<|im_end|>\n<|im_start|>assistant\n"
        prompt, said = (list(vl.place([one])[0].ids) for one in (text, answer["content"] + "<|im_end|>"))
        ids = torch.tensor([[*prompt, *said]])
        pixels: dict[str, Any] = {}
        if images:
            pixels = {name: torch.from_numpy(value) for name, value in vl._inputs(images).items()}
            pixels["mm_token_type_ids"] = (ids == vl.image_token_id).int()
        with torch.no_grad():
            logits = model(input_ids=ids, **pixels).logits[0, len(prompt) - 1 : -1]
        total += float(torch.nn.functional.cross_entropy(logits, ids[0, len(prompt) :], reduction="sum"))
        targets += len(said)
    assert targets == rows[-1]["eval_tokens"]
    assert total / targets == pytest.approx(wanted, abs=1e-5)


_SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
PALIGEMMA = {
    "model_type": "paligemma",
    "image_token_id": 5,
    "text_config": {"model_type": "gemma", **_SMALL, "vocab_size": 320, "num_key_value_heads": 1, "head_dim": 16},
    "vision_config": {"model_type": "siglip_vision_model", **_SMALL, "image_size": 28, "patch_size": 14},
    "projection_dim": 32,
}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a text trainer": (
        {"trainer": "text"},
        r"dataset: rows have images, and a TextTrainer takes none; write trainer: ",
    ),
    "a text tokenizer": ({"tokenizer": "bytes"}, r"dataset.tokenizer: is a ByteTokenizer, no processor of images"),
    "a text model": (
        {"model": {"name": "causal_lm", "config": {"model_type": "qwen3", "vocab_size": 320, "hidden_size": 32}}},
        r"model: a Qwen3ForCausalLM takes no images; write model.name: image_text",
    ),
    "a model that goes by types of tokens": (
        {"model": {"name": "image_text", "config": PALIGEMMA}},
        r"model: a PaliGemmaForConditionalGeneration takes token_type_ids, by which it attends to images",
    ),
    "another token": (
        {"image_token_id": 7},
        r"model: the model sets images in the place of token 7, the processor writes 5",
    ),
    "other patches": ({"patch_size": 4}, r"dataset.tokenizer: Qwen3VLForConditionalGeneration can't take an image"),
    "a pipeline": ({"accelerator": {"pp_size": 2}}, r"pp_size"),
    "sequence parallelism": (
        {"accelerator": {"tp_size": 2, "sequence_parallel": True}},
        r"puts more than text into its sequences",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_trained_is_refused_before_a_step(name: str, folder: Path, tmp_path: Path) -> None:
    change, reason = REFUSED[name]
    path = recipe(folder, tmp_path)
    content = json.loads(path.read_text())
    for key, value in change.items():
        if key == "tokenizer":
            content["dataset"]["tokenizer"] = value
        elif key == "image_token_id":
            content["model"]["config"][key] = value
        elif key == "patch_size":
            content["model"]["config"]["vision_config"] = {
                **content["model"]["config"]["vision_config"],
                "patch_size": value,
            }
        else:
            content[key] = value
    path.write_text(json.dumps(content))
    done = hp_train(str(path), "--nproc", "2") if "accelerator" in change else hp_train_here(str(path))
    assert done.returncode == 2
    assert re.search(reason, done.stderr), done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_processor_of_another_family_is_refused(folder: Path, tmp_path: Path) -> None:
    other_family("llava", tmp_path / "llava")
    done = hp_train_here(str(recipe(folder, tmp_path / "out")), f"--dataset.tokenizer.path={tmp_path / 'llava'}")
    assert done.returncode == 2
    told = r"dataset.tokenizer: Qwen3VLForConditionalGeneration can't take an image as PretrainedProcessor makes it: "
    assert re.search(told, done.stderr), done.stderr


def test_a_picture_that_is_lost_during_a_run_is_told_with_its_row(folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(folder, own)
    path = recipe(own, tmp_path / "out")
    train(path, "--training.stop_after=1")
    for file in own.glob("*.png"):
        # What a look at the files doesn't show.
        file.write_bytes(file.read_bytes()[:-1] + b"?")
        shutil.copystat(folder / file.name, file)
    done = hp_train_here(str(path), "--checkpoint.resume=latest")
    assert done.returncode == 1
    assert re.search(r"rows.jsonl:[0-9]+: .*-[01].png has changed since its row was encoded; start again", done.stderr)
