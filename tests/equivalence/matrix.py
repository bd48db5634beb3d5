"""The families and layouts whose numbers must not differ, how much they do, and the table of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from functools import cache

import torch

from tests.equivalence.layouts import Case, Layout, Steps, steps_on

FAMILIES = ("qwen3", "llama", "llama_tied", "qwen3_moe", "deepseek_v3")
MIXTURES = ("qwen3_moe", "deepseek_v3")
HSDP = {"dp_replicate_size": 2}


def _layout(
    num_ranks: int, fsdp: dict[str, object] | None = None, micro_batches: int = 1, **accelerator: object
) -> Layout:
    return Layout(num_ranks, accelerator, fsdp or {}, micro_batches)


# A line for each. Ranks that nothing names are data ranks, which shard parameters.
LAYOUTS: Mapping[str, Layout] = {
    "2 micro-batches": _layout(1, micro_batches=2),
    "4 micro-batches": _layout(1, micro_batches=4),
    "fsdp 2": _layout(2),
    "fsdp 2, 2 micro-batches": _layout(2, micro_batches=2),
    "fsdp 4": _layout(4),
    "hsdp 2 x 1": _layout(2, HSDP),
    "hsdp 2 x 2": _layout(4, HSDP),
    "tp 2": _layout(2, tp_size=2),
    "tp 4": _layout(4, tp_size=4),
    "fsdp 2 x tp 2": _layout(4, tp_size=2),
    "fsdp 2 x tp 2, 2 micro-batches": _layout(4, micro_batches=2, tp_size=2),
    "hsdp 2 x tp 2": _layout(4, HSDP, tp_size=2),
    "hsdp 2 x 2 x tp 2": _layout(8, HSDP, tp_size=2),
    "tp 2 sp": _layout(2, tp_size=2, sequence_parallel=True),
    "tp 2 sp lp": _layout(2, tp_size=2, sequence_parallel=True, loss_parallel=True),
    "tp 4 sp": _layout(4, tp_size=4, sequence_parallel=True),
    "fsdp 2 x tp 2 sp lp": _layout(4, tp_size=2, sequence_parallel=True, loss_parallel=True),
    "hsdp 2 x tp 2 sp, 2 micro-batches": _layout(4, HSDP, 2, tp_size=2, sequence_parallel=True),
    "cp 2": _layout(2, cp_size=2),
    "cp 2 contiguous": _layout(2, cp_size=2, cp_layout="contiguous"),
    "cp 4": _layout(4, cp_size=4),
    "cp 2 ulysses": _layout(2, cp_size=2, cp_method="ulysses"),
    "cp 2 ulysses contiguous": _layout(2, cp_size=2, cp_method="ulysses", cp_layout="contiguous"),
    "cp 4 ulysses": _layout(4, cp_size=4, cp_method="ulysses"),
    "cp 2 ring": _layout(2, cp_size=2, cp_method="ring"),
    "cp 2 ring contiguous": _layout(2, cp_size=2, cp_method="ring", cp_layout="contiguous"),
    "cp 4 ring": _layout(4, cp_size=4, cp_method="ring"),
    "fsdp 2 x cp 2": _layout(4, cp_size=2),
    "hsdp 2 x cp 2": _layout(4, HSDP, cp_size=2),
    "cp 2 x tp 2": _layout(4, cp_size=2, tp_size=2),
    "cp 2 ulysses x tp 2": _layout(4, cp_size=2, tp_size=2, cp_method="ulysses"),
    "cp 2 x tp 2 sp lp": _layout(4, cp_size=2, tp_size=2, sequence_parallel=True, loss_parallel=True),
    "fsdp 2 x cp 2 x tp 2": _layout(8, cp_size=2, tp_size=2),
    "fsdp 2 x cp 2 ring x tp 2": _layout(8, cp_size=2, tp_size=2, cp_method="ring"),
    # The ranks of experts are taken from those of fsdp, cp and tp.
    "fsdp 2, ep 2": _layout(2, ep_size=2),
    "fsdp 2, ep 2, 2 micro-batches": _layout(2, micro_batches=2, ep_size=2),
    "fsdp 4, ep 2": _layout(4, ep_size=2),
    "fsdp 4, ep 4": _layout(4, ep_size=4),
    "hsdp 2 x 2, ep 2": _layout(4, HSDP, ep_size=2),
    "cp 2, ep 2": _layout(2, cp_size=2, ep_size=2),
    "fsdp 2 x cp 2, ep 2": _layout(4, cp_size=2, ep_size=2),
    "fsdp 2 x cp 2 ulysses, ep 2": _layout(4, cp_size=2, ep_size=2, cp_method="ulysses"),
    "fsdp 2 x cp 2 ring, ep 4": _layout(4, cp_size=2, ep_size=4, cp_method="ring"),
    "fsdp 4 x cp 2, ep 4": _layout(8, cp_size=2, ep_size=4),
    "hsdp 2 x 2 x cp 2, ep 2": _layout(8, HSDP, cp_size=2, ep_size=2),
    "tp 2, ep 2": _layout(2, tp_size=2, ep_size=2),
    "tp 4, ep 2": _layout(4, tp_size=4, ep_size=2),
    "fsdp 2 x tp 2, ep 2": _layout(4, tp_size=2, ep_size=2),
    "fsdp 2 x tp 2, ep 4": _layout(4, tp_size=2, ep_size=4),
    "hsdp 2 x tp 2, ep 2": _layout(4, HSDP, tp_size=2, ep_size=2),
    "fsdp 4 x tp 2, ep 4": _layout(8, tp_size=2, ep_size=4),
    "hsdp 2 x 2 x tp 2, ep 4": _layout(8, HSDP, tp_size=2, ep_size=4),
    "fsdp 2 x cp 2 x tp 2, ep 2": _layout(8, cp_size=2, tp_size=2, ep_size=2),
    "fsdp 2 x cp 2 ring x tp 2, ep 4": _layout(8, cp_size=2, tp_size=2, ep_size=4, cp_method="ring"),
    "pp 2": _layout(2, micro_batches=4, pp_size=2),
    "pp 2 gpipe": _layout(2, micro_batches=2, pp_size=2, pp_schedule="gpipe"),
    "fsdp 2 x pp 2": _layout(4, micro_batches=2, pp_size=2),
    "hsdp 2 x pp 2": _layout(4, HSDP, micro_batches=2, pp_size=2),
    "pp 2 x tp 2": _layout(4, micro_batches=4, pp_size=2, tp_size=2),
    "pp 2 x tp 2 sp lp": _layout(4, micro_batches=4, pp_size=2, tp_size=2, sequence_parallel=True, loss_parallel=True),
    "pp 2 x cp 2": _layout(4, micro_batches=4, pp_size=2, cp_size=2),
    "pp 2 x cp 2 ring": _layout(4, micro_batches=4, pp_size=2, cp_size=2, cp_method="ring"),
    "fsdp 2 x pp 2, ep 2": _layout(4, micro_batches=2, pp_size=2, ep_size=2),
    "fsdp 2 x pp 2 x tp 2": _layout(8, micro_batches=2, pp_size=2, tp_size=2),
    "fsdp 2 x pp 2 x cp 2, ep 2": _layout(8, micro_batches=2, pp_size=2, cp_size=2, ep_size=2),
}
# What every run of the tests holds; the rest is left to `pytest -m layouts`.
CORE = (
    "2 micro-batches",
    "fsdp 2",
    "hsdp 2 x tp 2",
    "fsdp 2 x tp 2 sp lp",
    "fsdp 2 x cp 2",
    "cp 2 ulysses",
    "cp 2 ring",
    "cp 2, ep 2",
    "fsdp 4, ep 2",
    "fsdp 2 x tp 2, ep 4",
    "fsdp 2 x pp 2, ep 2",
)


def families_of(layout: str) -> list[str]:
    """The families that can be cut so."""
    return [family for family in FAMILIES if family in MIXTURES or not LAYOUTS[layout].accelerator.get("ep_size")]


@dataclass(frozen=True)
class Difference:
    """How far a layout is from one process, at most: in the first step, and over five steps of the optimizer.

    `loss`, `steps` (losses of all steps) and `absolute` (gradients) are differences; `weights` that of the weights
    after the last step. `relative` is that of a gradient to the largest element of its tensor, `norm` that of the norm
    of all gradients to itself.
    """

    loss: float
    absolute: float
    relative: float
    norm: float
    steps: float
    weights: float

    def text(self) -> str:
        """The differences in a table's cell."""
        return " ".join("0" if value == 0 else f"{value:.0e}".replace("e-0", "e-") for value in astuple(self))

    def beyond(self, limits: Difference) -> list[str]:
        """The differences that are larger than their limit."""
        pairs = zip(self.__dataclass_fields__, astuple(self), astuple(limits), strict=True)
        return [f"{name} {value:.2e} > {limit:.0e}" for name, value, limit in pairs if not value <= limit]


