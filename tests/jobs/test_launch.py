"""`hp-train launch`: quoting, what is refused, and what is never imported."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from hp_core.config.models import TrainerConfig
from hp_core.jobs import kubernetes, slurm, torchrun
from hp_core.jobs.job import Job
from tests.conftest import ROOT
from tests.e2e.runs import hp_train_here, recipe
from tests.jobs.cluster import expanded

# What an argument of a process can be: anything but NUL, and what UTF-8 has no bytes for.
WORDS = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)))
CONFIG = TrainerConfig.model_construct(output_dir="out")


def a_job(recipe: str, overrides: list[str], plugins: list[str], workdir: str) -> Job:
    return Job(recipe, "it", 1, 1, workdir, tuple(overrides), tuple(plugins))


@settings(max_examples=60, deadline=None)
@given(WORDS, st.lists(WORDS), st.lists(WORDS), WORDS)
def test_a_shell_gives_every_word_of_a_script_back(recipe, overrides, plugins, workdir):
    job = a_job(recipe, overrides, plugins, f"/{workdir}")
    script = slurm.script(job, CONFIG, slurm.Settings())
    # The commands are functions here, which print their arguments: first the folder's, then those of srun.
    show = 'show() { printf \'%s\\0\' "$@"; }; cd() { show "$@"; }; srun() { show "$@"; }\n'
    done = subprocess.run(["bash", "-c", show + script], capture_output=True, check=True)
    folder, *words = done.stdout.decode().split("\0")[:-1]
    assert folder == job.workdir
    assert words[words.index("hp-train") + 1 :][: len(job.arguments())] == job.arguments()


@settings(max_examples=200, deadline=None)
@given(WORDS, st.lists(WORDS), st.lists(WORDS))
def test_torchrun_s_line_gives_every_word_back(recipe, overrides, plugins):
    job = a_job(recipe, overrides, plugins, "/")
    line = torchrun.command_line(job, CONFIG, None)
    words = shlex.split(line)
    assert words[words.index("hp_core") + 1 :][: len(job.arguments())] == job.arguments()


# YAML has no place for these, and a manifest is YAML.
PRINTABLE = st.text(st.characters(exclude_categories=("Cs", "Cc", "Cn", "Co")) | st.sampled_from("\n\t$()"))


@settings(max_examples=200, deadline=None)
@given(PRINTABLE, st.lists(PRINTABLE), PRINTABLE)
def test_kubernetes_gives_every_word_back(recipe, overrides, value):
    job = a_job(recipe, overrides, [], "/w")
    asked = kubernetes.Settings(image="i", env=(f"A={value}",))
    _, train_job = YAML(typ="safe", pure=True).load_all(kubernetes.manifest(job, CONFIG, asked))
    trainer = train_job["spec"]["trainer"]
    variables = {"PET_NODE_RANK": "3", "HOME": "/root"}
    assert [expanded(one, variables) for one in trainer["args"]][: len(job.arguments())] == job.arguments()
    assert [expanded(one["value"], variables) for one in trainer["env"]] == [value]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["slurm", "--nodes", "0"], "--nodes 0: expected at least 1"),
        (["slurm", "--nodes", "2:4"], "argument --nodes: '2:4' is no whole number: a job asks for a certain number of"),
        (["torchrun", "--nodes", "2:4"], "a range is for the --nnodes of hp-train and torchrun themselves"),
        (["slurm", "--launch.nnodes=1:4"], "launch.nnodes: '1:4' leaves the number of machines open"),
        (["slurm", "--name", "a b"], "--name 'a b': expected letters, digits"),
        (["slurm", "--partition", "x\n#SBATCH --uid=0"], r"--partition 'x\n#SBATCH --uid=0': expected a word"),
        (["slurm", "--time", "3 days"], "--time '3 days': expected MINUTES, MINUTES:SECONDS"),
        (["slurm", "--time", "1:2:3:4"], "--time '1:2:3:4': expected MINUTES"),
        (["slurm", "--time", "2-"], "'2-': expected MINUTES"),
        (["slurm", "--time", "1-2-3"], "'1-2-3': expected MINUTES"),
        (["slurm", "--time", "12h"], "; write --time 2-12:00:00 for two and a half days"),
        (["slurm", "--time", "\u0661\u0662"], "expected MINUTES"),
        (["slurm", "--time", "0:00"], "--time '0:00': is no time at all"),
        (["slurm", "--time", "5:60"], "'5:60': 60 seconds are too many, at most 59; write --time 00:06:00"),
        (["slurm", "--time", "1:90:00"], "'1:90:00': 90 minutes are too many, at most 59; write --time 02:30:00"),
        (["slurm", "--time", "1-2:75"], "75 minutes are too many, at most 59; write --time 1-03:15:00"),
        (["slurm", "--time", "1:00", "--signal-before", "60"], "--signal-before 60: the job has 60 seconds in all"),
        (["slurm", "--time", "0-1", "--signal-before", "3600"], "the job has 3600 seconds in all"),
        (["slurm", "--signal-before", "0"], "--signal-before 0: expected at least 1"),
        (["slurm", "--memory", "64Gi"], "--memory '64Gi': expected a number and K, M, G or T"),
        (["slurm", "--nproc", "4", "--gpus", "2"], "--gpus 2: 4 processes need a GPU each"),
        (["slurm", "--gpus", "1", "--training.device=cpu"], "training.device: --gpus 1: the recipe trains on the CPU"),
        (["slurm", "--gpus", "0", "--training.device=cuda"], "training.device: --gpus 0: the recipe trains on GPUs"),
        (["slurm", "--checkpoint.resume=/there"], "checkpoint.resume: '/there': a job that is started again goes on"),
        (["slurm", "--training.train_itres=3"], "training.train_itres: unknown key; did you mean 'train_iters'?"),
        (["slurm", "--nodes", "3", "--training.global_batch_size=8"], "8 rows can't be cut"),
        (["slurm", "--image", "i"], "unrecognized arguments: --image i"),
        (["k8s", "--volume", "c:/w"], "Kubernetes runs a container's image; give --image"),
        (["k8s", "--image", "i"], "give --volume CLAIM:/PATH for the output_dir, or --restarts 0"),
        (["k8s", "--image", "i", "--volume", "c"], "--volume 'c': expected CLAIM:/PATH"),
        (["k8s", "--image", "i", "--restarts", "0", "--name", "1st"], "--name '1st': expected a small letter"),
        (["k8s", "--image", "i", "--restarts", "0", "--name", "n" * 51], "expected at most 50 letters"),
        (["k8s", "--image", "i", "--restarts", "0", "--env", "PET_NNODES=1"], "--env 'PET_NNODES=1': expected NAME"),
        (["k8s", "--image", "i", "--restarts", "-1"], "--restarts -1: expected at least 0"),
        (["k8s", "--image", "i", "--restarts", "0", "--workdir", "w"], "--workdir 'w': expected an absolute path"),
        (["torchrun", "--nodes", "2"], "2 machines need a place to meet; give --rdzv-endpoint HOST:29500"),
        (["torchrun", "--rdzv-endpoint", "h"], "--rdzv-endpoint h: one machine meets nobody"),
        (["torchrun", "--nodes", "2", "--rdzv-endpoint", "h:99999"], "'h:99999': 99999 is no port; write a number"),
        (["torchrun", "--nodes", "2", "--rdzv-endpoint", "[::1]:0"], "'[::1]:0': 0 is no port; write a number"),
        (["torchrun", "--nodes", "2", "--rdzv-endpoint", "a:b:c"], "--rdzv-endpoint 'a:b:c': expected HOST"),
        (["pbs"], "invalid choice: 'pbs'"),
    ],
)
def test_what_can_t_work_is_refused(tmp_path, arguments, message):
    kind, *rest = arguments
    done = hp_train_here("launch", kind, str(recipe(tmp_path)), *rest)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "time",
    ["90", "90:00", "48:00:00", "2-12", "2-12:30", "2-12:30:59", "0-36", "UNLIMITED", "infinite"],
)
def test_a_time_goes_to_slurm_as_it_was_given(tmp_path, time):
    done = hp_train_here("launch", "slurm", str(recipe(tmp_path)), "--time", time)
    assert done.returncode == 0, done.stderr
    assert f"#SBATCH --time={time}\n" in done.stdout


NEEDS_TWO = "launch: {nnodes: '1:2', rdzv_endpoint: 'a:1'}\n"


@pytest.mark.parametrize(
    ("kind", "extra", "wrong", "messages"),
    [
        (
            "slurm",
            "",
            ("--name", "a b", "--time", "x", "--memory", "y", "--training.device=cpu", "--gpus", "1"),
            ("--name", "--memory", "--time", "--gpus 1: the recipe"),
        ),
        ("slurm", "", ("--nodes", "0", "--cpus", "0", "--time", "x"), ("--nodes 0", "--cpus 0", "--time 'x'")),
        ("slurm", "", ("--nproc", "0", "--gpus", "-1", "--training.seed=x"), ("--nproc 0", "--gpus -1", "an integer")),
        ("slurm", "", ("--nodes", "3", "--time", "x", "--training.global_batch_size=8"), ("--time", "8 rows can't")),
        ("slurm", NEEDS_TWO, ("--time", "x"), ("--time", "leaves the number of machines open")),
        (
            "k8s",
            "",
            ("--image", "i i", "--volume", "c", "--restarts", "-1", "--training.train_itres=3"),
            ("--image", "--volume", "--restarts -1", "unknown key"),
        ),
        (
            "k8s",
            "",
            ("--volume", "c:/w", "--grace", "0", "--output_dir=/out", "--training.device=cuda", "--gpus", "0"),
            ("a container's image", "--grace 0", "--gpus 0: the recipe", "is on no volume"),
        ),
        (
            "torchrun",
            "",
            ("--nproc", "0", "--rdzv-endpoint", "h:0", "--plugin", "none_such"),
            ("--nproc 0", "0 is no port", "one machine meets nobody", "none_such"),
        ),
    ],
)
def test_all_that_is_wrong_comes_at_once(tmp_path, kind, extra, wrong, messages):
    done = hp_train_here("launch", kind, str(recipe(tmp_path, extra=extra)), *wrong)
    assert done.returncode == 2
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == len(messages), done.stderr
    for line, message in zip(lines, messages, strict=True):
        assert message in line


def test_a_path_to_start_from_is_fine_where_a_job_is_started_once(tmp_path):
    done = hp_train_here("launch", "slurm", str(recipe(tmp_path)), "--no-requeue", "--checkpoint.resume=/there")
    assert done.returncode == 0, done.stderr
    assert "--checkpoint.resume=latest" not in done.stdout


@pytest.mark.parametrize(("name", "file"), [("tiny", "a/tiny.yaml"), ("small", "small/recipe.yaml"), ("x", "x.yml")])
def test_a_job_is_called_as_its_recipe(tmp_path, name, file):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(recipe(tmp_path).read_text())
    assert f"--job-name={name}\n" in hp_train_here("launch", "slurm", str(path)).stdout


def test_a_job_that_saves_nothing_on_the_way_is_told_of(tmp_path):
    for extra, is_told in (("--checkpoint.save_every=0", True), ("--checkpoint.save_every=5", False)):
        done = hp_train_here("launch", "slurm", str(recipe(tmp_path)), extra)
        assert ("note: checkpoint.save_every is 0" in done.stderr) == is_told


def test_job_files_are_written_without_torch() -> None:
    modules = "hp_core.cli.launch, hp_core.jobs.slurm, hp_core.jobs.kubernetes, hp_core.jobs.torchrun"
    code = f"import sys, {modules}; sys.exit(bool({{'torch', 'transformers'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_help_has_no_traceback_and_every_kind(tmp_path: Path) -> None:
    for kind in ("slurm", "k8s", "torchrun"):
        with pytest.raises(SystemExit, match=r"^0$"):
            hp_train_here("launch", kind, "--help")


def test_what_the_job_sets_takes_the_place_of_what_the_user_wrote(tmp_path):
    """A recipe value that is given twice would be refused when the job starts."""
    values = ("--launch.nproc=3", "--launch.node_rank=1", "--output_dir=null", "--checkpoint.resume=null")
    done = hp_train_here("launch", "slurm", str(recipe(tmp_path)), "--nodes", "2", "--nproc", "2", *values)
    assert done.returncode == 0, done.stderr
    keys = [word.partition("=")[0] for word in done.stdout.split() if word.startswith("--")]
    for key in ("--launch.nproc", "--launch.node_rank", "--output_dir", "--checkpoint.resume"):
        assert keys.count(key) == 1, key
    assert "--launch.nproc=2 " in done.stdout
    assert "--launch.node_rank=null" in done.stdout


def test_what_the_job_would_refuse_is_refused_here(tmp_path):
    path = recipe(tmp_path, extra="launch: {nproc: 1}\n")
    done = hp_train_here("launch", "slurm", str(path), "--nodes", "3")
    assert done.returncode == 2
    assert "global_batch_size: 4 rows can't be cut into micro-batches of 1 on 3 ranks" in done.stderr


def test_what_a_recipe_says_of_other_machines_does_not_get_in_the_way(tmp_path):
    path = recipe(tmp_path, extra="launch: {nnodes: 2, rdzv_endpoint: 'a:1', rdzv_id: x, node_rank: 1}\n")
    alone = hp_train_here("launch", "slurm", str(path), "--nodes", "1")
    assert alone.returncode == 0, alone.stderr
    for key in ("rdzv_endpoint", "rdzv_id", "node_rank"):
        assert f"--launch.{key}=null" in alone.stdout
    both = hp_train_here("launch", "slurm", str(path))
    assert both.returncode == 0, both.stderr
    assert "#SBATCH --nodes=2\n" in both.stdout
    assert "a:1" not in both.stdout
    assert "--launch.node_rank=null" in both.stdout
