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
from tests.support.processes import wait_until

pytestmark = pytest.mark.usefixtures("namespaces")

ROOT = Path(__file__).parent.parent.parent.parent
LAYERS = str(ROOT / "examples" / "layers.py")
TOLD = ROOT / "tests" / "runtimes" / "real" / "scripts" / "told.py"
QUICK = ("--layers", "4", "--megabytes", "1", "--forward", "0.02", "--backward", "0.02")
ON_ONE_CORE = Path(__file__).parent / "scripts" / "on_one_core.py"


def command(*words, folder, status=0, on=("-m", "tests.support.forking")):
    """What ``paceline WORDS`` says, whose processes are all forked."""
    done = forked.run([*on, "paceline", *words], folder=folder, seconds=SECONDS)
    assert done.returncode == status, done.stderr
    return done.stdout, done.stderr


def emulate(folder, *words, steps=8, method="bsp:buckets=ddp", **options):
    own = ("--json", f"--method={method}", f"--steps={steps}")
    everything = ("emulate", LAYERS, *own, *words, "--", *QUICK)
    return command(*everything, folder=folder, **options)


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
    on = [ON_ONE_CORE]
    out, err = emulate(tmp_path, "--workers=2", "--link=200mbit", on=on)
    result = json.loads(out)
    assert (result["runtime"], result["workers"], result["steps"]) == ("emulated", 2, 8)
    assert result["compute"] == "paced by the script"
    assert result["network"].startswith("2 workers, 200 Mbit/s")
    # 1 MB each way at 25 MB/s: the wire sets the pace, and 40 ms are computed.
    assert result["step_seconds"] >= 0.04
    assert result["exposed_communication_seconds"] >= 0.02
    # Workers that only sleep may share a core, and nobody asked for measured links.
    assert not [note for note in result["notes"] if "2 workers" in note]
    assert "links measured" not in err


@pytest.mark.slow
def test_workers_know_the_cluster_that_is_described(tmp_path):
    """As in the simulated runtime, to the last bit of a mean over its racks."""
    racks = (Rack(workers=1, link=1e9 / 7, latency=0.0),)
    racks += (replace(racks[0], workers=3, speed=(1.0, 0.5, 1 / 3)),)
    file = tmp_path / "cluster.toml"
    file.write_text(cluster_toml(Cluster(racks)))
    cluster = load_cluster(file)
    out, _ = command("emulate", TOLD, f"--cluster={file}", folder=tmp_path)
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
    command(*words, folder=tmp_path)
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
    out, err = command("emulate", "speaks.py", *words, folder=tmp_path)
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
    words = ("emulate", "train.py", f"--cluster={cluster}", "--pace=slow.json")
    words += ("--json", "--check-links")
    out, err = command(*words, folder=tmp_path)
    assert "links: 4 links measured" in err
    result = json.loads(out)
    assert result["step_seconds"] >= 0.4  # the slower worker's
    assert result["compute"].startswith("paced: ")
    (tmp_path / "slow.json").write_text('{"format": "x", "workload": {}}')
    _, err = command(*words, folder=tmp_path, status=1)
    assert "its format is 'x'" in err


@pytest.mark.slow
def test_rules_throttle_a_link_repair_it_and_kill_a_worker(tmp_path):
    cluster = with_rules(
        tmp_path,
        'step = 3\nthrottle = "worker 1"\nrate = "20 Mbit/s"',
        'step = 6\nrepair = "worker 1"',
        "step = 9\nkill = 1",
    )
    folder = tmp_path / "records"
    out, err = emulate(tmp_path, cluster, f"--records={folder}", steps=500, status=1)
    assert out == ""
    # Nobody ended well, and what was done is there.
    seconds = records(folder)
    # 1 MB at 2.5 MB/s, after what was queued when the rule came; others make steps longer only
    assert all(step > 0.3 for step in seconds[4:6])
    assert max(min(seconds[1:3]), min(seconds[7:9])) < min(seconds[4:6])
    assert "rule: step 3: throttle worker 1 to 20 Mbit/s" in err
    assert re.search(
        r"the job failed: rank 1 was killed by SIGKILL .*: by a rule of the cluster",
        err,
    )


