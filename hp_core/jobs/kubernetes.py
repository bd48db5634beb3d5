"""A Kubeflow training job: the runtime that says how pods are restarted, and the job that runs in it."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from posixpath import normpath
from typing import TYPE_CHECKING, Any

from hp_core.errors import EXIT_USER_INPUT, Problem
from hp_core.jobs.job import Job, contradictions, fitting, positive, processes, resuming

if TYPE_CHECKING:
    from hp_core.config.models import TrainerConfig

API_VERSION = "trainer.kubeflow.org/v1alpha1"
_VOLUME = r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?:/[^:]*"
_LABEL = r"[a-z]([-a-z0-9]*[a-z0-9])?"
# The pods' names, which are host names, add to it: NAME-node-0-999.
_LONGEST_NAME = 50


@dataclass(frozen=True)
class Settings:
    """What only Kubernetes knows.

    `volumes` are claims and the paths where they are mounted, `env` environment variables; `grace` is how many seconds
    a pod has to save when it is asked to end, `restarts` how often all pods are started anew when one fails.
    """

    image: str | None = None
    namespace: str | None = None
    volumes: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    grace: int = 300
    restarts: int = 10


def problems(job: Job, config: TrainerConfig, settings: Settings) -> Iterator[Problem]:
    """Yield what keeps the manifest from training this recipe, rather than any."""
    yield from contradictions(job, config)
    yield from _unkept(job, config, settings)


def faults(job: Job, settings: Settings) -> Iterator[Problem]:
    """Yield what keeps the manifest from working, whatever the recipe says."""
    label = "a small letter, then small letters, digits and -"
    yield from fitting(job.name, "--name", _LABEL, label, "give --name")
    if len(job.name) > _LONGEST_NAME:
        yield Problem(f"--name {job.name!r}: expected at most {_LONGEST_NAME} letters", hint="give --name")
    yield from fitting(settings.namespace, "--namespace", r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", "small letters and -")
    yield from fitting(job.memory, "--memory", r"\d+([KMGT]i|[kMGT])?", "a number and a unit, such as 64Gi")
    yield from fitting(job.workdir, "--workdir", r"/.*", "an absolute path")
    if settings.image is None:
        yield Problem("Kubernetes runs a container's image", hint="give --image, one that has hp-train in it")
    else:
        yield from fitting(settings.image, "--image", r"\S+", "an image's name without spaces")
    for volume in settings.volumes:
        yield from fitting(volume, "--volume", _VOLUME, "CLAIM:/PATH")
    for variable in settings.env:
        yield from fitting(variable, "--env", r"(?s)(?!PET_)[A-Za-z_]\w*=.*", "NAME=VALUE, other than PET_…")
    yield from positive(settings.grace, "--grace")
    yield from positive(settings.restarts, "--restarts", 0)
    if job.resumes and not settings.volumes:
        message = "a pod that is started again finds nothing of what it saved in its container"
        yield Problem(message, hint="give --volume CLAIM:/PATH for the output_dir, or --restarts 0")


def _unkept(job: Job, config: TrainerConfig, settings: Settings) -> Iterator[Problem]:
    """Yield a problem if the run writes beside the volumes, where what it writes goes with its pod."""
    given = config.output_dir or _output_dir(job)
    whole = PurePosixPath(normpath(PurePosixPath(job.workdir) / given))
    # What has another form is a fault of its own.
    if not whole.is_absolute() or not all(re.fullmatch(_VOLUME, volume) for volume in settings.volumes):
        return
    paths = [volume.partition(":")[2] for volume in settings.volumes]
    if not paths or any(whole.is_relative_to(normpath(path)) for path in paths):
        return
    starts = "" if given.startswith("/") else f" ({whole} in the container)"
    message = f"{given!r}{starts} is on no volume, and is gone with its pod: --volume mounts {', '.join(paths)}"
    hint = f"write {PurePosixPath(paths[0]) / whole.name}, or give --volume CLAIM:{whole}"
    yield Problem(message, path="output_dir", hint=hint)


def _output_dir(job: Job) -> str:
    """Where a run writes whose recipe doesn't say."""
    return f"runs/{job.name}"


