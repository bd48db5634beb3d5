"""Makes what the recipe beside it trains: pictures of shapes with questions about them, and a processor.

Everything is drawn and written here: no model, tokenizer or picture is downloaded.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessorPil

FOLDER = Path("qwen3_vl_tiny")
SIZE = 48
SHAPES = ("circle", "square", "triangle", "cross", "ring", "bar")
COLORS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "yellow": (230, 200, 40)}
QUESTIONS = {"shape": "Which shape is it?", "color": "Which color is it?"}
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main() -> None:
    (FOLDER / "images").mkdir(parents=True, exist_ok=True)
    save_processor(FOLDER / "processor")
    random_numbers = random.Random(0)
    train = [row(number, random_numbers) for number in range(2400)]
    # Rows without a picture are in the same data: a model of images and text stays one of text.
    train += [text_row(first, second) for first in range(10) for second in range(10)]
    held_out = [row(number, random_numbers) for number in range(2400, 2600)]
    for name, rows in (("train", train), ("held_out", held_out)):
        lines = [json.dumps(one) + "\n" for one in rows]
        (FOLDER / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    print(f"{FOLDER}: the processor, {len(train)} rows to train on and {len(held_out)} to ask about")


def row(number: int, numbers: random.Random) -> dict[str, Any]:
    """A picture and a question about it; in every fourth row two pictures, of which the second is asked about."""
    shown = [picture(f"{number:04d}-{place}", numbers) for place in range(2 if number % 4 == 3 else 1)]
    kind = numbers.choice(list(QUESTIONS))
    content = [{"type": "image", "path": one["path"]} for one in shown]
    content.append({"type": "text", "text": QUESTIONS[kind]})
    answer = {"role": "assistant", "content": shown[-1][kind]}
    return {"messages": [{"role": "user", "content": content}, answer]}


def text_row(first: int, second: int) -> dict[str, Any]:
    """A question without a picture."""
    question = f"What is {first} plus {second}?"
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": str(first + second)}]}


def picture(name: str, numbers: random.Random) -> dict[str, str]:
    """Draw a shape of a random colour, size and place; return the file's path, the shape and the colour."""
    shape, color = numbers.choice(SHAPES), numbers.choice(list(COLORS))
    image = Image.new("RGB", (SIZE, SIZE), (numbers.randrange(10), numbers.randrange(10), numbers.randrange(10)))
    radius = numbers.randrange(10, 17)
    x, y = (numbers.randrange(radius + 1, SIZE - radius - 1) for _ in range(2))
    draw(ImageDraw.Draw(image), shape, x, y, radius, COLORS[color])
    path = FOLDER / "images" / f"{name}.png"
    image.save(path)
    return {"path": f"images/{path.name}", "shape": shape, "color": color}


def draw(pen: ImageDraw.ImageDraw, shape: str, x: int, y: int, radius: int, color: tuple[int, int, int]) -> None:
    box = (x - radius, y - radius, x + radius, y + radius)
    thin = max(3, radius // 3)
    if shape == "circle":
        pen.ellipse(box, fill=color)
    elif shape == "ring":
        pen.ellipse(box, outline=color, width=thin)
    elif shape == "square":
        pen.rectangle(box, fill=color)
    elif shape == "bar":
        pen.rectangle((x - radius, y - thin, x + radius, y + thin), fill=color)
    elif shape == "cross":
        pen.rectangle((x - radius, y - thin, x + radius, y + thin), fill=color)
        pen.rectangle((x - thin, y - radius, x + thin, y + radius), fill=color)
    else:
        turns = (math.pi * (third / 1.5 - 0.5) for third in range(3))
        pen.polygon([(x + radius * math.cos(turn), y + radius * math.sin(turn)) for turn in turns], fill=color)


def save_processor(folder: Path) -> None:
    """A tokenizer of the words that occur, with the marks of Qwen's, and its image processor with smaller patches."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=352, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False)
    words = [*SHAPES, *COLORS, *QUESTIONS.values(), "system", "user", "assistant", "What is 1 plus 2?"]
    backend.train_from_iterator(words * 10, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens={"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    images = Qwen2VLImageProcessorPil(
        patch_size=8, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 256, "longest_edge": SIZE * SIZE}
    )
    settings = {"processor_class": "Qwen3VLProcessor", "image_processor": images.to_dict()}
    (folder / "processor_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
