"""A batch script for Slurm that goes on by itself when its time is over."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hp_core.errors import EXIT_STOPPED, Problem
from hp_core.jobs.job import Job, fitting, positive, processes, resuming

if TYPE_CHECKING:
    from hp_core.config.models import TrainerConfig

# `#SBATCH` lines have a quoting of their own; no name or constraint needs it.
_WORD = r"[\w.,:+@=/\[\]*&|()!%-]+"
_TIME = re.compile(r"(?:([0-9]+)-)?([0-9]+)(?::([0-9]+))?(?::([0-9]+))?")
_TIMES = "MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS, DAYS-HOURS, DAYS-HOURS:MINUTES or DAYS-HOURS:MINUTES:SECONDS"
_UNLIMITED = ("UNLIMITED", "INFINITE")
_SECONDS = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}


@dataclass(frozen=True)
class Settings:
    """What only Slurm knows; None and the empty tuple leave it to the cluster's defaults.

    `signal_before` is how many seconds before its end the job is asked to stop, `setup` the shell commands that come
    before training.
    """

    time: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    signal_before: int = 300
    setup: tuple[str, ...] = ()


def faults(job: Job, settings: Settings) -> Iterator[Problem]:
    """Yield what keeps the script from working, whatever the recipe says."""
    yield from fitting(job.name, "--name", r"[\w.+-]+", "letters, digits and . _ + -", "give --name")
    for option in ("partition", "account", "qos", "constraint"):
        yield from fitting(getattr(settings, option), f"--{option}", _WORD, "a word without spaces and quotes")
    yield from fitting(job.memory, "--memory", r"\d+[KMGT]?", "a number and K, M, G or T, such as 64G")
    yield from positive(settings.signal_before, "--signal-before")
    misread = list(_faults_of_time(settings.time))
    yield from misread
    seconds = None if misread else _seconds(settings.time)
    if seconds is not None and settings.signal_before >= seconds:
        message = f"--signal-before {settings.signal_before}: the job has {seconds} seconds in all"
        yield Problem(message, hint="ask for more --time, or be asked to stop later")


def script(job: Job, config: TrainerConfig, settings: Settings) -> str:
    """Return the script.

    Slurm starts one task a machine, and `hp-train` there its processes: so a process that fails is told once, with its
    cause, and started again within the job (`launch.max_restarts`), which tasks of Slurm can't be.
    """
    parts = [
        "#!/bin/bash\n" + "".join(f"#SBATCH --{option}\n" for option in _options(job, settings)),
        f"cd {shlex.quote(job.workdir)} || exit\n" + "".join(f"{line}\n" for line in settings.setup),
    ]
    if job.nodes > 1:
        parts.append(_MEETING)
    parts.append(_training(job, config))
    parts.append(_REQUEUE if job.resumes else 'exit "$code"\n')
    return "\n".join(parts)


def _options(job: Job, settings: Settings) -> Iterator[str]:
    yield f"job-name={job.name}"
    yield f"nodes={job.nodes}"
    yield "ntasks-per-node=1"
    optional = {
        "cpus-per-task": job.cpus,
        "gpus-per-node": job.gpus or None,
        "mem": job.memory,
        "time": settings.time,
        "partition": settings.partition,
        "account": settings.account,
        "qos": settings.qos,
        "constraint": settings.constraint,
    }
    yield from (f"{option}={value}" for option, value in optional.items() if value is not None)
    # One file for all starts of the job, which would otherwise be replaced by each.
    yield "output=%x-%j.out"
    yield "open-mode=append"
    yield "requeue" if job.resumes else "no-requeue"
    # To this script alone: srun hands the signal on to the tasks.
    yield f"signal=B:USR1@{settings.signal_before}"


_MEETING = """\
# The machines meet at the first of them. Jobs that share it differ in their number.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
endpoint=$head:$((12000 + SLURM_JOB_ID % 20000))
"""


def added(job: Job, config: TrainerConfig) -> dict[str, str]:
    """The recipe values that the script adds to the user's; some name variables of the shell."""
    # Slurm's number stays the same when the job is started again.
    found = resuming(job, config, f"runs/{job.name}-$SLURM_JOB_ID")
    run_id = "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"
    return found | processes(job, config, endpoint="$endpoint", run_id=run_id, node_rank=None)