def manifest(job: Job, config: TrainerConfig, settings: Settings) -> str:
    """Return the manifest: two YAML documents for `kubectl apply -f -`."""
    from ruamel.yaml import YAML

    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.width = 2**20
    stream = io.StringIO()
    yaml.dump_all([_runtime(job, settings), _train_job(job, config, settings)], stream)
    return stream.getvalue()


def _metadata(job: Job, settings: Settings) -> dict[str, Any]:
    namespace = {} if settings.namespace is None else {"namespace": settings.namespace}
    return {"name": job.name, **namespace}


def _runtime(job: Job, settings: Settings) -> dict[str, Any]:
    """How pods are made and restarted, which a training job has no fields for."""
    claims = [one.partition(":") for one in settings.volumes]
    volumes = [
        {"name": f"volume-{index}", "persistentVolumeClaim": {"claimName": claim}}
        for index, (claim, _, _) in enumerate(claims)
    ]
    mounts = [{"name": f"volume-{index}", "mountPath": path} for index, (_, _, path) in enumerate(claims)]
    container = {
        "name": "node",
        "image": settings.image,
        "workingDir": job.workdir,
        # Loader workers and GPUs of a machine share memory, of which a container has 64 MB without this.
        "volumeMounts": [*mounts, {"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": settings.grace,
        "containers": [container],
        "volumes": [*volumes, {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}],
    }
    # A pod can't join the others again: all start anew, except after a mistake that would only be repeated.
    mistake = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [EXIT_USER_INPUT]}}
    node = {
        "name": "node",
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": {"backoffLimit": 0, "podFailurePolicy": {"rules": [mistake]}, "template": {"spec": pod}},
        },
    }
    give_up = {"name": "mistake", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    failure = {"maxRestarts": settings.restarts, "rules": [give_up]}
    return {
        "apiVersion": API_VERSION,
        "kind": "TrainingRuntime",
        "metadata": _metadata(job, settings),
        "spec": {
            "mlPolicy": {"numNodes": job.nodes, "torch": {}},
            "template": {"spec": {"failurePolicy": failure, "replicatedJobs": [node]}},
        },
    }


def added(job: Job, config: TrainerConfig) -> dict[str, str]:
    """The recipe values that the manifest adds to the user's; some name variables that Kubeflow sets."""
    endpoint = "$(PET_MASTER_ADDR):$(PET_MASTER_PORT)"
    meeting = processes(job, config, endpoint=endpoint, run_id=job.name, node_rank="$(PET_NODE_RANK)")
    return resuming(job, config, _output_dir(job)) | meeting


def _train_job(job: Job, config: TrainerConfig, settings: Settings) -> dict[str, Any]:
    ours = added(job, config)
    words = job.arguments(ours)
    # Kubernetes puts the values of variables in the place of $(NAME), and takes $$ for a plain $.
    arguments = [word.replace("$", "$$") for word in words[: -len(ours)]] + words[-len(ours) :]
    resources = {"cpu": job.cpus, "memory": job.memory, "nvidia.com/gpu": job.gpus or None}
    limits = {name: str(value) for name, value in resources.items() if value is not None}
    env = [{"name": name, "value": value} for name, _, value in (one.partition("=") for one in settings.env)]
    trainer: dict[str, Any] = {
        "image": settings.image,
        "command": ["hp-train"],
        "args": arguments,
        "numNodes": job.nodes,
        "numProcPerNode": job.nproc,
    }
    trainer |= {"env": [{**one, "value": one["value"].replace("$", "$$")} for one in env]} if env else {}
    trainer |= {"resourcesPerNode": {"requests": limits, "limits": dict(limits)}} if limits else {}
    return {
        "apiVersion": API_VERSION,
        "kind": "TrainJob",
        "metadata": _metadata(job, settings),
        "spec": {"runtimeRef": {"kind": "TrainingRuntime", "name": job.name}, "trainer": trainer},
    }
