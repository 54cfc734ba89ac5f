"""Jobs that survive without a supervisor: a server and workers that know each other by address
alone, each started again with the words that it was started with."""

import os
import signal
import socket
import sys
import threading

import pytest
import torch

from paceline.cli import app
from paceline.errors import PeerLostError, UsageError
from paceline.parameter_server.process import snapshot
from paceline.parameter_server.process.surviving import SurvivingJob
from paceline.run_options import RunOptions, ScriptJob
from paceline.runtimes.real import external_worker, runtime
from paceline.timeouts import timeouts
from paceline.transport.listener import ServerListener
from paceline.transport.protocol import BEFORE_IT_STOOD, IS_HERE
from paceline.transport.security import SECRET
from tests.support.engine import TOKEN, Engine
from tests.support.hanging import free_port
from tests.support.lives import counts_in, done_by_all, done_in, life_of
from tests.support.processes import SCRIPTS, kill

WORKERS = 2
BUCKETS = 3
TASK = {
    "SLURM_JOB_ID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "a,b",
}


@pytest.fixture
def engine(tmp_path):
    """Starts jobs; whatever happens, nothing of them outlives the test."""
    started: list[Engine] = []

    def start(method, what, name="job", serve=(), **environment):
        folder = tmp_path / name
        one = Engine(folder, WORKERS, method, what, list(serve), environment)
        started.append(one)
        return one

    yield start
    for one in started:
        one.stop()


def results(engine):
    return [torch.load(engine.folder / f"result-{rank}") for rank in range(WORKERS)]


