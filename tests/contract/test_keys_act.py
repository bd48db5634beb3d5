"""Every accepted recipe key does something: a test turns each on and sees a difference.

The table below must name every key of the recipe's own sections and every argument of the components that ship with
the project; a new one without a row here fails `test_every_key_has_a_row`.
"""

from __future__ import annotations

import gzip
import json
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from hp_core.components import Components, group
from hp_core.config.base import Section, section_in
from hp_core.config.models import TrainerConfig
from hp_core.config.signature import Signature
from hp_core.observe.trackers import read_metrics
from tests.conftest import ROOT
from tests.contract.adapters import PEFT_KEYS
from tests.contract.chats import CHAT_KEYS, chats
from tests.contract.images import IMAGE_KEYS
from tests.contract.launches import LAUNCH_KEYS
from tests.contract.texts import write_texts
from tests.contract.trackers import TRACKER_KEYS
from tests.e2e.runs import hp_train_here, manifest, steps, train

RECIPE = """\
model:
  name: causal_lm
  config: {model_type: llama, vocab_size: 300, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 1,
           num_attention_heads: 2, num_key_value_heads: 1}
dataset:
  name: text
  files: {texts}/some
  max_seq_len: 32
  validation_fraction: 0.3
  tokenizer: bytes
optimizer: {name: adamw, lr: 1e-2}
training: {train_iters: 2, global_batch_size: 4, seed: 3}
output_dir: {out}
"""

PLUGIN = "from hp_core import hookimpl\n\n\n@hookimpl\ndef on_train_end(run, report):\n    run.console.say('bye')\n"


@dataclass
class Outcome:
    """What one run left: its exit code, output, rows and directory."""

    code: int
    output: str
    directory: Path
    rows: list[dict[str, Any]] = field(default_factory=list)

    def losses(self) -> list[Any]:
        return steps(self.rows)

    def evaluations(self) -> list[int]:
        return [row["step"] for row in self.rows if "eval_loss" in row]

    def checkpoints(self) -> list[str]:
        folder = self.directory / "checkpoints"
        return sorted(one.name for one in folder.iterdir()) if folder.is_dir() else []


