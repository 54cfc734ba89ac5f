"""What belongs to a process belongs to a worker, and the process gets its own back."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from paceline.cluster import Cluster, Rack
from paceline.errors import (
    CollectiveMismatchError,
    DeadlockError,
    UsageError,
    WorkerFailedError,
)
from paceline.interfaces import current_runtime
from paceline.run_options import RunOptions
from paceline.runtimes.simulated import Simulation, clock
from paceline.runtimes.simulated.isolation import locations_of
from paceline.torch_internals import load_lazy_modules
from tests.support.hanging import SECONDS
from tests.support.simulations import run, run_on, simulation


def random_states() -> tuple[Any, torch.Tensor, Any]:
    return random.getstate(), torch.get_rng_state(), np.random.get_state()


def set_random_states(states: tuple[Any, torch.Tensor, Any]) -> None:
    random.setstate(states[0])
    torch.set_rng_state(states[1])
    np.random.set_state(states[2])


@pytest.fixture
def _process_kept() -> Iterator[None]:
    before, threads = random_states(), torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    set_random_states(before)


# ---- the process gets its state back ----


def process_state() -> dict[str, Any]:
    """All that a simulation bends, as a new thread and this one see it."""
    threads: list[int] = []
    thread = threading.Thread(target=lambda: threads.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return {
        "environment class": type(os.environ),
        "environment": dict(os.environ),
        "process groups": c10d._world,
        "initialized": dist.is_initialized(),
        "main": sys.modules["__main__"],
        "patched": (
            dist.init_process_group,
            dist.new_group,
            dist.monitored_barrier,
            DistributedDataParallel.__init__,
            DataLoader.__init__,
            signal.signal,
            torch.multiprocessing.spawn,
            torch.multiprocessing.start_processes,
        ),
        "handler": signal.getsignal(signal.SIGINT),
        "exception hook": sys.excepthook,
        "random": random.getstate(),
        "torch random": torch.get_rng_state().tolist(),
        "numpy random": [*map(str, np.random.get_state())],
        "numpy generator": np.random.get_bit_generator(),
        "kernel threads": torch.get_num_threads(),
        "kernel threads of a new thread": threads,
        "multithreaded backward": torch.autograd.is_multithreading_enabled(),
        "runtime": current_runtime(),
        "threads": threading.enumerate(),
        "arguments": sys.argv[:],
    }


def disturb(rank: int) -> None:
    """Change what a script might."""
    os.environ["PATH"] = f"/worker/{rank}"
    os.environ[f"ONLY_{rank}"] = "1"
    os.environ.pop("HOME", None)
    random.random()
    torch.rand(1)
    np.random.rand()
    np.random.seed(rank)
    torch.manual_seed(rank)
    dist.new_group([0, 1])
    dist.barrier()


def raise_on_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("boom")
    dist.barrier()


def skip_one(rank: int) -> None:
    if rank != 1:
        dist.barrier()


def mismatch(rank: int) -> None:
    dist.all_reduce(torch.zeros(1 + rank))


def fail_at_delivery(rank: int) -> None:
    dist.all_gather([torch.zeros(2)] * 3, torch.zeros(3))


@pytest.mark.usefixtures("_process_kept")
@pytest.mark.parametrize(
    ("end", "error"),
    [
        (lambda rank: None, None),
        (raise_on_one, WorkerFailedError),
        (skip_one, DeadlockError),
        (mismatch, CollectiveMismatchError),
        (fail_at_delivery, UsageError),
    ],
)
def test_the_process_gets_its_state_back(end, error: type[Exception] | None) -> None:
    def body(rank: int) -> None:
        disturb(rank)
        end(rank)

    random.gauss(0, 1)  # each of these keeps a second number for the next call
    np.random.standard_normal()
    torch.set_num_threads(3)  # unlike a worker's
    load_lazy_modules()  # torch's own doing, once a process
    before = process_state()
    with pytest.raises(error) if error else contextlib.nullcontext():
        run(3, body)
    after = process_state()
    assert list(after) == list(before)
    for key, value in after.items():
        assert value == before[key], key


@pytest.mark.parametrize("code", [None, 0])
def test_a_script_may_exit_well(code: int | None) -> None:
    run(2, lambda rank: (dist.barrier(), sys.exit(code)))


def test_a_script_that_exits_badly_has_failed() -> None:
    def body(rank: int) -> None:
        if rank == 1:
            sys.exit(3)
        dist.barrier()

    with pytest.raises(WorkerFailedError, match=r"worker 1 .*exit status 3"):
        run(2, body)


# ---- random states ----


def draw() -> list[float]:
    """A few numbers of every kind; normal ones keep a spare in the generator."""
    return [
        random.random(),
        random.gauss(0, 1),
        torch.rand(()).item(),
        torch.randn(()).item(),
        float(np.random.rand()),
        float(np.random.standard_normal()),
        *torch.randperm(5).tolist(),
    ]


def seed_all(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # it takes no more bits


def alone(seed: int, draws: int) -> list[list[float]]:
    """What one process with this seed draws."""
    seed_all(seed)
    return [draw() for _ in range(draws)]


@pytest.mark.usefixtures("_process_kept")
@pytest.mark.parametrize("seed", [7, 2**40 + 1])
def test_random_numbers_are_a_single_process_own_whatever_the_interleaving(
    seed: int,
) -> None:
    expected = alone(seed, 6)

    def body(rank: int) -> list[list[float]]:
        drawn = []
        for step in range(6):
            # Each step another worker is the last to arrive, so turns differ.
            if (rank + step) % 3:
                dist.barrier()
                drawn.append(draw())
            else:
                drawn.append(draw())
                dist.barrier()
        return drawn

    results = run(4, body, options=RunOptions(seed=seed))
    assert results == [expected] * 4


@pytest.mark.usefixtures("_process_kept")
def test_seeding_and_generators_are_each_workers_own() -> None:
    def body(rank: int) -> list[list[float]]:
        seed_all(rank)
        dist.barrier()
        first = draw()
        saved = random_states()
        dist.barrier()
        second = draw()
        dist.barrier()
        set_random_states(saved)
        dist.barrier()
        assert draw() == second
        return [first, second]

    results = run(3, body)
    assert results == [alone(rank, 2) for rank in range(3)]


# ---- the environment ----


def test_each_worker_sees_its_own_rank_variables() -> None:
    def body(rank: int) -> dict[str, str]:
        dist.barrier()
        keys = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE")
        assert "RANK" in os.environ
        assert {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= set(os.environ)
        return {key: os.environ[key] for key in keys}

    for rank, seen in enumerate(run(3, body)):
        assert seen == {
            "RANK": str(rank),
            "WORLD_SIZE": "3",
            # a worker a host: taken for the one machine that it really is
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "LOCAL_WORLD_SIZE": "3",
        }


def test_local_ranks_are_devices_where_there_are_any() -> None:
    """So that `torch.cuda.set_device(local_rank)` works, however many workers there are."""
    ranks = [here["LOCAL_RANK"] for here in locations_of(range(4), 2)]
    assert ranks == ["0", "1", "0", "1"]
    ranks = [here["LOCAL_RANK"] for here in locations_of([0, 0, 0, 1], 2)]
    assert ranks == ["0", "1", "0", "0"]


def test_workers_of_one_host_are_numbered_there() -> None:
    places: list[tuple[str, str, str]] = []

    def body(rank: int) -> None:
        keys = ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        places.append(tuple(os.environ[key] for key in keys))

    rack = Rack(workers=4, workers_per_host=2, link=1e6, latency=1e-3)
    Simulation(Cluster(racks=(rack,))).run(body)
    assert places == [(str(r // 2), str(r % 2), "2") for r in range(4)]


def test_changes_of_the_environment_are_a_workers_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SHARED", "before")
    monkeypatch.setenv("DOOMED", "before")

    def body(rank: int) -> None:
        count = len(os.environ)
        assert os.environ["SHARED"] == "before"
        os.environ["SHARED"] = f"of {rank}"
        os.environ["FRESH"] = f"of {rank}"
        if rank == 1:
            del os.environ["DOOMED"]
        dist.barrier()
        assert os.getenv("SHARED") == os.environ.get("FRESH") == f"of {rank}"
        copied = os.environ.copy()
        assert copied["SHARED"] == dict(os.environ)["SHARED"] == f"of {rank}"
        assert len(copied) == len(os.environ) == count + (0 if rank == 1 else 1)
        assert ("DOOMED" in os.environ) == (rank != 1)
        assert ("DOOMED" in list(os.environ)) == (rank != 1)
        if rank == 1:
            with pytest.raises(KeyError):
                os.environ["DOOMED"]
            with pytest.raises(KeyError):
                del os.environ["DOOMED"]
            assert os.environ.setdefault("DOOMED", "again") == "again"
            assert os.environ.pop("DOOMED") == "again"
        with pytest.raises(TypeError):
            os.environ["NUMBER"] = 5
        dist.barrier()

    run(3, body)
    assert os.environ["SHARED"] == os.environ["DOOMED"] == "before"
    assert "FRESH" not in os.environ
    assert "RANK" not in os.environ


# ---- __main__ ----


def test_each_worker_has_its_own_main_module() -> None:
    runtime = simulation(3)
    own_main = sys.modules["__main__"]

    def body(rank: int) -> None:
        module = ModuleType("__main__")
        module.rank = rank
        runtime.mains.register(rank, module)
        for _ in range(3):
            dist.barrier()
            assert sys.modules["__main__"].rank == rank

    run_on(runtime, body)
    assert sys.modules["__main__"] is own_main


# ---- kernels ----


def test_workers_compute_with_one_thread_and_call_hooks_on_their_own() -> None:
    def body(rank: int) -> None:
        assert torch.get_num_threads() == 1
        # Else CUDA's backward would run on a thread that does not have the turn.
        assert not torch.autograd.is_multithreading_enabled()
        called: list[threading.Thread] = []
        weight = torch.ones(3, requires_grad=True)
        weight.register_post_accumulate_grad_hook(
            lambda _: called.append(threading.current_thread())
        )
        dist.barrier()
        (weight * rank).sum().backward()
        assert called == [threading.current_thread()]

    run(2, body)


# ---- what is forced or refused ----


@pytest.mark.parametrize(
    "make",
    [
        lambda data: DataLoader(data, batch_size=2, num_workers=2),
        lambda data: DataLoader(data, 2, False, None, None, 2),
        lambda data: DataLoader(
            data,
            batch_size=2,
            num_workers=2,
            prefetch_factor=4,
            persistent_workers=True,
            timeout=5,
            multiprocessing_context="spawn",
        ),
    ],
    ids=["keyword", "positional", "with options for workers"],
)
def test_data_loaders_load_in_the_worker_and_say_so(make) -> None:
    def body(rank: int) -> list[list[float]]:
        loader = make(TensorDataset(torch.arange(5.0)))
        assert loader.num_workers == 0
        batches = []
        for (batch,) in loader:
            dist.barrier()
            batches.append(batch.tolist())
        return batches

    with pytest.warns(UserWarning, match=r"num_workers=2.*worker itself") as caught:
        results = run(2, body)
    assert caught[0].filename == __file__
    assert results == [[[0.0, 1.0], [2.0, 3.0], [4.0]]] * 2


def test_data_loaders_without_workers_are_left_alone() -> None:
    def body(rank: int) -> int:
        return len(list(DataLoader(TensorDataset(torch.arange(6.0)), batch_size=4)))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(2, body) == [2, 2]


def train(rank: int) -> None:
    raise AssertionError("a process was started")


OWN_WORKERS = r"workers of its own.*Call train"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: DistributedDataParallel(torch.nn.Linear(1, 1)),
            r"(?s)DistributedDataParallel.*paceline.distribute\(model, optimizer\)",
        ),
        (lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN), "signal handlers"),
        (lambda: torch.multiprocessing.spawn(train, nprocs=2), OWN_WORKERS),
        (lambda: torch.multiprocessing.start_processes(train, nprocs=2), OWN_WORKERS),
    ],
    ids=["DDP", "signal handlers", "spawn", "start_processes"],
)
def test_what_only_a_process_can_do_is_refused_with_what_to_do(
    call: Callable[[], object], message: str
) -> None:
    with pytest.raises(WorkerFailedError, match=message) as caught:
        run(2, lambda rank: call())
    assert isinstance(caught.value.__cause__, UsageError)


# ---- what blocks outside the clock ----


@pytest.mark.slow
def test_a_worker_that_blocks_outside_the_clock_ends_the_process_with_stacks() -> None:
    script = textwrap.dedent(
        """
        import threading
        import torch.distributed as dist
        from tests.support.simulations import run

        lock = threading.Lock()

        def body(rank):
            lock.acquire()  # worker 1 waits for worker 0, which waits in the barrier
            dist.barrier()

        run(2, body, patience=1.0)
        """
    )
    outcome = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert outcome.returncode == 70
    assert "worker 1 has blocked outside the virtual clock for 1 s" in outcome.stderr
    assert "in body" in outcome.stderr


def test_who_waits_for_a_processor_is_not_taken_for_blocked(monkeypatch):
    """At the lowest priority of a busy machine a worker may get next to nothing for a minute."""
    monkeypatch.setattr(clock, "waited_for_processor", lambda thread: time.monotonic())
    run(2, lambda rank: threading.Event().wait(0.8), patience=0.5)
