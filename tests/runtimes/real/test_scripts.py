"""Scripts as people write them, under torchrun, ``paceline run`` and ``simulate``."""

import itertools
import json
import os
import re
from pathlib import Path

import pytest
from torch.profiler import ProfilerActivity, profile

from paceline.records import StepRecorder
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
        job = torchrun(2, "ddp_idioms.py", folder=tmp_path / "torchrun", forked="all")
        first = job.wait().check_ended_well()
    else:
        first, _ = forked.run_together(2, [SCRIPTS / "ddp_idioms.py"], folder=tmp_path)
    real = beginning(first, "epoch", "accuracy")
    assert len(real) == 3
    assert float(real[-1].split()[-1]) > 0.9
    words = ["-m", "paceline", "simulate", "--workers=2", SCRIPTS / "ddp_idioms.py"]
    done = forked.run(words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert beginning(done, "epoch", "accuracy") == real


def test_no_thread_of_a_process_group_outlives_a_good_end():
    """The interpreter may abort while it is taken down, now and then, if one does."""
    (end,) = forked.run_together(1, [SCRIPTS / "threads.py"])
    before, after = beginning(end, "alive: ")
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
        forked="all",
    )
    by_variable = torchrun(
        2,
        "loops.py",
        folder=tmp_path / "torchrun",
        forked="all",
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
        assert re.search(r"loops\.py:\d+; code after the", job.stderr)

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


def test_a_misspelt_option_is_refused():
    end = forked.run(["-m", "paceline", "run", "--wrokers=2", SCRIPTS / "loops.py"])
    assert end.returncode == 1
    assert "unknown option '--wrokers'" in end.stderr


@pytest.mark.slow
@pytest.mark.parametrize("start", [run, torchrun])
def test_a_script_that_starts_workers_itself_is_refused(start, tmp_path):
    job = start(2, "spawns.py", folder=tmp_path / "job", forked="all").wait()
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
        words = (PACELINE, options, "ddp_idioms.py")
        job = launch(*words, folder=folder, forked="all", **variables)
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
@pytest.mark.parametrize("end", ["returns", "finishes", "destroys"])
def test_scripts_without_ceremony(tmp_path, end):
    """No ``__main__`` guard, and no destroy_process_group: they end with 0. How the interpreter
    is taken down is each worker's own: no launcher is needed, and real processes are."""
    jobs = [
        launch(PYTHON, [], "bare.py", end, folder=tmp_path / str(rank), **own)
        for rank, own in enumerate(forked.variables_of(2))
    ]
    for job in wait_for_all(jobs):
        job.check_ended_well()


@pytest.mark.slow
def test_a_run_says_what_a_step_took(tmp_path):
    """As in the other runtimes."""
    job = run(2, "bare.py", "returns", folder=tmp_path / "job", forked="all")
    said = job.wait().check_ended_well().stdout
    assert "2 workers" in said
    assert ", real runtime" in said
    assert "\nbsp  " in said


@pytest.mark.slow
def test_the_tasks_of_srun_train_together():
    job = next(
        number
        for number in itertools.count(os.getpid())
        if not somebody_listens(20000 + number % 20000)
    )
    step = {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
        "PACELINE_JSON": "1",
    }
    own = [{"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)} for task in range(2)]
    words = [SCRIPTS / "bare.py", "returns"]
    tasks = [forked.Forked(words, None, step | variables) for variables in own]
    ends = [task.done() for task in tasks]
    assert [end.returncode for end in ends] == [0, 0], ends
    result = json.loads(ends[0].stdout)
    assert (result["workers"], result["steps"]) == (2, 5)
    assert ends[1].stdout == ""


def test_workers_that_cannot_find_each_other_do_not_train_alone():
    variables = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4"}
    end = forked.run([SCRIPTS / "bare.py", "returns"], environment=variables)
    assert end.returncode == 1
    assert "each process would train alone; start it with torchrun" in end.stderr


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


def test_a_stand_in_has_its_true_size_and_takes_its_workloads_time():
    ends = forked.run_together(
        2, [SCRIPTS / "stand_in.py"], environment={"PACELINE_JSON": "1"}
    )
    assert all(f"checked {rank}" in end.stdout for rank, end in enumerate(ends))
    result = json.loads(ends[0].stdout.splitlines()[-1])
    assert result["step_seconds"] >= 0.08


@pytest.mark.slow
def test_plans_on_two_processes():
    """Also where one rank is out of data in the first step, while profiled, in the trial, or later."""
    words = [SCRIPTS / "plans.py", 0, 1, 5, 8, 12, 13, 20, 31]
    for rank, end in enumerate(forked.run_together(2, words)):
        assert f"checked {rank}" in end.stdout.splitlines()  # and a table


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
@pytest.mark.parametrize("beside", [0, 1], ids=["alone", "beside one that goes on"])
def test_what_trainings_hold_goes_when_they_have_ended(beside, tmp_path):
    """Between the fifth and the twentieth there is less than one thing more for each; and those
    that have ended still have their states."""
    words = [SCRIPTS / "many_trainings.py", beside, tmp_path / "checkpoint"]
    for end in forked.run_together(2, words):
        after_five, after_all = json.loads(end.stdout)
        for what, count in after_all.items():
            assert count - after_five[what] < 15


PROFILED = """
import paceline, torch
from torch.profiler import ProfilerActivity, profile

paceline.init()
for method in ("bsp", "asp"):
    model = torch.nn.Linear(64, 1)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = paceline.distribute(model, plain, method=method)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for step in range(2):
            optimizer.zero_grad()
            model(torch.ones(8, 64)).sum().backward()
            optimizer.step()
    profiler.export_chrome_trace(f"{method}-{paceline.rank()}.json")
    optimizer.finish()
"""


@pytest.mark.slow
def test_a_profiled_step_shows_what_it_waits_for(tmp_path):
    (tmp_path / "train.py").write_text(PROFILED)
    forked.run_together(2, [tmp_path / "train.py"], folder=tmp_path)
    for method, name in (("bsp", "all_reduce"), ("asp", "server")):
        for rank in range(2):
            trace = json.loads((tmp_path / f"{method}-{rank}.json").read_text())
            rows = {event["name"] for event in trace["traceEvents"]}
            assert f"paceline::wait {name}" in rows


def test_a_wait_is_a_row_where_a_profiler_runs_and_nothing_else():
    recorder = StepRecorder(0, lambda: 0.0, None)
    waits = []
    recorder.block("server", lambda: waits.append("unseen"))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        recorder.block("all_reduce", lambda: waits.append("seen"))
    assert [event.name for event in profiler.events()] == ["paceline::wait all_reduce"]
    assert waits == ["unseen", "seen"]
