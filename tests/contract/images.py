"""The keys of what trains on images: pictures that a recipe names, and for each key what it changes."""

from __future__ import annotations

import functools
import http.server
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.contract.chats import data_of
from tests.e2e.runs import hp_train_here, manifest
from tests.pictures import asked, model_config, picture, png, save_processor, write_rows

Check = Callable[[Any], bool]
TRAINER = "--trainer=vlm"


def folder(bench: Any) -> Path:
    """Pictures, a processor and rows about them; made once for a bench."""
    made: Path = bench.tmp_path / "pictures"
    if not made.exists():
        save_processor(made / "processor")
        for number in range(4):
            (made / f"{number}.png").write_bytes(png(picture(48, 48, seed=number)))
        (made / "elsewhere").mkdir()
        rows = [{"messages": asked({"path": f"{number}.png"}, "what?", answer=str(number))} for number in range(4)]
        write_rows(made / "rows.jsonl", rows)
        write_rows(made / "elsewhere" / "rows.jsonl", rows)
    return made


def pictures(bench: Any, file: str = "rows.jsonl", tokenizer: dict[str, Any] | None = None, **more: Any) -> list[str]:
    """Overrides of a recipe that train a tiny model on the pictures."""
    made = folder(bench)
    named = {"name": "processor", "path": str(made / "processor"), **(tokenizer or {})}
    dataset = {"name": "chat", "files": str(made / file), "max_seq_len": 64, "packing": "none", "tokenizer": named}
    model = {"name": "image_text", "config": model_config()}
    return [TRAINER, f"--model={json.dumps(model)}", f"--dataset={json.dumps({**dataset, **more})}"]


def losses_differ(*overrides: str) -> Check:
    return lambda bench: bool(bench.differ(*overrides, base=tuple(pictures(bench))))


def tokens_differ(**tokenizer: Any) -> Check:
    def check(bench: Any) -> bool:
        changed = data_of(bench, *pictures(bench, tokenizer=tokenizer))
        return changed["train"]["tokens"] != data_of(bench, *pictures(bench))["train"]["tokens"]

    return check


def refused(text: str, *overrides: str, **tokenizer: Any) -> Check:
    def check(bench: Any) -> bool:
        outcome = bench.run(*pictures(bench, tokenizer=tokenizer), *overrides)
        return outcome.code == 2 and text in outcome.output

    return check


def trained(bench: Any) -> Path:
    """An export of a trained model."""
    made = bench.tmp_path / "trained"
    if not made.exists():
        outcome = bench.run(*pictures(bench))
        assert outcome.code == 0, outcome.output
        assert hp_train_here("export", str(outcome.directory), "--to", str(made)).returncode == 0
    return made


def pretrained(*more: str, code: int = 0, text: str = "") -> Check:
    def check(bench: Any) -> bool:
        _, _, dataset = pictures(bench)
        model = f"--model={{name: image_text, pretrained: '{trained(bench)}'}}"
        outcome = bench.run(TRAINER, model, dataset, *more)
        fresh = bench.run(*pictures(bench))
        return outcome.code == code and text in outcome.output and (code != 0 or outcome.losses() != fresh.losses())

    return check


def generation(bench: Any) -> bool:
    outcome = bench.run(*pictures(bench), "--model.generation_config={eos_token_id: 2}")
    return bool(json.loads((outcome.directory / "assets/generation_config.json").read_text())["eos_token_id"] == 2)


def directories(bench: Any) -> bool:
    apart = pictures(bench, "elsewhere/rows.jsonl")
    missing, given = bench.run(*apart), bench.run(*apart, f"--dataset.image_dir={folder(bench)}")
    return missing.code == 2 and "there is no file" in missing.output and given.code == 0


def urls(bench: Any) -> bool:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

    made = folder(bench)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(made))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}"
        write_rows(made / "urls.jsonl", [{"messages": asked({"url": f"{address}/{n}.png"}, "?")} for n in range(4)])
        off, on = bench.run(*pictures(bench, "urls.jsonl")), bench.run(*pictures(bench, "urls.jsonl", image_urls=True))
        server.shutdown()
        thread.join()
    return off.code == 2 and "image_urls: true" in off.output and on.code == 0


def row_pixels(bench: Any) -> bool:
    free = data_of(bench, *pictures(bench, packing="best_fit", max_seq_len=256))
    bound = data_of(bench, *pictures(bench, packing="best_fit", max_seq_len=256, max_row_pixels=48 * 48))
    return bool(free["train"]["rows"] == 1 and bound["train"]["rows"] == 4)


def endings(bench: Any) -> bool:
    """Rows end with it, their padding too, so they are other data."""
    prints = []
    for token in ("<|im_end|>", "<|endoftext|>"):
        outcome = bench.run(*pictures(bench, tokenizer={"eos_token": token}))
        prints.append(manifest(outcome.directory)["data"]["train"]["fingerprint"])
    return prints[0] != prints[1] and refused("is not in the vocabulary", eos_token="nothing")(bench)


IMAGE_KEYS: dict[str, Check] = {
    "hp.models.image_text.pretrained": pretrained(),
    "hp.models.image_text.revision": pretrained("--model.revision=main", code=2, text="a directory has no revisions"),
    "hp.models.image_text.config": losses_differ("--model.config.vision_config.depth=1"),
    "hp.models.image_text.dtype": losses_differ("--model.dtype=bfloat16"),
    "hp.models.image_text.attn_implementation": losses_differ(
        "--model.attn_implementation=eager", "--model.dtype=bfloat16"
    ),
    "hp.models.image_text.generation_config": generation,
    "hp.models.image_text.trust_remote_code": pretrained("--model.trust_remote_code=true"),
    "hp.tokenizers.processor.path": refused("nowhere", path="./nowhere"),
    "hp.tokenizers.processor.revision": refused("a directory has no revisions", revision="v9"),
    "hp.tokenizers.processor.eos_token": endings,
    "hp.tokenizers.processor.min_pixels": tokens_differ(min_pixels=64 * 64),
    "hp.tokenizers.processor.max_pixels": tokens_differ(max_pixels=32 * 32),
    "hp.datasets.chat.image_dir": directories,
    "hp.datasets.chat.image_urls": urls,
    "hp.datasets.chat.max_row_pixels": row_pixels,
}
