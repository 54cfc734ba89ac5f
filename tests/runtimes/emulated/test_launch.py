"""Training jobs on an emulated cluster: from the command line to the last process."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cluster import Cluster, Rack, Workload, cluster_toml, load_cluster
from paceline.runtimes.simulated import Simulation
from paceline.runtimes.temporary_folder import scratch_folder
from paceline.testing import Case
from paceline.testing.method_checks import final_parameters
from tests.support import forked
from tests.support.emulation import SECONDS, Watch, descendants, network_of, networks

pytestmark = pytest.mark.usefixtures("namespaces")

ROOT = Path(__file__).parent.parent.parent.parent
LAYERS = str(ROOT / "examples" / "layers.py")
TOLD = ROOT / "tests" / "runtimes" / "real" / "scripts" / "told.py"
QUICK = ("--layers", "4", "--megabytes", "1", "--forward", "0.02", "--backward", "0.02")


def start(folder, *words, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "paceline", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        **options,
    )


def finish(process):
    out, err = process.communicate(timeout=SECONDS)
    return process.returncode, out, err


def succeed(folder, *words, **options):
    """What a command that ends well says."""
    status, out, err = finish(start(folder, *words, **options))
    assert status == 0, err
    return out, err


def emulate(folder, *words, steps=8, method="bsp:buckets=ddp", status=0):
    options = ("--json", f"--method={method}", f"--steps={steps}")
    command = ["-m", "paceline", "emulate", LAYERS, *options, *words, "--", *QUICK]
    done = forked.run(command, folder=folder, seconds=SECONDS)
    assert done.returncode == status, done.stderr
    return done.stdout, done.stderr


def on_one_core():
    """In the process that is started."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def records(folder):
    lines = (folder / "records.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    return [s["step_seconds"] for s in steps if s["worker"] == 0]


def with_rules(folder, *rules):
    path = folder / "cluster.toml"
    rack = '[[rack]]\nworkers = 2\nlink = "200 Mbit/s"\nlatency = "0 s"\n'
    path.write_text(rack + "".join(f"[[rule]]\n{rule}\n" for rule in rules))
    return f"--cluster={path}"


@pytest.mark.slow
def test_a_job_trains_and_says_what_it_was(tmp_path):
    out, _ = emulate(tmp_path, "--workers=2", "--link=200mbit")
    result = json.loads(out)
    assert (result["runtime"], result["workers"], result["steps"]) == ("emulated", 2, 8)
    assert result["compute"] == "paced by the script"
    assert result["network"].startswith("2 workers, 200 Mbit/s")
    # 1 MB each way at 25 MB/s: the wire sets the pace, and 40 ms are computed.
    assert result["step_seconds"] >= 0.04
    assert result["exposed_communication_seconds"] >= 0.02


@pytest.mark.slow
def test_workers_know_the_cluster_that_is_described(tmp_path):
    """As in the simulated runtime, to the last bit of a mean over its racks."""
    racks = (Rack(workers=1, link=1e9 / 7, latency=0.0),)
    racks += (replace(racks[0], workers=3, speed=(1.0, 0.5, 1 / 3)),)
    file = tmp_path / "cluster.toml"
    file.write_text(cluster_toml(Cluster(racks)))
    cluster = load_cluster(file)
    out, _ = succeed(tmp_path, "emulate", TOLD, f"--cluster={file}")
    found = json.loads(out.splitlines()[0])  # a table comes after it
    assert found["cluster"] == cluster_toml(cluster, exact=True)
    assert found["racks"] == [0, 1, 1, 1]
    assert found["speeds"] == list(cluster.speeds)
    case, ends = Case(method="bsp:collective=hierarchical"), {}

    def body(rank):
        ends[rank] = final_parameters(case, "ddp")

    Simulation(cluster).run(body)
    assert found["end"] == ends[0]


@pytest.mark.slow
def test_a_probe_takes_the_speeds_that_are_described(tmp_path):
    rack = Rack(workers=2, link=1e8, latency=0.0, speed=(1.0, 0.25))
    file = tmp_path / "described.toml"
    file.write_text(cluster_toml(Cluster((rack,))))
    words = ("probe", "--runtime=emulated", f"--cluster={file}", "--seconds=0.02")
    succeed(tmp_path, *words)
    assert load_cluster(tmp_path / "cluster.toml").speeds == rack.speed


SPEAKS = """
import os, sys
print("I am", os.environ["RANK"])
sys.stderr.write("trouble\\n")  # at once: print() writes a line's end by itself here
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shown", "said"),
    [
        ("first", ["I am 0"]),
        ("all", ["[0] I am 0", "[1] I am 1", "[2] I am 2"]),
    ],
)
def test_whose_words_are_shown(shown, said, tmp_path):
    (tmp_path / "speaks.py").write_text(SPEAKS)
    words = ("--workers=3", f"--output={shown}")
    _, out, err = finish(start(tmp_path, "emulate", "speaks.py", *words))
    assert sorted(out.splitlines()) == said
    lines = [line for line in err.splitlines() if "trouble" in line]
    assert sorted(lines) == ["[1] trouble", "[2] trouble", "trouble"]


@pytest.mark.slow
def test_speeds_and_a_workload_pace_the_workers(tmp_path):
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(
        '[[rack]]\nworkers = 2\nlink = "1 Gbit/s"\nlatency = "0 s"\nspeed = [1, 0.5]\n'
    )
    (tmp_path / "train.py").write_text(
        "import torch, paceline\n"
        "paceline.init()\n"
        "model = torch.nn.Linear(4, 4, bias=False)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "optimizer = paceline.distribute(model, optimizer, buckets='ddp')\n"
        "for _ in range(6):\n"
        "    optimizer.zero_grad()\n"
        "    model(torch.ones(2, 4)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    (tmp_path / "slow.json").write_text(
        json.dumps(
            {
                "format": "paceline workload 1",
                "workload": {
                    "names": ["weight"],
                    "sizes": [64],
                    "forward": [0.1],
                    "backward": [0.1],
                },
            }
        )
    )
    words = ("train.py", f"--cluster={cluster}", "--pace=slow.json", "--json")
    out, _ = succeed(tmp_path, "emulate", *words)
    result = json.loads(out)
    assert result["step_seconds"] >= 0.4  # the slower worker's
    assert result["compute"].startswith("paced: ")
    (tmp_path / "slow.json").write_text('{"format": "x", "workload": {}}')
    status, _, err = finish(start(tmp_path, "emulate", *words))
    assert status == 1
    assert "its format is 'x'" in err


@pytest.mark.slow
def test_a_throttled_link_shows_in_the_records(tmp_path):
    cluster = with_rules(
        tmp_path,
        'step = 3\nthrottle = "worker 1"\nrate = "20 Mbit/s"',
        'step = 6\nrepair = "worker 1"',
    )
    folder = tmp_path / "records"
    _, err = emulate(tmp_path, cluster, f"--records={folder}", steps=9)
    seconds = records(folder)
    # 1 MB at 2.5 MB/s, after what was queued when the rule came; others make steps longer only
    assert all(step > 0.3 for step in seconds[4:6])
    assert max(min(seconds[1:3]), min(seconds[7:9])) < min(seconds[4:6])
    assert "rule: step 3: throttle worker 1 to 20 Mbit/s" in err


@pytest.mark.slow
def test_a_cut_link_that_is_repaired_lets_the_job_go_on(tmp_path):
    cluster = with_rules(
        tmp_path, 'step = 3\ncut = "worker 1"', 'at = "14 s"\nrepair = "worker 1"'
    )
    folder = tmp_path / "records"
    emulate(tmp_path, cluster, f"--records={folder}")
    assert max(records(folder)) > 5.0  # it came there some time after the first step
    assert len(records(folder)) == 8


@pytest.mark.slow
def test_a_cut_that_lasts_ends_the_job_without_a_word_of_death(tmp_path, monkeypatch):
    """Whoever notices first: liveness, or the watch on the server's connection."""
    monkeypatch.setenv("PACELINE_UNREACHABLE_SECONDS", "3")
    cluster = with_rules(tmp_path, 'step = 3\ncut = "worker 1"')
    _, err = emulate(tmp_path, cluster, method="backup", status=1)
    assert "was unreachable for 3 s" in err
    assert "died" not in err


@pytest.mark.slow
def test_a_killed_worker_ends_the_job_and_is_named(tmp_path):
    cluster = with_rules(tmp_path, "step = 3\nkill = 1")
    folder = tmp_path / "records"
    out, err = emulate(tmp_path, cluster, f"--records={folder}", steps=500, status=1)
    assert out == ""
    assert len(records(folder)) >= 3  # nobody ended well, and what was done is there
    assert re.search(
        r"the job failed: rank 1 was killed by SIGKILL .*: by a rule of the cluster",
        err,
    )


@pytest.mark.slow
def test_a_script_that_fails_ends_the_job_with_its_error(tmp_path):
    (tmp_path / "bad.py").write_text(
        "import paceline, torch.distributed as dist\n"
        "paceline.init()\n"
        "if paceline.rank() == 1:\n"
        "    raise ValueError('no such luck')\n"
        "dist.barrier()\n"
    )
    words = ("--workers=2", "--link=1gbit")
    status, _, err = finish(start(tmp_path, "emulate", "bad.py", *words))
    assert status == 1
    assert "the job failed: rank 1" in err
    assert "ValueError: no such luck" in err


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "interrupt", "terminate"])
def test_nothing_is_left_of_a_job_that_is_ended(how, tmp_path, monkeypatch):
    """Neither workers, nor servers, nor hosts, nor its temporary folders."""
    (tmp_path / "train.py").write_text(
        "import os, time, torch, paceline\n"
        "paceline.init()\n"
        "model = torch.nn.Linear(2, 2)\n"
        "plain = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "optimizer = paceline.distribute(model, plain, method='asp')\n"
        "model(torch.ones(1, 2)).sum().backward()\n"
        "optimizer.step()\n"
        "os.write(1, b'ready\\n')\n"  # in one piece: two workers share the pipe
        "while True:\n"
        "    time.sleep(60)\n"
    )
    words = ("emulate", "train.py", "--workers=2", "--link=1gbit")
    words += ("--output=all",)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = os.environ | {
        "TMPDIR": str(temporary),
        # torch keeps this folder from one process to the next, in TMPDIR.
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
    }
    launcher = start(tmp_path, *words, start_new_session=True, env=environment)
    try:
        lines = {launcher.stdout.readline() for _ in range(2)}
        assert lines == {"[0] ready\n", "[1] ready\n"}
        inside = descendants(launcher.pid)
        spaces = {network_of(pid) for pid in inside} - {network_of("self")}
        assert len(spaces) == 3  # the switchboard and two hosts
        watch = Watch(inside)
        assert list(temporary.iterdir())
        if how == "kill":
            launcher.kill()
        elif how == "terminate":
            launcher.terminate()
        else:
            os.killpg(launcher.pid, signal.SIGINT)
        launcher.wait(SECONDS)
        watch.wait()
        assert not spaces & networks()
        statuses = {"kill": -signal.SIGKILL, "interrupt": 130, "terminate": 143}
        assert launcher.returncode == statuses[how]
        if how == "kill":  # by then nobody can remove anything; the next start does
            monkeypatch.setattr(tempfile, "tempdir", str(temporary))
            with scratch_folder() as folder:
                assert list(temporary.iterdir()) == [Path(folder)]
        assert list(temporary.iterdir()) == []
    finally:
        launcher.kill()
        launcher.communicate()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "expected a script: paceline emulate"),
        (("nothing.py",), "there is no script nothing.py"),
        pytest.param((LAYERS, "--link=0mbit"), "above zero", marks=pytest.mark.slow),
        pytest.param(
            (LAYERS, "--pace=nothing"),
            "unknown built-in workload 'nothing'",
            marks=pytest.mark.slow,
        ),
        ((LAYERS, "--workers=100000"), "expected at most"),
    ],
)
def test_what_cannot_be_is_refused(words, message, tmp_path):
    done = forked.run(["-m", "paceline", "emulate", *words], folder=tmp_path)
    assert done.returncode == 1
    assert message in done.stderr


