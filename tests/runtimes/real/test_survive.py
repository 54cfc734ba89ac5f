"""``paceline run --survive``: who dies, when, and what is left of the job then."""

import os
import random
import signal
from pathlib import Path

import pytest
import torch

from paceline.cli import app
from paceline.errors import UsageError
from paceline.parameter_server.process import snapshot
from paceline.runtimes.real.supervisor import SupervisedServers
from tests.support.lives import (
    START_SECONDS,
    counts_in,
    done_by_all,
    done_in,
    life_of,
    servers_of,
    wait_for_steps,
    wait_in,
)
from tests.support.processes import (
    BAD_END_SECONDS,
    PACELINE,
    SCRIPTS,
    Job,
    kill,
    launch,
    run,
    torchrun,
)
from tests.support.server_talk import METHODS, WORKERS

BUCKETS = 3
SILENT_SECONDS = 4


@pytest.fixture
def start(tmp_path):
    """Starts survive.py; whatever happens, nothing of it outlives the test."""
    jobs: list[Job] = []

    def start_one(
        method, what, name="job", launcher=run, options=(), forked="all", **environment
    ):
        folder = tmp_path / name
        folder.mkdir()
        if launcher is run:
            environment["options"] = ["--survive", f"--method={method}", *options]
        arguments = ("survive.py", folder, what)
        job = launcher(
            *(WORKERS, *arguments), folder=folder / "job", forked=forked, **environment
        )
        jobs.append(job)
        return job, folder

    yield start_one
    for job in jobs:
        job.stop()


def check_counts(job, folder, method, kills):
    """Of what a killed life had pushed, only its last step is not known: at most one."""
    counts = counts_in(job.stderr)
    came = counts["gradients applied"] + counts.get("gradients dropped", 0)
    known = BUCKETS * done_by_all(folder)
    assert known <= came <= known + BUCKETS * kills, counts
    if method != "backup:wait_for=2" and method != "backup":
        assert "gradients dropped" not in counts
    # Who ends without a goodbye is lost too.
    assert counts.get("workers lost", 0) <= kills + WORKERS, counts
    assert not counts.get("requests refused"), counts


def check_kills(start, method, kills, seed=0, **options):
    choose = random.Random(f"{method} {seed}")
    job, folder = start(method, "until", **options)
    for rank in range(WORKERS):
        wait_for_steps(job, folder, rank, 0, 1)
    killed, in_vain = {}, set()
    for _ in range(kills):
        rank = choose.randrange(WORKERS)
        after = choose.choice((0, 0, 1, choose.randrange(2, 60)))
        earlier = killed.get(rank, -1)
        wait_in(
            job, lambda r=rank, e=earlier: life_of(folder, r)[1] > e, "another life"
        )
        process, life = life_of(folder, rank)
        if rank in in_vain:  # three lives in a row without a step would end the job
            after = max(after, 1)
        wait_for_steps(job, folder, rank, life, done_in(folder, rank, life) + after)
        (in_vain.discard if after else in_vain.add)(rank)
        kill(process)
        killed[rank] = life
    for rank, life in killed.items():
        wait_for_steps(job, folder, rank, life + 1, 1)
    (folder / "enough").touch()
    job.wait(START_SECONDS).check_ended_well()
    check_counts(job, folder, method, kills)
    said = job.stderr.count("was killed by SIGKILL after step")
    assert said == kills, job.output
    results = [torch.load(folder / f"result-{rank}") for rank in range(WORKERS)]
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_worker_is_killed(start):
    """Steps are long: meanwhile the others do not keep processors busy."""
    check_kills(start, METHODS[0], kills=1, PAUSE="0.02")


COMPRESSED = "compression=top-k,compression.density=0.1,compression.small=0"
KILLED = [
    *("r2sp", "ssp:staleness=0", "backup:wait_for=2", "sync-switch:bsp_steps=2"),
    # Who comes back begins with all of the model, and goes on with differences.
    f"asp:{COMPRESSED},replies=deltas",
]


@pytest.mark.slow
@pytest.mark.parametrize("method", KILLED)
def test_workers_are_killed_many_times(start, method):
    check_kills(start, method, kills=10)


@pytest.mark.slow
def test_a_worker_is_killed_while_it_imports(start):
    """These are processes as people have them."""
    check_kills(start, "asp", kills=1, seed=1, forked=True)


