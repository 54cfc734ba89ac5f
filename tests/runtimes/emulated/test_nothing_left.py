"""However the launcher ends, no process and no namespace is left."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cluster import uniform_cluster
from paceline.runtimes.emulated.errors import KeeperLostError
from paceline.runtimes.emulated.keeper_client import Client
from paceline.runtimes.emulated.link_check import check_links
from paceline.runtimes.emulated.network import EmulatedNetwork
from tests.support.emulation import (
    SECONDS,
    Watch,
    descendants,
    network_of,
    networks,
    parent_of,
)
from tests.support.processes import PACELINE, launch, wait_until

pytestmark = pytest.mark.usefixtures("namespaces")

LAUNCHER = Path(__file__).parent / "scripts" / "launcher.py"


def test_ctrl_c_reaches_the_launcher_alone():
    before = descendants(os.getpid())
    with Client():
        keeper = descendants(os.getpid()) - before
        assert keeper
        assert os.getsid(0) not in {os.getsid(process) for process in keeper}


def command(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode()


def start(how):
    launcher = subprocess.Popen(
        [sys.executable, str(LAUNCHER), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert launcher.stdout.readline() == b"ready\n", launcher.stderr.read()
    return launcher


def end(launcher, how):
    if how == "exception":
        launcher.stdin.close()
    elif how == "interrupt":
        os.killpg(launcher.pid, signal.SIGINT)  # what a terminal's Ctrl-C does
    elif how == "terminate":
        launcher.terminate()
    else:
        launcher.kill()


def check_end(how):
    launcher = start(how)
    try:
        with launcher.stdout, launcher.stderr, launcher.stdin:
            inside = descendants(launcher.pid)
            spaces = {network_of(pid) for pid in inside} - {network_of("self")}
            # Guard, keeper, three or more in each host; the switchboard and two hosts.
            assert len(inside) >= 8
            assert len(spaces) == 3
            forked = {pid for pid in inside if "launcher.py" in command(pid)}
            assert len(forked) == (how == "forked")
            watch = Watch(inside - forked)
            end(launcher, how)
            launcher.wait(SECONDS)
            watch.wait()
            for pid in forked:
                os.kill(pid, signal.SIGKILL)
            assert not spaces & networks()
    finally:
        launcher.kill()
    return launcher.returncode


# The others start two interpreters with torch each, which takes seconds.
@pytest.mark.parametrize(
    "how",
    [
        "kill",
        pytest.param("forked", marks=pytest.mark.slow),
        pytest.param("interrupt", marks=pytest.mark.slow),
        pytest.param("terminate", marks=pytest.mark.slow),
        pytest.param("exception", marks=pytest.mark.slow),
    ],
)
def test_nothing_survives_the_launcher(how):
    assert check_end(how) != 0


def two_hosts():
    return EmulatedNetwork(uniform_cluster(2, "100 Mbit/s", "0 s"), process_bytes=0)


@pytest.mark.parametrize("victim", ["guard", "keeper"])
def test_when_the_keeper_is_killed_all_is_gone_and_every_call_says_so(victim):
    before = descendants(os.getpid())
    with two_hosts() as network:
        process = network.popen(1, ["sleep", "1000"])
        (guard,) = (
            pid
            for pid in descendants(os.getpid()) - before
            if "emulated.keeper" in command(pid)
            and int(Path(f"/proc/{pid}/stat").read_text().split()[3]) == os.getpid()
        )
        (keeper,) = descendants(guard) - {process.pid}
        space = network_of(process.pid)
        watch = Watch([guard, keeper, process.pid])
        os.kill({"guard": guard, "keeper": keeper}[victim], signal.SIGKILL)
        watch.wait()
        assert process.wait(SECONDS) == -signal.SIGKILL
        assert "start the cluster again" in process.keeper_fault
        for call in (
            lambda: network.popen(0, ["true"]),
            lambda: network.cut(0),
            lambda: network.set_rate(0, 1e6),
            lambda: network.socket(0),
            lambda: check_links(network),
        ):
            with pytest.raises(KeeperLostError, match="start the cluster again"):
                call()
        assert space not in networks()


@pytest.mark.slow
def test_a_job_whose_keeper_is_killed_says_so(tmp_path):
    script = tmp_path / "sleeps.py"
    script.write_text("import time; print('here', flush=True); time.sleep(1000)")
    words = ["emulate", "--workers=2", "--link=100mbit"]
    job = launch(PACELINE, words, script, folder=tmp_path / "job", forked=True)
    try:
        wait_until(lambda: "here" in job.stdout, 2 * SECONDS, "worker 0")
        kept = [pid for pid in job.processes() if "emulated.keeper" in command(pid)]
        # A process that the keeper has just forked has its name, too.
        (guard,) = (pid for pid in kept if parent_of(pid) not in kept)
        (keeper,) = (pid for pid in kept if parent_of(pid) == guard)
        os.kill(keeper, signal.SIGKILL)
        job.wait().check_nothing_left()
    finally:
        job.stop()
    assert job.status == 1
    assert "rank 0 was killed by SIGKILL" in job.stderr
    assert job.stderr.count("start the cluster again") == 1


def test_after_an_exception_nothing_is_left():
    before = descendants(os.getpid())

    def fail():
        with two_hosts() as network:
            network.popen(0, ["sleep", "1000"])
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail()
    assert descendants(os.getpid()) <= before


def test_a_process_that_is_still_running_ends_with_the_cluster():
    with two_hosts() as network:
        process = network.popen(0, ["sleep", "1000"])
        assert process.poll() is None
    assert process.wait(SECONDS) == -signal.SIGKILL
    with pytest.raises(KeeperLostError, match="was closed"):
        network.cut(0)


def test_nothing_is_named_on_the_machine():
    interfaces = set(os.listdir("/sys/class/net"))
    here = network_of("self")
    with two_hosts():
        assert set(os.listdir("/sys/class/net")) == interfaces
        assert network_of("self") == here