def wait_for_steps(engine, rank, steps, life=0):
    """Of a life, or that another has begun."""
    engine.wait_for(
        lambda: (
            done_in(engine.folder, rank, life) >= steps
            or life_of(engine.folder, rank)[1] > life
        ),
        f"step {steps} in life {life} of worker {rank}",
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", ["asp", "ssp"])
def test_workers_are_killed_and_no_gradient_counts_twice(engine, method):
    job = engine(method, "until")
    for rank in range(WORKERS):
        wait_for_steps(job, rank, 3)
    for life, rank in ((0, 1), (0, 0), (1, 1)):
        wait_for_steps(job, rank, 2, life)
        kill(life_of(job.folder, rank)[0])
        wait_for_steps(job, rank, 2, life + 1)
    (job.folder / "enough").touch()
    job.wait()
    assert job.ends == [(name, -signal.SIGKILL) for name in "101"]
    counts = counts_in(job.now["server"].stderr)
    known = BUCKETS * done_by_all(job.folder)
    # Of what a killed life had pushed, only its last step is not known.
    assert known <= counts["gradients applied"] <= known + 3 * BUCKETS, counts
    assert 3 <= counts["workers lost"] <= 3 + WORKERS
    first, second = results(job)
    assert torch.equal(first, second)


@pytest.mark.slow
def test_the_server_is_killed_and_goes_on_with_the_same_bits(engine, tmp_path):
    path = tmp_path / "snapshot"
    undisturbed = engine("backup", "steps:40", "undisturbed")
    (undisturbed.folder / "go").touch()
    undisturbed.wait()
    serve = [f"--snapshot={path}", "--snapshot-seconds=0.001"]
    job = engine("backup", "steps:40", serve=serve)
    for rank in range(WORKERS):
        wait_for_steps(job, rank, 20)
    # Snapshots become rare on a busy machine: the first may be of the start.
    job.wait_for(lambda: snapshot.read(path)["step"] > 0, "a snapshot of a step")
    job.now["server"].process.kill()
    (job.folder / "go").touch()
    job.wait()
    assert ("server", -signal.SIGKILL) in job.ends
    assert sorted(name for name, _ in job.ends) == ["0", "1", "server"]
    assert f"the job goes on from {path}: step" in job.said("server")
    for rank in range(WORKERS):
        assert "PeerLostError: server 0 at 127.0.0.1:" in job.said(str(rank))
    assert not path.exists(), "the job has ended well"
    for mine, theirs in zip(results(job), results(undisturbed), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.slow
def test_a_server_that_is_told_to_end_keeps_its_last_step(engine, tmp_path):
    path = tmp_path / "snapshot"
    serve = [f"--snapshot={path}", "--snapshot-seconds=3600"]
    job = engine("asp", "until", serve=serve)
    for rank in range(WORKERS):
        wait_for_steps(job, rank, 5)
    assert not path.exists()
    os.kill(job.now["server"].process.pid, signal.SIGTERM)
    for rank in range(WORKERS):
        wait_for_steps(job, rank, 5, life=1)
    (job.folder / "enough").touch()
    job.wait()
    assert ("server", 128 + signal.SIGTERM) in job.ends
    assert f"goes on from {path}: step" in job.said("server")


@pytest.mark.slow
def test_a_rank_twice_and_a_stranger_are_refused_while_the_job_goes_on(engine):
    job = engine("asp", "until")
    for rank in range(WORKERS):
        wait_for_steps(job, rank, 2)
    at = ["run", "--survive", "--server", f"127.0.0.1:{job.port}"]
    script = [str(SCRIPTS / "survive.py"), str(job.folder / "elsewhere"), "until"]
    (job.folder / "elsewhere").mkdir()
    others = {
        "twice": (["--rank=1", "--workers=2"], {}, "worker 1 is here already"),
        "sizes": (["--rank=1", "--workers=3"], {}, "this server's has 2: give both"),
        "token": (
            ["--rank=1", "--workers=2"],
            {"PACELINE_SERVERS_TOKEN": "of another job of mine"},
            "does not know this worker: its token",
        ),
    }
    for name, (options, environment, sentence) in others.items():
        words = [*at, *options, "--method=asp", *script]
        other = job.start_other(name, words, environment).wait()
        assert other.status == 1
        assert sentence in other.stderr, other.output
    (job.folder / "enough").touch()
    job.wait()
    said = job.said("server")
    for words in (
        "is here already",
        "of a job of 3 workers",
        "does not know the job's",
    ):
        assert words in said
    assert not job.ends


# ---- on the way to the server ----


@pytest.fixture
def fast(monkeypatch):
    for name in ("server_retry", "rank_retry"):
        monkeypatch.setattr(timeouts, name, 0.001)


def test_a_worker_waits_for_its_server(fast, capsys):
    port, tries = free_port(), []

    def connect():
        tries.append(1)
        if len(tries) == 1:
            raise PeerLostError("it has ended again")
        return "an end"

    def listen():
        with socket.create_server(("127.0.0.1", port)) as listener:
            for _ in range(2):
                listener.accept()[0].close()

    thread = threading.Timer(0.05, listen)
    thread.start()
    assert (
        external_worker.connect_with_retry("server 0", "127.0.0.1", port, 3, connect)
        == "an end"
    )
    thread.join()
    said = capsys.readouterr().err
    assert said.count(f"worker 3 waits for server 0 at 127.0.0.1:{port}") == 1


def test_nobody_ever_listens(fast, monkeypatch):
    monkeypatch.setattr(timeouts, "server_listen", 0.0)
    with pytest.raises(PeerLostError, match="is `paceline serve --survive` running"):
        external_worker.connect_with_retry(
            "server 0", "127.0.0.1", free_port(), 0, lambda: None
        )


@pytest.mark.parametrize(
    ("reason", "tries"), [(f"worker 0 {IS_HERE} a place", 3), ("another token", 1)]
)
def test_only_a_place_that_is_taken_is_asked_for_again(fast, reason, tries):
    tried = []

    def connect():
        tried.append(1)
        if len(tried) < 3:
            raise UsageError(reason)
        return "an end"

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        if tries == 1:
            with pytest.raises(UsageError, match=reason):
                external_worker.connect_with_retry(
                    "server 0", "127.0.0.1", port, 0, connect
                )
        else:
            external_worker.connect_with_retry(
                "server 0", "127.0.0.1", port, 0, connect
            )
    assert len(tried) == tries


@pytest.mark.parametrize("again", ["listens again", "never lets anybody in"])
def test_who_closes_every_connection_is_not_waited_for(
    fast, monkeypatch, capsys, again
):
    monkeypatch.setattr(timeouts, "server_close", 0.0)
    tried = []

    def connect():
        tried.append(1)
        if len(tried) > 1 and again == "listens again":
            return "an end"
        raise PeerLostError(f"it closed a connection {BEFORE_IT_STOOD}")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        if again == "listens again":
            assert external_worker.connect_with_retry(
                "server 0", "127.0.0.1", port, 0, connect
            )
        else:
            with pytest.raises(PeerLostError, match=BEFORE_IT_STOOD):
                external_worker.connect_with_retry(
                    "server 0", "127.0.0.1", port, 0, connect
                )
    assert len(tried) == 2
    said = capsys.readouterr().err
    assert said.count("worker 0 tries again: it closed a connection") == 1


def test_a_proxy_may_close_connections_for_longer_than_a_place_is_taken(
    fast, monkeypatch
):
    monkeypatch.setattr(timeouts, "rank_taken", 0.0)
    tried = []

    def connect():
        tried.append(1)
        if len(tried) > 3:
            return "an end"
        raise PeerLostError(f"it closed a connection {BEFORE_IT_STOOD}")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert external_worker.connect_with_retry(
            "server 0", "127.0.0.1", port, 0, connect
        )


# ---- who, and how many ----


@pytest.fixture
def server(monkeypatch):
    """A server of three workers, as ``paceline serve --survive`` has it; returns where."""
    for name in (SECRET, "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PACELINE_SERVERS_TOKEN", TOKEN)
    listener = ServerListener(workers=3, token=TOKEN, numbers=True)
    job = SurvivingJob(listener)
    read, write = os.pipe()
    thread = threading.Thread(target=lambda: list(job.run(read)))
    thread.start()
    yield f"127.0.0.1:{listener.port}"
    os.close(write)
    thread.join()
    job.host.close()
    os.close(read)


@pytest.fixture
def exec_as_worker(monkeypatch):
    """Returns the variables with which a worker becomes its script."""
    found = []
    monkeypatch.setattr(os, "execve", lambda *what: found.append(what))

    def run(server, rank=None, workers=None):
        job = ScriptJob("train.py", options=RunOptions(method="asp"))
        external_worker.exec_as_worker(job, server, rank, workers)
        program, words, environment = found.pop()
        assert (program, words) == (sys.executable, [sys.executable, "train.py"])
        return environment

    return run


def test_the_server_tells_how_many_workers_there_are(
    server, exec_as_worker, monkeypatch
):
    said = exec_as_worker(server, rank=2)
    assert (said["RANK"], said["WORLD_SIZE"]) == ("2", "3")
    assert said["PACELINE_SERVERS"] == server
    monkeypatch.setenv("RANK", "1")
    assert exec_as_worker(server)["WORLD_SIZE"] == "3"
    assert exec_as_worker(server, rank=0, workers=3)["RANK"] == "0"


def test_a_script_with_variables_set_by_hand_asks_its_server_too(server, monkeypatch):
    """It took itself for the only worker until the server refused it, with its data loaded."""
    monkeypatch.setenv("WORLD_SIZE", "")
    monkeypatch.setenv("PACELINE_SURVIVE", "1")
    monkeypatch.delenv("PACELINE_SERVERS", raising=False)
    for rank in "0", "2":
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(
            UsageError, match=r"PACELINE_SERVERS=HOST:PORT, .* or WORLD"
        ):
            runtime._find_place()
        monkeypatch.setenv("PACELINE_SERVERS", server)
        place = runtime._find_place()
        assert place is not None
        assert (place.rank, place.size) == (int(rank), 3)
        monkeypatch.setenv("WORLD_SIZE", "")
        monkeypatch.delenv("PACELINE_SERVERS")


def test_a_lone_rank_that_the_launcher_contradicts(server, exec_as_worker, monkeypatch):
    for name, value in (TASK | {"RANK": "0"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        UsageError, match=r"RANK=0, but srun .* task 2 of 3: .* --rank 0"
    ):
        exec_as_worker(server)
    assert exec_as_worker(server, rank=1)["RANK"] == "1"
    monkeypatch.setenv("RANK", "2")
    assert exec_as_worker(server)["RANK"] == "2"


def test_what_the_launcher_has_said_of_a_machine_stays(
    server, exec_as_worker, monkeypatch
):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert exec_as_worker(server, rank=2, workers=3)["LOCAL_RANK"] == "1"


@pytest.mark.parametrize(
    ("rank", "workers", "environment", "sentence"),
    [
        (1, 4, {}, "4 workers.* 3"),
        (None, None, TASK | {"SLURM_STEP_NUM_TASKS": "5"}, "of a job of 5 workers"),
        (3, None, {}, "worker 3 .*expected 0 to 2"),
        (0, None, {"PACELINE_SERVERS_TOKEN": "of another job of mine"}, "its token"),
    ],
)
def test_what_the_server_would_refuse_ends_before_the_script(
    server, exec_as_worker, monkeypatch, rank, workers, environment, sentence
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=sentence):
        exec_as_worker(server, rank, workers)


# ---- bad input ----

WORKER = ["run", "--survive", "--server=127.0.0.1:29600"]
SERVE = ["serve", "--survive", "--workers=2"]
ONE = ["--rank=0", "--workers=2"]
BAD_INPUT = {
    "no port": (["run", "--survive", "--server=host", *ONE], {}, "expected HOST:PORT"),
    "two": (["run", "--survive", "--server=a:1+b:2", *ONE], {}, "expected HOST:PORT"),
    "rank": ([*WORKER, "--rank=2", "--workers=2"], {}, "--rank: expected 0 to 1"),
    "who": (WORKER, {}, "--rank: no launcher's variables say which worker this is"),
    "sizes": ([*WORKER, "--workers=4"], TASK, "--workers 4, but .* variables name 3"),
    "alone": (["run", "--server=a:1", *ONE], {}, "expected --survive --server"),
    "where": (["run", "--survive", "--rank=1"], {}, "expected --survive --server"),
    "torchrun": ([*WORKER, *ONE, "--nnodes=2"], {}, "leave out --nnodes=2"),
    "snapshot": ([*WORKER, *ONE, "--snapshot=a"], {}, "are the server's"),
    "token": (
        [*WORKER, *ONE],
        {"PACELINE_SERVERS_TOKEN": ""},
        "does not know the servers' token",
    ),
    "short": ([*WORKER, *ONE], {SECRET: "short"}, "at least 16 characters"),
    "plain": (
        ["run", "--survive", "--server=10.0.0.9:1", *ONE],
        {},
        "could be reached by the whole network",
    ),
    "bsp": ([*WORKER, *ONE, "--method=bsp"], {}, "Use one whose server updates"),
    "no token": (SERVE, {"PACELINE_SERVERS_TOKEN": ""}, "the same for this server"),
    "no survive": (["serve", "--workers=2", "--snapshot=a"], {}, "means nothing"),
    "no folder": ([*SERVE, "--snapshot=nowhere/a"], {}, "there is no folder"),
    "damaged": ([*SERVE, "--snapshot=there"], {}, "there cannot be read"),
    "seconds": ([*SERVE, "--snapshot-seconds=1"], {}, "nothing without --snapshot"),
    "evict": (
        ["serve", "--workers=2", "--evict-silent=5"],
        {},
        "--evict-silent means nothing without --survive",
    ),
    "silent": ([*SERVE, "--evict-silent=0"], {}, "expected more than 0 s"),
}


@pytest.mark.parametrize("what", BAD_INPUT)
def test_bad_input(tmp_path, monkeypatch, what):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").write_text("something")
    words, environment, sentence = BAD_INPUT[what]
    for name in (SECRET, "RANK", "WORLD_SIZE", "PACELINE_TRUSTED_NETWORK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"PACELINE_SERVERS_TOKEN": TOKEN, **environment}.items():
        monkeypatch.setenv(name, value)
    script = [] if words[0] == "serve" else [str(SCRIPTS / "survive.py"), "a", "until"]
    with pytest.raises(UsageError, match=sentence):
        app([*words, *script], standalone_mode=False)