@pytest.mark.slow
def test_the_server_is_killed_and_goes_on_with_the_same_bits(start, tmp_path):
    """From a snapshot that is kept wherever nobody named a file, too; nothing is left of it."""
    undisturbed, elsewhere = start("backup", "steps:40", "undisturbed")
    (elsewhere / "go").touch()
    undisturbed.wait(START_SECONDS).check_ended_well()
    records, named = tmp_path / "records", tmp_path / "named"
    for folder in (records, named):
        folder.mkdir()
    stale = records / "server-of-another-job.snapshot"
    stale.write_text("what another job has left")
    places = {
        "temporary": (None, []),
        "records": (records, [f"--records={records}"]),
        "named": (named, [f"--snapshot={named / 'server-1.snapshot'}"]),
    }
    for name, (own, options) in places.items():
        job, folder = start(
            "backup", "steps:40", f"job-{name}", options=options, **OFTEN
        )
        kill_server(job, folder, own or job.temporary, stale)
        for rank in range(WORKERS):
            mine = torch.load(folder / f"result-{rank}")
            assert torch.equal(mine, torch.load(elsewhere / f"result-{rank}")), name
    assert stale.read_text() == "what another job has left"


@pytest.mark.slow
def test_a_server_that_comes_back_has_no_copies_of_what_workers_have(start, tmp_path):
    """All pull anew, and go on with differences from that."""
    options = [f"--snapshot={tmp_path / 'server-1.snapshot'}"]
    job, folder = start(KILLED[-1], "steps:40", options=options, **OFTEN)
    kill_server(job, folder, tmp_path)
    results = [torch.load(folder / f"result-{rank}") for rank in range(WORKERS)]
    assert all(torch.equal(result, results[0]) for result in results)


OFTEN = {"PACELINE_SNAPSHOT_SECONDS": "0.001"}


def kill_server(job, folder, own, stale=None):
    """In step 20 of a job that keeps its snapshot somewhere in *own*, to its good end."""

    def kept():
        return [path for path in own.rglob("server-*.snapshot") if path != stale]

    wait_in(job, kept, "a snapshot")
    for rank in range(WORKERS):
        wait_for_steps(job, folder, rank, 0, 20)
    kill(servers_of(job)[0])
    (folder / "go").touch()
    job.wait(START_SECONDS).check_ended_well()
    assert "it goes on from its snapshot of step" in job.stderr
    assert "steps are lost" in job.stderr
    assert not kept(), "the job has ended well"
    assert not list(own.rglob("*.part"))


def test_no_two_jobs_have_one_file_for_their_snapshots(tmp_path):
    folder = tmp_path / "records" / "of both"
    jobs = [SupervisedServers(WORKERS) for _ in range(2)]
    for job in jobs:
        job.keep_snapshot_in(folder)
        assert not job.has_snapshot
    paths = {job.snapshot for job in jobs}
    assert len(paths) == 2
    assert {path.parent for path in paths} == {folder}
    jobs[0].snapshot.write_text("of the first one")
    assert not jobs[1].has_snapshot
    jobs[1].remove_snapshot()
    assert jobs[0].has_snapshot


@pytest.mark.slow
def test_the_server_is_killed_before_its_first_snapshot(start):
    """The training begins anew, and less is lost than between two snapshots."""
    job, folder = start("asp", "until")
    for rank in range(WORKERS):
        wait_for_steps(job, folder, rank, 0, 5)
    kill(servers_of(job)[0])
    for rank in range(WORKERS):
        wait_for_steps(job, folder, rank, 1, 1)
    (folder / "enough").touch()
    job.wait(START_SECONDS).check_ended_well()
    assert "the parameter server was killed by SIGKILL after step" in job.stderr
    assert "no snapshot was taken yet, and the training begins anew" in job.stderr


@pytest.mark.slow
@pytest.mark.parametrize("keeps", ["records", "snapshot"])
def test_a_job_goes_on_from_the_snapshot_of_one_that_was_ended(start, tmp_path, keeps):
    path = tmp_path / "kept"
    job, folder = start("asp", "until", options=[f"--{keeps}={path}"], **OFTEN)

    def kept():
        return [*path.glob("server-*.snapshot")] if keeps == "records" else [path]

    wait_in(job, lambda: [file for file in kept() if file.exists()], "a snapshot")
    job.process.send_signal(signal.SIGTERM)
    job.wait(BAD_END_SECONDS)
    assert job.status == 128 + signal.SIGTERM
    assert "paceline: SIGTERM: all workers were ended" in job.stderr
    job.check_nothing_left()
    [file] = kept()
    if keeps == "records":  # else its user knows where it is
        assert f"--snapshot {file} --resume" in job.stderr
    options = [f"--snapshot={file}", "--resume"]
    job, folder = start("asp", "until", "later", options=options)
    (folder / "enough").touch()
    job.wait(START_SECONDS).check_ended_well()
    assert not file.exists()


