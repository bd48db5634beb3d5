"""What each rank holds of each parameter: arithmetic on shapes and sizes, without processes or a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from types import MappingProxyType

from hp_core.errors import Problem
from hp_core.parallel.sizes import ParallelSizes


@dataclass(frozen=True)
class Cut:
    """One dimension of a parameter, shared by the ranks of an axis.

    An axis of `tp` or `ep` cuts evenly; FSDP2 (`fsdp`, `efsdp`) as `torch.chunk` does, so that the last ranks may hold
    less, or nothing.
    """

    axis: str
    dim: int
    num_ranks: int

    def length(self, whole: int, coordinate: int) -> int:
        """How much of `whole` the rank at this coordinate of the axis holds."""
        most = -(-whole // self.num_ranks)
        return max(0, min(most, whole - coordinate * most))


@dataclass(frozen=True)
class ParameterLayout:
    """Where a parameter lies: its cuts, the first of which is made first, and the pipeline ranks that have it."""

    fqn: str
    shape: tuple[int, ...]
    cuts: tuple[Cut, ...] = ()
    pp_ranks: tuple[int, ...] = (0,)

    @property
    def numel(self) -> int:
        """The elements of the whole."""
        return prod(self.shape)

    def local_shape(self, coordinates: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of what a rank holds, if it is a pipeline rank that has the parameter."""
        shape = list(self.shape)
        for cut in self.cuts:
            shape[cut.dim] = cut.length(shape[cut.dim], coordinates[cut.axis])
        return tuple(shape)

    def local_numel(self, coordinates: Mapping[str, int]) -> int:
        """The elements that a rank holds."""
        return prod(self.local_shape(coordinates)) if coordinates["pp"] in self.pp_ranks else 0

    def numel_before(self, axis: str, coordinates: Mapping[str, int]) -> int:
        """The elements that the ranks of an axis hold together, whatever they are cut by before."""
        shape = list(self.shape)
        for cut in self.cuts:
            if cut.axis == axis:
                break
            shape[cut.dim] = cut.length(shape[cut.dim], coordinates[cut.axis])
        return prod(shape)

    @property
    def placements(self) -> dict[str, str]:
        """The placement on each axis that cuts it, in the words of the sharding contract."""
        return {cut.axis: f"shard({cut.dim})" for cut in self.cuts}


@dataclass(frozen=True)
class ModelLayout:
    """Every parameter of a model, once, on the ranks of these sizes."""

    sizes: ParallelSizes
    parameters: tuple[ParameterLayout, ...]

    @property
    def axes(self) -> Mapping[str, int]:
        """The axes along which parameters are cut, and their sizes."""
        return axis_sizes(self.sizes)

    @cached_property
    def total(self) -> int:
        """The elements of the whole model."""
        return sum(one.numel for one in self.parameters)

    def local_parameters(self, rank: int) -> int:
        """The elements that this rank holds.

        Raises:
            ValueError: there is no such rank.
        """
        return self._local(coordinates_of(rank, self.sizes))

    @property
    def first_coordinates(self) -> dict[str, int]:
        """Those of rank 0."""
        return dict.fromkeys(self.axes, 0)

    @cached_property
    def by_rank(self) -> tuple[int, ...]:
        """The elements of every rank. Only what is cut unevenly is looked at more than once."""
        axes = self.axes
        even = [0] * axes["pp"]
        varying: dict[tuple[int, str], list[int]] = {
            (pp, axis): [0] * axes[axis] for pp in range(axes["pp"]) for axis in ("fsdp", "efsdp")
        }
        for one in self.parameters:
            last = one.cuts[-1] if one.cuts else None
            for pp_rank in one.pp_ranks:
                first = self.first_coordinates | {"pp": pp_rank}
                if last is None or last.axis not in ("fsdp", "efsdp"):
                    even[pp_rank] += one.local_numel(first)
                    continue
                for coordinate in range(axes[last.axis]):
                    varying[pp_rank, last.axis][coordinate] += one.local_numel(first | {last.axis: coordinate})
        places = (coordinates_of(rank, self.sizes) for rank in range(self.sizes.world))
        return tuple(
            even[at["pp"]] + varying[at["pp"], "fsdp"][at["fsdp"]] + varying[at["pp"], "efsdp"][at["efsdp"]]
            for at in places
        )

    @cached_property
    def most_local_parameters(self) -> int:
        """The elements of the rank that holds most of them: the first of every axis, in its pipeline stage."""
        return max(self._local({**self.first_coordinates, "pp": pp}) for pp in range(self.sizes.pp))

    @cached_property
    def fewest_local_parameters(self) -> int:
        """The elements of the rank that holds the fewest: the last of every axis, in its pipeline stage."""
        last = {axis: size - 1 for axis, size in self.axes.items()}
        return min(self._local({**last, "pp": pp}) for pp in range(self.sizes.pp))

    def _local(self, coordinates: Mapping[str, int]) -> int:
        return sum(one.local_numel(coordinates) for one in self.parameters)


