"""Groups beside the job's own; and no thread waits in the job's store, which holds up the others."""

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from paceline.collectives.process_groups import (
    PollingStore,
    default_store,
    group_beside,
    meet,
)
from paceline.errors import UsageError
from paceline.torch_internals import all_reduce_options, local_store
from tests.support.hanging import SECONDS

SOON = timedelta(seconds=0.01)


class Impatient(dist.Store):
    """A store that says at once what it has, and refuses whoever would wait in it."""

    timeout = timedelta(seconds=SECONDS)

    def __init__(self):
        super().__init__()
        self.held = {}
        self.asked = threading.Event()

    def set(self, key, value):
        self.held[key] = value

    def check(self, keys):
        self.asked.set()
        return all(key in self.held for key in keys)

    def get(self, key):
        return self.held[key]

    def wait(self, keys, timeout=None):
        raise AssertionError(f"waits in the store for {keys}")


def test_who_gets_what_is_not_there_yet_asks_until_it_is():
    store, found = Impatient(), []
    patient = PollingStore(store)
    thread = threading.Thread(target=lambda: found.append(patient.get("key")))
    thread.start()
    assert store.asked.wait(SECONDS)
    patient.set("key", b"here")
    thread.join(SECONDS)
    assert found == [b"here"]


def test_what_never_comes_is_named():
    store = Impatient()
    store.set("one", b"")
    with pytest.raises(dist.DistStoreError, match="two"):
        PollingStore(store).wait(["one", "two"], SOON)
    store.timeout = SOON
    with pytest.raises(dist.DistStoreError, match="three"):
        PollingStore(store).get("three")


def test_who_has_not_come_is_named():
    store = PollingStore(Impatient())
    store.set("before 2", b"here")
    with pytest.raises(UsageError, match=r"'g'.*\[7\]"):
        meet(store, 0, (3, 7, 9), "group 'g'", SOON, "before")


def test_gloo_makes_a_group_and_waits_in_no_store():
    store, made = Impatient(), {}

    def make(rank):
        made[rank] = dist.ProcessGroupGloo(
            PollingStore(store), rank, 2, timeout=timedelta(seconds=SECONDS)
        )

    threads = [threading.Thread(target=make, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    values = [torch.tensor([1.0]), torch.tensor([2.0])]
    works = [made[rank].allreduce([values[rank]]) for rank in (0, 1)]
    for work in works:
        work.wait()
    assert [value.item() for value in values] == [3.0, 3.0]


def test_control_gloo_waits_in_a_store_that_lets_it():
    with pytest.raises(AssertionError, match="waits in the store"):
        dist.ProcessGroupGloo(Impatient(), 0, 2, timeout=timedelta(seconds=1))


@pytest.fixture
def group():
    """A default process group of this process alone."""
    dist.init_process_group("gloo", store=local_store(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_the_default_group_s_store(group):
    default_store().set("key", "value")
    assert c10d._get_default_store().get("key") == b"value"


def test_a_group_beside_the_job_s_own(group):
    known = dict(c10d._world.pg_map)
    beside = group_beside(group, "beside", [0])
    assert (beside.rank(), beside.size()) == (0, 1)
    assert dict(c10d._world.pg_map) == known
    buffer = torch.ones(3)
    beside.allreduce([buffer], all_reduce_options(dist.ReduceOp.SUM)).wait()
    assert torch.equal(buffer, torch.ones(3))
