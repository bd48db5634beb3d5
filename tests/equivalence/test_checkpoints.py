"""What any layout of ranks has saved, any other goes on with: the next losses are those of the unbroken run."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from hp_core.checkpoint.layout import search
from hp_core.checkpoint.saver import Contents, Saver
from hp_core.checkpoint.store import load_checkpoint, optimizer_names
from hp_core.config.checkpoint import CheckpointConfig
from hp_core.config.models import AcceleratorConfig, FsdpConfig
from hp_core.parallel.environment import ProcessEnvironment
from hp_core.parallel.setup import DistributedSetup
from hp_core.parallel.tiny import tiny_setup
from hp_core.testing.ranks import run_ranks
from hp_core.training.gradients import clip
from tests.equivalence.layouts import MAX_NORM, WITH_FAMILIES, Case, Layout, Trial, beyond
from tests.equivalence.matrix import LAYOUTS, families_of

ALONE = "one process"
HERE = (*WITH_FAMILIES, __name__)
# One of each technique, and what packs two of them on one parameter.
CORE = (ALONE, "fsdp 2", "tp 2", "cp 2", "fsdp 2, ep 2", "tp 2, ep 2", "pp 2")
MORE = (
    "fsdp 4",
    "hsdp 2 x 1",
    "fsdp 2 x tp 2 sp lp",
    "tp 4",
    "fsdp 2 x cp 2",
    "fsdp 4, ep 2",
    "fsdp 4, ep 4",
    "fsdp 2 x tp 2, ep 4",
    "fsdp 2 x pp 2, ep 2",
    "pp 2 x tp 2",
    "fsdp 2 x pp 2 x tp 2",
)
CORE_FAMILIES = ("llama_tied", "qwen3_moe")
NUM_SAVED, NUM_AFTER = 3, 2


def layout_of(name: str) -> Layout:
    return Layout() if name == ALONE else LAYOUTS[name]


def families(name: str) -> list[str]:
    return families_of(next(iter(LAYOUTS)) if name == ALONE else name)


class Training(Trial):
    """Steps of AdamW, whose moments and count of steps have to come back as well."""

    def __init__(self, setup: DistributedSetup, family: str, layout: Layout) -> None:
        super().__init__(setup, Case(family), layout)
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=5e-3)

    def take(self, first: int, number: int) -> list[float]:
        """The losses of some steps, each of which moves the weights."""
        losses = []
        for step in range(first, first + number):
            losses.append(self._accumulate(step))
            clip(self.parameters, self._norm(), MAX_NORM)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return losses

    def save(self, run: Path) -> None:
        contents = Contents(
            step=NUM_SAVED,
            model=self.model,
            loss_fn=self.loss_fn,
            optimizers=[self.optimizer],
            trainer_state={"optimizers": optimizer_names([self.optimizer]), "world_size": self.setup.world_size},
            manifest={},
            plugin_state={},
        )
        saver = Saver(run, CheckpointConfig(), self.setup)
        saver.start(contents)
        saver.finish()

    def load(self, run: Path) -> None:
        checkpoint = search(run).newest
        assert checkpoint is not None
        load_checkpoint(
            checkpoint,
            model=self.model,
            loss_fn=self.loss_fn,
            optimizers=[self.optimizer],
            seed=7,
            setup=self.setup,
        )


def setup_of(environment: ProcessEnvironment, layout: Layout, seed: int) -> AbstractContextManager[DistributedSetup]:
    accelerator, fsdp = AcceleratorConfig(**layout.accelerator), FsdpConfig(**layout.fsdp)
    return tiny_setup(environment, accelerator=accelerator, fsdp=fsdp, seed=seed)


def save_on_ranks(environment: ProcessEnvironment, name: str, folder: Path) -> dict[str, list[float]]:
    """Save each family after some steps, and return its losses of the next ones."""
    layout, losses = layout_of(name), {}
    with setup_of(environment, layout, seed=7) as setup:
        for family in families(name):
            training = Training(setup, family, layout)
            training.take(0, NUM_SAVED)
            training.save(folder / family)
            losses[family] = training.take(NUM_SAVED, NUM_AFTER)
    return losses


def load_on_ranks(environment: ProcessEnvironment, name: str, runs: list[tuple[str, Path]]) -> list[list[float]]:
    """Go on from each of these runs, with weights and moments of another seed at first."""
    layout = layout_of(name)
    found = []
    with setup_of(environment, layout, seed=99) as setup:
        for family, run in runs:
            training = Training(setup, family, layout)
            training.take(0, 1)
            training.load(run)
            found.append(training.take(NUM_SAVED, NUM_AFTER))
    return found


class Saved:
    """The checkpoints of layouts, each written when it is first asked for, and how those runs went on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.losses: dict[str, dict[str, list[float]]] = {}

    def by(self, name: str) -> dict[str, list[float]]:
        if name not in self.losses:
            place = self.folder / name
            ranks = run_ranks(save_on_ranks, layout_of(name).num_ranks, name, place, timeout=300, preload=HERE)
            assert all(losses == ranks[0] for losses in ranks)
            self.losses[name] = ranks[0]
        return self.losses[name]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("saved"))


def require_the_same(saved: Saved, reader: str, writers: tuple[str, ...], chosen: tuple[str, ...] | None) -> None:
    """What each writer saved goes on in the layout of the reader as it did in its own."""
    wanted = {
        (writer, family): losses
        for writer in writers
        for family, losses in saved.by(writer).items()
        if family in families(reader) and (chosen is None or family in chosen)
    }
    runs = [(family, saved.folder / writer / family) for writer, family in wanted]
    found = run_ranks(load_on_ranks, layout_of(reader).num_ranks, reader, runs, timeout=600, preload=HERE)[0]
    distances = {
        case: max(abs(one - other) for one, other in zip(losses, wanted[case], strict=True))
        for case, losses in zip(wanted, found, strict=True)
    }
    assert {case: distance for case, distance in distances.items() if not distance <= 1e-6} == {}


@pytest.mark.parametrize("reader", CORE)
def test_a_checkpoint_of_any_layout_goes_on_in_any_other(saved: Saved, reader: str) -> None:
    require_the_same(saved, reader, CORE, CORE_FAMILIES)


@pytest.mark.layouts
@pytest.mark.parametrize("reader", [*CORE, *MORE])
def test_every_family_and_layout(saved: Saved, reader: str) -> None:
    require_the_same(saved, reader, (*CORE, *MORE), None)


@pytest.mark.parametrize("family", beyond(("qwen3", "llama", *CORE_FAMILIES, "deepseek_v3"), *CORE_FAMILIES))
def test_losses_tell_what_was_not_restored(saved: Saved, family: str) -> None:
    """The limit is far below what is off without the weights, the moments or their count of steps."""
    wanted = saved.by(ALONE)[family]
    with setup_of(ProcessEnvironment(), Layout(), seed=99) as setup:
        training = Training(setup, family, Layout())
        training.load(saved.folder / ALONE / family)
        for state in training.optimizer.state.values():
            state["exp_avg_sq"].mul_(1.1)
        found = training.take(NUM_SAVED, NUM_AFTER)
    assert found[0] == pytest.approx(wanted[0], abs=1e-6)
    assert abs(found[1] - wanted[1]) > 1e-5
