import copy
import dataclasses
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.registry import _COMPILER_FNS, register_backend
from torch._functorch.aot_autograd import make_boxed_compiler
from torch._inductor.exc import InvalidCxxCompiler

from hp_core import InputError
from hp_core.config.compile import CompileConfig
from hp_core.config.memory import ActivationCheckpointConfig
from hp_core.config.models import AcceleratorConfig
from hp_core.errors import RunError
from hp_core.model import compile as compiling
from hp_core.model.compile import Compilation, Compiled, as_written, compile_settings, compiler_of, start_compiling
from hp_core.training.compiling import Compilations
from tests.model.tiny import QWEN3, QWEN3_MOE, a_setup, build

# torch reads gradients that are not there while it compiles, and hides the warning, which as an error it can't.
pytestmark = pytest.mark.filterwarnings("default")
CONFIG = {**QWEN3, "num_hidden_layers": 3, "attention_dropout": 0.1}
ALONE = AcceleratorConfig()
IDS = torch.arange(2 * 16).reshape(2, 16) % 61


@pytest.fixture(autouse=True)
def _as_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HP_CACHE_DIR", str(tmp_path / "cache"))
    torch._dynamo.reset()
    with compile_settings(settings(), ALONE):
        yield
    torch._dynamo.reset()


@pytest.fixture
def fails() -> Iterator[str]:
    """A backend that compiles nothing."""

    @register_backend(name="makes_nothing")
    def makes_nothing(graph: Any, inputs: Any) -> Any:
        raise NotImplementedError("no code for this machine\nand more")

    yield "makes_nothing"
    del _COMPILER_FNS["makes_nothing"]


@pytest.fixture
def fails_backward() -> Iterator[str]:
    """A backend that compiles a forward pass alone."""

    def none(graph: Any, inputs: Any) -> Any:
        raise NotImplementedError("no gradients on this machine")

    register_backend(
        aot_autograd(fw_compiler=make_boxed_compiler(lambda graph, inputs: graph.forward), bw_compiler=none),
        name="only_forward",
    )
    yield "only_forward"
    del _COMPILER_FNS["only_forward"]


def settings(**values: Any) -> CompileConfig:
    return CompileConfig.model_validate({"mode": "default", "backend": "aot_eager", **values})


def compiled(config: Any = None, recomputed: str = "off", **values: Any) -> Any:
    again = None if recomputed == "off" else ActivationCheckpointConfig(mode=recomputed)  # type: ignore[arg-type]
    with a_setup() as setup:
        model = build(setup, config or CONFIG, activation_checkpoint=again, compile_config=settings(**values))
    start_compiling(model)
    return model


@pytest.fixture(scope="module")
def plain() -> Any:
    with a_setup() as setup:
        return build(setup, CONFIG)


def gradients(model: Any, ids: torch.Tensor = IDS) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    hidden.float().square().mean().backward()
    found = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad()
    return found


def assert_alike(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float = 0.0) -> None:
    assert found.keys() == wanted.keys()
    for name, one in wanted.items():
        assert float((found[name] - one).abs().max()) <= tolerance * float(one.abs().max()), name


def watched(model: Any) -> Compilations:
    compiler = compiler_of(model)
    assert compiler is not None
    return Compilations(compiler)


@pytest.mark.parametrize("recomputed", ["off", "full", "selective"])
def test_layers_share_a_graph_and_drop_what_they_drop_without(plain: Any, recomputed: str) -> None:
    model = compiled(recomputed=recomputed)
    watch = watched(model)
    assert_alike(gradients(model), gradients(plain), 1e-6)
    watch.read()
    facts = watch.facts()
    assert (facts["modules"], facts["graphs"], facts["graph_breaks"], facts["recompiled"]) == (3, 1, {}, {})
    assert next(watch.lines()).startswith("compile: 3 modules, 1 graph in ")


def test_an_evaluation_has_a_graph_of_its_own(plain: Any) -> None:
    model = compiled()
    gradients(model)
    watch = watched(model)
    with torch.no_grad():
        found = model.eval()(input_ids=IDS, use_cache=False).logits
        wanted = copy.deepcopy(plain).eval()(input_ids=IDS, use_cache=False).logits
    assert torch.equal(found, wanted)
    watch.read()
    assert watch.facts()["graphs"] == 1