LIMITS = Difference(loss=1e-6, absolute=1e-6, relative=1e-5, norm=1e-6, steps=2e-6, weights=2e-6)


@cache
def _alone(family: str) -> Steps:
    (steps,) = steps_on([Case(family)], Layout())
    return steps


def differences(layout: str) -> dict[str, Difference]:
    """Those of each family that can be cut so."""
    families = families_of(layout)
    found = steps_on([Case(family) for family in families], LAYOUTS[layout])
    return {family: difference(one, _alone(family)) for family, one in zip(families, found, strict=True)}


def difference(found: Steps, wanted: Steps) -> Difference:
    """How far `found` is from `wanted`, which must have the same gradients and weights."""
    absolute, relative = zip(*_each(found.first.gradients, wanted.first.gradients), strict=True)
    weights, _ = zip(*_each(found.weights, wanted.weights), strict=True)
    return Difference(
        loss=abs(found.first.loss - wanted.first.loss),
        absolute=_largest(absolute),
        relative=_largest(relative),
        norm=abs(found.first.norm / wanted.first.norm - 1),
        steps=_largest(abs(one - other) for one, other in zip(found.losses, wanted.losses, strict=True)),
        weights=_largest(weights),
    )


def _largest(values: Iterable[float]) -> float:
    # Python's own would pass over what is no number.
    return float(torch.tensor(list(values), dtype=torch.float64).max())


