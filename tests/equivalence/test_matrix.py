"""Every family on every layout gives the numbers of one process, and the documentation says how closely."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.equivalence.layouts import Found, Steps, beyond
from tests.equivalence.matrix import (
    BEGIN,
    CORE,
    END,
    HEADER,
    LAYOUTS,
    LIMITS,
    NOT_CUT,
    ROW,
    Difference,
    difference,
    differences,
    families_of,
    recorded,
    row,
    table_in,
)


@pytest.mark.parametrize("layout", beyond(LAYOUTS, *CORE))
def test_a_layout_gives_the_numbers_of_one_process(layout: str, record_property: Callable[[str, object], None]) -> None:
    """Loss, every gradient, their norm, and the losses and weights of five clipped steps."""
    found = differences(layout)
    record_property(ROW, row(layout, found))
    assert {family: one.beyond(LIMITS) for family, one in found.items()} == {family: [] for family in found}


def a_difference(found: dict[str, list[float]], wanted: dict[str, list[float]], **others: float) -> Difference:
    def steps(gradients: dict[str, list[float]], loss: float, norm: float, last: float) -> Steps:
        tensors = {name: torch.tensor(values) for name, values in gradients.items()}
        return Steps(Found(loss, tensors, norm), [loss, last], {"weight": torch.tensor([last])})

    return difference(
        steps(found, others.get("loss", 4.0), others.get("norm", 2.0), others.get("last", 3.0)),
        steps(wanted, 4.0, 2.0, 3.0),
    )


def test_differences_by_hand() -> None:
    wanted = {"a": [8.0, 1.0], "b": [0.5, 0.0], "zero": [0.0]}
    assert a_difference(wanted, wanted) == Difference(0, 0, 0, 0, 0, 0)
    found = a_difference({**wanted, "a": [8.0, 2.0], "b": [0.5, 0.25]}, wanted, loss=4.5, norm=2.2, last=5.0)
    assert found == Difference(0.5, 1.0, 0.5, pytest.approx(0.1), 2.0, 2.0)
    # What is zero for one process has to be zero; a number that isn't one is never close.
    assert a_difference({**wanted, "zero": [1e-12]}, wanted).relative == float("inf")
    assert a_difference({**wanted, "b": [float("nan"), 0.0]}, wanted).beyond(LIMITS) != []
    assert found.beyond(LIMITS)[0] == "loss 5.00e-01 > 1e-06"
    assert found.text() == "5e-1 1e+00 5e-1 1e-1 2e+00 2e+00"


def test_rows_are_recorded_in_their_place(tmp_path: Path) -> None:
    first, second, *_ = LAYOUTS
    cells = (NOT_CUT,) * (len(HEADER) - 1)
    empty = f"before\n{BEGIN}{END}\nafter\n"
    once = recorded(empty, [(second, *cells)])
    twice = recorded(once, [(first, *cells)])
    assert table_in(twice) == [HEADER, (first, *cells), (second, *cells)]
    assert twice.startswith("before\n")
    assert twice.endswith("after\n")
    assert recorded(twice.replace(second, "a layout of yesterday"), []) == recorded(empty, [(first, *cells)])
    with pytest.raises(ValueError, match="no lines"):
        recorded("nothing", [])


def test_the_documentation_has_every_layout_and_family(root: Path) -> None:
    header, *table = table_in((root / "docs" / "parallelism.md").read_text(encoding="utf-8"))
    assert header == HEADER
    hint = "run: pytest tests/equivalence --matrix --record docs/parallelism.md"
    assert [line[0] for line in table] == list(LAYOUTS), hint
    for layout, *cells in table:
        for family, cell in zip(HEADER[1:], cells, strict=True):
            if family not in families_of(layout):
                assert cell == NOT_CUT
                continue
            assert Difference(*map(float, cell.split())).beyond(LIMITS) == [], (layout, family)
