"""``paceline run --survive``: who dies, when, and what is left of the job then."""

import json
import os
import random
import signal
from collections import Counter
from pathlib import Path

import pytest
import torch

from paceline.cli import app
from paceline.errors import UsageError
from paceline.interfaces import Sender
from paceline.messages import (
    Done,
    Join,
    Joined,
    Leave,
    Load,
    Note,
    Parameters,
    Pull,
    Push,
    Refused,
    Unit,
)
from paceline.server import snapshot
from paceline.server.process import SilenceWatch, make_machine
from paceline.server.snapshot import Snapshots
from tests.real.helpers import (
    BAD_END_SECONDS,
    PACELINE,
    SCRIPTS,
    Job,
    kill,
    launch,
    run,
    torchrun,
)
from tests.real.lives import (
    START_SECONDS,
    done_by_all,
    done_in,
    life_of,
    servers_of,
    wait_for_steps,
    wait_in,
)

METHODS = [
    *("asp", "r2sp", "ssp", "ssp:staleness=0", "backup", "backup:wait_for=2"),
    *("sync-switch", "sync-switch:bsp_steps=2"),
]
ASYNCHRONOUS = ("asp", "r2sp", "ssp", "sync-switch:bsp_steps=2")
WORKERS = 3
BUCKETS = 3
SILENT_SECONDS = 4

# ---- the state machine ----

HOW = {
    "SGD": {
        "lr": 0.1,
        "momentum": 0.9,
        "dampening": 0.0,
        "weight_decay": 0.0,
        "nesterov": False,
        "maximize": False,
    },
    "Adam": {
        "lr": 0.1,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "amsgrad": False,
        "maximize": False,
        "decoupled_weight_decay": False,
    },
}


class Talk:
    """Three workers that talk to a server, one after the other, at times of their own."""

    def __init__(self, server, method="asp", optimizer="SGD", now=0.0):
        self.server, self.now = server, now
        self.numbers = Counter()
        self.how = [HOW[optimizer]]
        self.join = Join(
            options=f"{method} with {optimizer}",
            method=method,
            units=[[Unit(0, 0, 2, 0, (2,))], [Unit(1, 0, 3, 0, (3,))]],
            dtypes=["float32", "float32"],
            optimizer=optimizer,
            hyperparameters=self.how,
        )

    def ask(self, worker, message, payload=None, life=0):
        number = self.numbers[worker, life]
        self.numbers[worker, life] += 1
        sender = Sender(worker, life, "", number, number)
        return self.server.on_message(sender, message, payload, self.now)

    def begin(self, life=0):
        """All join, and the first one loads parameters; returns their first steps."""
        steps, loaded = [], True
        for worker in range(WORKERS):
            [answer] = self.ask(worker, self.join, life=life)
            assert isinstance(answer.message, Joined), answer
            steps.append(answer.message.step)
            loaded = loaded and answer.message.loaded
        if not loaded:
            for bucket, size in enumerate((2, 3)):
                self.ask(0, Load(bucket=bucket), torch.zeros(size), life)
        return steps

    def push(self, worker, step, bucket, life=0):
        generator = torch.Generator().manual_seed(100 * step + 10 * worker + bucket)
        gradient = torch.randn((2, 3)[bucket], generator=generator)
        message = Push(
            step=step,
            bucket=bucket,
            weight=1 / WORKERS,
            used=[True],
            hyperparameters=self.how,
        )
        return self.ask(worker, message, gradient, life)

    def step(self, step, workers=range(WORKERS), life=0):
        for bucket in range(2):
            for worker in workers:
                self.push(worker, step, bucket, life)

    def parameters(self, life=0):
        found = []
        for bucket in range(2):
            [answer] = self.ask(0, Pull(bucket=bucket), life=life)
            assert isinstance(answer.message, Parameters)
            found += answer.payload.tolist()
        return found


def through_a_file(path, saved):
    snapshot.write(path, saved)
    return snapshot.read(path)


