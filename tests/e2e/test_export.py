"""What a run trains is what plain transformers loads, whatever its layout, replacements, dtype and adapters were."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hp_core.config import load_recipe
from hp_core.model.tiny import tiny_config
from tests.e2e.runs import hp_train_here, manifest, recipe, train
from tests.equivalence.layouts import beyond

IDS = (torch.arange(24).reshape(2, 12) * 7 + 3) % 90
# Steps that move no weight, so that runs of all layouts end with the same ones.
STILL = ("--optimizer.lr=1e-30", "--training.train_iters=1", "--training.micro_batch_size=1")
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "fsdp 2": (2, ()),
    "tp 2": (2, ("--accelerator.tp_size=2",)),
    "ep 2": (2, ("--accelerator.ep_size=2",)),
    "pp 2": (2, ("--accelerator.pp_size=2",)),
    "fsdp 2 x tp 2": (4, ("--accelerator.tp_size=2",)),
    "fsdp 2 x pp 2, ep 2": (4, ("--accelerator.pp_size=2", "--accelerator.ep_size=2")),
}
FAMILIES = ("qwen3", "llama", "llama_tied", "qwen3_moe", "deepseek_v3")
CORE = [("llama_tied", "fsdp 2"), ("llama_tied", "pp 2"), ("qwen3_moe", "ep 2"), ("deepseek_v3", "ep 2")]
CORE += [("qwen3", "tp 2"), ("qwen3_moe", "tp 2")]
CASES = [
    (family, layout)
    for family in FAMILIES
    for layout in LAYOUTS
    if "ep" not in layout or family in ("qwen3_moe", "deepseek_v3")
]
WATCHER = """\
import torch

from hp_core import hookimpl

IDS = (torch.arange(24).reshape(2, 12) * 7 + 3) % 90


@hookimpl
def on_train_end(run, report):
    with torch.no_grad():
        logits = run.model.eval()(input_ids=IDS, position_ids=torch.arange(12).expand(2, -1), use_cache=False).logits
    if run.setup.environment.is_main:
        torch.save(logits, run.directory.path / "logits.pt")
"""
RELOAD = """\
import sys, torch
from transformers import AutoModelForCausalLM
ids = (torch.arange(24).reshape(2, 12) * 7 + 3) % 90
for directory in sys.argv[1:]:
    model, info = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        torch.save(model.eval()(input_ids=ids, use_cache=False).logits, directory + "/logits.pt")
assert not any(name.startswith(("hp_core", "hp_plugins", "peft")) for name in sys.modules)
"""


def a_recipe(folder: Path, family: str = "llama", extra: str = "") -> Path:
    """A recipe of the family's tiny model with a vocabulary for bytes."""
    path = recipe(folder, extra=extra)
    config = {**tiny_config(family), "vocab_size": 260}
    text = path.read_text()
    head, _, rest = text.partition("dataset:\n")
    body = "".join(f"    {key}: {json.dumps(value)}\n" for key, value in config.items())
    text = f"model:\n  name: causal_lm\n  config:\n{body}dataset:\n  tokenizer: {{name: bytes}}\n{rest}"
    path.write_text(text)
    assert head
    return path


