"""The keys of the recipe's section `peft`: for each what it changes, and which parameters a run trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hp_core.observe.trackers import read_metrics
from tests.e2e.runs import manifest, steps

BASE = ("--peft.method=lora", "--optimizer={name: sgd, lr: 1.0}", "--training.train_iters=3")
LOOK = """\
from hp_core import hookimpl


@hookimpl
def on_train_start(run):
    names = [name for name, one in run.model.named_parameters() if one.requires_grad]
    run.record(trained=sorted({name.partition('.lora_')[0] for name in names}))
    run.record(dtypes=sorted({str(one.dtype) for one in run.model.parameters() if one.requires_grad}))
"""
LAYER = "model.layers.0."


def found(bench: Any, *overrides: str) -> tuple[list[str], list[str], list[float]]:
    """The modules that are trained, by their names, the dtypes of their parameters, and the losses."""
    (bench.tmp_path / "look_at_adapters.py").write_text(LOOK)
    outcome = bench.run(*BASE, "--plugins=[./look_at_adapters.py]", *overrides)
    assert outcome.code == 0, outcome.output
    record = manifest(outcome.directory)
    return record["trained"], record["dtypes"], steps(read_metrics(outcome.directory))


def trains(wanted: list[str], *overrides: str) -> Callable[[Any], bool]:
    return lambda bench: found(bench, *overrides)[0] == wanted


def learns_otherwise(*overrides: str, from_the_start: bool = False) -> Callable[[Any], bool]:
    """Only what begins otherwise has another first loss: adapters add nothing at first."""

    def check(bench: Any) -> bool:
        plain, changed = found(bench)[2], found(bench, *overrides)[2]
        return plain[1:] != changed[1:] and (plain[0] != changed[0]) == from_the_start

    return check


def adapts_alone(bench: Any) -> bool:
    plain = bench.run(*BASE[1:])
    trained, _, losses = found(bench)
    return len(trained) == 7 and losses[0] == plain.losses()[0] and losses[1:] != plain.losses()[1:]


PEFT_KEYS: dict[str, Callable[[Any], bool]] = {
    "peft.method": adapts_alone,
    "peft.r": learns_otherwise("--peft.r=2"),
    "peft.lora_alpha": learns_otherwise("--peft.lora_alpha=64"),
    "peft.lora_dropout": learns_otherwise("--peft.lora_dropout=0.5"),
    "peft.target_modules": trains(
        [f"{LAYER}mlp.up_proj", f"{LAYER}self_attn.q_proj"], "--peft.target_modules=[q_proj, '*.up_*']"
    ),
    "peft.exclude_modules": trains(
        [f"{LAYER}self_attn.{name}_proj" for name in "koqv"], "--peft.exclude_modules='*.mlp.*'"
    ),
    "peft.modules_to_save": trains(
        ["lm_head.modules_to_save.default.weight", f"{LAYER}self_attn.q_proj"],
        "--peft.target_modules=q_proj",
        "--peft.modules_to_save=lm_head",
    ),
    "peft.use_rslora": learns_otherwise("--peft.use_rslora=true"),
    "peft.use_dora": learns_otherwise("--peft.use_dora=true"),
    "peft.init_lora_weights": learns_otherwise("--peft.init_lora_weights=false", from_the_start=True),
    "peft.autocast_adapter_dtype": lambda bench: (
        [
            found(bench, "--model.dtype=bfloat16", f"--peft.autocast_adapter_dtype={value}")[1]
            for value in ("true", "false")
        ]
        == [["torch.float32"], ["torch.bfloat16"]]
    ),
}