@pytest.mark.parametrize("optimizer", HOW)
@pytest.mark.parametrize("method", METHODS)
def test_a_restored_server_goes_on_with_the_same_bits(tmp_path, method, optimizer):
    talk = Talk(make_machine(WORKERS, "server"), method, optimizer)
    assert talk.begin() == [0, 0, 0]
    for step in range(3):
        talk.step(step)
    saved = talk.server.snapshot()
    again = Talk(make_machine(WORKERS, "server"), method, optimizer)
    for step in range(3, 6):  # what is done now is not in the snapshot
        talk.step(step)
    assert again.server.restore(through_a_file(tmp_path / "file", saved)) == 3
    assert again.begin(life=1) == [3, 3, 3]
    for step in range(3, 6):
        again.step(step, life=1)
    assert again.parameters(life=1) == talk.parameters()
    assert again.server.counts == talk.server.counts


@pytest.mark.parametrize("method", METHODS)
def test_a_restored_server_does_not_wait_for_who_is_done(method):
    talk = Talk(make_machine(WORKERS, "server"), method)
    talk.begin()
    talk.step(0)
    again = Talk(make_machine(WORKERS, "server"), method)
    again.server.restore(talk.server.snapshot())
    again.server.on_lost(2, 0, 0.0)
    for worker in (0, 1):
        again.ask(worker, again.join)
    for bucket in range(2):
        again.push(0, 1, bucket)
        answers = again.push(1, 1, bucket)
        # with two of three to wait for, the last one's step is not over before it is in
    assert {a.to.worker for a in answers} >= {1}


