"""The named components: one entry-point group for each kind, listed without importing any of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hp_core.entry_points import Entry, EntryLoadError, choose, scan, spellings

Component = Entry
ComponentLoadError = EntryLoadError


@dataclass(frozen=True)
class Group:
    """A kind of component.

    `section` is the recipe section that names one; `runtime_arguments` are the keyword arguments that the trainer
    provides when it builds one, which a recipe can therefore not write.
    """

    name: str
    section: str
    runtime_arguments: tuple[str, ...] = ()


OPTIMIZERS = "hp.optimizers"
_MESHES = ("mesh", "tp_mesh", "cp_mesh", "ep_mesh")

GROUPS: tuple[Group, ...] = (
    Group(
        "hp.models",
        "model",
        ("distributed_setup", "peft_config", "activation_checkpoint", "activation_swap", "compile_config"),
    ),
    Group("hp.losses", "loss_fn"),
    Group(OPTIMIZERS, "optimizer", ("model",)),
    Group("hp.lr_schedulers", "lr_scheduler", ("optimizer", "train_iters")),
    Group("hp.module_replacements", "plan_overrides.replace_module", ("module", "module_fqn", "context")),
    Group("hp.inner_wrappers", "plan_overrides.inner_wrapper", ("target_module", *_MESHES)),
    Group("hp.local_computes", "plan_overrides.local_compute_fn", ("module", *_MESHES)),
    Group("hp.datasets", "dataset", ("transform", "tokenizer", "mesh_context", "training_config")),
    Group("hp.tokenizers", "dataset.tokenizer"),
    Group(
        "hp.dataloaders",
        "dataloader",
        ("dataset", "collate_fn", "batch_sampler", "batch_size", "dp_world_size", "max_seq_len", "seed"),
    ),
    Group("hp.collators", "dataloader.collate_fn", ("tokenizer", "max_seq_len", "mesh_context")),
    Group("hp.trainers", "trainer", ("config",)),
    Group("hp.trackers", "trackers", ("run_dir", "config", "first_step", "recipe", "run_names")),
)

_BY_NAME = {one.name: one for one in GROUPS}


def group(name: str) -> Group:
    """Return the group with this entry-point name. Raises `KeyError` for a name that is no group."""
    return _BY_NAME[name]


class Components:
    """The components that are installed, or those a test puts together. Immutable."""

    def __init__(self, components: Iterable[Component]) -> None:
        self._components = tuple(sorted(set(components)))

    @classmethod
    def discover(cls) -> Components:
        """Read the installed distributions' entry points; imports nothing and doesn't depend on their order."""
        return cls(entry for entry in scan().entries if entry.group in _BY_NAME)

    def all(self) -> tuple[Component, ...]:
        """Return every component, sorted by group, name and distribution."""
        return self._components

    def names(self, group: str) -> tuple[str, ...]:
        """Return the names of a group as a recipe may write them, sorted.

        A name that several distributions offer appears as `package:name` for each of them.
        """
        return spellings(self._members(group))

    def find(self, group: str, name: str) -> Component:
        """Return the component that a recipe calls `name` or `package:name`.

        Raises `InputError`, without a position, when there is none or more than one.
        """
        return choose(self._members(group), name, f"{_BY_NAME[group].section} component")

    def _members(self, group: str) -> list[Component]:
        return [one for one in self._components if one.group == group]