@pytest.mark.slow
def test_a_silent_worker_is_evicted_and_one_that_evaluates_is_not(start):
    silent = {"PACELINE_SILENT_SECONDS": str(SILENT_SECONDS)}
    job, folder = start("asp", "evaluate", **silent)
    wait_for_steps(job, folder, 2, 0, 5)
    wait_in(job, (folder / "evaluating").exists, "an evaluation")
    process, _ = life_of(folder, 2)
    os.kill(process, signal.SIGSTOP)
    wait_in(
        job,
        lambda: "nothing was heard of worker 2 for" in job.stderr,
        "the eviction",
    )
    os.kill(process, signal.SIGCONT)
    wait_for_steps(job, folder, 2, 1, 5)
    (folder / "go").touch()
    (folder / "enough").touch()
    job.wait(START_SECONDS).check_ended_well()
    # A worker that got no processor for as long is evicted, too: on a machine that others use.
    assert "nothing was heard of worker 1 " not in job.stderr, job.output
    assert "taken for lost: join with another incarnation" in job.stderr
    assert "worker 2 ended with exit status 1 after step" in job.stderr


@pytest.mark.slow
def test_under_torchrun_a_death_ends_the_job(start):
    job, folder = start("asp", "until", launcher=torchrun)
    for rank in range(WORKERS):
        wait_for_steps(job, folder, rank, 0, 5)
    kill(life_of(folder, 1)[0])
    job.wait(BAD_END_SECONDS)
    assert job.status == 1
    job.check_nothing_left()


# ---- bad input ----


@pytest.mark.slow
def test_a_script_that_always_fails_is_given_up(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit(3)")
    options = ["run", "--survive", "--workers=2", "--method=asp"]
    job = launch(PACELINE, options, script, folder=tmp_path / "job", forked="all")
    job.wait(BAD_END_SECONDS)
    assert job.status == 1
    assert (
        "ended with exit status 3, for the 3rd time in a row without completing a step"
        in job.stderr
    )
    assert job.stderr.count("it is started again") <= 4
    job.check_nothing_left()


def test_a_snapshot_that_another_job_keeps_is_refused(tmp_path):
    path, script = tmp_path / "snapshot", tmp_path / "fails.py"
    script.write_text("raise SystemExit(3)")
    with (
        snapshot.snapshot_lock(path),
        pytest.raises(UsageError, match="another server"),
    ):
        app(
            ["run", "--survive", f"--snapshot={path}", str(script)],
            standalone_mode=False,
        )


BAD_INPUT = {
    "without": (
        ["--snapshot=FILE"],
        "--snapshot and --resume mean nothing without --survive",
    ),
    "bsp": (
        ["--survive", "--method=bsp"],
        "Use one whose server updates: asp, backup, ",
    ),
    "torchrun": (["--survive", "--nnodes=2"], "leave out --nnodes=2"),
    "unknown": (["--survive", "--method=asq"], "unknown method 'asq'"),
    "workers": (["--survive", "--workers=-1"], "--workers: expected 1 or more"),
    "too many": (
        ["--survive", "--workers=2", "--method=backup:wait_for=3"],
        "at most the 2 workers",
    ),
    "folder": (["--survive", "--snapshot=nowhere/FILE"], "there is no folder"),
    "there": (["--survive", "--snapshot=there"], "remove it to begin anew"),
}


@pytest.mark.parametrize("what", BAD_INPUT)
def test_bad_input(tmp_path, monkeypatch, what):
    monkeypatch.chdir(tmp_path)
    Path("there").write_text("something")
    options, sentence = BAD_INPUT[what]
    words = ["run", *options, str(SCRIPTS / "survive.py"), "folder", "until"]
    with pytest.raises(UsageError, match=sentence):
        app(words, standalone_mode=False)
    assert Path("there").read_text() == "something"
