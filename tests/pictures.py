"""Pictures, a processor for them and tiny models that take them, made by the tests that need them."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import CLIPImageProcessorPil, PreTrainedTokenizerFast, Qwen2VLImageProcessorPil

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
START, END, IMAGE = 3, 4, 5
PATCH = 8
# Pixels of the smallest and the largest image; a token is 16 by 16.
SMALLEST, LARGEST = 256, 4096
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Three numbers of dimensions of 24, for time, height and width.
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
_TEXT = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
_TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
_VISION = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": PATCH}
_VISION |= {"out_hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def model_config(family: str = "qwen3_vl") -> dict[str, Any]:
    """A tiny configuration that fits `save_processor`'s."""
    text = {**_TEXT, "rope_parameters": _ROPE, **(_EXPERTS if family.endswith("moe") else {})}
    ids = {"image_token_id": IMAGE, "video_token_id": 6, "vision_start_token_id": START, "vision_end_token_id": END}
    return {"model_type": family, **ids, "text_config": text, "vision_config": _VISION}


def other_family(name: str, folder: Path) -> dict[str, Any]:
    """The tiny configuration of another family than Qwen3-VL, whose processor is saved to the folder."""
    if name == "llava":
        size = {"height": 28, "width": 28}
        images: Any = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=size)
        more = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        _save_processor(folder, "LlavaProcessor", images, image_token="<|image_pad|>", **more)
        vision = {"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 24, "patch_size": 14}
        vision |= {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "projection_dim": 16}
        # The last layer of the tower is used for nothing.
        features = {"vision_feature_layer": -2, "vision_feature_select_strategy": "default"}
        text = {"model_type": "llama", **_TEXT}
        return {"model_type": name, "image_token_id": IMAGE, "text_config": text, "vision_config": vision, **features}
    bounds = {"shortest_edge": 28 * 28, "longest_edge": 8 * 28 * 28}
    images = Qwen2VLImageProcessorPil(patch_size=14, merge_size=2, size=bounds)
    _save_processor(folder, "Qwen2VLProcessor" if name == "qwen2_vl" else "Qwen2_5_VLProcessor", images)
    vision = {"depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 14}
    if name == "qwen2_vl":
        vision |= {"embed_dim": 32, "mlp_ratio": 2}
    else:
        vision |= {"intermediate_size": 48, "out_hidden_size": 32, "window_size": 56, "fullatt_block_indexes": [1]}
    text = {key: value for key, value in _TEXT.items() if key != "head_dim"}
    # Ids beyond a tiny vocabulary are told as a mistake.
    text |= {"rope_parameters": _ROPE, "bos_token_id": 0, "eos_token_id": 2}
    return {**model_config(), "model_type": name, "text_config": text, "vision_config": vision}


def save_processor(folder: Path, template: str = TEMPLATE) -> Path:
    """A byte-level tokenizer with Qwen's marks, and Qwen's image processor with small patches."""
    size = {"shortest_edge": SMALLEST, "longest_edge": LARGEST}
    images = Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=2, size=size)
    return _save_processor(folder, "Qwen3VLProcessor", images, template)


def _save_processor(folder: Path, kind: str, images: Any, template: str = TEMPLATE, **settings: Any) -> Path:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [*SPECIAL, "<|video_pad|>"]
    trainer = BpeTrainer(vocab_size=280, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(["user assistant system"] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens={"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    content = {"processor_class": kind, "image_processor": images.to_dict(), **settings}
    (folder / "processor_config.json").write_text(json.dumps(content))
    return folder


def picture(width: int = 32, height: int = 32, *, seed: int = 0) -> Image.Image:
    """Stripes whose colours depend on the seed."""
    image = Image.new("RGB", (width, height))
    image.putdata(
        [
            ((37 * seed + 5 * x) % 256, (11 * seed + 9 * y) % 256, (x * y + seed) % 256)
            for y in range(height)
            for x in range(width)
        ]
    )
    return image


def png(image: Image.Image) -> bytes:
    """The image as a PNG file."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def as_base64(image: Image.Image) -> str:
    """The image as a PNG file in base64."""
    return base64.b64encode(png(image)).decode()


def asked(*parts: str | dict[str, Any], answer: str = "yes") -> list[dict[str, Any]]:
    """A conversation of one question, of texts and images, and its answer."""
    content = [{"type": "text", "text": one} if isinstance(one, str) else {"type": "image", **one} for one in parts]
    return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """The rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
