"""Scripts as people write them, under torchrun, ``paceline run`` and ``simulate``."""

import json
import re

import pytest

from tests.support import forked
from tests.support.hanging import free_port
from tests.support.processes import (
    PACELINE,
    PYTHON,
    SCRIPTS,
    launch,
    run,
    somebody_listens,
    torchrun,
    wait_for_all,
)


def beginning(job, *words):
    """The lines of all output that begin with one of *words*."""
    lines = (job.stdout + job.stderr).splitlines()
    return [line for line in lines if line.startswith(words)]


@pytest.mark.parametrize(
    "launcher", ["none", pytest.param("torchrun", marks=pytest.mark.slow)]
)
def test_ddp_idioms_give_the_same_metric_everywhere(launcher, tmp_path):
    """And the script's own ``destroy_process_group`` loses no figures."""
    if launcher == "torchrun":
        job = torchrun(2, "ddp_idioms.py", folder=tmp_path / "torchrun").wait()
        first = job.check_ended_well()
    else:
        first, _ = forked.run_together(2, [SCRIPTS / "ddp_idioms.py"], folder=tmp_path)
    real = beginning(first, "epoch", "accuracy")
    assert len(real) == 3
    assert float(real[-1].split()[-1]) > 0.9
    words = ["-m", "paceline", "simulate", "--workers=2", SCRIPTS / "ddp_idioms.py"]
    done = forked.run(words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert beginning(done, "epoch", "accuracy") == real


@pytest.mark.slow
def test_no_thread_of_a_process_group_outlives_a_good_end(tmp_path):
    """The interpreter may abort while it is taken down, now and then, if one does."""
    job = run(1, "threads.py", folder=tmp_path / "job").wait().check_ended_well()
    before, after = beginning(job, "alive: ")
    assert "gloo" in before
    assert after == "alive: []"


MISMATCHES = {
    "name": ("'weight float32[3x2]'", "'kernel float32[3x2]'"),
    "shape": ("'weight float32[3x2]'", "'weight float32[2x3]'"),
    "dtype": ("'weight float32[3x2]'", "'weight float64[3x2]'"),
    "count": ("2 tensors", "rank 2 has 4", "'weight1 float32[3x2]'"),
    "fewer": ("2 tensors", "rank 2 has 1", "'weight float32[3x2]'"),
    "frozen": ("'weight float32[3x2]'", "'weight float32[3x2] frozen'"),
    "buckets": ("different options", "buckets=ddp", "buckets=wfbp"),
    "optimizer": ("different options", "with SGD", "with Adam"),
}


def test_what_differs_between_ranks_is_refused_on_all_of_them(tmp_path):
    ranks = forked.together(3, [SCRIPTS / "mismatch.py", tmp_path, "shape"])
    ends = [rank.done() for rank in ranks]
    for case, words in MISMATCHES.items():
        told = [(tmp_path / f"{case}-{rank}.txt").read_text() for rank in range(3)]
        assert told[0].startswith("ModelMismatchError: ")
        assert told[0] == told[1] == told[2]
        for word in (*words, "rank 0", "rank 2"):
            assert word in told[0], (case, told[0])
    # And where nobody catches it, it ends each rank, in words.
    for end in ends:
        assert end.returncode == 1
        assert "rank 2 has 'weight float32[2x3]'" in end.stderr


def test_unused_parameters_and_uneven_data():
    for rank, end in enumerate(forked.run_together(3, [SCRIPTS / "behaviours.py"])):
        assert f"checked {rank} of 3" in end.stdout.splitlines()


NOT_MEASURED = (
    "runtime",
    "workers",
    "method",
    "steps",
    "bytes_sent_per_worker",
    "metrics",
)


@pytest.mark.slow
def test_command_line_decides_over_the_script(tmp_path):
    """--steps, --method and --json: as options, and as variables under plain torchrun."""
    spec = "bsp:buckets=wfbp"
    port = free_port()
    options = ["--nnodes=1", "--node-rank", "0"]  # torchrun's own pass through
    options += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    by_option = run(
        2,
        "loops.py",
        *("--", "one", "--own=2", "--workers"),
        folder=tmp_path / "run",
        options=["--json", "--steps=7", f"--method={spec}", *options],
    )
    by_variable = torchrun(
        2,
        "loops.py",
        folder=tmp_path / "torchrun",
        PACELINE_JSON="1",
        PACELINE_STEPS="7",
        PACELINE_METHOD=spec,
    )
    wait_for_all([by_option, by_variable])
    assert "arguments ['one', '--own=2', '--workers']" in by_option.stderr
    assert not somebody_listens(port)
    for job in (by_option, by_variable):
        job.check_ended_well()
        override = f"paceline: --method {spec} overrides the script's"
        assert job.stderr.count(override) == 1
        assert "'bsp:buckets=single'" in job.stderr
        assert "came to its end" not in job.stdout + job.stderr
        ended = "ended after 7 steps, as --steps asked, in optimizer.step() at "
        assert job.stderr.count(ended) == 1
        assert re.search(r"loops\.py:\d+; what stands after the", job.stderr)

    [only_line] = by_option.stdout.splitlines()
    assert "noise" in by_option.stderr
    [json_line] = beginning(by_variable, "{")
    assert by_variable.stdout.endswith(json_line + "\n")
    assert "noise" in by_variable.stdout
    one, other = json.loads(only_line), json.loads(json_line)
    assert list(one) == list(other)
    for name in NOT_MEASURED:
        assert one[name] == other[name]
    assert (one["runtime"], one["workers"], one["steps"]) == ("real", 2, 7)
    assert one["method"] == spec
    assert one["step_seconds"] > 0


def test_a_misspelt_option_is_refused(tmp_path):
    job = launch(
        PACELINE, ["run", "--wrokers=2"], "loops.py", folder=tmp_path / "job"
    ).wait()
    assert job.status == 1
    assert "unknown option '--wrokers'" in job.stderr
    job.check_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["run", "torchrun"])
