"""What was saved comes back bit for bit on any number of ranks, and what can't come back says why."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import hp_core.checkpoint.writing as writing
from hp_core.checkpoint.layout import METADATA, TRAINER_STATE, PassedOver, as_checkpoint, search, step_directory
from hp_core.checkpoint.saver import Contents, save_checkpoint
from hp_core.checkpoint.store import Restored, load_checkpoint, optimizer_names
from hp_core.errors import InputError, RunError
from hp_core.testing.ranks import run_ranks
from hp_core.training.protocols import parts_of
from hp_core.training.state import seed_everything
from hp_plugins.optimizers.adamw import AdamW
from hp_plugins.optimizers.groups import ParameterGroup
from hp_plugins.optimizers.muon import Muon
from hp_plugins.optimizers.sgd import SGD
from tests.model.tiny import LLAMA, LLAMA_TIED, a_setup, build, whole

FROZEN = "model.layers.1.mlp.up_proj.weight"
IDLE = "lm_head.weight"
OPTIMIZERS = {"adamw": {"lr": 1e-2}, "muon": {"lr": 0.02, "adamw_lr": 1e-2}, "sgd": {"lr": 0.1, "momentum": 0.9}}
CLASSES = {"adamw": AdamW, "muon": Muon, "sgd": SGD}


def make(setup, name: str = "adamw", config: dict = LLAMA, groups: tuple = (), seed_offset: float = 0.0):
    model = build(setup, config)
    optimizer = CLASSES[name](**OPTIMIZERS[name], groups=groups, model=model).get_optimizer()
    if seed_offset:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(seed_offset)
    return model, optimizer


def take_steps(model, optimizer, steps: int, idle: str | None = None) -> None:
    """The same update for any number of ranks: gradients are made of the parameters, not of a loss."""
    for _ in range(steps):
        for fqn, parameter in model.named_parameters():
            if parameter.requires_grad and fqn != idle:
                parameter.grad = (parameter.detach() * 3 + 0.01).square()
        optimizer.step()
        optimizer.zero_grad()


def save(setup, run: str, step: int, model, optimizer) -> Path:
    optimizers = parts_of(optimizer)
    state = {"optimizers": optimizer_names(optimizers), "world_size": setup.world_size, "state": {"step": step}}
    contents = Contents(step, model, torch.nn.Module(), optimizers, trainer_state=state, manifest={"step": step})
    return save_checkpoint(Path(run), contents, setup)


def load(setup, path: Path | str, model, optimizer) -> Restored:
    checkpoint = as_checkpoint(Path(path))
    assert checkpoint is not None
    parts = parts_of(optimizer)
    return load_checkpoint(checkpoint, model=model, loss_fn=torch.nn.Module(), optimizers=parts, seed=3, setup=setup)


def contents(model, optimizer) -> dict[str, Any]:
    """Weights and optimizer state as whole tensors and numbers."""
    found: dict[str, Any] = {fqn: whole(p.detach()).clone() for fqn, p in model.named_parameters()}
    for part in parts_of(optimizer):
        for fqn, parameter in model.named_parameters():
            for key, value in part.state.get(parameter, {}).items():
                found[f"{fqn}/{key}"] = whole(value).clone() if isinstance(value, torch.Tensor) else value
    return found


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        for name, value in one.items()
    )


@dataclass
class Outcome:
    """What was saved or loaded, what two more steps made of it, and what was drawn in between."""

    contents: dict[str, Any]
    later: dict[str, Any]
    drawn: torch.Tensor
    new_ranks: tuple[int, ...] = ()


def save_on_ranks(environment, run: str) -> dict[str, Outcome]:
    """Three steps with a parameter that is frozen and one that never gets a gradient; save; two steps more."""
    outcomes = {}
    with a_setup(environment) as setup:
        for name in OPTIMIZERS:
            model, optimizer = make(setup, name, groups=(ParameterGroup(match=FROZEN, frozen=True),))
            take_steps(model, optimizer, 3, idle=IDLE)
            saved = contents(model, optimizer)
            seed_everything(5, setup.random_rank)
            save(setup, f"{run}/{name}", 3, model, optimizer)
            assert same(saved, contents(model, optimizer))
            drawn = torch.rand(4)
            take_steps(model, optimizer, 2, idle=IDLE)
            outcomes[name] = Outcome(saved, contents(model, optimizer), drawn)
    return outcomes


def load_on_ranks(environment, run: str) -> dict[str, Outcome]:
    outcomes = {}
    with a_setup(environment, seed=99) as setup:
        for name in OPTIMIZERS:
            # Other weights and some stale state, all of which must go.
            model, optimizer = make(setup, name, groups=(ParameterGroup(match=FROZEN, frozen=True),), seed_offset=1.0)
            take_steps(model, optimizer, 1)
            path = step_directory(Path(run, name), 3)
            restored = load(setup, path, model, optimizer)
            loaded, drawn = contents(model, optimizer), torch.rand(4)
            take_steps(model, optimizer, 2, idle=IDLE)
            outcomes[name] = Outcome(loaded, contents(model, optimizer), drawn, restored.new_ranks)
    return outcomes


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict[int, tuple[str, list[dict[str, Outcome]]]]:
    """Directories of checkpoints by the number of ranks that wrote them, and what each rank has to tell."""
    found = {}
    for writers in (1, 2):
        run = str(tmp_path_factory.mktemp("run"))
        found[writers] = (run, run_ranks(save_on_ranks, writers, run))
    return found


@pytest.mark.parametrize("writers", [1, 2])
@pytest.mark.parametrize("readers", [1, 2])
def test_weights_and_state_come_back_bit_for_bit_on_any_number_of_ranks(written, writers, readers):
    run, outcomes = written[writers]
    results = run_ranks(load_on_ranks, readers, run)
    for rank, result in enumerate(results):
        for name, loaded in result.items():
            saved = outcomes[0][name]
            assert same(loaded.contents, saved.contents), name
            assert loaded.new_ranks == tuple(range(writers, readers))
            if rank < writers:
                assert torch.equal(loaded.drawn, outcomes[rank][name].drawn)
            if writers == readers:
                # From there on as if the run had never stopped.
                assert same(loaded.later, saved.later), name
    if readers == 2:
        # New streams differ between the ranks as the old ones did.
        assert not torch.equal(results[0]["sgd"].drawn, results[1]["sgd"].drawn)


def test_what_was_saved_has_state_for_what_was_moved_and_nothing_else(written):
    (_, alone), (_, both) = written[1], written[2]
    keys = {"adamw": "exp_avg_sq", "muon": "momentum_buffer", "sgd": "momentum_buffer"}
    for name, key in keys.items():
        saved = alone[0][name].contents
        assert any(one.endswith(f"/{key}") for one in saved)
        assert not any(one.startswith((f"{FROZEN}/", f"{IDLE}/")) for one in saved)
        assert all(same(result[name].contents, both[0][name].contents) for result in both)
        if name != "muon":
            # Muon's iteration runs in bf16 and rounds with the order of the sum.
            assert same(saved, both[0][name].contents)


def test_tied_weights_stay_tied(tmp_path):
    with a_setup() as setup:
        model, optimizer = make(setup, config=LLAMA_TIED)
        take_steps(model, optimizer, 1)
        path = save(setup, str(tmp_path), 1, model, optimizer)
        saved = contents(model, optimizer)
        again, other = make(setup, config=LLAMA_TIED, seed_offset=1.0)
        load(setup, path, again, other)
        assert again.lm_head.weight is again.model.embed_tokens.weight
        assert same(contents(again, other), saved)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_saving_before_any_step_takes_none(tmp_path, name):
    with a_setup() as setup:
        model, optimizer = make(setup, name)
        before = contents(model, optimizer)
        path = save(setup, str(tmp_path), 0, model, optimizer)
        assert same(contents(model, optimizer), before)
        assert all(not part.state for part in parts_of(optimizer))
        again, other = make(setup, name)
        load(setup, path, again, other)
        assert all(not part.state for part in parts_of(other))
        for one in ((model, optimizer), (again, other)):
            take_steps(*one, 1)
        assert same(contents(model, optimizer), contents(again, other))
        steps = {value.item() for key, value in contents(again, other).items() if key.endswith("/step")}
        assert steps == (set() if name == "sgd" else {1.0})


def test_numbers_in_an_optimizer_s_state_come_back(tmp_path):
    with a_setup() as setup:
        model, optimizer = make(setup, "sgd")
        take_steps(model, optimizer, 1)
        optimizer.state[model.lm_head.weight]["seen"] = 7
        path = save(setup, str(tmp_path), 1, model, optimizer)
        again, other = make(setup, "sgd")
        load(setup, path, again, other)
        assert other.state[again.lm_head.weight]["seen"] == 7
        optimizer.state[model.lm_head.weight]["seen"] = object()
        with pytest.raises(RunError, match=r"optimizer state 'seen' of lm_head\.weight is a object; it can't be saved"):
            save(setup, str(tmp_path), 2, model, optimizer)
        assert not step_directory(tmp_path, 2).exists()


# What does not fit.


@pytest.fixture
def checkpoint(tmp_path):
    """A process group and the directory of a checkpoint made with AdamW."""
    with a_setup() as setup:
        model, optimizer = make(setup)
        take_steps(model, optimizer, 1)
        yield setup, save(setup, str(tmp_path), 1, model, optimizer)


@pytest.mark.parametrize(("name", "classes"), [("sgd", "SGD"), ("muon", "WholeMatrixMuon, AdamW")])
def test_another_optimizer_is_refused(checkpoint, name, classes):
    setup, path = checkpoint
    with pytest.raises(InputError, match=f"written with AdamW, the recipe builds {classes}; .* can't be carried over"):
        load(setup, path, *make(setup, name))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 1}, "'model.layers.1.input_layernorm.weight' is not in the recipe's model"),
        ({"num_hidden_layers": 3}, "'model.layers.2.input_layernorm.weight' is not in the checkpoint"),
        ({"model_type": "qwen3"}, "'model.layers.0.self_attn.k_norm.weight' is not in the checkpoint"),
        ({"intermediate_size": 40}, "is torch.float32 (48, 32) there and torch.float32 (40, 32) in the recipe's model"),
    ],
)
def test_another_model_is_refused(tmp_path, change, message):
    # Without momentum: no state of the optimizer gives the difference away.
    with a_setup() as setup:
        model = build(setup, LLAMA)
        path = save(setup, str(tmp_path), 1, model, SGD(lr=1.0, model=model).get_optimizer())
        other = build(setup, {**LLAMA, **change})
        with pytest.raises(InputError) as caught:
            load(setup, path, other, SGD(lr=1.0, model=other).get_optimizer())
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def remove(file: Path) -> None:
    file.unlink()


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def zero(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


@pytest.mark.parametrize("pattern", ["*.distcp", METADATA, "rank_*.pt", TRAINER_STATE])
@pytest.mark.parametrize("damage", [remove, truncate, empty, zero])
def test_a_damaged_file_is_the_user_s_to_know_of(checkpoint, pattern, damage):
    setup, path = checkpoint
    if damage is remove and pattern in (METADATA, TRAINER_STATE):
        (path / pattern).unlink()
        assert as_checkpoint(path) is None
        return
    for file in path.glob(pattern):
        damage(file)
    with pytest.raises(InputError) as caught:
        load(setup, path, *make(setup))
    message = str(caught.value)
    assert str(path) in message
    assert "Traceback" not in message
    assert "\n" not in message


def damaged_on_ranks(environment, path: str):
    with a_setup(environment) as setup:
        model, optimizer = make(setup)
        try:
            load(setup, path, model, optimizer)
        except InputError as error:
            return str(error)
        return None


def test_a_damaged_shard_is_an_error_on_every_rank(written, tmp_path):
    path = tmp_path / "step_00000003"
    shutil.copytree(step_directory(Path(written[2][0], "adamw"), 3), path)
    truncate(path / "__1_0.distcp")
    messages = run_ranks(damaged_on_ranks, 2, str(path))
    assert all(message is not None and "can't be loaded" in message for message in messages)


# One after the other.


def test_a_left_over_directory_never_counts_and_is_replaced(checkpoint, tmp_path):
    setup, path = checkpoint
    left_over = step_directory(tmp_path, 2).with_name("step_00000002.tmp")
    path.rename(left_over)
    (left_over / "junk").touch()
    assert as_checkpoint(left_over) is None
    assert search(tmp_path).newest is None
    assert search(tmp_path).passed_over == (PassedOver(left_over, "incomplete"),)
    written = save(setup, str(tmp_path), 2, *make(setup))
    assert [one.name for one in written.parent.iterdir()] == ["step_00000002"]
    assert not (written / "junk").exists()
    newest = search(tmp_path).newest
    assert newest is not None
    assert newest.step == 2
    assert newest.trainer_state()["state"] == {"step": 2}
    assert newest.manifest() == {"step": 2}


def test_saving_a_step_that_exists_replaces_it(checkpoint):
    setup, path = checkpoint
    (path / "junk").touch()
    model, optimizer = make(setup, "sgd", seed_offset=0.5)
    assert save(setup, str(path.parent.parent), 1, model, optimizer) == path
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    assert not (path / "junk").exists()
    again, other = make(setup, "sgd")
    load(setup, path, again, other)
    assert same(contents(again, other), contents(model, optimizer))


@pytest.mark.parametrize("function", ["write_file", "put_in_place", "listed"])
def test_a_disk_that_is_full_leaves_what_was_there(checkpoint, monkeypatch, function):
    setup, path = checkpoint

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing, function, full)
    with pytest.raises(RunError, match=f"can't write checkpoint {path}: .*No space left on device"):
        save(setup, str(path.parent.parent), 1, *make(setup))
    monkeypatch.undo()
    assert as_checkpoint(path) is not None
    load(setup, path, *make(setup))


def test_a_folder_that_can_t_be_made_is_said(checkpoint, tmp_path):
    setup, _ = checkpoint
    (tmp_path / "run").touch()
    with pytest.raises(RunError, match="can't write checkpoint"):
        save(setup, str(tmp_path / "run"), 1, *make(setup))


class Remembers(torch.nn.Module):
    """Holds the model, as a loss may, and a buffer of its own."""

    def __init__(self, model, name: str = "mean") -> None:
        super().__init__()
        self.model = model
        self.register_buffer(name, torch.zeros(()))


def save_with_loss(environment, run: str) -> None:
    with a_setup(environment) as setup:
        model, optimizer = make(setup)
        loss_fn = Remembers(model)
        loss_fn.mean += 3
        state = {"optimizers": optimizer_names(parts_of(optimizer)), "world_size": setup.world_size}
        contents = Contents(1, model, loss_fn, parts_of(optimizer), trainer_state=state, manifest={})
        save_checkpoint(Path(run), contents, setup)


def test_a_loss_that_holds_the_model_is_stored_without_it(tmp_path):
    run_ranks(save_with_loss, 2, str(tmp_path))
    checkpoint = as_checkpoint(step_directory(tmp_path, 1))
    assert set(torch.load(checkpoint.path / "rank_00000.pt", weights_only=True)["loss"]) == {"mean"}
    with a_setup() as setup:
        model, optimizer = make(setup)
        parts = {"model": model, "optimizers": parts_of(optimizer), "seed": 3, "setup": setup}
        loss_fn = Remembers(model)
        load_checkpoint(checkpoint, loss_fn=loss_fn, **parts)
        assert loss_fn.mean == 3
        with pytest.raises(InputError, match="what Remembers remembered lacks 'count'; a loss registers"):
            load_checkpoint(checkpoint, loss_fn=Remembers(model, "count"), **parts)
