"""The conformance table: a row per registered method."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from paceline.cluster import Cluster, Rack
from paceline.interfaces import Method

InPlainTorch = Callable[[list[torch.nn.Module], list[torch.optim.Optimizer], int], None]


def mean_of_gradients(
    models: list[torch.nn.Module], optimizers: list[torch.optim.Optimizer], number: int
) -> None:
    """Train as exact methods do: each step uses the mean of all gradients."""
    for tensors in zip(*(model.parameters() for model in models), strict=True):
        mean = torch.stack([tensor.grad for tensor in tensors]).mean(0)
        for tensor in tensors:
            tensor.grad = mean.clone()
    for optimizer in optimizers:
        optimizer.step()


def mean_of_models(every: int) -> InPlainTorch:
    """Train as local SGD does: local steps, and a mean of all models every *every* steps."""

    def step(
        models: list[torch.nn.Module],
        optimizers: list[torch.optim.Optimizer],
        number: int,
    ) -> None:
        for optimizer in optimizers:
            optimizer.step()
        if number % every:
            return
        with torch.no_grad():
            for tensors in zip(*(model.parameters() for model in models), strict=True):
                mean = torch.stack(tensors).mean(0)
                for tensor in tensors:
                    tensor.copy_(mean)

    return step


@dataclass(frozen=True, kw_only=True)
class Case:
    """One method, and its particular properties.

    Attributes:
        method: A spec or a method object.
        timing_free: Its result depends only on the data, and not on which worker is fast. So all
            runtimes end with the same parameters.
        learning_rate: Learning rate that solves the kit's quadratic problem in *steps* steps.
        steps: Number of steps until the kit's problem is solved.
        under_way: Between steps a part of an update is in flight, so a restart changes the result
            slightly.
        rounding: Largest difference between one worker alone and its reference, if a value is
            derived instead of sent.
        lossy: Largest compression error of a mean in each element, as a share of a tensor's largest
            gradient. Gradients at the optimum are about 1, so training ends as far from there.
        counts: Each gradient moves the parameters once, by the optimizer's step. This is not so if an
            outer optimizer also steps, a part of a gradient waits, or an estimate of it is applied.
            Laws that count gradients in the parameters do not apply then.
        equals: A reference with bit-equal parameters after each step: another method, or a function
            that trains all workers' models in plain torch. It gets the models with their gradients
            after step 1, 2, and so on.
        state: The optimizer needs a state, so SGD gets a momentum too small to change anything.
        together: If final parameters are compared, workers start every *together* steps at the same
            time; 0: they do not. A worker that waits for no others may otherwise end before they
            begin.
        racks: Two workers or more are simulated in two racks, which are two groups by hand.
        aggregates: As *racks*, and both racks' switches aggregate.
        reference: The step of one worker alone, if it is not plain ``optimizer.step()``.
    """

    method: str | Method
    timing_free: bool = True
    learning_rate: float = 0.6
    steps: int = 40
    under_way: bool = False
    rounding: float = 0.0
    lossy: float = 0.0
    counts: bool = True
    equals: str | InPlainTorch | None = None
    state: bool = False
    together: int = 0
    racks: bool = False
    aggregates: bool = False
    reference: Callable[[torch.optim.Optimizer], None] | None = None

    @property
    def name(self) -> str:
        """Name for test ids and messages."""
        return self.method if isinstance(self.method, str) else self.method.name

    def cluster(self, workers: int) -> Cluster:
        """The simulated cluster for *workers* workers."""
        two = self.racks or self.aggregates
        return cluster_of(workers, 2 if two else 1, aggregates=self.aggregates)


def cluster_of(workers: int, racks: int = 1, *, aggregates: bool = False) -> Cluster:
    """A cluster of *workers* workers in one rack, or in two: the first half of the workers and the others,
    with an uplink of half a link. Methods that take groups by hand use the two racks as groups. *aggregates*:
    the racks' switches aggregate."""
    sizes = (
        [workers] if racks == 1 or workers == 1 else [workers // 2, -(-workers // 2)]
    )
    rate, uplink = 125e6, None if len(sizes) == 1 else 62.5e6
    names = ("near", "far") if racks > 1 else ("",)
    return Cluster(
        tuple(
            Rack(
                workers=n,
                link=rate,
                latency=50e-6,
                uplink=uplink,
                group=name,
                aggregates=aggregates,
            )
            for n, name in zip(sizes, names, strict=False)
        )
    )


def _deferring(method: str, rounding: float = 0.0) -> Case:
    """A method that applies a part of each gradient a step late."""
    return Case(method=method, under_way=True, steps=60, rounding=rounding)


_ROUNDED = 2.0**-22
"""A few units in the last place: servers keep the momentum, workers derive it."""


def _asynchronous(method: str) -> Case:
    """A method whose workers do not wait: gradients are stale, so steps are smaller."""
    return Case(method=method, timing_free=False, learning_rate=0.3, steps=120)


def _loses_momentum_after(steps: int) -> Callable[[torch.optim.Optimizer], None]:
    """A plain step that sets the optimizer's momentum to zero every *steps* steps."""
    done: Counter[torch.optim.Optimizer] = Counter()

    def step(optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        done[optimizer] += 1
        if done[optimizer] == steps:
            for state in optimizer.state.values():
                for name in ("momentum_buffer", "exp_avg"):
                    if state.get(name) is not None:
                        state[name].zero_()

    return step


_SWITCHED = replace(
    _asynchronous("sync-switch:bsp_steps=4"), reference=_loses_momentum_after(4)
)


def _local(method: str, every: int = 0) -> Case:
    """A method with local steps and occasional averages. *every*: it only averages all models every so many
    steps."""
    equals = mean_of_models(every) if every else None
    return Case(method=method, learning_rate=0.3, steps=80, equals=equals)


def _outer(method: str, steps: int = 180) -> Case:
    """A method with local steps and an outer optimizer with momentum, which applies the workers' change."""
    return Case(method=method, learning_rate=0.3, steps=steps, counts=False)


def _late(compression: str) -> Case:
    """A compressor with delayed elements: they wait until they are sent, and then count at once. Training ends
    as far from the optimum as such a step is long. The kit's tensors are small."""
    return Case(
        method=f"bsp:compression={compression},compression.small=0",
        learning_rate=0.1,
        steps=100,
        lossy=0.1,
        counts=False,
    )


_SPARSE_LOCO = Case(
    method="sparse-loco:sync_every=2,compression=top-k,compression.density=0.5,compression.small=0",
    learning_rate=0.1,
    steps=100,
    lossy=0.25,
    counts=False,
)


def _in_groups(method: str) -> Case:
    """A method with groups of workers whose servers do not wait for each other."""
    return replace(_asynchronous(method), together=4, racks=True)


def _pushed(method: str, **others: Any) -> Case:
    """The same with compressed gradients that are pushed to servers."""
    return replace(_asynchronous(method), **others)


_SENT_LATE: dict[str, Any] = {"learning_rate": 0.1, "lossy": 0.1, "counts": False}
_TOP_K = "compression=top-k,compression.density=0.5,compression.small=0"
_EF21 = "bsp:compression=ef21,compression.density=0.5,compression.small=0"
_LOW_RANK = (
    "bsp:compression=powersgd,compression.rank=1,compression.small=0,"
    "compression.warmup_steps=0"
)

CASES: tuple[Case, ...] = (
    Case(method="bsp", equals=mean_of_gradients),
    Case(method="bsp:overlap=false", equals="bsp"),
    Case(method="bsp:collective=parameter-server", equals=mean_of_gradients),
    Case(method="bsp:collective=ring", equals=mean_of_gradients),
    Case(method="bsp:collective=tree", equals=mean_of_gradients),
    Case(method="bsp:collective=halving-doubling", equals=mean_of_gradients),
    Case(method="bsp:collective=hierarchical", racks=True, equals=mean_of_gradients),
    Case(method="bsp:collective=auto", racks=True, equals=mean_of_gradients),
    Case(method="bsp:collective=rina", aggregates=True, equals=mean_of_gradients),
    Case(method="bsp:compression=bf16", lossy=2**-8),
    Case(method="bsp:compression=int8", lossy=1 / 127),
    Case(method="bsp:compression=int4,compression.error_feedback=true", lossy=1 / 7),
    Case(method="bsp:compression=qsgd", lossy=1 / 30),
    Case(method="bsp:compression=ef-sign", learning_rate=0.1, steps=100, lossy=0.5),
    Case(method=_LOW_RANK, learning_rate=0.3, steps=80, lossy=0.5),
    Case(method=_EF21, learning_rate=0.3, steps=90, counts=False),
    _late("dgc,compression.density=0.5,compression.momentum=0"),
    _late("gd-top-k,compression.epoch_steps=3"),
    _late("top-k,compression.density=0.5"),
    Case(method="priority", equals="bsp"),
    Case(method="dear", equals="bsp:collective=ring"),
    Case(method="dear:collective=auto", racks=True, equals=mean_of_gradients),
    Case(method="dear:collective=hierarchical", racks=True, equals=mean_of_gradients),
    Case(method="osp:collective=native"),
    Case(method="osp:collective=native,overlap=false,defer=nothing", equals="bsp"),
    Case(method="osp:collective=hierarchical", racks=True),
    _deferring("osp:collective=auto,defer=most,budget=constant,most=0.5,chunk=16"),
    _deferring("osp:collective=native,defer=most,budget=constant,most=0.5,chunk=16"),
    _deferring("osp:collective=native,defer=most,budget=constant,most=1,chunk=16"),
    Case(method="osp"),
    Case(method="osp:overlap=false,defer=nothing", equals=mean_of_gradients),
    _deferring("osp:defer=most,budget=constant,most=0.5,chunk=16", _ROUNDED),
    _deferring("osp:defer=most,budget=constant,most=1,chunk=16", _ROUNDED),
    _asynchronous("asp"),
    _asynchronous("ssp"),
    _asynchronous("dssp"),
    _in_groups("gssp"),
    replace(_in_groups("grouping-sgd"), counts=False),
    _pushed("asp:compression=qsgd", lossy=1 / 30),
    _pushed("ssp:compression=qsgd,replies=deltas", lossy=1 / 30),
    _pushed(f"asp:{_TOP_K},replies=deltas", **_SENT_LATE),
    _pushed(f"ssp:{_TOP_K}", **_SENT_LATE),
    _asynchronous("r2sp"),
    _asynchronous("r2sp:warmup_steps=2,overlap=false"),
    Case(method="ssp:staleness=0"),
    _local("local-sgd:sync_every=2", 2),
    _local("post-local-sgd:sync_every=4,sync_each_step_until=2"),
    _local("hierarchical-local-sgd:sync_every=4,group=2,group_every=2"),
    replace(_local("hierarchical-local-sgd:sync_every=2", 0), racks=True),
    replace(_local("local-sgd:sync_every=2,collective=hierarchical", 2), racks=True),
    replace(_local("hierarchical-local-sgd:sync_every=2,collective=auto"), racks=True),
    _outer("slowmo:sync_every=2", steps=120),
    _outer("diloco:sync_every=2"),
    replace(_outer("diloco:sync_every=2,compression=int8"), lossy=1 / 127),
    replace(_outer("diloco:sync_every=2,compression=int4"), lossy=1 / 7),
    _outer("streaming-diloco:sync_every=3,fragments=3,delay=0"),
    _outer("streaming-diloco:sync_every=8,fragments=2,delay=3", steps=400),
    _SPARSE_LOCO,
    replace(
        _local("daso:sync_every=3,delay=2,group=rack"),
        steps=100,
        counts=False,
        racks=True,
    ),
    _local("daso:sync_every=1,delay=0,group=2"),
    _local("daso:sync_every=4,delay=0,group=2,warmup_steps=3"),
    _local("sel-sync:delta=0", 1),
    _local("sel-sync:delta=0.01,window=3"),
    Case(method="backup", equals=mean_of_gradients),
    Case(method="backup:overlap=false", equals="backup"),
    Case(method="ds-sync"),
    Case(method="ds-sync:overlap=forward", state=True),
    Case(method="ds-sync:groups=topology", racks=True),
    Case(method="ds-sync:overlap=step"),
    Case(method="sync-switch:bsp_steps=1000", equals=mean_of_gradients),
    _SWITCHED,
)
"""Every registered method has at least one row."""
