"""Ray: the framework's trainer as it is, and jobs that survive workers, servers and nodes.

Each test has a cluster of several nodes on this machine (``ray.cluster_utils``). What dies dies
when the job has come so far, not at a time. benchmarks/ray_kills.py kills more of it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.test_trainers import SCRIPTS, needs

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples" / "ray"
SECONDS = 600


def started(script: str, *words: object) -> subprocess.CompletedProcess[str]:
    needs("ray")
    return subprocess.run(
        [sys.executable, str(SCRIPTS / script), *map(str, words)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


ROWS = [
    "backup:1:worker",
    "asp:1:worker",
    "backup:1:server",
    "backup:1:node",
    "backup:1:server's node",
    "backup:1:both nodes",
]


@pytest.fixture(scope="module")
def survived(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What of_ray.py says of each row."""
    done = started("of_ray.py", tmp_path_factory.mktemp("survived"), *ROWS)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    told = [json.loads(line) for line in re.findall("^=== (.*)$", done.stdout, re.M)]
    return dict(zip(ROWS, told, strict=True))


@pytest.mark.parametrize("row", ROWS)
def test_a_job_survives(survived, row):
    """Each step is applied once: gradients are ones, and under backup a step's mean is one. Under
    asp each gradient is; only of what a killed incarnation pushed last nobody knows whether it came."""
    told = survived[row]
    assert told["last"] == told["steps"] - 1
    assert not told["left"], "the job has ended well"
    assert [one["rank"] for one in told["results"]] == [0, 1]
    assert sum(one["incarnation"] for one in told["results"]) >= 1, (
        "nobody was started again"
    )
    assert len({w for one in told["results"] for w in one["weight"]}) == 1, told
    if told["method"] == "backup":
        assert told["moved"] == told["steps"]
    else:
        gradients = 2 * told["moved"]
        assert told["noted"] <= gradients <= told["noted"] + told["kills"], told


SENTENCES = {
    "many": "UsageError: the Ray cluster is too small: this job needs 4 CPU, and its nodes have 2",
    "GPU": "1 GPU, and its nodes have 0",
    "large": "No node has room for worker 0 (2 CPU each, on one node)",
    "busy": "CPU, on one of 3 nodes: 1 CPU | 1 CPU | no resource; wait longer (room_seconds=)",
    "loop": "WorkerFailedError: worker 0 failed with ValueError: so it goes: 7",
    "script's": "method 'bsp' under --survive: its workers meet in collectives",
    "folder": "there is no folder /nowhere",
    "there": "the file exists, and may be what another job left",
    "always dies": "UsageError: worker 0 has died 3 times in a row without a completed step",
    "room goes": "UsageError: worker 0 has not started for",
    "coordinator goes": "PeerLostError: the coordinator of the job",
}
RESULTS = {
    "apart": "['trained', 'idle']",
    "server goes": "['trained']",
    "late": "['trained']",
    "terminated": "['trained']",
}


@pytest.fixture(scope="module")
def said():
    """What was said of each job of on_ray.py in which something is wrong."""
    done = started("on_ray.py", "tried")
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(re.findall(r"^=== ([^:]+): (.*)$", done.stdout, re.MULTILINE))


@pytest.mark.parametrize("name", SENTENCES)
def test_what_cannot_be_ends_with_words(said, name):
    assert SENTENCES[name] in said[name]
    assert "Error: " in said[name]


@pytest.mark.parametrize("name", RESULTS)
def test_what_is_whole_is_given_back(said, name):
    assert said[name] == RESULTS[name]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"workers": 2, "method": "bsp"}, "Use one whose server updates: asp, backup"),
        ({"workers": 2, "method": "gssp"}, "it has 2 servers, one for each group"),
        ({"workers": 2, "method": "asq"}, "unknown method 'asq'"),
        ({"workers": 2, "method": "ssp:stalness=3"}, "unknown key 'stalness'"),
        ({"workers": 2, "method": "backup:wait_for=3"}, "at most the 2 workers"),
        ({"workers": 0, "method": "asp"}, r"run\(workers=\): expected 1 or more"),
    ],
)
def test_what_is_refused_before_any_cluster(options, sentence):
    needs("ray")
    code = (
        "import sys\nfrom paceline.integrations.ray import run\n"
        "from paceline.errors import UsageError\n"
        f"try: run(print, **{options!r})\n"
        "except UsageError as error: print('=== ' + str(error))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert re.search(f"=== .*{sentence}", done.stdout), (
        done.stdout + done.stderr[-2000:]
    )


def test_ray_train_as_it_is(tmp_path):
    """Two nodes, a worker on each: what Ray's own DDP learns, to every digit; and about that where
    gradients are deferred, which osp does not do in 45 steps unless told to."""
    needs("ray", "pyarrow", "pandas")
    trainer, survive = EXAMPLES / "torch_trainer.py", EXAMPLES / "survive.py"
    deferring = "osp:defer=most,budget=constant"
    methods = ("ddp", "bsp:buckets=ddp", deferring)
    lines = [f"{trainer} --method {method}" for method in methods]
    lines += [f"{survive} --workers 1 --steps 100"]
    done = started("on_ray.py", *lines)
    assert done.returncode == 0, done.stderr[-3000:]
    pattern = r"^(\S+): accuracy (\S+), sum of .* (\S+)$"
    told = {
        method: (float(accuracy), digest)
        for method, accuracy, digest in re.findall(pattern, done.stdout, re.MULTILINE)
    }
    assert told["bsp:buckets=ddp"] == told["ddp"]
    assert told[deferring][1] != told["ddp"][1]
    assert abs(told[deferring][0] - told["ddp"][0]) < 0.05
    assert re.search(r"^worker 0: accuracy 0\.[5-9]", done.stdout, re.MULTILINE)
