"""Every error a user can meet, and the one place that turns an error into text and an exit code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

EXIT_DONE = 0
EXIT_RUN_FAILED = 1
EXIT_USER_INPUT = 2
EXIT_STOPPED = 75
# What a shell reports for a process ended by Ctrl-C.
EXIT_INTERRUPTED = 130


@dataclass(frozen=True)
class Origin:
    """Where a value was written.

    `file`, `line` and `column` (1-based) place it in a recipe; `option` is the command-line option it came
    from, as typed (`--training.seed=1`). Neither means a default.
    """

    file: str | None = None
    line: int | None = None
    column: int | None = None
    option: str | None = None

    def __str__(self) -> str:
        if self.option is not None:
            return self.option
        if self.file is None:
            return "default"
        if self.line is None:
            return self.file
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, where it is, and one hint that can be pasted.

    `path` is the dotted recipe path (`plan_overrides[0].match`), empty when the problem is not a recipe value.
    """

    message: str
    path: str = ""
    origin: Origin | None = None
    hint: str = ""

    def __str__(self) -> str:
        position = f"{self.origin}: " if self.origin is not None and str(self.origin) != "default" else ""
        path = f"{self.path}: " if self.path else ""
        hint = f"; {self.hint}" if self.hint else ""
        return f"{position}{path}{self.message}{hint}"


class HpError(Exception):
    """An error with a message for the user; its traceback is never shown."""

    exit_code = EXIT_RUN_FAILED


class InputError(HpError):
    """The user's recipe, command line, files or plugins are wrong. Holds every problem found, in order."""

    exit_code = EXIT_USER_INPUT

    def __init__(self, problems: Problem | str | Iterable[Problem]) -> None:
        if isinstance(problems, str):
            problems = (Problem(problems),)
        elif isinstance(problems, Problem):
            problems = (problems,)
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[InputError], tuple[tuple[Problem, ...]]]:
        return InputError, (self.problems,)


class ArgumentError(HpError):
    """Raised by a component that finds one of its own recipe arguments wrong while it is built.

    `path` is relative to the component's section (`groups[0].match`). `Target.build` turns it into an
    `InputError` with the position of that value in the recipe.
    """

    exit_code = EXIT_USER_INPUT

    def __init__(self, path: str, message: str, hint: str = "") -> None:
        self.path = path
        self.message = message
        self.hint = hint
        super().__init__(f"{path}: {message}" + (f"; {hint}" if hint else ""))

    def __reduce__(self) -> tuple[type[ArgumentError], tuple[str, str, str]]:
        return ArgumentError, (self.path, self.message, self.hint)


class RunError(HpError):
    """The run failed for a reason that is not the user's input; the message says where and why."""


@contextmanager
def noting(where: Callable[[], str]) -> Iterator[None]:
    """Add a note to whatever is raised inside: where in the run it happened (`step 3, rank 1`)."""
    try:
        yield
    except BaseException as error:
        # What `add_note` does, which python 3.10 lacks.
        error.__notes__ = [*notes_of(error), where()]  # type: ignore[attr-defined]
        raise


def notes_of(error: BaseException) -> list[str]:
    """The notes that an exception has, innermost first."""
    return list(error.__dict__.get("__notes__", ()))