def _training(job: Job, config: TrainerConfig) -> str:
    ours = added(job, config)
    theirs = job.arguments(ours)[: -len(ours)]
    # Without the number of Slurm's step, or hp-train would take itself for one of the ranks.
    words = ["env -u SLURM_STEP_ID", *(shlex.quote(word) for word in ["hp-train", *theirs])]
    words += [f'--{key}="{value}"' if "$" in value else f"--{key}={value}" for key, value in ours.items()]
    # srun does not take this one over from sbatch.
    cpus = f" --cpus-per-task={job.cpus}" if job.cpus is not None else ""
    command = " \\\n    ".join([f"srun --ntasks-per-node=1{cpus} --kill-on-bad-exit=0 --wait=120", *_lines(words)])
    return _TRAINING.format(command=command)


def _lines(words: list[str]) -> Iterator[str]:
    """Group an option's words: the command and recipe, then one recipe value a line."""
    line: list[str] = []
    for word in words:
        if word.startswith(("--", "'--")) and line:
            yield " ".join(line)
            line = []
        line.append(word)
    yield " ".join(line)


_TRAINING = """\
# Slurm sends USR1 shortly before the time is over. Training then saves and ends with code 75. It is passed on once: a
# second signal would end training at once.
srun= asked_to_stop= passed_on=
pass_on() {{
    asked_to_stop=yes
    if [ -n "$srun" ] && [ -z "$passed_on" ]; then
        passed_on=yes
        kill -USR1 "$srun"
    fi
}}
trap pass_on USR1
# A job that is cancelled or preempted is told by Slurm itself, and has as long to save as this script lives.
trap : TERM

{command} &
srun=$!
[ -z "$asked_to_stop" ] || pass_on
# A signal ends the waiting, and not what is waited for.
while kill -0 "$srun" 2>/dev/null; do wait "$srun"; done
wait "$srun"
code=$?
"""

# 138 is the signal itself, where it came before training could listen: nothing is lost by starting again. A job that
# was cancelled got another signal, or none here.
_REQUEUE = f"""\
if [ -n "$asked_to_stop" ] && {{ [ "$code" -eq {EXIT_STOPPED} ] || [ "$code" -eq 138 ]; }}; then
    echo "stopped with code $code: job $SLURM_JOB_ID goes back into the queue"
    scontrol requeue "$SLURM_JOB_ID" && exit 0
fi
exit "$code"
"""


def _faults_of_time(time: str | None) -> Iterator[Problem]:
    """Yield what Slurm would not read, or read as another time than it says."""
    if time is None or time.upper() in _UNLIMITED:
        return
    if _TIME.fullmatch(time) is None:
        yield Problem(f"--time {time!r}: expected {_TIMES}", hint="write --time 2-12:00:00 for two and a half days")
        return
    if _seconds(time) == 0:
        yield Problem(f"--time {time!r}: is no time at all", hint="leave --time out for the cluster's limit")
    # What comes first has no larger unit that it could be carried to. Jobs are asked for by hours of any number.
    for unit, number in list(_parts(time).items())[1:]:
        if unit != "hours" and number > 59:
            hint = f"write --time {_formatted(_seconds(time) or 0)}"
            yield Problem(f"--time {time!r}: {number} {unit} are too many, at most 59", hint=hint)


def _formatted(seconds: int) -> str:
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{f'{days}-' if days else ''}{hours:02}:{minutes:02}:{seconds:02}"


def _parts(time: str) -> dict[str, int]:
    """What a time limit that Slurm can read says, by unit, the largest first."""
    match = _TIME.fullmatch(time)
    assert match is not None
    days, *rest = match.groups()
    given = [part for part in rest if part is not None]
    # Without days a lone number is minutes and a pair minutes and seconds; with them, hours come first.
    units = list(_SECONDS)[1 if days is not None or len(given) == 3 else 2 :]
    first = {} if days is None else {"days": int(days)}
    return first | {unit: int(part) for unit, part in zip(units, given, strict=False)}


def _seconds(time: str | None) -> int | None:
    """A time limit in seconds; None for none."""
    if time is None or time.upper() in _UNLIMITED:
        return None
    return sum(number * _SECONDS[unit] for unit, number in _parts(time).items())
