"""The keys of the chat dataset: files that recipes name, and for each key what it changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.e2e.runs import manifest

TEMPLATE = """\
{%- for turn in messages %}
{{- '<' ~ turn.role ~ '>' ~ (mood or '') ~ turn.content ~ '<end>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' ~ (mood or '') }}{% endif %}"""
SPECIAL = ("<end>", "<system>", "<user>", "<assistant>")
DATED = TEMPLATE.replace("{%- for", "{{- strftime_now('%Y') }}{%- for", 1)

# What each changes in the counts of a run on `chats.jsonl`.
CHANGES = {
    "files": "'{texts}/more_chats.jsonl'",
    "train_on": "last",
    "chat_template_kwargs": "{mood: 'gladly '}",
    "chat_template": "'{texts}/loud.jinja'",
    "max_seq_len": "64",
    "packing": "none",
    "length_policy": "truncate",
    "validation_fraction": "0.6",
    "validation_files": "'{texts}/more_chats.jsonl'",
    "sources": "{a: {files: '{texts}/chats.jsonl'}, b: {files: '{texts}/alpaca.jsonl', format: alpaca}}",
}
# Refused as if the key were not there, with what the message says.
REFUSED = {
    "hub_id": ("no/where", "dataset.hub_id: the data set 'no/where' can't be loaded"),
    "hub_config": ("x", "dataset.hub_config: has no effect on files"),
    "split": ("x", "dataset.split: has no effect on files"),
}


def write_chats(folder: Path) -> None:
    """Conversations in several formats, and a tokenizer with a chat template."""
    from transformers import AutoTokenizer

    from hp_plugins.tokenizers.byte_level import byte_tokenizer

    def write(name: str, rows: list[dict[str, Any]]) -> None:
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def turns(number: int, count: int) -> list[dict[str, Any]]:
        roles = ("user", "assistant")
        return [
            {"role": roles[n % 2], "content": f"text {number} of turn {n}" * (1 + number % 3)} for n in range(count)
        ]

    chats = [{"messages": turns(number, 2 + 2 * (number % 2)), "two": 2} for number in range(16)]
    weighted = [
        {"messages": [turns(number, 2)[0], {**turns(number, 2)[1], "weight": 1 + number}]} for number in range(8)
    ]
    write("chats", chats)
    write("more_chats", chats[:5])
    write("weighted_chats", weighted)
    write("alpaca", [{"instruction": f"do {number}", "output": f"done {number}"} for number in range(8)])
    write("faulty_chats", [*chats, {"messages": []}, {"messages": None}])
    (folder / "loud.jinja").write_text(TEMPLATE.replace("'<' ~ turn.role", "'!!' ~ '<' ~ turn.role"))
    (folder / "dated.jinja").write_text(DATED)
    plain = folder / "chat_bytes"
    byte_tokenizer().save(plain)
    tokenizer = AutoTokenizer.from_pretrained(plain)
    tokenizer.add_special_tokens({"eos_token": SPECIAL[0], "additional_special_tokens": list(SPECIAL[1:])})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "chat_tokenizer")


def chats(file: str = "chats", **more: str) -> str:
    """The dataset section of a recipe, as an override."""
    given = "".join(f", {name}: {value}" for name, value in more.items())
    tokenizer = "{name: pretrained, path: '{texts}/chat_tokenizer'}"
    return f"--dataset={{name: chat, files: '{{texts}}/{file}.jsonl', max_seq_len: 192, tokenizer: {tokenizer}{given}}}"


def data_of(bench: Any, *overrides: str) -> dict[str, Any]:
    """The counts of a run's data."""
    outcome = bench.run("--training={train_iters: 1, global_batch_size: 1}", *overrides)
    assert outcome.code == 0, outcome.output
    found: dict[str, dict[str, Any]] = manifest(outcome.directory)["data"]
    return {
        role: {name: one for name, one in counts.items() if name != "fingerprint"} for role, counts in found.items()
    }