class Bench:
    """Runs the recipe with changes, each in a directory of its own; remembers the unchanged run."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.count = 0
        self.texts = write_texts(tmp_path / "texts")
        self.recipe = tmp_path / "recipe.yaml"
        self.recipe.write_text(RECIPE.replace("{texts}", str(self.texts)).replace("{out}", str(tmp_path / "default")))

    def run(self, *overrides: str, nproc: int = 1) -> Outcome:
        self.count += 1
        out = self.tmp_path / f"run{self.count}"
        given = [one.replace("{tmp}", str(self.tmp_path)).replace("{texts}", str(self.texts)) for one in overrides]
        if not any(one.startswith("--output_dir") for one in given):
            given.append(f"--output_dir={out}")
        else:
            out = Path(next(one for one in given if one.startswith("--output_dir")).partition("=")[2])
        if nproc > 1:
            return Outcome(0, "", out, train(self.recipe, *given[:-1], nproc=nproc, out=out))
        done = hp_train_here(str(self.recipe), *given)
        rows = read_metrics(out) if (out / "metrics.jsonl").exists() else []
        return Outcome(done.returncode, done.stdout + done.stderr, out, rows)

    def differ(self, *overrides: str, base: tuple[str, ...] = ()) -> bool:
        """Whether the losses or learning rates change."""
        plain, changed = self.run(*base), self.run(*base, *overrides)
        assert plain.code == changed.code == 0, changed.output
        return plain.losses() != changed.losses() or steps(plain.rows, "lr") != steps(changed.rows, "lr")


def losses_differ(*overrides: str, base: tuple[str, ...] = ()) -> Callable[[Bench], bool]:
    return lambda bench: bench.differ(*overrides, base=base)


def says(text: str, *overrides: str, code: int = 0) -> Callable[[Bench], bool]:
    def check(bench: Bench) -> bool:
        outcome = bench.run(*overrides)
        return outcome.code == code and text in outcome.output

    return check


def with_base(bench: Bench) -> bool:
    child = bench.tmp_path / "child.yaml"
    child.write_text(f"base: recipe.yaml\ntraining:\n  train_iters: 1\noutput_dir: {bench.tmp_path / 'child'}\n")
    done = hp_train_here(str(child))
    return done.returncode == 0 and len(read_metrics(bench.tmp_path / "child")) == 2


def with_plugin(bench: Bench) -> bool:
    (bench.tmp_path / "bye.py").write_text(PLUGIN)
    outcome = bench.run("--plugins=[./bye.py]")
    return "bye" in outcome.output and manifest(outcome.directory)["plugins"][0]["hooks"] == ["on_train_end"]


def resumed(bench: Bench) -> bool:
    first = bench.run("--training.stop_after=1")
    second = bench.run(f"--output_dir={first.directory}", "--checkpoint.resume=latest")
    return steps(first.rows, "step") == [1] and steps(second.rows, "step") == [1, 2]


def allowed_plugins(bench: Bench) -> bool:
    (bench.tmp_path / "bye.py").write_text(PLUGIN)
    first = bench.run("--training.stop_after=1")
    again = (f"--output_dir={first.directory}", "--checkpoint.resume=latest", "--plugins=[./bye.py]")
    return bench.run(*again).code == 2 and bench.run(*again, "--checkpoint.allow_plugin_changes=true").code == 0


def determinism(bench: Bench) -> bool:
    try:
        outcome = bench.run("--training.enable_full_determinism=true")
        return manifest(outcome.directory)["world"]["deterministic"] is True
    finally:
        torch.use_deterministic_algorithms(False)


def nonfinite(*overrides: str, code: int, text: str) -> Callable[[Bench], bool]:
    loss = "--loss_fn={_target_: tests.e2e.parts.FaultyLoss, rank: 0, call: 5, times: 8}"

    def check(bench: Bench) -> bool:
        outcome = bench.run(loss, "--training.train_iters=3", *overrides)
        return outcome.code == code and text in outcome.output

    return check


def peak(bench: Bench) -> bool:
    """What MFU is relative to from the first row on; measured, it is that of no recipe."""
    rows = bench.run("--training.device_peak_tflops=0.5").rows
    given = [row["mfu"] / row["tflops_per_second"] for row in rows if "mfu" in row]
    measured = bench.run().output
    return given == [pytest.approx(2.0)] * 2 and "MFU is relative to" in measured


def replicas(bench: Bench) -> bool:
    outcome = bench.run("--fsdp_config.dp_replicate_size=2", nproc=2)
    return (manifest(outcome.directory)["world"]["dp_replicate"], len(outcome.rows)) == (2, 3)


def shared_among(axis: str, *base: str) -> Callable[[Bench], bool]:
    def check(bench: Bench) -> bool:
        alone, shared = bench.run(*base), bench.run(*base, f"--accelerator.{axis}_size=2", nproc=2)
        same = shared.losses() == pytest.approx(alone.losses(), abs=1e-5)
        return same and manifest(shared.directory)["world"][axis] == 2

    return check


def ways_to_share_sequences(*ways: str) -> Callable[[Bench], bool]:
    """Other parts of the sequence draw other dropout, and so do other heads and tiles."""

    def check(bench: Bench) -> bool:
        base = ("--accelerator.cp_size=2", "--model.config.attention_dropout=0.5")
        found = [
            bench.run(*base, *more, nproc=2).losses() for more in ((), *((f"--accelerator.{one}",) for one in ways))
        ]
        return len({str(losses) for losses in found}) == len(found)

    return check


def plan_of(directory: Path) -> dict[str, Any]:
    plan: dict[str, Any] = json.loads((directory / "plan.json").read_text())
    return plan


IN_STAGES = ("--accelerator.pp_size=2", "--training.global_batch_size=4", "--training.micro_batch_size=1")
LAYERS = "--model.config.num_hidden_layers=6"


def schedules(bench: Bench) -> bool:
    """The schedule of torch that runs."""
    (bench.tmp_path / "look.py").write_text(
        "from hp_core import hookimpl\n\n\n@hookimpl\ndef on_train_end(run):\n"
        "    run.record(found=[type(one).__name__ for one in run.model.forward._schedules.values()])\n"
    )
    names = ("1f1b", "gpipe", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble")
    base = ("--plugins=[./look.py]", LAYERS, *IN_STAGES)
    found = [
        manifest(bench.run(*base, f"--accelerator.pp_schedule={name}", nproc=2).directory)["found"] for name in names
    ]
    torch_names = ("1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
    return found == [[f"Schedule{name}"] for name in torch_names]


def stages(bench: Bench) -> bool:
    base = (LAYERS, *IN_STAGES, "--accelerator.pp_schedule=interleaved_1f1b")
    outcome = bench.run(*base, "--accelerator.pp_stages_per_rank=3", nproc=2)
    return [one["pp_rank"] for one in plan_of(outcome.directory)["stages"]] == [0, 1, 0, 1, 0, 1]


def layers_of_stages(bench: Bench) -> bool:
    outcome = bench.run(LAYERS, *IN_STAGES, "--accelerator.pp_layers=[5, 1]", nproc=2)
    return [one["last_layer"] for one in plan_of(outcome.directory)["stages"]] == [4, 5]


def halves(key: str, module: str, dim: int, *more: str) -> Callable[[Bench], bool]:
    """Of what a module gives, each of two tensor ranks has a half; the losses are the same."""

    def check(bench: Bench) -> bool:
        (bench.tmp_path / "look.py").write_text(
            "from hp_core import hookimpl\n\n\n@hookimpl\ndef on_train_start(run):\n"
            f"    run.model.get_submodule({module!r}).register_forward_hook(\n"
            f"        lambda module, args, found: run.record(size=found.shape[{dim}])\n    )\n"
        )
        base = ("--plugins=[./look.py]", "--accelerator.tp_size=2", *more)
        whole, half = (bench.run(*base, *cut, nproc=2) for cut in ((), (f"--accelerator.{key}=true",)))
        same = half.losses() == pytest.approx(whole.losses(), abs=1e-5)
        return same and manifest(whole.directory)["size"] == 2 * manifest(half.directory)["size"]

    return check


def shards(bench: Bench) -> bool:
    outcome = bench.run("--fsdp_config={dp_shard_size: 1, dp_replicate_size: 2}", nproc=2)
    return manifest(outcome.directory)["world"]["dp_shard"] == 1


def resharding(bench: Bench) -> bool:
    (bench.tmp_path / "look.py").write_text(
        "from hp_core import hookimpl\n\n\n@hookimpl\ndef on_train_start(run):\n"
        "    group = run.model.model.layers[0]._get_fsdp_state()._fsdp_param_group\n"
        "    run.record(reshards=group.post_forward_mesh_info is not None)\n"
    )
    found = [
        manifest(bench.run("--plugins=[./look.py]", f"--fsdp_config.reshard_after_forward={value}", nproc=2).directory)
        for value in ("true", "false")
    ]
    return [one["reshards"] for one in found] == [True, False]


def gathered_ahead(direction: str, value: int) -> Callable[[Bench], bool]:
    """How many layers the root has gathered while it runs: FSDP2's own choice is no list."""

    def check(bench: Bench) -> bool:
        (bench.tmp_path / "ahead.py").write_text(
            "from hp_core import hookimpl\n\n\n@hookimpl\ndef on_train_start(run):\n"
            f"    run.record(ahead=len(run.model._get_fsdp_state()._states_to_{direction}_prefetch))\n"
        )
        base = ("--plugins=[./ahead.py]", "--model.config.num_hidden_layers=2")
        found = [
            manifest(bench.run(*base, *more, nproc=2).directory)["ahead"]
            for more in ((), (f"--fsdp_config.{direction}_prefetch={value}",))
        ]
        return found == [0, value]

    return check


def keeps_less(mode: str, *more: str) -> Callable[[Bench], bool]:
    """The modules that are run again, two times a step rather than once; the losses are the same to the last bit."""

    def check(bench: Bench) -> bool:
        (bench.tmp_path / "look.py").write_text(
            "from hp_core import hookimpl\n\ncalls = []\n\n\n@hookimpl\ndef on_train_start(run):\n"
            "    for layer in run.model.model.layers:\n"
            "        layer.self_attn.q_proj.register_forward_hook(lambda *_: calls.append(1))\n\n\n"
            "@hookimpl\ndef on_train_end(run):\n    run.record(calls=len(calls))\n"
        )
        base = (
            "--plugins=[./look.py]",
            "--model.config.num_hidden_layers=2",
            "--training.train_iters=1",
            "--evaluation.at_end=false",
        )
        off, on = (bench.run(*base, *extra) for extra in ((), (f"--activation_checkpoint.mode={mode}", *more)))
        calls = [manifest(one.directory)["calls"] for one in (off, on)]
        again = {"full": 2.0, "selective": 2.0, "every_n": 1.5}[mode] if "modules" not in "".join(more) else 1.5
        return calls[1] == again * calls[0] and on.losses() == off.losses()

    return check


def on_host(bench: Bench, *overrides: str) -> int:
    """What a run holds on the host between the forward and the backward pass; its losses are the same as without."""
    (bench.tmp_path / "host.py").write_text(
        "from hp_core import hookimpl\nfrom hp_core.model.activation_swap import swap_of\n\nheld = []\n\n\n"
        "@hookimpl\ndef on_train_start(run):\n"
        "    run.model.register_forward_hook(lambda *_: held.append(swap_of(run.model).host_bytes))\n\n\n"
        "@hookimpl\ndef on_train_end(run):\n    run.record(held=max(held))\n"
    )
    base = ("--model.config.num_hidden_layers=2", "--training.train_iters=2", "--evaluation.at_end=false")
    off, on = bench.run(*base), bench.run(*base, "--activation_swap.mode=host", "--plugins=[./host.py]", *overrides)
    assert on.code == 0, on.output
    assert on.losses() == off.losses()
    return int(manifest(on.directory)["held"])


