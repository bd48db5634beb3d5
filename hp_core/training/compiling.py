"""What became of the modules that a run compiles, told after its first step and when it changes."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._dynamo import utils as dynamo
from torch._dynamo.output_graph import GraphCompileReason

from hp_core.hookspecs import hookimpl
from hp_core.model.compile import Compiler, start_compiling
from hp_core.parallel.agreement import gathered
from hp_core.training.run import Run

_TORCH = str(Path(torch.__file__).parent)
# torch remembers 64 compilations, and a step may have more.
_NUM_REMEMBERED = 256
_EXPLAINED, _ADDRESS = "Explanation: ", re.compile(" at 0x[0-9a-f]+")


@dataclass
class Compilations:
    """What torch.compile has done in this process since this was made.

    Attributes:
        compiler: what compiles the modules.
        seconds: what compiling took.
        graph_breaks: by reason and place, how many functions end a graph there.
        recompiled: why code was compiled again, and how often.
        given_up: the same where that was too often, so that what comes next runs as it is written.
    """

    compiler: Compiler
    seconds: float = 0.0
    graph_breaks: Counter[str] = field(default_factory=Counter)
    recompiled: Counter[str] = field(default_factory=Counter)
    given_up: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        dynamo.set_compilation_metrics_limit(_NUM_REMEMBERED)
        self._before = self._counts()
        self._num_breaks = len(dynamo.graph_break_reasons)
        self._remembered = dynamo.get_compilation_metrics()

    def read(self) -> None:
        """Take in what torch has done since the last time."""
        self.graph_breaks.update(map(_place_and_reason, dynamo.graph_break_reasons[self._num_breaks :]))
        self._num_breaks = len(dynamo.graph_break_reasons)
        known = set(map(id, self._remembered))
        self._remembered = dynamo.get_compilation_metrics()
        for one in self._remembered:
            if id(one) not in known:
                self._take(one)

    def _take(self, one: dynamo.CompilationMetrics) -> None:
        self.seconds += (one.duration_us or 0) / 1e6
        reason = (one.recompile_reason or "").partition(": ")[2]
        if "recompile limit exceeded" in (one.fail_reason or ""):
            self.given_up[reason] += 1
        elif one.fail_type not in (None, "Unsupported"):
            first = (one.fail_reason or "").strip().partition("\n")[0]
            function = f"{one.co_name} ({one.co_filename}:{one.co_firstlineno})"
            self.compiler.failures.setdefault(f"{one.fail_type}: {first}", function)
        elif reason:
            self.recompiled[reason] += 1

    def _counts(self) -> Mapping[str, int]:
        inductor = dynamo.counters["inductor"]
        return {
            "graphs": self.compiler.num_graphs,
            "from_cache": inductor["fxgraph_cache_hit"],
            "not_in_cache": inductor["fxgraph_cache_miss"],
        }

    def facts(self) -> dict[str, Any]:
        """The same for a run's manifest."""
        counts = {name: number - self._before[name] for name, number in self._counts().items()}
        return {
            "modules": len(self.compiler.names),
            **counts,
            "seconds": round(self.seconds, 3),
            "graph_breaks": dict(self.graph_breaks),
            "recompiled": dict(self.recompiled),
            "given_up": dict(self.given_up),
            "failures": dict(self.compiler.failures),
        }

    def lines(self) -> Iterator[str]:
        """What is worth knowing after the first step."""
        facts = self.facts()
        cached, compiled = facts["from_cache"], facts["not_in_cache"]
        cache = f" ({cached} of {cached + compiled} parts from the cache)" if cached + compiled else ""
        end = "" if self.graph_breaks else "; no graph breaks"
        made = f"{_count(facts['modules'], 'module')}, {_count(facts['graphs'], 'graph')}"
        yield f"compile: {made} in {self.seconds:.1f} s{cache}{end}"
        for reason, number in self.graph_breaks.items():
            yield f"compile: graph break in {_count(number, 'function')} at {reason}"

    def warnings(self) -> Iterator[str]:
        """What makes a run slower than its recipe says."""
        for message, where in self.compiler.failures.items():
            yield f"compile: {where} can't be compiled, and it and all alike run as they are written: {message}"
        for reason in self.given_up:
            yield f"compile: torch's recompile limit is reached: what is new runs as it is written; last {reason}"


class CompileWatch:
    """Starts compiling, and tells what comes of it: after the first step all of it, later what is new."""

    def __init__(self) -> None:
        self._found: Compilations | None = None
        self._warned: set[str] | None = None
        self._next_number = 1

    @hookimpl
    def on_train_start(self, run: Run) -> None:
        """Compile what runs from now on."""
        assert run.model is not None
        # A rank without a module to compile still hears of the others.
        self._found = Compilations(start_compiling(run.model) or Compiler(run.config.compile))

    @hookimpl
    def on_step_end(self, run: Run) -> None:
        """Say what there is to say."""
        assert self._found is not None
        self._found.read()
        if self._warned is None:
            self._tell_all(run, self._found)
        else:
            self._tell_new(run, self._found, self._warned)

    def _tell_all(self, run: Run, found: Compilations) -> None:
        console, setup = run.console, run.setup
        for line in found.lines():
            console.say(line)
        by_rank = gathered(list(found.warnings()), setup)
        for rank, lines in enumerate(by_rank):
            for line in lines:
                console.say(line if rank == 0 else f"rank {rank}: {line}")
        self._warned = set(by_rank[setup.rank])
        # From here on what is compiled is compiled again, or late.
        found.recompiled.clear()
        run.record(compile=found.facts())

    def _tell_new(self, run: Run, found: Compilations, warned: set[str]) -> None:
        lines = [line for line in found.warnings() if line not in warned]
        warned.update(lines)
        number = found.recompiled.total()
        if number >= self._next_number:
            # Each time that there are twice as many, or this would fill a log.
            self._next_number = 2 * number
            last = list(found.recompiled)[-1]
            lines.append(f"compile: compiled again {_count(number, 'time')} since the first step, last because {last}")
        for line in lines:
            _say(line, run)
        if lines:
            run.record(compile=found.facts())


def _say(line: str, run: Run) -> None:
    if run.setup.environment.is_main:
        run.console.say(line)
    else:
        print(f"rank {run.setup.rank}: {line}", file=sys.stderr, flush=True)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _place_and_reason(one: GraphCompileReason) -> str:
    """The innermost line that is not torch's own, and what torch says of it."""
    own = [frame for frame in one.user_stack if not frame.filename.startswith(_TORCH)]
    place = f"{own[-1].filename}:{own[-1].lineno}" if own else "a place in torch"
    lines = [line.strip() for line in one.reason.splitlines()]
    explained = [line.removeprefix(_EXPLAINED) for line in lines if line.startswith(_EXPLAINED)]
    return f"{place}: {_ADDRESS.sub('', (explained or lines)[0])}"
