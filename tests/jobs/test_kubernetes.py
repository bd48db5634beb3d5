"""The manifest is what Kubeflow takes, and its command trains with the environment that Kubeflow gives it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from hp_core.observe.trackers import read_metrics
from tests.e2e.runs import hp_train_here, steps
from tests.jobs.cluster import commands, expanded, finish, free_port, has_taken
from tests.jobs.test_slurm import SETTINGS, slow_recipe


def printed(path: Path | str, *arguments: str) -> str:
    done = hp_train_here("launch", "k8s", str(path), *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def documents(text: str) -> list[dict[str, Any]]:
    return list(YAML(typ="safe", pure=True).load_all(text))


class Pods:
    """The pods of a training job, as processes of this host."""

    def __init__(self, text: str, folder: Path) -> None:
        self.runtime, job = documents(text)
        self.trainer = job["spec"]["trainer"]
        self.folder = folder
        self.env = commands(folder / "bin")
        self.log = folder / "pods.out"

    def start(self, when: Callable[[], bool] | None = None) -> list[int]:
        """Run all pods once; all are asked to end once `when` holds, as when a node is drained."""
        (node,) = self.runtime["spec"]["template"]["spec"]["replicatedJobs"]
        (container,) = node["template"]["spec"]["template"]["spec"]["containers"]
        # What Kubeflow adds to the environment of a pod.
        shared = {
            "PET_NNODES": str(self.trainer["numNodes"]),
            "PET_NPROC_PER_NODE": str(self.trainer["numProcPerNode"]),
        }
        shared |= {"PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": str(free_port())}
        with self.log.open("a") as log:
            pods = []
            for rank in range(self.trainer["numNodes"]):
                env = {**shared, "PET_NODE_RANK": str(rank)}
                words = [expanded(word, env) for word in (*self.trainer["command"], *self.trainer["args"])]
                pods.append(
                    subprocess.Popen(
                        words,
                        env={**self.env, **env},
                        cwd=container["workingDir"],
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
            return finish(pods, when)


@pytest.mark.parametrize("nodes", [1, 2])
def test_pods_that_must_end_save_and_go_on_when_they_start_again(tmp_path, nodes):
    path = slow_recipe(tmp_path / "$(HOME) 'x'")
    sizes = ("--nodes", str(nodes), "--nproc", "1", "--image", "i", "--volume", f"work:{tmp_path}")
    pods = Pods(printed(path, *sizes, "--workdir", str(tmp_path), *SETTINGS), tmp_path)
    run = path.parent / "run"
    codes = pods.start(when=lambda: has_taken(run, 2))
    assert codes == [75] * nodes, pods.log.read_text()
    first = read_metrics(run)
    assert 2 <= len(first) < 8
    assert pods.start() == [0] * nodes, pods.log.read_text()
    rows = read_metrics(run)
    assert steps(rows, "step") == list(range(1, 9))
    assert rows[: len(first)] == first


FULL = (
    *("--image", "registry/train:1", "--nodes", "2", "--nproc", "4", "--namespace", "team", "--grace", "120"),
    *("--volume", "work:/workspace", "--volume", "data:/data", "--env", "HF_HOME=/data/hf", "--cpus", "8"),
    *("--memory", "64Gi", "--restarts", "3", "--training.global_batch_size=8"),
)


def test_the_manifest_is_what_kubeflow_takes(tmp_path, monkeypatch):
    """Field by field, as the resource definitions of Kubeflow Trainer, JobSet and Kubernetes spell them."""
    monkeypatch.chdir(tmp_path)
    slow_recipe(tmp_path / "x")
    runtime, job = documents(printed("x/tiny.yaml", *FULL, "--output_dir=null"))
    for one in (runtime, job):
        assert one["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
        assert one["metadata"] == {"name": "tiny", "namespace": "team"}
    assert runtime["kind"] == "TrainingRuntime"
    job_set = runtime["spec"]["template"]["spec"]
    assert job_set["failurePolicy"]["maxRestarts"] == 3
    (node,) = job_set["replicatedJobs"]
    labels = node["template"]["metadata"]["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert node["template"]["spec"]["backoffLimit"] == 0
    pod = node["template"]["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    assert pod["terminationGracePeriodSeconds"] == 120
    (container,) = pod["containers"]
    assert container["name"] == node["name"] == "node"
    mounted = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    claims = {one["name"]: one.get("persistentVolumeClaim", {}).get("claimName") for one in pod["volumes"]}
    assert {mounted[name]: claim for name, claim in claims.items()} == {
        "/workspace": "work",
        "/data": "data",
        "/dev/shm": None,
    }
    assert job["kind"] == "TrainJob"
    assert job["spec"]["runtimeRef"] == {"kind": "TrainingRuntime", "name": "tiny"}
    trainer = job["spec"]["trainer"]
    assert (trainer["image"], trainer["numNodes"], trainer["numProcPerNode"]) == ("registry/train:1", 2, 4)
    assert trainer["resourcesPerNode"]["limits"] == {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "4"}
    assert trainer["env"] == [{"name": "HF_HOME", "value": "/data/hf"}]
    assert trainer["command"] == ["hp-train"]
    assert trainer["args"] == [
        "train",
        "x/tiny.yaml",
        "--training.global_batch_size=8",
        "--checkpoint.resume=latest",
        "--output_dir=runs/tiny",
        "--launch.nproc=4",
        "--launch.nnodes=2",
        "--launch.rdzv_endpoint=$(PET_MASTER_ADDR):$(PET_MASTER_PORT)",
        "--launch.rdzv_id=tiny",
        "--launch.node_rank=$(PET_NODE_RANK)",
    ]


K8S = ("launch", "k8s")
ASKED = ("--image", "i", "--volume", "data:/data", "--volume", "work:/work/")


@pytest.mark.parametrize(
    ("output_dir", "workdir", "whole"),
    [
        ("null", "/workspace", "/workspace/runs/tiny"),
        ("out", "/workspace", "/workspace/out"),
        ("/out", "/data", "/out"),
        ("../out", "/data", "/out"),
        ("/database", "/data", "/database"),
    ],
)
def test_a_run_beside_the_volumes_is_refused(tmp_path, output_dir, workdir, whole):
    path = slow_recipe(tmp_path / "x")
    done = hp_train_here(*K8S, str(path), *ASKED, f"--output_dir={output_dir}", "--workdir", workdir)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "output_dir: " in line
    assert "is gone with its pod: --volume mounts /data, /work/; write /data/" in line
    assert line.endswith(f"or give --volume CLAIM:{whole}")


@pytest.mark.parametrize(
    ("output_dir", "workdir"),
    [("null", "/data"), ("null", "/work/a"), ("/data", "/x"), ("/work/a/../b", "/x"), ("../data/x", "/x")],
)
def test_a_run_on_a_volume_is_fine(tmp_path, output_dir, workdir):
    path = slow_recipe(tmp_path / "x")
    printed(path, *ASKED, f"--output_dir={output_dir}", "--workdir", workdir)


def test_kubectl_reads_the_manifest(tmp_path):
    """Its offline half, which knows names, kinds and YAML, but no definitions of a cluster."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("there is no kubectl here")
    (tmp_path / "kustomization.yaml").write_text("resources: [job.yaml]\n")
    text = printed(slow_recipe(tmp_path / "x"), *FULL, "--output_dir=null")
    (tmp_path / "job.yaml").write_text(text)
    done = subprocess.run([kubectl, "kustomize", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    by_kind = {one["kind"]: one for one in documents(done.stdout)}
    assert by_kind == {one["kind"]: one for one in documents(text)}