def test_check_says_what_this_machine_can_do(tmp_path):
    out, _ = succeed(tmp_path, "check", "--json")
    found = json.loads(out)
    assert {"namespaces", "tbf", "netem"} <= {item["name"] for item in found["items"]}


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_an_ordinary_user_can_emulate(tmp_path):
    """As somebody without a name, if such a one may read this checkout."""
    somebody = 65534
    tmp_path.chmod(0o777)
    python = [sys.executable, "-c", "import paceline"]
    try:
        subprocess.run(
            python,
            user=somebody,
            group=somebody,
            cwd="/",
            capture_output=True,
            check=True,
        )
    except (PermissionError, subprocess.CalledProcessError):
        pytest.skip("an ordinary user may not read this checkout or its interpreter")
    words = ("--workers=2", "--link=200mbit", "--steps=6", "--json")
    out, _ = succeed(
        "/", "emulate", LAYERS, *words, "--", *QUICK, user=somebody, group=somebody
    )
    assert json.loads(out)["steps"] == 6


COMPUTES = """
import time
import paceline, torch

paceline.init()
model = torch.nn.Linear(8, 8)
plain = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = paceline.distribute(model, plain, buckets="ddp")
for _ in range(6):
    optimizer.zero_grad()
    loss = model(torch.ones(4, 8)).square().mean()
    end = time.process_time() + 0.03
    while time.process_time() < end:
        pass
    loss.backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize("paced", [True, False])
def test_workers_that_share_too_few_cores_are_told(tmp_path, paced):
    """What they compute takes longer than on machines of their own."""
    (tmp_path / "train.py").write_text(COMPUTES)
    pace = Workload(
        names=("weight", "bias"),
        sizes=(256, 32),
        forward=(0.001, 0.001),
        backward=(0.001, 0.001),
    )
    pace.save(str(tmp_path / "pace.json"))
    words = [*["--pace=pace.json"] * paced, "--workers=2", "--json", "train.py"]
    out, _ = succeed(tmp_path, "emulate", *words, preexec_fn=on_one_core)
    (told,) = [note for note in json.loads(out)["notes"] if "2 workers" in note]
    assert "1 core" in told
    assert "paceline emulate examples/workload.py" in told
    assert ("where 4 ms were asked for" in told) == paced
    assert ("pace.json" in told) == paced


@pytest.mark.slow
@pytest.mark.parametrize("check", [True, False])
def test_links_are_measured_where_that_is_asked_for(check, tmp_path):
    words = ("emulate", LAYERS, "--workers=2", "--steps=2", *["--check-links"] * check)
    _, err = succeed(tmp_path, *words, "--", *QUICK)
    assert ("links: 4 links measured" in err) == check


@pytest.mark.slow
def test_workers_that_only_sleep_may_share_a_core(tmp_path):
    words = ("emulate", LAYERS, "--workers=2", "--json", "--steps=8")
    out, _ = succeed(tmp_path, *words, "--", *QUICK, preexec_fn=on_one_core)
    assert not [note for note in json.loads(out)["notes"] if "2 workers" in note]