def test_before_training_and_for_a_while_modules_run_as_they_are_written(plain: Any) -> None:
    with a_setup() as setup:
        model = build(setup, CONFIG, compile_config=settings())
    watch = watched(model)
    assert_alike(gradients(model), gradients(plain))
    start_compiling(model)
    with as_written(model):
        gradients(model)
    watch.read()
    assert watch.facts()["graphs"] == 0
    gradients(model)
    watch.read()
    assert watch.facts()["graphs"] == 1


def test_patterns_name_what_is_compiled(plain: Any) -> None:
    model = compiled(modules=["*.mlp", "model.layers.0.self_attn"])
    names = [name for name, one in model.named_modules() if isinstance(one.forward, Compiled)]
    assert names == ["model.layers.0.self_attn", *(f"model.layers.{index}.mlp" for index in range(3))]
    assert_alike(gradients(model), gradients(plain), 1e-6)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_nothing_is_renamed_and_a_copy_runs_its_own_forward(plain: Any, copied: Any) -> None:
    model = compiled(recomputed="full")
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    expected = gradients(model)
    twin = copied(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    found = gradients(twin)
    assert found.keys() == expected.keys()
    assert not any(one.any() for one in found.values())
    assert_alike(gradients(model), expected)


def test_hooks_of_a_module_see_what_they_saw(plain: Any) -> None:
    seen = []
    for model in (compiled(), copy.deepcopy(plain)):
        model.model.layers[1].register_forward_hook(lambda module, args, output: seen.append(output.detach().clone()))
        gradients(model)
    assert torch.equal(*seen)


def test_a_second_length_is_compiled_for_all_and_told(plain: Any) -> None:
    model = compiled()
    watch = watched(model)
    for length in (16, 12, 10, 8):
        assert_alike(gradients(model, IDS[:, :length]), gradients(plain, IDS[:, :length]), 1e-6)
    watch.read()
    assert watch.facts()["graphs"] == 2
    (reason,) = watch.recompiled
    assert "expected 16, actual 12" in reason


@pytest.mark.parametrize(("dynamic", "graphs"), [(True, 1), (False, 3)])
def test_lengths_together_or_each_by_itself(dynamic: bool, graphs: int) -> None:
    model = compiled(dynamic=dynamic)
    watch = watched(model)
    for length in (16, 12, 10):
        gradients(model, IDS[:, :length])
    watch.read()
    assert watch.facts()["graphs"] == graphs


def test_torch_giving_up_is_told_loudly(plain: Any) -> None:
    model = compiled(dynamic=False)
    watch = watched(model)
    with torch._dynamo.config.patch(recompile_limit=2):
        for length in (16, 12, 10):
            assert_alike(gradients(model, IDS[:, :length]), gradients(plain, IDS[:, :length]), 1e-6)
    watch.read()
    (line,) = watch.warnings()
    assert line.startswith("compile: torch's recompile limit is reached: what is new runs as it is written; last ")
    assert "actual 10" in line


def test_a_graph_break_is_told_with_its_place(plain: Any) -> None:
    model = compiled()
    mlp = model.model.layers[0].mlp
    inner = mlp.forward

    def printing(hidden: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        found: torch.Tensor = inner(hidden)
        return found

    mlp.forward = printing
    watch = watched(model)
    assert_alike(gradients(model), gradients(plain), 1e-6)
    watch.read()
    ((told, number),) = watch.graph_breaks.items()
    place, _, reason = told.partition(": ")
    assert place == f"{__file__}:{printing.__code__.co_firstlineno + 1}"
    assert reason.startswith("User-inserted graph break")
    assert f"compile: graph break in {number} functions at {told}" in watch.lines()


def test_what_a_backend_can_not_compile_runs_as_written_and_is_told(plain: Any, fails: str) -> None:
    model = compiled(backend=fails, on_failure="eager")
    watch = watched(model)
    assert_alike(gradients(model), gradients(plain))
    watch.read()
    (line,) = watch.warnings()
    assert line == (
        "compile: model.layers.0 can't be compiled, and it and all alike run as they are written: "
        "NotImplementedError: no code for this machine"
    )


def test_or_ends_the_run(fails: str) -> None:
    model = compiled(backend=fails)
    wanted = (
        r"^compile: model.layers.0 can't be compiled: NotImplementedError: no code for this machine; "
        "write compile.on_failure: eager$"
    )
    with pytest.raises(RunError, match=wanted):
        gradients(model)


def test_a_backward_pass_that_can_not_be_compiled_is_no_different(plain: Any, fails_backward: str) -> None:
    wanted = r"^compile: model.layers.0 can't be compiled: NotImplementedError: no gradients on this machine; "
    with pytest.raises(RunError, match=wanted):
        gradients(compiled(backend=fails_backward))
    model = compiled(backend=fails_backward, on_failure="eager")
    watch = watched(model)
    assert_alike(gradients(model), gradients(plain))
    watch.read()
    (line,) = watch.warnings()
    assert line.endswith("run as they are written: NotImplementedError: no gradients on this machine")


@pytest.mark.parametrize(
    ("values", "path", "message", "hint"),
    [
        ({"backend": "aot_eagr"}, "compile.backend", "torch.compile has no backend 'aot_eagr'", "did you mean"),
        (
            {"mode": "reduce-overhead", "backend": "inductor"},
            "compile.mode",
            "reduce-overhead records CUDA graphs, which a cpu hasn't",
            "write mode: default",
        ),
        (
            {"mode": "max-autotune", "backend": "inductor"},
            "compile.mode",
            "max-autotune records CUDA graphs, which a cpu hasn't",
            "write mode: max-autotune-no-cudagraphs",
        ),
        ({"modules": ["*.mpl"]}, "compile.modules[0]", "'*.mpl' matches no module of the model", "*.mlp"),
    ],
)
def test_what_makes_no_sense_is_refused(values: dict[str, Any], path: str, message: str, hint: str) -> None:
    with pytest.raises(InputError) as caught:
        compiled(**values)
    (problem,) = caught.value.problems
    assert (problem.path, problem.message) == (path, message)
    assert hint in problem.hint


def test_a_part_of_what_selective_runs_again_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        compiled(recomputed="selective", modules=["*.mlp"])
    assert [one.path for one in caught.value.problems] == ["compile.modules"] * 3
    assert caught.value.problems[0].message.startswith("'model.layers.0.mlp' is in a module of which selective keeps")


def test_experts_on_other_ranks_are_refused() -> None:
    with a_setup() as setup:
        model = build(setup, QWEN3_MOE)
        spread = dataclasses.replace(setup, expert_mesh=setup.mesh)
        with pytest.raises(InputError) as caught:
            Compilation.of(model, settings(modules=["*.experts"]), spread)
        assert Compilation.of(model, settings(modules=["*.mlp"]), spread).chosen
    first, *_ = caught.value.problems
    assert first.path == "compile.modules"
    assert first.message.startswith("'model.layers.0.mlp.experts' sends tokens to experts on other ranks")


def test_a_machine_without_a_compiler_is_refused_unless_it_may_run_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def search() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(compiling, "get_cpp_compiler", search)
    with pytest.raises(InputError) as caught:
        compiled(backend="inductor")
    (problem,) = caught.value.problems
    assert problem.path == "compile.backend"
    assert problem.message.startswith("inductor needs a C++ compiler: No working C++ compiler found")
    assert compiler_of(compiled(backend="inductor", on_failure="eager")) is not None


def test_code_is_kept_where_other_caches_are_unless_the_user_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HP_CACHE_DIR", str(tmp_path / "hp"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "own"))
    with compile_settings(settings(), ALONE):
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "own")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    with compile_settings(settings(), ALONE):
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "hp" / "compiled")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HP_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(InputError, match=r"the cache .* can't be written"), compile_settings(settings(), ALONE):
        pass


def fails_in_a_run() -> None:
    with compile_settings(settings(on_failure="eager"), ALONE):
        assert torch._dynamo.config.suppress_errors
        gradients(compiled(modules=["*.mlp", "*.self_attn"]))
        assert torch._dynamo.config.recompile_limit == 16
        raise ZeroDivisionError


def test_torch_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    before = torch._dynamo.config.get_config_copy()
    with pytest.raises(ZeroDivisionError):
        fails_in_a_run()
    assert torch._dynamo.config.get_config_copy() == before
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_experts_are_the_same_too() -> None:
    with a_setup() as setup:
        plain = build(setup, QWEN3_MOE)
    assert_alike(gradients(compiled(QWEN3_MOE, recomputed="full")), gradients(plain), 1e-6)