def test_a_script_that_starts_workers_itself_is_refused(launcher, tmp_path):
    start = {"run": run, "torchrun": torchrun}[launcher]
    job = start(2, "spawns.py", folder=tmp_path / "job").wait()
    assert job.status == 1
    assert "a script that starts workers of its own starts a job in each" in job.stderr
    assert "Call main once, for this worker" in job.stderr
    job.check_nothing_left()


@pytest.mark.slow
def test_two_machines(tmp_path):
    """The same command on each machine; here both are this one. The second is told its
    place by variables, as Kubeflow's trainer does."""
    port = free_port()
    place = {
        "nnodes": "2",
        "node_rank": "0",
        "master_addr": "127.0.0.1",
        "master_port": str(port),
    }
    jobs = []
    for node in range(2):
        options = ["run", "--workers=1", "--json"]
        place["node_rank"] = str(node)
        variables = {}
        if node == 0:
            options += [f"--{name}={value}" for name, value in place.items()]
        else:
            variables = {f"PET_{key.upper()}": value for key, value in place.items()}
        folder = tmp_path / f"node-{node}"
        job = launch(PACELINE, options, "ddp_idioms.py", folder=folder, **variables)
        jobs.append(job)
    wait_for_all(jobs)
    for job in jobs:
        job.check_ended_well()
    # Rank 0's machine has the result.
    result = json.loads(jobs[0].stdout)
    assert (result["workers"], result["steps"]) == (2, 16)
    assert jobs[1].stdout == ""
    assert re.search(r"accuracy 0\.9", jobs[0].stderr)
    assert not somebody_listens(port)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["returns", "finishes"])
def test_scripts_without_ceremony(tmp_path, end):
    """No ``__main__`` guard, and no destroy_process_group: starts, and ends with 0."""
    if end == "returns":
        check_bare_script(tmp_path, end, [run], workers=1, forked=True)
    else:
        check_bare_script(tmp_path, end, [run, torchrun])


@pytest.mark.slow
@pytest.mark.parametrize("end", ["returns", "finishes", "destroys"])
def test_scripts_without_ceremony_many_times(tmp_path, end):
    """How the interpreter is taken down is each worker's own: no launcher is needed."""
    for number in range(4):
        jobs = [
            launch(PYTHON, [], "bare.py", end, folder=tmp_path / f"{number}-{r}", **own)
            for r, own in enumerate(forked.variables_of(2))
        ]
        for job in wait_for_all(jobs):
            job.check_ended_well()


def check_bare_script(folder, end, launchers, workers=2, **options):
    jobs = [
        start(workers, "bare.py", end, folder=folder / start.__name__, **options)
        for start in launchers
    ]
    for job in wait_for_all(jobs):
        job.check_ended_well()
    # under paceline run, what a step took, as in the other runtimes
    assert f"{workers} worker" in jobs[0].stdout
    assert ", real runtime" in jobs[0].stdout
    assert "\nbsp  " in jobs[0].stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    ["ssp:staleness=0,buckets=wfbp", "bsp:collective=parameter-server"],
)
def test_both_runtimes_count_the_same_bytes_towards_servers(tmp_path, method):
    options = {"JSON": "1", "STEPS": "7", "METHOD": method}
    environment = {f"PACELINE_{name}": value for name, value in options.items()}
    loops = SCRIPTS / "loops.py"
    ranks = forked.run_together(2, [loops], folder=tmp_path, environment=environment)
    [real] = beginning(ranks[0], "{")
    words = ["-m", "paceline", "simulate", "--workers=2", "--json", "--steps=7"]
    virtual = forked.run([*words, f"--method={method}", loops], folder=tmp_path)
    assert virtual.returncode == 0, virtual.stderr
    sent = [
        json.loads(text)["bytes_sent_per_worker"] for text in (real, virtual.stdout)
    ]
    assert sent[0] == sent[1] > 0