def swaps_less(bench: Bench) -> bool:
    one_layer = on_host(bench, "--activation_swap.modules=[model.layers.1]")
    plan = plan_of(bench.tmp_path / f"run{bench.count}")
    assert plan["activations"] == {"mode": "off", "recomputed": [], "swapped": ["model.layers.1"]}
    return 0 < one_layer < on_host(bench)


BACKENDS = """\
import json
from pathlib import Path

import torch
from torch._dynamo.backends.registry import _COMPILER_FNS, register_backend

from hp_core import hookimpl


def hp_records(graph, inputs):
    with (Path(__file__).parent / "graphs").open("a") as file:
        print(json.dumps(any(isinstance(one, torch.SymInt) for one in inputs)), file=file)
    return graph


def hp_fails(graph, inputs):
    raise NotImplementedError("no code for this machine")


for one in (hp_records, hp_fails):
    _COMPILER_FNS.pop(one.__name__, None)
    register_backend(one)


@hookimpl
def on_train_end(run, report):
    pass
"""


def compiled(bench: Bench, *overrides: str, backend: str = "hp_records") -> tuple[Outcome, list[bool]]:
    """A run of two layers that compiles, and of each graph whether it is for any length."""
    torch._dynamo.reset()
    (bench.tmp_path / "backends.py").write_text(BACKENDS)
    graphs = bench.tmp_path / "graphs"
    graphs.write_text("")
    base = ("--plugins=[./backends.py]", "--model.config.num_hidden_layers=2", "--evaluation.at_end=false")
    with warnings.catch_warnings():
        # torch reads gradients that are not there, and hides the warning, which as an error it can't.
        warnings.simplefilter("default")
        found = bench.run(*base, f"--compile.backend={backend}", *overrides)
    return found, [json.loads(line) for line in graphs.read_text().splitlines()]


def compiles(bench: Bench) -> bool:
    on, graphs = compiled(bench, "--compile.mode=default")
    off = bench.run("--model.config.num_hidden_layers=2", "--evaluation.at_end=false")
    assert on.code == 0, on.output
    facts = manifest(on.directory)["compile"]
    assert (facts["modules"], facts["graphs"], on.code) == (2, len(graphs), 0), on.output
    return "compile" not in manifest(off.directory) and on.losses() == off.losses() and len(graphs) > 0


def compiles_one(bench: Bench) -> bool:
    on, _ = compiled(bench, "--compile.mode=default", "--compile.modules=[model.layers.1.mlp]")
    return int(manifest(on.directory)["compile"]["modules"]) == 1


def compiles_for_any_length(bench: Bench) -> bool:
    found = [compiled(bench, "--compile.mode=default", *extra)[1] for extra in ((), ("--compile.dynamic=true",))]
    return list(map(set, found)) == [{False}, {True}]


def tells_what_fails(bench: Bench) -> bool:
    """A run ends, or goes on with a line that says that it is slower."""
    stopped, _ = compiled(bench, "--compile.mode=default", backend="hp_fails")
    went_on, _ = compiled(bench, "--compile.mode=default", "--compile.on_failure=eager", backend="hp_fails")
    told = "model.layers.0 can't be compiled"
    return (stopped.code, went_on.code) == (1, 0) and told in stopped.output and told in went_on.output


def replaced(bench: Bench, **entry: Any) -> list[str]:
    """The modules that a run with this entry of `plan_overrides` replaced."""
    given = {"match": "model.norm", "replace_module": "rms_norm", **entry}
    outcome = bench.run(f"--plan_overrides={json.dumps([given])}", "--training.train_iters=1")
    assert outcome.code == 0, outcome.output
    (summary,) = manifest(outcome.directory)["replaced_modules"]
    assert summary["factory"] == given["replace_module"]
    modules: list[str] = summary["modules"]
    return modules


# An MLP that is planned as a chain of three, which keep the features between them cut.
_CUT, _WHOLE = {"tp": "shard(-1)"}, {"tp": "replicate"}
CHAIN = [
    {"match": "*.mlp", "params": "none"},
    *(
        {"match": f"*.{name}_proj", "params": {"weight": {"tp": "shard(0)"}}, "out_dst": _CUT}
        for name in ("gate", "up")
    ),
    {
        "match": "*.down_proj",
        "params": {"weight": {"tp": "shard(1)"}},
        "in_src": {"input": _CUT},
        "in_dst": {"input": _CUT},
        "out_src": {"tp": "partial"},
        "out_dst": _WHOLE,
    },
]


def planned(side: str, place: str, wanted: str) -> Callable[[Bench], bool]:
    """What the plan of two tensor ranks says of the last module of the chain, whose losses are one process's."""

    def check(bench: Bench) -> bool:
        found = chained(bench)
        (boundary,) = [one for one in found["boundaries"] if one["name"].endswith("down_proj")]
        (edge,) = [one for one in boundary["edges"] if one["side"] == side]
        return bool(edge[place] == wanted)

    return check


def chained(bench: Bench) -> dict[str, Any]:
    entries = f"--plan_overrides={json.dumps(CHAIN)}"
    alone, shared = bench.run(), bench.run(entries, "--accelerator.tp_size=2", nproc=2)
    assert shared.losses() == pytest.approx(alone.losses(), abs=1e-5)
    return plan_of(shared.directory)


def cut_parameters(bench: Bench) -> bool:
    plan = chained(bench)
    cut = {
        one["name"].rpartition(".mlp.")[2]: one["placements"] for one in plan["parameters"] if ".mlp." in one["name"]
    }
    return cut == {
        "gate_proj.weight": {"tp": "shard(0)"},
        "up_proj.weight": {"tp": "shard(0)"},
        "down_proj.weight": {"tp": "shard(1)"},
    }


def refused_type(*overrides: str, text: str) -> Callable[[Bench], bool]:
    entry = "{match: model.norm, replace_module: rms_norm, module_type: torch.nn.Module}"
    return says(text, f"--plan_overrides=[{entry}]", *overrides, code=2)


def timeout(bench: Bench) -> bool:
    """A rank that hangs is noticed after the timeout, not after half an hour."""
    from hp_core.testing.ranks import RankError

    with pytest.raises(RankError, match=r"(?i)timed? ?out"):
        bench.run("--launch.timeout=3", "--loss_fn={_target_: tests.contract.texts.HangingLoss}", nproc=2)
    return True


