"""Asks the exported model about the held-out pictures, with plain transformers, and counts the right answers."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

FOLDER = Path("qwen3_vl_tiny")
CHANCE = {"shape": 1 / 6, "color": 1 / 4}


def main() -> None:
    where = sys.argv[1] if len(sys.argv) > 1 else str(FOLDER / "model")
    model = AutoModelForImageTextToText.from_pretrained(where).eval()
    tokenizer = AutoTokenizer.from_pretrained(where)
    # With torchvision installed, AutoProcessor.from_pretrained(where) is both.
    images = AutoImageProcessor.from_pretrained(where, backend="pil")
    asked, right = Counter[str](), Counter[str]()
    for line in (FOLDER / "held_out.jsonl").read_text(encoding="utf-8").splitlines():
        question, answer = json.loads(line)["messages"]
        kind = next(name for name in CHANCE if name in question["content"][-1]["text"])
        asked[kind] += 1
        right[kind] += answered(model, tokenizer, images, question) == answer["content"]
    for kind, chance in CHANCE.items():
        share = right[kind] / asked[kind]
        print(f"{kind}: {share:.1%} of {asked[kind]} answers are right; {chance:.1%} would be by chance")
    print(json.dumps({kind: right[kind] / asked[kind] for kind in CHANCE}))


def answered(model: Any, tokenizer: Any, images: Any, question: dict[str, Any]) -> str:
    """The model's answer to a question about pictures."""
    parts = question["content"]
    pixels = images(
        images=[Image.open(FOLDER / part["path"]) for part in parts if part["type"] == "image"], return_tensors="pt"
    )
    text = tokenizer.apply_chat_template([question], tokenize=False, add_generation_prompt=True)
    for grid in pixels["image_grid_thw"]:
        tokens = int(grid.prod()) // images.merge_size**2
        text = text.replace(tokenizer.image_token, "<|image|>" * tokens, 1)
    inputs = tokenizer(text.replace("<|image|>", tokenizer.image_token), return_tensors="pt")
    kinds = (inputs["input_ids"] == model.config.image_token_id).long()
    with torch.no_grad():
        found = model.generate(**inputs, **pixels, mm_token_type_ids=kinds, max_new_tokens=4, do_sample=False)
    return str(tokenizer.decode(found[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)).strip()


if __name__ == "__main__":
    main()
