"""Plain lines where nobody watches, a bar on a terminal, silence on other ranks."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console as RichConsole

from hp_core.observe import console as module
from hp_core.observe.console import Console

ROW = {"step": 3, "loss": 2.34567, "grad_norm": 1.25, "lr": 0.00123456, "tokens_per_second": 12345.6}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module.time, "monotonic", clock.monotonic)
    return clock


def plain(capsys, *calls) -> str:
    console = Console(enabled=True)
    for call in calls:
        call(console)
    return capsys.readouterr().out


def test_lines_are_printed_as_they_are(capsys):
    lines = [
        "recipe.yaml:100:3: a [bold]word[/bold] and a :smile: in runs/x:100:y",
        "x" * 300,
        "step 3: saved runs/a/checkpoints/step_00000003",
    ]
    assert plain(capsys, *(lambda console, line=line: console.say(line) for line in lines)) == "\n".join(lines) + "\n"


def test_a_logged_step_is_one_plain_line(capsys, clock):
    console = Console(enabled=True)
    with console.training(first_step=0, num_steps=10):
        clock.now += 6
        console.row(ROW)
    assert capsys.readouterr().out == (
        "step 3/10  loss 2.3457  grad norm 1.250  lr 0.00123  12,346 tokens/s  ETA 0:00:14\n"
    )


@pytest.mark.parametrize(
    ("row", "numbers"),
    [
        ({"step": 1, "lr": 1.0, "skipped": "no tokens", "loss": None, "grad_norm": None}, "skipped: no tokens  lr 1"),
        ({"step": 1, "lr": 1e-5, "loss": None, "tokens_per_second": None}, "loss -  lr 1e-05"),
        ({"step": 1, "lr": 1.0, "loss": 0.0, "grad_norm": 0.0}, "loss 0.0000  grad norm 0.000  lr 1"),
    ],
)
def test_what_has_no_number_is_not_given_one(capsys, clock, row, numbers):
    console = Console(enabled=True)
    with console.training(first_step=0, num_steps=2):
        console.row(row)
    assert capsys.readouterr().out == f"step 1/2  {numbers}  ETA 0:00:00\n"


def test_the_time_left_counts_from_where_the_run_was_resumed(clock):
    console = Console(enabled=True)
    with console.training(first_step=100, num_steps=200):
        assert console.eta(100) == "-"
        clock.now += 100
        assert console.eta(110) == "0:15:00"
        assert console.eta(101) == "2:45:00"
        assert console.eta(200) == "0:00:00"


def test_other_ranks_say_nothing(capsys):
    console = Console(enabled=False)
    with console.training(first_step=0, num_steps=2):
        console.say("hello")
        console.row(ROW)
    assert capsys.readouterr() == ("", "")


@pytest.fixture
def terminal() -> Console:
    console = Console(enabled=True)
    console._console = RichConsole(file=io.StringIO(), force_terminal=True, width=120, emoji=False, highlight=False)
    return console


def shown(console: Console) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console._console.file.getvalue())


def test_a_terminal_gets_a_bar_and_lines_above_it(terminal, clock):
    with terminal.training(first_step=2, num_steps=10):
        terminal.row(ROW)
        terminal.say("step 3: saved [somewhere]")
    text = shown(terminal)
    assert "step 3/10 " in text
    assert "━" in text
    assert "loss 2.3457  grad norm 1.250  lr 0.00123  12,346 tokens/s" in text
    assert "ETA 0:00:00" in text
    assert "step 3: saved [somewhere]\n" in text
    assert "step 3/10  loss" not in text


def test_after_the_bar_lines_are_plain_again(terminal):
    with pytest.raises(RuntimeError), terminal.training(first_step=0, num_steps=10):
        raise RuntimeError
    assert terminal._progress is None
    terminal.say("the end")
    assert shown(terminal).endswith("the end\n")