def samples(bench: Bench, **settings: Any) -> list[str]:
    given = {"prompts": ["ab"], "max_new_tokens": 8, "temperature": 1.0, "seed": 0, **settings}
    outcome = bench.run(f"--evaluation.samples={json.dumps(given)}")
    assert outcome.code == 0, outcome.output
    return [json.loads(line)["text"] for line in (outcome.directory / "samples.jsonl").read_text().splitlines()]


def saved_in_background(bench: Bench) -> bool:
    """Files are written by another thread; they are the same."""
    from hp_core.checkpoint import saver

    threads: list[bool] = []
    write = saver.write_checkpoint

    def writing(*args: Any, **settings: Any) -> list[str]:
        threads.append(threading.current_thread() is threading.main_thread())
        return write(*args, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saver, "write_checkpoint", writing)
        runs = [bench.run("--checkpoint.save_every=1", f"--checkpoint.async={value}") for value in ("false", "true")]
    assert runs[0].checkpoints() == runs[1].checkpoints()
    return threads == [True, True, False, False]


def kept(bench: Bench, *overrides: str) -> list[int]:
    """The steps of which checkpoints are left of four, of which the last is kept."""
    always = ("--training.train_iters=4", "--checkpoint.save_every=1", "--checkpoint.keep_last=1")
    return [int(name.removeprefix("step_")) for name in bench.run(*always, *overrides).checkpoints()]


def traced(bench: Bench, *overrides: str) -> str:
    """The text of the trace of the second of two steps."""
    outcome = bench.run("--profiler.start_step=2", *overrides)
    assert outcome.code == 0, outcome.output
    (path,) = (outcome.directory / "profile").glob("*.json.gz")
    return f"{path.name}\n{gzip.decompress(path.read_bytes()).decode()}"


def trace_says(text: str, *overrides: str) -> Callable[[Bench], bool]:
    return lambda bench: text in traced(bench, *overrides) and text not in traced(bench)


ROOT_LOSS = ("--debug.detect_anomaly=true", "--loss_fn={_target_: tests.e2e.parts.RootLoss}")


def at_end(bench: Bench) -> bool:
    return (bench.run().evaluations(), bench.run("--evaluation.at_end=false").evaluations()) == ([2], [])


def loaded(*extra: str) -> Callable[[Bench], Outcome]:
    def run(bench: Bench) -> Outcome:
        from tests.model.tiny import a_setup, build

        path = bench.tmp_path / "pretrained"
        if not path.exists():
            config = {"model_type": "llama", "vocab_size": 300, "hidden_size": 16, "intermediate_size": 24}
            with a_setup() as setup:
                sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
                build(setup, {**config, **sizes}).save_pretrained(path)
        return bench.run("--model={name: causal_lm, pretrained: 'PATH'}".replace("PATH", str(path)), *extra)

    return run


def pretrained(bench: Bench) -> bool:
    outcome = loaded()(bench)
    return outcome.code == 0 and outcome.losses() != bench.run().losses()


def rows_of(bench: Bench, *overrides: str) -> dict[str, Any]:
    outcome = bench.run("--training.train_iters=1", *overrides)
    assert outcome.code == 0, outcome.output
    return manifest(outcome.directory)["data"]


def data_differs(*overrides: str, base: tuple[str, ...] = ()) -> Callable[[Bench], bool]:
    return lambda bench: rows_of(bench, *base) != rows_of(bench, *base, *overrides)