def _each(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> Iterable[tuple[float, float]]:
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        distance, largest = float((found[name] - value).abs().max()), float(value.abs().max())
        # A gradient that is zero everywhere has to be zero.
        yield distance, distance / largest if largest else float("inf" if distance else 0)


HEADER = ("layout", *FAMILIES)
# The name under which a test hands its row on.
ROW = "row of the matrix"
NOT_CUT = "–"
BEGIN, END = "<!-- matrix -->\n", "<!-- end of matrix -->"


def row(layout: str, found: Mapping[str, Difference]) -> tuple[str, ...]:
    """A row of the table: the layout, and the differences of each family."""
    return (layout, *(found[family].text() if family in found else NOT_CUT for family in FAMILIES))


def table_in(document: str) -> list[tuple[str, ...]]:
    """The rows of the document's table, the header first."""
    lines = document.partition(BEGIN)[2].partition(END)[0].splitlines()
    table = [tuple(cell.strip() for cell in line.strip("| ").split("|")) for line in lines if line.startswith("|")]
    return [one for one in table if set(one) != {"---"}]


def recorded(document: str, table: Iterable[tuple[str, ...]]) -> str:
    """The document with these rows in its table; those of other layouts stay.

    Raises:
        ValueError: the document has no place for a table.
    """
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the document has no lines {BEGIN!r} and {END!r}")
    header, *kept = [*table_in(document)] or [HEADER]
    by_layout = {one[0]: one for one in [*(kept if header == HEADER else []), *table]}
    lines = [HEADER, ("---",) * len(HEADER), *(by_layout[layout] for layout in LAYOUTS if layout in by_layout)]
    return before + begin + "".join(f"| {' | '.join(line)} |\n" for line in lines) + end + after