def axis_sizes(sizes: ParallelSizes) -> Mapping[str, int]:
    """The axes along which parameters lie: those of the dense mesh, and `efsdp` and `ep`, which cut its ranks anew."""
    fsdp = sizes.dp_shard * sizes.cp
    return MappingProxyType(
        {
            "pp": sizes.pp,
            "dp_replicate": sizes.dp_replicate,
            "fsdp": fsdp,
            "tp": sizes.tp,
            "efsdp": fsdp * sizes.tp // sizes.ep,
            "ep": sizes.ep,
        }
    )


def coordinates_of(rank: int, sizes: ParallelSizes) -> dict[str, int]:
    """Where a rank stands on each axis.

    Raises:
        ValueError: there is no such rank.
    """
    if not 0 <= rank < sizes.world:
        raise ValueError(f"no rank {rank} among {sizes.world}")
    axes = axis_sizes(sizes)
    expert_rank = rank % (axes["fsdp"] * sizes.tp)
    rest, coordinates = rank, {}
    for axis in ("tp", "fsdp", "dp_replicate", "pp"):
        rest, coordinates[axis] = divmod(rest, axes[axis])
    coordinates["efsdp"], coordinates["ep"] = divmod(expert_rank, sizes.ep)
    return coordinates


def fsdp_cuts(before: Sequence[Cut], shape: Sequence[int], num_ranks: int, *, axis: str = "fsdp") -> tuple[Cut, ...]:
    """The cuts of a parameter after FSDP2 has sharded it, which it does with every one but a scalar."""
    dim = 0 if before else fsdp_dim(shape, num_ranks)
    return (*before, Cut(axis, dim, num_ranks)) if num_ranks > 1 and shape else tuple(before)


def fsdp_dim(shape: Sequence[int], num_ranks: int) -> int:
    """The dimension along which FSDP2 shards a parameter that nothing else cuts.

    The first; of fused experts, (experts, rows, columns), that can't be divided by number, the last if it can be. Ranks
    without an expert would hold, gather and send padding of the size of one.
    """
    dim = expert_shard_dim(shape[0], shape, num_ranks) if len(shape) == 3 else 0
    return 0 if dim is None else dim


def expert_shard_dim(num_own: int, shape: Sequence[int], num_shards: int) -> int | None:
    """The dimension along which ranks that hold the same experts share them, None where they can't.

    By expert, or where a rank's experts can't be divided, by the last dimension: transformers reads the shards of fused
    experts off the files of single ones along these two alone.
    """
    if num_own % num_shards == 0:
        return 0
    return len(shape) - 1 if len(shape) > 2 and shape[-1] % num_shards == 0 else None


def unsharable_experts(num_own: int, size: int, num_shards: int) -> Problem:
    """What to say where `expert_shard_dim` finds none."""
    message = f"{num_own} experts a rank, of size {size}, can't be shared by {num_shards} ranks"
    return Problem(message, path="accelerator.ep_size", hint="choose a larger ep_size")