def faulty(bench: Bench, *overrides: str) -> Outcome:
    """A run on texts of which two are none."""
    rows = [{"text": f"a text, number {index} of many"} for index in range(12)]
    (bench.tmp_path / "faulty.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {}, {"text": 1}]))
    return bench.run("--dataset.files={tmp}/faulty.jsonl", "--training.global_batch_size=1", *overrides)


def processes_encode(*base: str) -> Callable[[Bench], bool]:
    """How many other processes encode, where data is worth them."""
    from hp_core.data import parallel, writing

    def check(bench: Bench) -> bool:
        found: list[int] = []
        for number in (1, 2):
            started: list[int] = []

            class Counted(parallel.EncodingProcess):
                def __init__(self, encoder: bytes, started: list[int] = started) -> None:
                    super().__init__(encoder)
                    started.append(self.pid)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(parallel, "PAYS_AFTER_SECONDS", 0.0)
                patch.setattr(parallel, "EncodingProcess", Counted)
                patch.setattr(writing, "_BATCH_ROWS", 1)
                given = (f"--dataset.num_proc={number}", f"--dataset.cache_dir={{tmp}}/cache{number}")
                assert bench.run(*base, *given).code == 0
            found.append(len(started))
        return found == [0, 1]

    return check


def column_of_a_file(bench: Bench) -> bool:
    """The column of the constant 2 doubles the loss of a whole set; without it, the loss that takes it is refused."""
    loss = "--loss_fn={_target_: tests.contract.texts.ColumnLoss, column: two}"
    plain, doubled, without = (
        bench.run(*OTHER, "--training.train_iters=1", "--optimizer.lr=1e-30", *more)
        for more in ((), (loss, "--dataset.columns=[two]"), (loss,))
    )
    assert doubled.code == 0, doubled.output
    return doubled.rows[-1]["eval_loss"] == pytest.approx(2 * plain.rows[-1]["eval_loss"]) and without.code == 2


def pinned(bench: Bench) -> bool:
    from hp_core.data.order import evaluation_batches
    from hp_plugins.dataloaders.torch_loader import torch_loader

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.accelerator.is_available", lambda: True)
        given = {"dataset": [0], "collate_fn": list, "batch_sampler": evaluation_batches(1, 0, 1, 1), "seed": 0}
        return [torch_loader(pin_memory=value, **given).pin_memory for value in (True, False)] == [True, False]


def weights_act(*loss: str) -> Callable[[Bench], bool]:
    """Weights that differ between documents change the loss of a whole set."""

    def check(bench: Bench) -> bool:
        common = (*OTHER, *loss, "--training.train_iters=1", "--optimizer.lr=1e-30")
        plain = bench.run(*common)
        weighted = bench.run(*common, "--dataset.columns=[weight]", "--loss_fn.token_weights=weight")
        assert plain.code == weighted.code == 0, weighted.output
        return abs(weighted.rows[-1]["eval_loss"] / plain.rows[-1]["eval_loss"] - 1) > 1e-4

    return check


def rows_of_a_chunk(bench: Bench, *overrides: str, computed_by: Any = None) -> int:
    """The most tokens whose logits a chunked loss held at a time."""
    from hp_plugins.losses.objective import Objective

    owner, method = computed_by or (Objective, "total_and_gradient_")
    seen: list[int] = []
    plain = getattr(owner, method)

    def watched(self: Any, logits: torch.Tensor, *others: Any) -> torch.Tensor:
        seen.append(len(logits))
        return plain(self, logits, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, method, watched)
        outcome = bench.run("--training.train_iters=1", *overrides)
    assert outcome.code == 0, outcome.output
    return max(seen)


def rows_of_a_distilled_chunk(bench: Bench, *overrides: str) -> int:
    """Likewise, with a teacher."""
    from hp_plugins.losses.divergence import Divergence

    return rows_of_a_chunk(bench, *DISTILLATION, *overrides, computed_by=(Divergence, "sums_and_gradient_"))


DOCS = ("--dataset={name: python_docs, max_files: 6, max_seq_len: 32, validation_fraction: 0.3, tokenizer: bytes}",)
BPE = ("--dataset.tokenizer={name: bpe, vocab_size: 280}",)
MUON = ("--optimizer={name: muon, lr: 0.02, adamw_lr: 1e-2}", "--training.train_iters=4")
SGD = ("--optimizer={name: sgd, lr: 0.1, momentum: 0.5}", "--training.train_iters=4")
COSINE = ("--lr_scheduler={name: cosine, warmup_steps: 1}", "--training.train_iters=4")
LINEAR = ("--lr_scheduler={name: linear, warmup_steps: 1}", "--training.train_iters=4")
WSD = ("--lr_scheduler={name: wsd, decay_steps: 2}", "--training.train_iters=4")
DENSE = ("--loss_fn={name: causal_lm}",)
CHUNKED = ("--loss_fn={name: chunked_causal_lm}",)
FOCAL = ("--loss_fn={name: focal}",)
Z_LOSS = ("--loss_fn={name: z_loss, loss: causal_lm}",)
TEACHER = (
    "{name: causal_lm, config: {model_type: llama, vocab_size: 300, hidden_size: 24, intermediate_size: 24, "
    "num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1}}"
)
DISTILLATION = (f"--loss_fn={{name: distillation, teacher: {TEACHER}}}",)
EXPERTS = (
    "--model.config={model_type: qwen3_moe, head_dim: 8, num_experts: 4, "
    "num_experts_per_tok: 2, moe_intermediate_size: 8, vocab_size: 300, hidden_size: 16, num_hidden_layers: 1, "
    "num_attention_heads: 2, num_key_value_heads: 1}"
)
OTHER = ("--dataset.files={texts}/other.jsonl", "--training.global_batch_size=1")
CACHE = "--dataset.cache_dir={tmp}/mine"
ALONE = "max_seq_len: 32, tokenizer: bytes"
NAMED = "{a: {files: {texts}/other.jsonl}, b: {files: {texts}/other.jsonl, field: title}}"
SOURCES = (
    f"--dataset={{name: text, max_seq_len: 32, tokenizer: bytes, sources: {NAMED}}}",
    "--training.global_batch_size=1",
)


def keys_of_sources(bench: Bench) -> bool:
    """Each key of a source acts: on the rows, on how many of them an epoch takes, or on what targets count for."""
    changes = (
        "b.field=text",
        "b={files: {texts}/other.jsonl, template: '{title} {text}'}",
        "b={megatron: {texts}/tokens}",
        "b={files: {texts}/some}",
    )
    plain = rows_of(bench, *SOURCES)
    assert all(rows_of(bench, *SOURCES, f"--dataset.sources.{one}") != plain for one in changes)
    weights = rows_of(bench, *SOURCES, "--dataset.sources.a.weight=1", "--dataset.sources.b.weight=3")["train"]
    weighted = rows_of(
        bench,
        *SOURCES,
        "--dataset.sources.a.loss_weight=2",
        "--loss_fn={name: causal_lm, token_weights: token_weights}",
    )
    refused = [
        bench.run(*SOURCES, f"--dataset.sources.b={one}", "--training.train_iters=1")
        for one in ("{hub_id: no/where}", "{files: x, hub_config: x}", "{files: x, split: x}")
    ]
    return (
        weights["sources"]["a"]["epoch_rows"] == pytest.approx(weights["rows"] / 4, abs=1)
        and weighted["train"]["columns"] == ["token_weights"]
        and [one.code for one in refused] == [2, 2, 2]
        and all(f"dataset.sources.b.{key}" in one.output for key, one in zip(KEYS_OF_HUB, refused, strict=True))
    )


STREAM = (
    f"--dataset={{name: text, files: {{texts}}/other.jsonl, {ALONE}, streaming: true}}",
    "--training.train_iters=4",
)


def streamed(bench: Bench) -> bool:
    """Nothing is cached, so a folder for it is refused, and the same rows come in another order."""
    unused = bench.run(*STREAM, "--dataset.cache_dir={tmp}/unused")
    assert "dataset.cache_dir: has no effect on streamed data" in unused.output
    stream = bench.run(*STREAM, "--training.global_batch_size=1")
    assert stream.code == 0, stream.output
    whole = bench.run(*STREAM, "--dataset.streaming=false", "--training.global_batch_size=1")
    return unused.code == 2 and stream.losses() != whole.losses()


KEYS_OF_HUB = ("hub_id", "hub_config", "split")


def cached(*base: str) -> Callable[[Bench], bool]:
    def check(bench: Bench) -> bool:
        assert bench.run(*base, CACHE).code == 0
        return (bench.tmp_path / "mine").is_dir()

    return check


KEYS: dict[str, Callable[[Bench], bool]] = {
    "base": with_base,
    "plugins": with_plugin,
    "output_dir": lambda bench: (bench.run("--output_dir={tmp}/elsewhere").directory / "metrics.jsonl").is_file(),
    "training.train_iters": lambda bench: len(bench.run("--training.train_iters=3").losses()) == 3,
    "training.train_samples": lambda bench: (
        steps(bench.run("--training={train_samples: 6, global_batch_size: 4}").rows, "samples") == [4, 6]
    ),
    "training.train_epochs": lambda bench: (
        steps(bench.run("--training={train_epochs: 1, global_batch_size: 16, micro_batch_size: 16}").rows, "epoch")[-1]
        == 1
    ),
    "training.global_batch_size": losses_differ("--training.global_batch_size=8"),
    "training.micro_batch_size": says("global_batch_size", "--training.micro_batch_size=3", code=2),
    "training.max_grad_norm": losses_differ("--training.max_grad_norm=1e-3", base=SGD),
    "training.seed": losses_differ("--training.seed=4"),
    "training.enable_full_determinism": determinism,
    "training.log_every": lambda bench: (
        steps(bench.run("--training.log_every=2", "--training.train_iters=5").rows, "step") == [2, 4, 5]
    ),
    "training.backend": says("nccl does not run on the CPU", "--training.backend=nccl", code=2),
    "training.device": says("no CUDA device is visible", "--training.device=cuda", code=2),
    "training.device_peak_tflops": peak,
    "training.nonfinite": nonfinite("--training.nonfinite=skip", code=0, text="the step is skipped"),
    "training.nonfinite_limit": nonfinite(
        "--training.nonfinite=skip", "--training.nonfinite_limit=1", code=1, text="nonfinite_limit=1 in a row"
    ),
    "training.stop_after": lambda bench: bench.run("--training.stop_after=1").checkpoints() == ["step_00000001"],
    "fsdp_config.dp_shard_size": shards,
    **{
        f"accelerator.{axis}_size": shared_among(axis, *base)
        for axis, base in (("tp", ()), ("cp", ()), ("ep", (EXPERTS,)), ("pp", (LAYERS, *IN_STAGES[1:])))
    },
    "accelerator.pp_schedule": schedules,
    "accelerator.pp_stages_per_rank": stages,
    "accelerator.pp_layers": layers_of_stages,
    "accelerator.cp_layout": ways_to_share_sequences("cp_layout=contiguous"),
    "accelerator.cp_method": ways_to_share_sequences("cp_method=ulysses", "cp_method=ring"),
    "accelerator.sequence_parallel": halves("sequence_parallel", "model.layers.0.input_layernorm", 1),
    "accelerator.loss_parallel": halves("loss_parallel", "lm_head", -1, "--loss_fn=causal_lm"),
    "fsdp_config.dp_replicate_size": replicas,
    "fsdp_config.reshard_after_forward": resharding,
    "fsdp_config.forward_prefetch": gathered_ahead("forward", 1),
    "fsdp_config.backward_prefetch": gathered_ahead("backward", 2),
    "mixed_precision.param_dtype": losses_differ("--mixed_precision.param_dtype=bfloat16"),
    "mixed_precision.reduce_dtype": losses_differ(
        "--mixed_precision.reduce_dtype=bfloat16", base=("--mixed_precision.param_dtype=bfloat16",)
    ),
    "compile.mode": compiles,
    "compile.backend": compiles,
    "compile.modules": compiles_one,
    "compile.dynamic": compiles_for_any_length,
    "compile.on_failure": tells_what_fails,
    "activation_checkpoint.mode": keeps_less("full"),
    "activation_checkpoint.n": keeps_less("every_n", "--activation_checkpoint.n=2"),
    "activation_swap.mode": lambda bench: on_host(bench) > 0,
    "activation_swap.modules": swaps_less,
    "activation_checkpoint.modules": keeps_less("full", "--activation_checkpoint.modules=[model.layers.1.*attn]"),
    "plan_overrides.match": lambda bench: (
        replaced(bench) == ["model.norm"]
        and sorted(replaced(bench, match=["model.norm", "*.input_layernorm"]))
        == ["model.layers.0.input_layernorm", "model.norm"]
    ),
    "plan_overrides.when": lambda bench: replaced(bench, when="tp") == [],
    "plan_overrides.module_type": refused_type(
        "--plan_overrides[0].module_type=torch.nn.Linear", text="1 of the 1 modules that match are no Linear"
    ),
    "plan_overrides.exact_type": refused_type(
        "--plan_overrides[0].exact_type=true", text="1 of the 1 modules that match are no Module exactly"
    ),
    "plan_overrides.replace_module": lambda bench: (
        replaced(bench, match="*.mlp", replace_module="swiglu") == ["model.layers.0.mlp"]
    ),
    "plan_overrides.params": cut_parameters,
    "plan_overrides.in_src": planned("input", "src", "shard(-1)"),
    "plan_overrides.in_dst": planned("input", "dst", "shard(-1)"),
    "plan_overrides.out_src": planned("output", "src", "partial"),
    "plan_overrides.out_dst": planned("output", "dst", "replicate"),
    "plan_overrides.inner_wrapper": losses_differ(
        "--plan_overrides=[{match: '*.self_attn', inner_wrapper: {_target_: tests.contract.texts.halved}}]"
    ),
    "plan_overrides.local_compute_fn": losses_differ(
        "--plan_overrides=[{match: '*.experts', local_compute_fn: {_target_: tests.contract.texts.silent_experts}}]",
        base=(EXPERTS,),
    ),
    "evaluation.every": lambda bench: bench.run("--evaluation.every=1").evaluations() == [1, 2],
    "evaluation.at_end": at_end,
    "evaluation.samples.prompts": lambda bench: [t[:2] for t in samples(bench, prompts=["xy", "zw"])] == ["xy", "zw"],
    "evaluation.samples.max_new_tokens": lambda bench: samples(bench) != samples(bench, max_new_tokens=2),
    "evaluation.samples.temperature": lambda bench: samples(bench) != samples(bench, temperature=0.0),
    "evaluation.samples.seed": lambda bench: samples(bench) != samples(bench, seed=1),
    "checkpoint.save_every": lambda bench: len(bench.run("--checkpoint.save_every=1").checkpoints()) == 2,
    "checkpoint.async": saved_in_background,
    "checkpoint.keep_last": lambda bench: kept(bench) == [4],
    "checkpoint.keep_every": lambda bench: kept(bench, "--checkpoint.keep_every=2") == [2, 4],
    "checkpoint.keep_best.metric": lambda bench: kept(bench, "--checkpoint.keep_best={metric: samples}") == [1, 4],
    "checkpoint.keep_best.mode": lambda bench: (
        kept(bench, "--checkpoint.keep_best={metric: samples, mode: max, count: 2}") == [3, 4]
    ),
    "checkpoint.keep_best.count": lambda bench: (
        kept(bench, "--checkpoint.keep_best={metric: samples, count: 2}") == [1, 2, 4]
    ),
    "checkpoint.save_last": lambda bench: bench.run("--checkpoint.save_last=false").checkpoints() == [],
    "checkpoint.resume": resumed,
    "checkpoint.allow_plugin_changes": allowed_plugins,
    **LAUNCH_KEYS,
    "launch.timeout": timeout,
    "profiler.start_step": lambda bench: traced(bench).startswith("rank0.step2.json.gz"),
    "profiler.stop_step": trace_says("rank0.steps2-3", "--profiler.stop_step=3", "--training.train_iters=3"),
    "profiler.ranks": says("no rank 1: the run has rank 0 alone", "--profiler={start_step: 1, ranks: [1]}", code=2),
    "profiler.record_shapes": trace_says('"Input Dims"', "--profiler.record_shapes=true"),
    "profiler.with_stack": trace_says('"python_function"', "--profiler.with_stack=true"),
    "profiler.profile_memory": trace_says('"[memory]"', "--profiler.profile_memory=true"),
    "profiler.memory_snapshot": says(
        "only CUDA's allocator", "--profiler={start_step: 1, memory_snapshot: true}", "--training.device=cpu", code=2
    ),
    "debug.check_outputs": says(
        "model.layers.0.self_attn (LlamaAttention): its output[0] is not finite",
        "--debug.check_outputs=true",
        f"--plugins=[{ROOT / 'tests' / 'e2e' / 'overflows.py'}]",
        code=1,
    ),
    "debug.detect_anomaly": says("Function 'MulBackward0' returned nan values", *ROOT_LOSS, code=1),
    # Sections that name a component: naming another one acts.
    "trainer": says("no trainer component is named 'nothing'", "--trainer=nothing", code=2),
    "model": pretrained,
    "loss_fn": losses_differ("--loss_fn={name: causal_lm, label_smoothing: 0.5}"),
    "optimizer": losses_differ(*SGD),
    "lr_scheduler": losses_differ("--lr_scheduler=cosine"),
    "dataset.source": data_differs(*DOCS),
    "dataset.tokenizer": data_differs(*BPE),
    "dataloader.loader": says("no dataloader component is named 'nothing'", "--dataloader.name=nothing", code=2),
    "dataloader.collate_fn": says("built", "--dataloader.collate_fn={_target_: tests.contract.texts.loud_rows}"),
    # Arguments of the components that ship with the project.
    "hp.models.causal_lm.pretrained": pretrained,
    "hp.models.causal_lm.revision": lambda bench: (
        "a directory has no revisions" in loaded("--model.revision=main")(bench).output
    ),
    "hp.models.causal_lm.config": losses_differ("--model.config.num_hidden_layers=2"),
    "hp.models.causal_lm.dtype": losses_differ("--model.dtype=bfloat16"),
    "hp.models.causal_lm.attn_implementation": losses_differ(
        "--model.attn_implementation=eager", base=("--model.dtype=bfloat16", "--dataset.max_seq_len=64")
    ),
    "hp.models.causal_lm.generation_config": lambda bench: (
        json.loads(
            (
                bench.run("--model.generation_config={eos_token_id: 7}").directory / "assets/generation_config.json"
            ).read_text()
        )["eos_token_id"]
        == 7
    ),
    "hp.models.causal_lm.trust_remote_code": lambda bench: (
        bench.run("--model={name: causal_lm, pretrained: '{texts}/remote', trust_remote_code: true}").code == 0
        and bench.run("--model={name: causal_lm, pretrained: '{texts}/remote'}").code == 2
    ),
    **{
        f"hp.losses.{loss[0].partition(': ')[2][:-1]}.{name}": losses_differ(f"--loss_fn.{name}={value}", base=base)
        for loss in (DENSE, CHUNKED)
        for name, value, base in (
            ("label_smoothing", "0.2", loss),
            ("z_loss", "0.1", loss),
            ("ignore_index", str(ord("a")), loss),
        )
    },
    **{
        f"hp.losses.{loss[0].partition(': ')[2].strip('}').partition(',')[0]}.{name}": losses_differ(
            f"--loss_fn.{name}=0.1", base=(*loss, EXPERTS)
        )
        for loss in (DENSE, CHUNKED, FOCAL, DISTILLATION)
        for name in ("router_balance", "router_z_loss")
    },
    "hp.losses.causal_lm.token_weights": weights_act(*DENSE),
    "hp.losses.chunked_causal_lm.token_weights": weights_act(*CHUNKED),
    "hp.losses.chunked_causal_lm.chunk_size": lambda bench: (
        rows_of_a_chunk(bench, *CHUNKED, "--loss_fn.chunk_size=5") == 5 < rows_of_a_chunk(bench, *CHUNKED)
    ),
    # 20,000 logits in fp32 are 80,000 bytes.
    "hp.losses.chunked_causal_lm.memory_budget_mib": lambda bench: (
        rows_of_a_chunk(bench, *CHUNKED, "--model.config.vocab_size=20000", "--loss_fn.memory_budget_mib=1")
        == 2**20 // 80_000
    ),
    "hp.losses.focal.gamma": losses_differ("--loss_fn.gamma=0.5", base=FOCAL),
    "hp.losses.focal.ignore_index": losses_differ(f"--loss_fn.ignore_index={ord('a')}", base=FOCAL),
    "hp.losses.focal.token_weights": weights_act(*FOCAL),
    "hp.losses.z_loss.loss": losses_differ("--loss_fn.loss=focal", base=Z_LOSS),
    "hp.losses.z_loss.coefficient": losses_differ("--loss_fn.coefficient=0.1", base=Z_LOSS),
    **{
        f"hp.losses.distillation.{name.partition('.')[0]}": losses_differ(
            f"--loss_fn.{name}={value}", base=DISTILLATION
        )
        for name, value in {
            "teacher.config.hidden_size": "32",
            "direction": "reverse",
            "temperature": "2.0",
            "kl_weight": "0.9",
            "ignore_index": str(ord("a")),
        }.items()
    },
    "hp.losses.distillation.token_weights": weights_act(*DISTILLATION),
    "hp.losses.distillation.chunk_size": lambda bench: (
        rows_of_a_distilled_chunk(bench, "--loss_fn.chunk_size=5") == 5 < rows_of_a_distilled_chunk(bench)
    ),
    # Four buffers of 80,000 bytes for a token.
    "hp.losses.distillation.memory_budget_mib": lambda bench: (
        rows_of_a_distilled_chunk(
            bench,
            "--model.config.vocab_size=20000",
            "--loss_fn.teacher.config.vocab_size=20000",
            "--loss_fn.memory_budget_mib=1",
        )
        == 2**20 // (4 * 80_000)
    ),
    **{
        f"hp.optimizers.adamw.{name}": losses_differ(f"--optimizer.{name}={value}", "--training.train_iters=4")
        for name, value in {
            "lr": "0.1",
            "betas": "[0.5, 0.5]",
            "eps": "1.0",
            "weight_decay": "5.0",
            "groups": "[{match: '*proj*', lr: 0.5}]",
        }.items()
    },
    "hp.optimizers.adamw.fused": says("fused: False", "--optimizer.fused=false", "-p", "{texts}/look.py"),
    **{
        f"hp.optimizers.sgd.{name}": losses_differ(f"--optimizer.{name}={value}", base=SGD)
        for name, value in {
            "lr": "1.0",
            "momentum": "0.0",
            "nesterov": "true",
            "weight_decay": "5.0",
            "groups": "[{match: '*proj*', frozen: true}]",
        }.items()
    },
    **{
        f"hp.optimizers.muon.{name}": losses_differ(f"--optimizer.{name}={value}", base=MUON)
        for name, value in {
            "lr": "0.5",
            "adamw_lr": "0.1",
            "momentum": "0.1",
            "nesterov": "false",
            "ns_steps": "1",
            "adjust_lr_fn": "match_rms_adamw",
            "weight_decay": "5.0",
            "adamw_betas": "[0.1, 0.1]",
            "adamw_eps": "1.0",
            "groups": "[{match: '*proj*', lr: 0.5}]",
        }.items()
    },
    "hp.lr_schedulers.constant.warmup_steps": losses_differ("--lr_scheduler={name: constant, warmup_steps: 4}"),
    "hp.lr_schedulers.linear.warmup_steps": losses_differ("--lr_scheduler.warmup_steps=3", base=LINEAR),
    "hp.lr_schedulers.linear.min_lr_ratio": losses_differ("--lr_scheduler.min_lr_ratio=0.5", base=LINEAR),
    "hp.lr_schedulers.cosine.warmup_steps": losses_differ("--lr_scheduler.warmup_steps=3", base=COSINE),
    "hp.lr_schedulers.cosine.min_lr_ratio": losses_differ("--lr_scheduler.min_lr_ratio=0.5", base=COSINE),
    "hp.lr_schedulers.wsd.warmup_steps": losses_differ("--lr_scheduler.warmup_steps=2", base=WSD),
    "hp.lr_schedulers.wsd.decay_steps": losses_differ("--lr_scheduler.decay_steps=4", base=WSD),
    "hp.lr_schedulers.wsd.min_lr_ratio": losses_differ("--lr_scheduler.min_lr_ratio=0.5", base=WSD),
    "hp.lr_schedulers.wsd.decay": losses_differ(
        "--lr_scheduler.decay=cosine", base=("--lr_scheduler={name: wsd, decay_steps: 3}", WSD[1])
    ),
    "hp.datasets.text.files": data_differs("--dataset.files={texts}/other.jsonl"),
    "hp.datasets.text.hub_id": says("hub_id", "--dataset={name: text, hub_id: 'no/where', tokenizer: bytes}", code=2),
    "hp.datasets.text.hub_config": says("hub_config", "--dataset.hub_config=x", code=2),
    "hp.datasets.text.split": says("split", "--dataset.split=test", code=2),
    "hp.datasets.text.megatron": data_differs(
        "--dataset={name: text, megatron: '{texts}/tokens.bin', max_seq_len: 32, tokenizer: bytes}",
        base=("--training.global_batch_size=1",),
    ),
    "hp.datasets.text.sources": keys_of_sources,
    "hp.datasets.text.streaming": streamed,
    "hp.datasets.text.block_documents": losses_differ(
        "--dataset.block_documents=2", base=(*STREAM, "--training.global_batch_size=1")
    ),
    "hp.datasets.text.temperature": data_differs("--dataset.temperature=4", base=SOURCES),
    "hp.datasets.text.field": data_differs("--dataset.field=title", base=OTHER),
    "hp.datasets.text.template": data_differs('--dataset.template="{title} {text}"', base=OTHER),
    "hp.datasets.text.columns": column_of_a_file,
    "hp.datasets.text.max_seq_len": data_differs("--dataset.max_seq_len=16"),
    "hp.datasets.text.validation_fraction": data_differs("--dataset.validation_fraction=0.6"),
    "hp.datasets.text.validation_files": data_differs(
        "--dataset.validation_files={texts}/other.jsonl", base=("--dataset.validation_fraction=0",)
    ),
    "hp.datasets.text.cache_dir": cached(),
    "hp.datasets.text.num_proc": processes_encode(),
    "hp.datasets.text.packing": data_differs("--dataset.packing=best_fit"),
    "hp.datasets.text.length_policy": data_differs("--dataset.length_policy=truncate"),
    "hp.datasets.text.on_error": lambda bench: (
        faulty(bench).code == 2 and "left out: 2 faulty rows" in faulty(bench, "--dataset.on_error=skip").output
    ),
    "hp.datasets.text.max_errors": lambda bench: (
        faulty(bench, "--dataset.on_error=skip", "--dataset.max_errors=1").code == 2
    ),
    **PEFT_KEYS,
    **CHAT_KEYS,
    **IMAGE_KEYS,
    "hp.datasets.chat.num_proc": processes_encode(chats(), "--training={train_iters: 1, global_batch_size: 1}"),
    "hp.datasets.python_docs.max_files": data_differs("--dataset.max_files=5", base=DOCS),
    "hp.datasets.python_docs.max_seq_len": data_differs("--dataset.max_seq_len=16", base=DOCS),
    "hp.datasets.python_docs.validation_fraction": data_differs("--dataset.validation_fraction=0.6", base=DOCS),
    "hp.datasets.python_docs.num_proc": processes_encode(*DOCS),
    "hp.datasets.python_docs.packing": data_differs("--dataset.packing=none", base=DOCS),
    "hp.datasets.python_docs.length_policy": data_differs("--dataset.length_policy=truncate", base=DOCS),
    "hp.datasets.python_docs.include": data_differs("--dataset.include=docstrings", base=DOCS),
    "hp.datasets.python_docs.cache_dir": cached(*DOCS),
    "hp.tokenizers.bpe.vocab_size": data_differs("--dataset.tokenizer.vocab_size=270", base=BPE),
    "hp.tokenizers.bpe.min_frequency": data_differs("--dataset.tokenizer.min_frequency=100000", base=BPE),
    "hp.tokenizers.bpe.sample_bytes": data_differs("--dataset.tokenizer.sample_bytes=20", base=BPE),
    "hp.tokenizers.pretrained.path": says("nowhere", "--dataset.tokenizer={name: pretrained, path: ./nowhere}", code=2),
    "hp.tokenizers.pretrained.revision": lambda bench: (
        bench.run("--dataset.tokenizer={name: pretrained, path: '{texts}/tokenizer', revision: v9}").code == 2
    ),
    "hp.tokenizers.pretrained.eos_token": data_differs(
        "--dataset.tokenizer.eos_token=a", base=("--dataset.tokenizer={name: pretrained, path: '{texts}/tokenizer'}",)
    ),
    "hp.dataloaders.torch.num_workers": says("workers: 2", "--dataloader.num_workers=2", "-p", "{texts}/look.py"),
    "hp.dataloaders.torch.pin_memory": pinned,
    "hp.dataloaders.torch.prefetch_factor": says(
        "prefetch: None ahead: 3", "--dataloader={prefetch_factor: 3}", "-p", "{texts}/look.py"
    ),
    **TRACKER_KEYS,
}


def own_keys(model: type[Section], prefix: str = "") -> set[str]:
    """Every leaf key of the recipe's own sections."""
    found = set()
    for name, info in model.recipe_keys().items():
        section, _ = section_in(info.annotation)
        if section is not None:
            found |= own_keys(section, f"{prefix}{name}.")
        else:
            found.add(f"{prefix}{name}")
    return found


def component_keys() -> set[str]:
    """Every recipe argument of the components of this project."""
    return {
        f"{one.group}.{one.name}.{name}"
        for one in Components.discover().all()
        if one.distribution == "hyperparallel"
        for name in Signature.of(one.load()).parameters
        if name not in group(one.group).runtime_arguments
    }


def test_every_key_has_a_row():
    assert set(KEYS) == own_keys(TrainerConfig) | component_keys()


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("keys"))


@pytest.mark.filterwarnings("ignore:Error detected in MulBackward0")
@pytest.mark.parametrize("key", KEYS)
def test_the_key_acts(bench, key):
    assert KEYS[key](bench)