def export(run: Path, to: Path, *options: str) -> str:
    done = hp_train_here("export", str(run), "--to", str(to), *options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def reload(*directories: Path) -> list[torch.Tensor]:
    """Load exports in a fresh process that has nothing but transformers, without a network; returns their logits."""
    command = [sys.executable, "-W", "error::UserWarning", "-c", RELOAD, *map(str, directories)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 0, done.stderr
    return [torch.load(directory / "logits.pt", weights_only=True) for directory in directories]


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "logits.pt"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: Any) -> dict[str, Path]:
    """For each family, the export of a run in one process."""
    found: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in found:
            folder = tmp_path_factory.mktemp(family)
            train(a_recipe(folder, family), *STILL)
            export(folder / "run", folder / "out")
            found[family] = folder / "out"
        return found[family]

    return make  # type: ignore[return-value]


@pytest.mark.parametrize("case", beyond(CASES, *CORE), ids=" on ".join)
def test_a_run_of_any_layout_exports_to_the_bytes_of_one_process(
    case: tuple[str, str], alone: Any, tmp_path: Path
) -> None:
    family, layout = case
    num_ranks, overrides = LAYOUTS[layout]
    train(a_recipe(tmp_path, family), *STILL, *overrides, nproc=num_ranks)
    export(tmp_path / "run", tmp_path / "out")
    assert files(tmp_path / "out") == files(alone(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_is_what_save_pretrained_writes(family: str, alone: Any, tmp_path: Path) -> None:
    exported = alone(family)
    model = AutoModelForCausalLM.from_pretrained(exported)
    model.save_pretrained(tmp_path / "again")
    found, wanted = (load_file(one / "model.safetensors") for one in (exported, tmp_path / "again"))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) and found[name].dtype == wanted[name].dtype for name in wanted)
    # Tied heads are there once, and loaded as one.
    assert ("lm_head.weight" in found) == (family != "llama_tied")
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (family == "llama_tied")
    configs = [json.loads((one / "config.json").read_text()) for one in (exported, tmp_path / "again")]
    assert configs[0] == configs[1]
    assert AutoTokenizer.from_pretrained(exported)("héllo")["input_ids"] == list("héllo".encode())


REPLACED = """\
plan_overrides:
  - match: ["*layernorm", model.norm]
    replace_module: {name: rms_norm}
  - match: "*.self_attn"
    replace_module: {name: fused_qkv}
"""
TRAINED = {
    "bf16": ("llama", "", 2, ("--model.dtype=bfloat16",)),
    "mixed": ("qwen3", "", 2, ("--mixed_precision.param_dtype=bfloat16",)),
    "replaced": (
        "qwen3_moe",
        REPLACED + '  - match: "*.experts"\n    replace_module: {name: grouped_experts}\n',
        2,
        (),
    ),
    "replaced on tp": ("llama", REPLACED + '  - match: "*.mlp"\n    replace_module: {name: swiglu}\n', 2, ("tp",)),
}


def trained(folder: Path, family: str, extra: str, num_ranks: int, overrides: tuple[str, ...]) -> torch.Tensor:
    """Train three steps and export; returns the logits of the trained model."""
    path = a_recipe(folder, family, f"plugins: [./watcher.py]\n{extra}")
    (folder / "watcher.py").write_text(WATCHER)
    options = ["--accelerator.tp_size=2" if one == "tp" else one for one in overrides]
    train(path, "--training.train_iters=3", *options, nproc=num_ranks)
    export(folder / "run", folder / "out")
    return torch.load(folder / "run" / "logits.pt", weights_only=True)


def test_a_fresh_process_loads_what_was_trained(tmp_path: Path) -> None:
    wanted = {}
    for name, (family, extra, num_ranks, overrides) in TRAINED.items():
        (tmp_path / name).mkdir()
        wanted[name] = trained(tmp_path / name, family, extra, num_ranks, overrides)
    found = dict(zip(TRAINED, reload(*(tmp_path / name / "out" for name in TRAINED)), strict=True))
    for name, logits in wanted.items():
        allowed = {"bf16": 0.0, "mixed": 0.05}.get(name, 1e-5)
        torch.testing.assert_close(found[name], logits.to(found[name].dtype), rtol=0, atol=allowed)
    assert found["bf16"].dtype == torch.bfloat16
    assert json.loads((tmp_path / "bf16" / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    # The layout of the original modules, whatever the run's was.
    names = load_file(tmp_path / "replaced" / "out" / "model.safetensors")
    assert {"model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.experts.3.up_proj.weight"} <= names.keys()
    assert manifest(tmp_path / "replaced" / "run")["export"] == {"possible": True, "why": None, "tokenizer": True}


FUSING = """\
import torch
from torch import nn

from hp_core import Convert, hookimpl

NAMES = ("gate_proj.weight", "up_proj.weight")


class FusedMLP(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.gate_up_proj = nn.Linear(mlp.gate_proj.in_features, 2 * mlp.gate_proj.out_features, bias=False)
        self.down_proj, self.act_fn = mlp.down_proj, mlp.act_fn

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.act_fn(gate) * up)

    def weight_transforms(self):
        fuse = lambda tensors: {"gate_up_proj.weight": torch.cat([tensors[name] for name in NAMES])}
        split = lambda tensors: dict(zip(NAMES, tensors["gate_up_proj.weight"].chunk(2), strict=True))
        return [Convert(NAMES, ("gate_up_proj.weight",), fuse, split)]


@hookimpl
def replace_module(module):
    return FusedMLP(module)
"""
# The plugin answers for it; the factory alone would change the activation only.
ANSWERED = 'plan_overrides:\n  - match: "*.mlp"\n    replace_module: {name: swiglu}\n'


def test_a_plugin_of_the_command_line_is_part_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "fusing.py").write_text(FUSING)
    (tmp_path / "watcher.py").write_text(WATCHER)
    path = a_recipe(tmp_path, extra=f"plugins: [./watcher.py]\n{ANSWERED}")
    done = hp_train_here(str(path), "-p", "plugins/fusing.py", "--training.train_iters=3")
    assert done.returncode == 0, done.stderr
    assert manifest(tmp_path / "run")["replaced_modules"][0]["types"] == ["LlamaMLP -> FusedMLP"]
    wanted = torch.load(tmp_path / "run" / "logits.pt", weights_only=True)
    written = tmp_path / "run" / "recipe.yaml"
    listed = [str(tmp_path / "watcher.py"), str(tmp_path / "plugins" / "fusing.py")]
    assert load_recipe(written).config.plugins == listed
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    export(Path("../run"), Path("out"))
    torch.testing.assert_close(reload(tmp_path / "elsewhere" / "out")[0], wanted, rtol=0, atol=1e-5)
    # Other code would convert the weights otherwise.
    plugin = tmp_path / "plugins" / "fusing.py"
    plugin.write_text(FUSING + "\n# changed\n")
    refused = hp_train_here("export", "../run", "--to", "other")
    assert refused.returncode == 2
    assert "the plugins are not those that the run was trained with: plugin fusing.py (sha256 " in refused.stderr
    plugin.write_text(FUSING)
    # The written recipe goes on with the run, and has the same plugins.
    again = ("--output_dir=null", "--checkpoint.resume=../run", "--training.train_iters=4")
    done = hp_train_here(str(written), *again)
    assert done.returncode == 0, done.stderr
    assert "resuming from ../run/checkpoints/step_00000003 (step 3)" in done.stdout
    done = hp_train_here(str(written), "-p", str(tmp_path / "watcher.py"))
    assert done.returncode == 2
    assert "is listed already" in done.stderr