OTHERS = {
    "optimizer": ({"optimizer": "Adam"}, "options is 'asp with SGD' there"),
    "method": ({"method": "ssp"}, "options is 'asp with SGD' there"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_snapshot_of_another_training_is_refused(what):
    others, sentence = OTHERS[what]
    talk = Talk(make_machine(WORKERS, "server"))
    talk.begin()
    again = Talk(make_machine(WORKERS, "server"), **others)
    again.server.restore(talk.server.snapshot())
    [answer] = again.ask(0, again.join)
    assert isinstance(answer.message, Refused)
    assert "the snapshot is of another training: " + sentence in answer.message.reason


def test_a_snapshot_of_other_workers_is_refused():
    talk = Talk(make_machine(WORKERS, "server"))
    talk.begin()
    with pytest.raises(UsageError, match="of 3 workers, and this job has 2"):
        make_machine(2, "server").restore(talk.server.snapshot())


def test_there_is_nothing_to_save_before_parameters_are_there():
    talk = Talk(make_machine(WORKERS, "server"))
    assert talk.server.snapshot() == {}
    talk.ask(0, talk.join)
    assert talk.server.snapshot() == {}


DAMAGES = {
    "cut": (lambda data: data[:-1], "is damaged"),
    "changed": (lambda data: data[:300] + b"?" + data[301:], "is damaged"),
    "foreign": (lambda _: b"something else", "is no snapshot of this version"),
    "empty": (lambda _: b"", "is no snapshot of this version"),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_file_is_refused(tmp_path, how):
    damage, sentence = DAMAGES[how]
    path = tmp_path / "file"
    snapshot.write(path, {"step": 1, "tensor": torch.ones(10)})
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UsageError, match=sentence):
        snapshot.read(path)


def test_a_failed_write_leaves_the_snapshot_before(tmp_path):
    path = tmp_path / "file"
    snapshot.write(path, {"step": 1})
    with pytest.raises(Exception, match="pickle"):
        snapshot.write(path, {"step": lambda: 2})
    assert list(tmp_path.iterdir()) == [path]
    assert snapshot.read(path) == {"step": 1}
    with pytest.raises(OSError, match="no-folder"):
        snapshot.write(tmp_path / "no-folder" / "file", {"step": 1})


def keeping(method):
    """A server with snapshots every 10 s, and the steps of those that it has taken."""
    taken = []
    server = Snapshots(
        make_machine(WORKERS, "server"),
        Path("file"),
        10.0,
        keep=lambda _, saved: taken.append(saved["step"]),
        clock=lambda: 0.0,
    )
    talk = Talk(server, method)
    talk.begin()
    assert server.next_deadline() == 20.0
    return talk, taken


def ring(talk):
    """As the shell does when it has dealt with what came in."""
    deadline = talk.server.next_deadline()
    if deadline is not None and talk.now >= deadline:
        talk.server.on_timer(talk.now)


@pytest.mark.parametrize("method", METHODS)
def test_a_snapshot_is_taken_at_the_end_of_a_step(method):
    talk, taken = keeping(method)
    talk.step(0)
    assert taken == []  # it is too early
    talk.now = 11.0
    talk.step(1)
    assert taken == []  # the answers leave first
    ring(talk)
    assert taken == [2]
    assert talk.server.next_deadline() == 31.0


def test_without_a_quiet_moment_it_is_taken_as_things_are():
    talk, taken = keeping("asp")
    for worker in range(WORKERS):
        talk.push(worker, 0, 0)
    talk.now = 11.0
    for step in range(5):  # whoever is through with a step, another is in one
        for worker in range(WORKERS):
            talk.push(worker, step, 1)
            talk.push(worker, step + 1, 0)
    assert taken == []
    talk.server.on_timer(20.0)
    assert taken == [5]
    assert talk.server.next_deadline() == 40.0
    talk.server.on_timer(40.0)
    assert taken == [5]  # nothing has happened since
    assert talk.server.next_deadline() == 60.0


@pytest.mark.parametrize("method", ["ssp:staleness=0", "backup"])
def test_no_snapshot_is_taken_in_the_middle_of_a_step(method):
    """Bucket 0 is a step ahead of bucket 1: nobody could go on from that."""
    talk, taken = keeping(method)
    talk.step(0)
    for worker in range(WORKERS):
        talk.push(worker, 1, 0)
    talk.server.on_timer(20.0)
    assert taken == []
    assert talk.server.next_deadline() == 30.0
    talk.now = 21.0
    for worker in range(WORKERS):
        talk.push(worker, 1, 1)
    ring(talk)
    assert taken == [2]


def test_a_disk_that_is_full_does_not_end_the_training(capsys):
    def keep(path, saved):
        raise OSError("no space left")

    server = Snapshots(make_machine(WORKERS, "server"), Path("file"), 10.0, keep)
    talk = Talk(server)
    talk.begin()
    talk.now = 11.0
    talk.step(0)
    ring(talk)
    assert "no snapshot of step 1: no space left" in capsys.readouterr().err
    talk.step(1)


# ---- silence, in virtual time ----


def watched(method="asp", judges=lambda worker: True):
    evicted = []
    server = SilenceWatch(
        make_machine(WORKERS, "server"),
        60.0,
        lambda *news: evicted.append(news),
        judges,
    )
    talk = Talk(server, method)
    talk.begin()
    return talk, evicted


def pass_time(talk, until):
    """As the shell does: the timer rings at each deadline until then."""
    while (deadline := talk.server.next_deadline()) is not None and deadline <= until:
        before, talk.now = talk.now, max(talk.now, deadline)
        talk.server.on_timer(talk.now)
        again = talk.server.next_deadline()
        assert again is None or again > before, "the shell would spin"
    talk.now = until


def steps(talk, first, count, seconds=1.0, workers=range(WORKERS)):
    for step in range(first, first + count):
        talk.step(step, workers)
        pass_time(talk, talk.now + seconds)


def test_a_silent_worker_is_taken_for_lost():
    talk, evicted = watched()
    steps(talk, 0, 10)
    steps(talk, 10, 59, workers=(0, 1))  # it spoke last at 9 s, and now it is 69 s
    assert evicted == [(2, 0, 60.0)]
    [answer] = talk.push(2, 10, 0)
    assert "taken for lost: join with another life" in answer.message.reason
    [answer] = talk.ask(2, talk.join, life=1)
    assert isinstance(answer.message, Joined)


@pytest.mark.parametrize("method", ["ssp", "ssp:staleness=0", "backup"])
def test_who_waits_for_a_silent_worker_is_not_silent(method):
    talk, evicted = watched(method)
    steps(talk, 0, 5)
    steps(talk, 5, 1, workers=(0, 1))
    if method == "ssp":
        steps(talk, 6, 3, workers=(0, 1))  # now they have to wait
    pass_time(talk, talk.now + 1000)
    assert evicted[0][0] == 2
    # Answered at the eviction: from then on their own silence counts.
    assert all(silence == 60.0 for _, _, silence in evicted)


@pytest.mark.parametrize("method", ["asp", "backup"])
def test_a_snapshot_that_takes_longer_than_any_silence_evicts_nobody(method):
    evicted, talk = [], None

    def keep(path, saved):
        talk.now += 70.0  # the disk is busy

    machine = make_machine(WORKERS, "server")
    snapshots = Snapshots(machine, Path("file"), 10.0, keep, clock=lambda: talk.now)
    server = SilenceWatch(snapshots, 60.0, lambda *news: evicted.append(news))
    talk = Talk(server, method)
    talk.begin()
    steps(talk, 0, 10)
    talk.step(10)  # answered, and the snapshot is due
    for _ in range(3):  # before and after the disk, nobody having spoken
        ring(talk)
    assert talk.now > 70.0
    pass_time(talk, talk.now + 50.0)
    talk.step(11)
    assert evicted == []


def test_a_server_that_was_stopped_counts_that_for_nobody():
    talk, evicted = watched()
    steps(talk, 0, 10)
    steps(talk, 10, 50, workers=(0, 1))  # worker 2 spoke 51 s ago
    talk.now += 1000.0
    ring(talk)
    for worker in (0, 1):  # what has come in meanwhile is read only now
        ring(talk)
        talk.push(worker, 60, 0)
    assert evicted == []
    start = talk.now
    pass_time(talk, start + 8.0)
    assert evicted == []
    pass_time(talk, start + 10.0)  # 61 s in which the server listened
    assert [worker for worker, *_ in evicted] == [2]


def test_slow_steps_allow_a_longer_silence():
    talk, evicted = watched()
    steps(talk, 0, 10, seconds=20.0)
    steps(talk, 10, 28, seconds=20.0, workers=(0, 1))
    assert evicted == []
    steps(talk, 38, 3, seconds=20.0, workers=(0, 1))
    assert evicted == [(2, 0, 600.0)]


def test_a_first_step_may_take_ten_times_as_long():
    talk, evicted = watched()
    pass_time(talk, 599.0)
    assert evicted == []
    pass_time(talk, 600.0)
    assert len(evicted) == WORKERS


def test_an_evaluation_evicts_nobody():
    """Fifty steps' length of forward passes, of which the worker notes one a second."""
    talk, evicted = watched()
    steps(talk, 0, 10, seconds=20.0)
    for second in range(1000):
        [answer] = talk.ask(2, Note())
        assert isinstance(answer.message, Done)
        if second % 20 == 0:
            talk.step(10 + second // 20, workers=(0, 1))
        pass_time(talk, talk.now + 1)
    assert evicted == []


def test_who_is_out_of_data_is_not_silent():
    talk, evicted = watched()
    steps(talk, 0, 5)
    talk.ask(2, Leave())
    steps(talk, 5, 200, workers=(0, 1))
    assert evicted == []


def test_whom_another_server_judges_may_be_silent():
    others = {2}
    talk, evicted = watched(judges=lambda worker: worker not in others)
    steps(talk, 0, 5)
    steps(talk, 5, 100, workers=(0, 1))  # as where it waits there
    assert evicted == []
    others.clear()  # it belongs here from now on
    steps(talk, 105, 55, workers=(0, 1))
    assert evicted == []
    steps(talk, 160, 10, workers=(0, 1))
    assert [worker for worker, *_ in evicted] == [2]


def test_notes_of_a_former_life_do_not_count():
    talk, evicted = watched()
    steps(talk, 0, 5)
    talk.server.on_lost(2, 0, talk.now)
    talk.ask(2, talk.join, life=1)
    talk.step(5, workers=(2,), life=1)
    talk.step(6, workers=(2,), life=1)
    start = talk.now
    for _ in range(59):
        talk.ask(2, Note())
        steps(talk, int(talk.now), 1, workers=(0, 1))
    assert evicted == []
    steps(talk, int(talk.now), 1, workers=(0, 1))
    assert evicted == [(2, 1, talk.now - start)]


# ---- real processes ----


@pytest.fixture
def start(tmp_path):
    """Starts survive.py; whatever happens, nothing of it outlives the test."""
    jobs: list[Job] = []

    def start_one(
        method, what, name="job", launcher=run, options=(), forked=False, **environment
    ):
        folder = tmp_path / name
        folder.mkdir()
        environment["PACELINE_SERVER_COUNTS"] = str(folder / "counts")
        if launcher is run:
            words = ["--survive", f"--method={method}", *options]
            environment |= {"options": words, "forked": forked}
        arguments = ("survive.py", folder, what)
        job = launcher(WORKERS, *arguments, folder=folder / "job", **environment)
        jobs.append(job)
        return job, folder

    yield start_one
    for job in jobs:
        job.stop()


def check_counts(folder, method, kills):
    """Of what a killed life had pushed, only its last step is not known: at most one."""
    counts = json.loads((folder / "counts").read_text())
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
    check_counts(folder, method, kills)
    said = job.stderr.count("was killed by SIGKILL after step")
    assert said == kills, job.output
    results = [torch.load(folder / f"result-{rank}") for rank in range(WORKERS)]
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_worker_is_killed(start):
    """Steps are long: meanwhile the others do not keep processors busy."""
    check_kills(start, METHODS[0], kills=1, forked="all", PAUSE="0.02")


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_workers_are_killed_many_times(start, method):
    check_kills(start, method, kills=20, forked="all")


@pytest.mark.slow
def test_workers_are_killed_some_of_them_while_they_import(start):
    check_kills(start, "asp", kills=2, seed=1, forked=True)


@pytest.mark.slow
def test_the_server_is_killed_and_there_is_no_snapshot(start):
    job, folder = start("asp", "until", forked="all")
    for rank in range(WORKERS):
        wait_for_steps(job, folder, rank, 0, 5)
    kill(servers_of(job)[0])
    job.wait(BAD_END_SECONDS + 10)
    assert job.status == 1
    assert "the parameter server was killed by SIGKILL after step" in job.stderr
    assert "there is no snapshot: give --snapshot FILE" in job.stderr
    assert job.stderr.count("PeerLostError: server 0 at 127.0.0.1:") == WORKERS
    job.check_nothing_left()


@pytest.mark.slow
def test_the_server_is_killed_and_goes_on_with_the_same_bits(start, tmp_path):
    path = tmp_path / "snapshot"
    undisturbed, elsewhere = start("backup", "steps:40", "undisturbed", forked="all")
    (elsewhere / "go").touch()
    job, folder = start(
        "backup",
        "steps:40",
        options=[f"--snapshot={path}"],
        forked="all",
        PACELINE_SNAPSHOT_SECONDS="0.001",
    )
    for rank in range(WORKERS):
        wait_for_steps(job, folder, rank, 0, 20)
    assert path.exists()
    kill(servers_of(job)[0])
    (folder / "go").touch()
    job.wait(START_SECONDS).check_ended_well()
    assert "it goes on from its snapshot of step" in job.stderr
    assert "steps are lost" in job.stderr
    assert not path.exists(), "the job has ended well"
    assert not snapshot.unfinished(path).exists()
    undisturbed.wait(START_SECONDS).check_ended_well()
    for rank in range(WORKERS):
        mine = torch.load(folder / f"result-{rank}")
        assert torch.equal(mine, torch.load(elsewhere / f"result-{rank}"))


@pytest.mark.slow
def test_a_job_goes_on_from_the_snapshot_of_one_that_was_ended(start, tmp_path):
    path = tmp_path / "snapshot"
    options = [f"--snapshot={path}"]
    often = {"forked": "all", "PACELINE_SNAPSHOT_SECONDS": "0.001"}
    job, folder = start("asp", "until", options=options, **often)
    wait_in(job, path.exists, "a snapshot")
    job.process.send_signal(signal.SIGTERM)
    job.wait(BAD_END_SECONDS)
    assert job.status == 128 + signal.SIGTERM
    assert "paceline: SIGTERM: all workers were ended" in job.stderr
    job.check_nothing_left()
    resumed = {"forked": "all", "PACELINE_RESUME": "1"}
    job, folder = start("asp", "until", "later", options=options, **resumed)
    (folder / "enough").touch()
    job.wait(START_SECONDS).check_ended_well()
    assert not path.exists()


@pytest.mark.slow
def test_a_silent_worker_is_evicted_and_one_that_evaluates_is_not(start):
    silent = {"PACELINE_SILENT_SECONDS": str(SILENT_SECONDS)}
    job, folder = start("asp", "evaluate", forked="all", **silent)
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
    assert job.stderr.count("nothing was heard of worker") == 1, job.output
    assert "taken for lost: join with another life" in job.stderr
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


def test_a_script_that_always_fails_is_given_up(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit(3)")
    options = ["run", "--survive", "--workers=2", "--method=asp"]
    job = launch(PACELINE, options, script, folder=tmp_path / "job", forked=True)
    job.wait(BAD_END_SECONDS)
    assert job.status == 1
    assert (
        "ended with exit status 3, for the 3rd time in a row without completing a step"
        in job.stderr
    )
    assert job.stderr.count("it is started again") <= 4
    job.check_nothing_left()


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
        "there are only 2 workers",
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
