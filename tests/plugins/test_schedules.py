"""Learning rates by hand: step k of a warm-up of W uses k / W of the peak."""

from __future__ import annotations

import pytest
import torch

from hp_core.errors import ArgumentError
from hp_plugins.schedulers.schedules import constant, cosine, linear, wsd


def rates(build, steps: int, peak: float = 1.0, **arguments) -> list[float]:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=peak)
    scheduler = build(optimizer=optimizer, train_iters=steps, **arguments)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_wsd_warms_up_stays_and_decays():
    found = rates(wsd, 10, warmup_steps=4, decay_steps=4, min_lr_ratio=0.2)
    assert found == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2])


def test_wsd_cosine_decay_ends_at_the_minimum():
    found = rates(wsd, 6, warmup_steps=2, decay_steps=2, decay="cosine", min_lr_ratio=0.1)
    assert found == pytest.approx([0.5, 1.0, 1.0, 1.0, 0.55, 0.1])


def test_linear_is_a_straight_line_to_the_last_step():
    assert rates(linear, 6, warmup_steps=2, min_lr_ratio=0.0) == pytest.approx([0.5, 1.0, 0.75, 0.5, 0.25, 0.0])


def test_cosine_is_half_way_in_the_middle():
    found = rates(cosine, 6, peak=2.0, warmup_steps=2, min_lr_ratio=0.1)
    assert found[1] == 2.0
    assert found[3] == pytest.approx(2.0 * 0.55)
    assert found[5] == pytest.approx(0.2)


@pytest.mark.parametrize("build", [constant, linear, cosine])
def test_no_warmup_starts_at_or_below_the_peak_and_never_at_zero(build):
    found = rates(build, 5)
    assert all(0 < rate <= 1 for rate in found)
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize(
    ("build", "arguments"), [(constant, {}), (linear, {}), (cosine, {}), (wsd, {"decay_steps": 0})]
)
@pytest.mark.parametrize("warmup", [5, 7])
def test_a_warmup_as_long_as_the_run_only_rises(build, arguments, warmup):
    assert rates(build, 5, warmup_steps=warmup, **arguments) == pytest.approx([k / warmup for k in range(1, 6)])


def test_wsd_without_decay_stays():
    assert rates(wsd, 4, warmup_steps=2, decay_steps=0) == [0.5, 1.0, 1.0, 1.0]


def test_wsd_longer_than_the_run_is_refused():
    with pytest.raises(ArgumentError, match="warmup_steps 4 \\+ decay_steps 4 are more than the run's 6 steps"):
        rates(wsd, 6, warmup_steps=4, decay_steps=4)