@pytest.mark.slow
def test_a_cut_link_that_is_repaired_lets_the_job_go_on(tmp_path):
    cluster = with_rules(
        tmp_path, 'step = 3\ncut = "worker 1"', 'at = "9 s"\nrepair = "worker 1"'
    )
    folder = tmp_path / "records"
    emulate(tmp_path, cluster, f"--records={folder}")
    assert max(records(folder)) > 1.0  # it came there some time after the first step
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
def test_a_script_that_fails_ends_the_job_with_its_error(tmp_path):
    (tmp_path / "bad.py").write_text(
        "import paceline, torch.distributed as dist\n"
        "paceline.init()\n"
        "if paceline.rank() == 1:\n"
        "    raise ValueError('no such luck')\n"
        "dist.barrier()\n"
    )
    words = ("emulate", "bad.py", "--workers=2", "--link=1gbit")
    _, err = command(*words, folder=tmp_path, status=1)
    assert "the job failed: rank 1" in err
    assert "ValueError: no such luck" in err


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
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
    words = ["-m", "tests.support.forking", "paceline", "emulate", "train.py"]
    words += ["--workers=2", "--link=1gbit", "--output=all"]
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    launcher = forked.Forked(words, tmp_path, {"TMPDIR": str(temporary)})
    try:
        ready = {"[0] ready", "[1] ready"}
        wait_until(lambda: ready <= set(launcher.stdout.splitlines()), SECONDS, "steps")
        inside = descendants(launcher.pid)
        spaces = {network_of(pid) for pid in inside} - {network_of("self")}
        assert len(spaces) == 3  # the switchboard and two hosts
        watch = Watch(inside)
        assert list(temporary.iterdir())
        if how == signal.SIGINT:
            os.killpg(launcher.pid, how)
        else:
            launcher.send_signal(how)
        launcher.wait(SECONDS)
        watch.wait()
        assert not spaces & networks()
        killed = how == signal.SIGKILL
        assert launcher.returncode == (-how if killed else 128 + how)
        if killed:  # by then nobody can remove anything; the next start does
            monkeypatch.setattr(tempfile, "tempdir", str(temporary))
            with scratch_folder() as folder:
                assert list(temporary.iterdir()) == [Path(folder)]
        assert list(temporary.iterdir()) == []
    finally:
        launcher.kill()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "expected a script: paceline emulate"),
        (("nothing.py",), "there is no script nothing.py"),
        ((LAYERS, "--link=0mbit"), "above zero"),
        ((LAYERS, "--pace=nothing"), "unknown built-in workload 'nothing'"),
        ((LAYERS, "--workers=100000"), "expected at most"),
    ],
)
def test_what_cannot_be_is_refused(words, message, tmp_path):
    _, err = command("emulate", *words, folder=tmp_path, status=1)
    assert message in err


def test_check_says_what_this_machine_can_do(tmp_path):
    out, _ = command("check", "--json", folder=tmp_path)
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
    words = ["-m", "paceline", "emulate", LAYERS, "--workers=2", "--link=200mbit"]
    done = subprocess.run(
        [sys.executable, *words, "--steps=6", "--json", "--", *QUICK],
        user=somebody,
        group=somebody,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 6


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
    words = ["emulate", *["--pace=pace.json"] * paced, "--workers=2", "--json"]
    out, _ = command(*words, "train.py", folder=tmp_path, on=[ON_ONE_CORE])
    (told,) = [note for note in json.loads(out)["notes"] if "2 workers" in note]
    assert "1 core" in told
    assert "paceline emulate examples/workload.py" in told
    assert ("where 4 ms were asked for" in told) == paced
    assert ("pace.json" in told) == paced
