"""bsp is DDP: the same parameters after 20 steps, whichever runtime and bucket rule."""

import ast
import runpy

import pytest
import torch

import paceline
from paceline.cli.options import SCRATCH
from paceline.cluster import uniform_cluster
from paceline.runtimes.simulated import Simulation
from tests.runtimes.real.scripts.train_cases import CASES
from tests.support import forked
from tests.support.processes import SCRIPTS

BOUNDS = {"sgd": 1e-6, "adamw": 1e-5, "batchnorm": 1e-6, "everything": 1e-6}


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def trained(request, tmp_path_factory):
    """A folder of what real processes trained, with paceline and with DDP, and of what
    simulated workers did."""
    size = request.param
    folders = {w: tmp_path_factory.mktemp(f"{w}-{size}") for w in ("real", "simulated")}
    script, real, virtual = SCRIPTS / "train_cases.py", *folders.values()
    forked.run_together(size, [script, real, "paceline", "ddp"])
    words = ["-m", "paceline", "simulate", f"--workers={size}", script, "--"]
    done = forked.run([*words, virtual, "paceline"], folder=virtual)
    assert done.returncode == 0, done.stderr
    folders["simulated"] /= SCRATCH  # where a simulation's checkpoints end up
    return size, folders


def load(folder, engine, name, rank):
    return torch.load(folder / f"{engine}-{name}-{rank}.pt", weights_only=True)


def assert_close(actual, expected, bound):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        largest = tensor.abs().max()
        error = (actual[name] - tensor).abs().max()
        assert error <= bound * largest, f"{name}: {error} of {largest}"


@pytest.mark.parametrize("name", CASES)
def test_real_equals_ddp(trained, name):
    size, folders = trained
    bound = BOUNDS[name.partition("-")[0]]
    for rank in range(size):
        ours, theirs = (
            load(folders["real"], engine, name, rank) for engine in ("paceline", "ddp")
        )
        assert ("evaluated" in ours) == (rank > 0)
        theirs = {key: theirs[key] for key in ours}
        assert_close(ours, theirs, bound)


@pytest.mark.parametrize("name", CASES)
def test_simulated_equals_real(trained, name):
    """To the last bit: the simulated runtime adds in gloo's order."""
    size, folders = trained
    for rank in range(size):
        virtual, real = (
            load(folders[runtime], "paceline", name, rank)
            for runtime in ("simulated", "real")
        )
        assert_close(virtual, real, bound=0.0)


@pytest.mark.parametrize("name", CASES)
def test_training_moved_the_parameters(trained, name):
    """Equal to DDP means something only where training happened, and everywhere alike."""
    size, folders = trained
    torch.manual_seed(0)
    start = CASES[name][0]()
    states = [load(folders["real"], "paceline", name, rank) for rank in range(size)]
    for key, parameter in start.named_parameters():
        assert parameter.requires_grad != torch.equal(states[0][key], parameter)
        for state in states[1:]:
            assert torch.equal(state[key], states[0][key])


COMPRESSED = "compression=top-k,compression.density=0.1,compression.small=0"


@pytest.mark.slow
@pytest.mark.parametrize("replies", ["full", "deltas"])
def test_compressed_pushes_end_with_the_bits_of_virtual_time(replies):
    script = SCRIPTS / "compressible_pushes.py"
    method = f"backup:{COMPRESSED},replies={replies},buffers=local"
    ends = {}

    def body(rank):
        paceline.init()
        ends[rank] = runpy.run_path(str(script))["train"](method)

    Simulation(uniform_cluster(2, "1gbit", "50us")).run(body)
    assert ends[0] == ends[1]
    for said in forked.run_together(2, [script, method]):
        assert ast.literal_eval(said.stdout) == ends[0]