def changes(name: str, value: str) -> Callable[[Any], bool]:
    def check(bench: Any) -> bool:
        if name == "sources":
            base = chats().replace("files: '{texts}/chats.jsonl', ", "")
            return bool(data_of(bench, f"{base[:-1]}, sources: {value}}}") != data_of(bench, chats()))
        return bool(data_of(bench, chats(), f"--dataset.{name}={value}") != data_of(bench, chats()))

    return check


def refused(name: str, value: str, message: str) -> Callable[[Any], bool]:
    def check(bench: Any) -> bool:
        section = chats().replace("files: '{texts}/chats.jsonl', ", "") if name == "hub_id" else chats()
        outcome = bench.run(section, f"--dataset.{name}={value}")
        return outcome.code == 2 and message in outcome.output

    return check


def formats(bench: Any) -> bool:
    named = data_of(bench, chats("alpaca", format="alpaca"))
    mapped = data_of(bench, chats("alpaca", mapping="{user: instruction, assistant: output}"))
    return named == mapped and bench.run(chats("alpaca")).code == 2


def weights(bench: Any) -> bool:
    loss = "--loss_fn={name: causal_lm, token_weights: token_weights}"
    plain = bench.run(chats("weighted_chats"))
    data = data_of(bench, chats("weighted_chats", token_weights="true"), loss)
    return plain.code == 2 and "token_weights: true" in plain.output and data["train"]["columns"] == ["token_weights"]


def dates(bench: Any) -> bool:
    section = chats(chat_template="'{texts}/dated.jinja'")
    return bench.run(section).code == 2 and data_of(bench, section, '--dataset.date="2026-01-31"') != {}


def temperatures(bench: Any) -> bool:
    named = "{a: {files: '{texts}/chats.jsonl'}, b: {files: '{texts}/alpaca.jsonl', format: alpaca}}"
    base = chats(packing="none").replace("files: '{texts}/chats.jsonl', ", "")[:-1] + f", sources: {named}}}"
    return data_of(bench, base) != data_of(bench, base, "--dataset.temperature=4")


def columns(bench: Any) -> bool:
    loss = "--loss_fn={_target_: tests.contract.texts.ColumnLoss, column: two}"
    return (
        data_of(bench, chats(columns="[two]"), loss)["train"]["columns"] == ["two"]
        and bench.run(chats(), loss).code == 2
    )


def errors(bench: Any) -> bool:
    skipped = data_of(bench, chats("faulty_chats", on_error="skip"))
    limited = bench.run(chats("faulty_chats", on_error="skip", max_errors="1"))
    return (bench.run(chats("faulty_chats")).code, limited.code, skipped["train"]["faulty_rows"]) == (2, 2, 2)


def streams(bench: Any) -> bool:
    """Nothing is cached, so a folder for it is refused, and blocks of other sizes are shuffled otherwise."""
    base = (chats(streaming="true"), "--training={train_iters: 4, global_batch_size: 1}")
    unused = bench.run(*base, "--dataset.cache_dir={tmp}/no_chats")
    assert "dataset.cache_dir: has no effect on streamed data" in unused.output
    whole, blocks = bench.run(*base), bench.run(*base, "--dataset.block_documents=3")
    assert whole.code == 0, whole.output
    return unused.code == 2 and whole.losses() != blocks.losses()


def cached(bench: Any) -> bool:
    data_of(bench, chats(), "--dataset.cache_dir={tmp}/chats_here")
    return (bench.tmp_path / "chats_here").is_dir()


CHAT_KEYS: dict[str, Callable[[Any], bool]] = {
    f"hp.datasets.chat.{name}": check
    for name, check in {
        **{name: changes(name, value) for name, value in CHANGES.items()},
        **{name: refused(name, *values) for name, values in REFUSED.items()},
        "format": formats,
        "mapping": formats,
        "token_weights": weights,
        "date": dates,
        "temperature": temperatures,
        "columns": columns,
        "on_error": errors,
        "max_errors": errors,
        "cache_dir": cached,
        "streaming": streams,
        "block_documents": streams,
    }.items()
}
