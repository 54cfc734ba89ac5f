"""A checkpoint is of one moment: of all tensors, and of parameters and optimizer alike."""

import pytest
import torch

import paceline
from paceline.core.settings import parse_method
from paceline.spec import parse
from paceline.testing import CASES
from paceline.testing.problems import Counting
from tests.support.training import simulate

STEPS, MOMENTUM, RATE = 4, 0.9, 0.25
GROUPS = "gssp"
"""How many updates its gradients are depends on what servers pass on together."""
METHODS = {
    parse(case.method).name: case.method
    for case in reversed(CASES)
    if case.counts and not case.lossy
}
"""The kit's first row of each method. An outer optimizer moves parameters by more than their
gradients, and compressed gradients by others."""


def train(rank, method, folder):
    model, optimizer = begin(method)
    steps(model, optimizer, STEPS, lambda: 0.01 * (1 + 3 * rank))
    paceline.save(folder)
    steps(model, optimizer, 2, lambda: 0.01 * (3 - rank))
    optimizer.finish()


def begin(method, saved_under=None):
    """*saved_under*: the method of the checkpoint that is to be read."""
    model = Counting()
    grouped = (saved_under or method).startswith(GROUPS)
    momentum = 0.0 if grouped else MOMENTUM
    inner = torch.optim.SGD(model.parameters(), lr=RATE, momentum=momentum)
    return model, paceline.distribute(model, inner, method=method, buckets="wfbp")


def steps(model, optimizer, count, seconds):
    for _ in range(count):
        paceline.pace(seconds())
        optimizer.zero_grad()
        model().backward()
        optimizer.step()


def read(rank, folder, method):
    """What is in the checkpoint: elements of the parameters, and of their momentum."""
    model, optimizer = begin("bsp", saved_under=method)
    paceline.load(folder)
    optimizer.finish()
    buffers = [
        state["momentum_buffer"]
        for state in optimizer.state_dict()["state"].values()
        if state.get("momentum_buffer") is not None
    ]
    return [
        [
            number
            for tensor in tensors
            for number in tensor.detach().reshape(-1).tolist()
        ]
        for tensors in (model.parameters(), buffers)
    ]


def updates(number, part, place=0.0, velocity=0.0):
    """Where so many updates lead, each at *part* of the learning rate."""
    for _ in range(number):
        velocity = MOMENTUM * velocity + 1.0
        place -= part * RATE * velocity
    return place, velocity


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_every_tensor_is_of_the_same_number_of_updates(method, tmp_path):
    """Gradients are one. Worker 0 comes to save first; each of the others' steps until then
    is in what was saved, and none after."""
    workers = 3
    simulate(workers, lambda rank: train(rank, method, tmp_path / "checkpoint"))
    (found,) = simulate(1, lambda rank: read(rank, tmp_path / "checkpoint", method))
    apart = method.startswith(
        ("asp", "ssp", "dssp", "r2sp")
    )  # each gradient is an update
    together, has_switched = 0 if apart else STEPS, False
    if method.startswith("sync-switch"):
        switches, _ = parse_method(method)
        together = min(STEPS, switches.bsp_steps)
        has_switched = together == switches.bsp_steps
    if method.startswith(GROUPS):
        assert found[0] == pytest.approx([-STEPS * RATE] * 18, rel=1e-5)
        return
    place, velocity = updates(together, 1.0)
    velocity = 0.0 if has_switched else velocity
    number = workers * (STEPS - together)
    place, velocity = updates(number, 1 / workers, place, velocity)
    assert found[0] == pytest.approx([place] * 18, rel=1e-5)
    assert found[1] == pytest.approx([velocity] * 18, rel=1e-5)


def test_who_is_spared_by_each_step_comes_to_save_all_the_same(tmp_path):
    """Where the fastest 2 of 3 are waited for, the slowest goes on alone once these are there:
    it would wait for them, and they for it."""
    seen = {}

    def train(rank):
        model, optimizer = begin("backup:wait_for=2")
        steps(model, optimizer, 6, lambda: 0.01 * (1 + 3 * rank))
        paceline.save(tmp_path / "checkpoint")
        with optimizer.consolidated():
            seen[rank] = model.vector[0].item()
        torch.distributed.barrier()
        steps(model, optimizer, 3, lambda: 0.01)
        optimizer.finish()
        return model.vector[0].item()

    ends = simulate(3, train)
    (found,) = simulate(1, lambda rank: read(rank, tmp_path / "checkpoint", "backup"))
    # The first two have done 6 steps, and the slowest goes on with the job's next each time.
    number = next(n for n in range(6, 19) if updates(n, 1.0)[0] <= found[0][0] + 1e-4)
    place, velocity = updates(number, 1.0)
    assert found[0] == pytest.approx([place] * 18, rel=1e-5)
    assert found[1] == pytest.approx([velocity] * 18, rel=1e-5)
    assert seen == dict.fromkeys(range(3), found[0][5])
    assert len(set(ends)) == 1
    assert ends[0] < place
