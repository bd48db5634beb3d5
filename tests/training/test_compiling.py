"""What a run says of its compilations, and when."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hp_core.config.compile import CompileConfig
from hp_core.model.compile import start_compiling
from hp_core.training.compiling import Compilations, CompileWatch
from tests.model.tiny import QWEN3, a_setup, build

# As in tests/model/test_compile.py.
pytestmark = pytest.mark.filterwarnings("default")
IDS = torch.arange(2 * 32).reshape(2, 32) % 61


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def run() -> Iterator[Any]:
    """What a watch needs of a run that compiles for each length anew; `said` and `facts` are what it is told."""
    config = CompileConfig(mode="default", backend="aot_eager", dynamic=False)
    said: list[str] = []
    facts: dict[str, Any] = {}
    with a_setup() as setup:
        yield SimpleNamespace(
            model=build(setup, QWEN3, compile_config=config),
            setup=setup,
            config=SimpleNamespace(compile=config),
            console=SimpleNamespace(say=said.append),
            record=facts.update,
            said=said,
            facts=facts,
        )


def step(run: Any, length: int) -> None:
    run.model(input_ids=IDS[:, :length], use_cache=False).logits.sum().backward()


def test_the_first_step_is_told_and_then_what_is_compiled_again_each_time_that_it_has_doubled(run: Any) -> None:
    watch = CompileWatch()
    step(run, 20)
    watch.on_train_start(run=run)
    told = []
    for length in (16, 16, 17, 18, 19, 20, 21):
        step(run, length)
        watch.on_step_end(run=run)
        told.append(len(run.said))
        run.said.clear()
    # Of one, two, and four more; nothing was compiled before training.
    assert told == [1, 0, 1, 1, 0, 1, 0]
    assert run.facts["compile"]["graphs"] == 5
    assert sum(run.facts["compile"]["recompiled"].values()) == 4


def test_lines_say_what_was_compiled_and_why_again(run: Any) -> None:
    watch = CompileWatch()
    watch.on_train_start(run=run)
    for length in (16, 18):
        step(run, length)
        watch.on_step_end(run=run)
    first, again = run.said
    assert first.startswith("compile: 2 modules, 1 graph in ")
    assert first.endswith("; no graph breaks")
    assert again.startswith("compile: compiled again 1 time since the first step, last because ")
    assert "expected 16, actual 18" in again


def test_a_warning_is_said_once_and_by_a_rank_beside_the_main_one_with_its_number(
    run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    watch = CompileWatch()
    watch.on_train_start(run=run)
    step(run, 16)
    watch.on_step_end(run=run)
    run.said.clear()
    compiler = start_compiling(run.model)
    assert compiler is not None
    compiler.failures["no code"] = "model.layers.1"
    for _ in range(2):
        watch.on_step_end(run=run)
    wanted = "compile: model.layers.1 can't be compiled, and it and all alike run as they are written: no code"
    assert run.said == [wanted]
    run.setup = SimpleNamespace(environment=SimpleNamespace(is_main=False), rank=3)
    compiler.failures["other code"] = "model.layers.1"
    watch.on_step_end(run=run)
    assert run.said == [wanted]
    assert capsys.readouterr().err == f"rank 3: {wanted.replace('no code', 'other code')}\n"


def test_what_torch_itself_fails_at_is_told_with_its_function(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = start_compiling(run.model)
    assert compiler is not None
    compilations = Compilations(compiler)

    def fails(*_: Any, **__: Any) -> None:
        raise AssertionError("a fault of torch\nand its trace")

    monkeypatch.setattr(torch._dynamo.output_graph.OutputGraph, "compile_and_call_fx_graph", fails)
    # What monkeypatch takes back of torch's settings is gone for good.
    with torch._dynamo.config.patch(suppress_errors=True):
        step(run, 16)
    compilations.read()
    failures = compilations.facts()["failures"]
    assert failures
    assert all("a fault of torch" in message and "and its trace" not in message for message in failures)
