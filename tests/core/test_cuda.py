"""Cases on one GPU: two processes that share it, one with NCCL, simulated workers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import paceline
from paceline.cluster import uniform_cluster
from paceline.runtimes.simulated import Simulation
from tests.core.cuda_cases import CASES, NEED_CPU_TENSORS, moved

ROOT = Path(__file__).parent.parent.parent

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device"
)


def launch(processes, backend):
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words += [f"--nproc-per-node={processes}", "-m", "tests.core.cuda_cases"]
    done = subprocess.run(
        [*words, backend],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": one_gpu()},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return set(done.stdout.splitlines())


def one_gpu():
    """The first of those that the caller may use."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


@pytest.mark.parametrize("backend", ["gloo", "default"])
def test_two_processes_share_a_gpu(backend):
    """Also with the backend that paceline chooses: NCCL refuses two ranks on one GPU,
    so it must be gloo, on both."""
    lines = launch(2, backend)
    assert lines >= {f"rank {rank} {name}: ok" for rank in range(2) for name in CASES}


@pytest.mark.parametrize("backend", ["nccl", "default"])
def test_one_process_with_nccl(backend):
    lines = launch(1, backend)
    skipped = NEED_CPU_TENSORS if backend == "nccl" else set()
    assert lines >= {
        f"rank 0 {name}: ok" for name, case in CASES.items() if case not in skipped
    }


# Torch says so of every hook on a parameter that a stream of the model's own uses, DDP's too.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_simulated_workers_share_a_gpu(name):
    simulation = Simulation(uniform_cluster(3, "1gbit", "50us"))

    def body(rank):
        paceline.init()
        CASES[name]()

    with moved():
        simulation.run(body)
