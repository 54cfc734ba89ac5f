"""What a simulation keeps does not grow with its steps, nor wait for the cycle collector."""

import gc
from collections.abc import Iterator

import pytest
import torch

import paceline
from tests.support.simulations import run, simulation

EARLY, STEPS = 30, 100
ELEMENTS = 1000


@pytest.fixture(scope="module", autouse=True)
def collector_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def living(kind: type) -> list:
    """What is there by reference counts alone. Without a collection, what was made since
    the last one is all young."""
    young = gc.get_objects(generation=0)
    return [thing for thing in young if issubclass(type(thing), kind)]


def storages() -> list[torch.UntypedStorage]:
    all_of_them = (tensor.untyped_storage() for tensor in living(torch.Tensor))
    return list({storage.data_ptr(): storage for storage in all_of_them}.values())


def bytes_of_tensors() -> int:
    return sum(storage.nbytes() for storage in storages())


class Model(torch.nn.Module):
    """One large parameter, and a buffer that travels."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(ELEMENTS))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return (self.weight - x).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        "bsp:buckets=wfbp",
        "bsp:collective=parameter-server,buckets=wfbp",
        "bsp:collective=parameter-server,servers=per-node,buckets=wfbp",
        "backup",
        "backup:wait_for=1",
        "asp",
        "ssp",
        "r2sp",
        "sync-switch:bsp_steps=50",
        "osp:budget=constant",
        "osp:collective=native,budget=constant,buckets=wfbp",
    ],
)
def test_later_steps_keep_no_more_than_earlier_ones(method: str) -> None:
    seen = {}

    def train(rank: int) -> None:
        model = Model()
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = paceline.distribute(model, plain, method=method)
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            model(float(rank)).backward()
            optimizer.step()
            if rank == 0 and step in (EARLY, STEPS):
                seen[step] = bytes_of_tensors()
        optimizer.finish()

    simulation(2).run(train)
    # What is under way differs from step to step; a copy kept in each is 70 copies.
    assert seen[STEPS] < seen[EARLY] + 10 * 4 * ELEMENTS


@pytest.mark.slow
@pytest.mark.parametrize("play", [False, True], ids=["priced", "played"])
def test_a_collectives_copies_go_with_the_last_result(play: bool) -> None:
    """Also where ranks still hold their work."""
    elements = 2003 if play else 2011  # what no other tensor here has
    kept = {}

    def body(rank: int) -> None:
        tensor = torch.zeros(elements)
        work = torch.distributed.all_reduce(tensor, async_op=True)
        work.wait()
        torch.distributed.barrier()  # the last rank has its result, too
        kept[rank] = [s.nbytes() for s in storages()].count(4 * elements)
        torch.distributed.barrier()
        assert work.is_completed()

    run(3, body, play=play)
    assert kept == {0: 3, 1: 3, 2: 3}  # each rank's own tensor
