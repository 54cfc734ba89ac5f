"""What has moved, compressed: tensor by tensor, under the names of the parameters."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import paceline
from paceline.compression import NoCompression, make
from paceline.interfaces.buckets import stand_in_for
from paceline.methods.local_updates import SparseLoCo
from paceline.testing import inspect
from paceline.testing.problems import Counting
from tests.methods.local_updates.helpers import double, momentum, sgd, train
from tests.methods.local_updates.test_laws import CLOSE, apart, count
from tests.support.tables import crossed
from tests.support.training import flat, simulate

RESIDUALS = "int8:error_feedback=true"
SPARSE = "top-k:density=0.1,error_feedback=true"
PLAIN = "outer_learning_rate=1,outer_momentum=0,nesterov=false"

METHODS = [
    "diloco:sync_every=4",
    "slowmo:sync_every=4",
    "streaming-diloco:sync_every=6,fragments=2,delay=2",
    "local-sgd:sync_every=4",
    "post-local-sgd:sync_every=4,sync_each_step_until=3",
    "hierarchical-local-sgd:sync_every=4,group=2,group_every=2",
    "sel-sync:delta=0.01,window=3",
    "sparse-loco:sync_every=4",
]


def wide() -> nn.Module:
    """The same on every worker; its matrices are large enough for sparse codes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 40), nn.Tanh(), nn.Linear(40, 30)).double()


def to_own(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """A loss on another batch in each step, whose targets differ between workers."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    x = torch.randn(8, 48, generator=generator, dtype=torch.float64)
    return (model(x) - (1 + rank) * x[:, :30]).square().mean()


WIDE: dict[str, Any] = {"make": wide, "loss": to_own}


@dataclass(frozen=True)
class Exact(NoCompression):
    """A code of which nothing is lost."""

    name: ClassVar[str] = "exact"


class TwoRates(nn.Module):
    """Two tensors, of which one moves ten thousand times as far as the other."""

    def __init__(self) -> None:
        super().__init__()
        self.fast = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.slow = nn.Parameter(torch.zeros(3, dtype=torch.float64))


def test_a_tensor_that_moves_little_is_not_lost_beside_one_that_moves_far() -> None:
    """They share a bucket. Codes have 127 levels."""

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return (model.fast + 1e-4 * model.slow).sum()  # type: ignore[operator]

    def body(rank: int) -> nn.Module:
        model = TwoRates()
        optimizer = paceline.distribute(
            model,
            sgd(model.parameters()),
            method="diloco:sync_every=2,outer_learning_rate=0.5,outer_momentum=0,nesterov=false",
            compression="int8",
            buckets="single",
        )
        for step in range(4):
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            optimizer.step()
        optimizer.finish()
        return model

    for model in simulate(2, body):
        assert model.fast.tolist() == pytest.approx([-0.2] * 3)
        assert model.slow.tolist() == pytest.approx([-0.2e-4] * 3)


# ---- what is coded: differences, and never parameters ----


@pytest.mark.parametrize("method", crossed(2, METHODS))
def test_a_code_that_loses_nothing_changes_nothing(method: str) -> None:
    """Rounding apart, where the mean would have been assigned as it is."""
    keys = {"compression": "none"}
    dense = train(method, 3, 11, **WIDE | keys)
    coded = train(method, 3, 11, **WIDE | {"compression": Exact()})
    for plain, one in zip(dense, coded, strict=True):
        assert apart(plain.steps, one.steps) < CLOSE
        assert apart([plain.end], [one.end]) < CLOSE


@pytest.mark.parametrize("method", METHODS)
def test_how_large_parameters_are_does_not_matter(method: str) -> None:
    """They are 1e6, and 8 bits of that are 4,000; all that moves is of the size of 1."""

    def make_far() -> nn.Module:
        model = double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1e6)
        return model

    def near(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        places = torch.cat([p.reshape(-1) for p in model.parameters()])
        generator = torch.Generator().manual_seed(100 * rank + step)
        goal = torch.randn(len(places), generator=generator, dtype=torch.float64)
        return (places - 1e6 - goal).square().sum()

    keys: dict[str, Any] = {"make": make_far, "loss": near, "optimizer": sgd}
    keys["compression"] = "int8"
    for one in train(method, 2, 9, **keys):
        assert (one.end - 1e6).abs().max() < 10


@pytest.mark.parametrize(
    ("method", "instead"),
    [("daso:group=2", "hierarchical-local-sgd"), ("ds-sync", "local-sgd or diloco")],
)
def test_where_workers_share_no_parameters_compression_is_refused(
    method: str, instead: str
) -> None:
    with pytest.raises(paceline.PacelineError, match=f"never .*compressed.* {instead}"):
        train(method, 2, 1, compression="bf16")


# ---- what is kept back ----


def test_what_is_left_out_of_one_code_is_sent_with_the_next() -> None:
    plain, coarse = (
        train("diloco:sync_every=2", 2, 12, compression=code)[0].end
        for code in ("none", RESIDUALS)
    )
    moved = (plain - flat(double())).abs().max()
    assert 0 < (coarse - plain).abs().max() < 0.02 * moved


def kept_back(optimizer: Any) -> torch.Tensor:
    """A worker's residuals, in the order of parameters."""
    (states,) = (
        state.save()
        for state in inspect(optimizer).worker_states
        if state.name.startswith("compression.")
    )
    rows = [states[name] for name in ("0.weight", "0.bias", "2.weight", "2.bias")]
    return torch.cat([row["residual"].reshape(-1) for row in rows])


class Seen:
    """What workers had after each of their own steps, before any mean, and what they keep
    back, all together, after each round of so many steps."""

    def __init__(self, workers: int, every: int) -> None:
        self.stepped: list[list[torch.Tensor]] = [[] for _ in range(workers)]
        self.left: list[torch.Tensor] = []
        self._optimizers: list[Any] = [None] * workers
        self._every = every

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        own = list(parameters)
        inner = momentum(own)

        def note(*_: Any) -> None:
            mine = nn.utils.parameters_to_vector(own).detach().clone()
            self.stepped[paceline.rank()].append(mine)

        inner.register_step_post_hook(note)
        return inner

    def watch(self, rank: int, step: int, model: nn.Module, optimizer: Any) -> None:
        self._optimizers[rank] = optimizer
        last = rank == len(self._optimizers) - 1
        if last and (step + 1) % self._every == 0:  # all have sent, and nobody more
            kept = [kept_back(one) for one in self._optimizers]
            self.left.append(torch.stack(kept).sum(0))

    def moved(self, anchor: torch.Tensor, number: int) -> torch.Tensor:
        """In the mean, in a round that began at the *anchor*; workers count by their steps."""
        last = self._every * (number + 1) - 1
        ends = [own[min(last, len(own) - 1)] for own in self.stepped]
        shares = self._shares(number)
        changes = [s * (anchor - end) for s, end in zip(shares, ends, strict=True)]
        return torch.stack(changes).mean(0)

    def weight(self, number: int) -> float:
        """What a worker counts in that round, in the mean."""
        return statistics.fmean(self._shares(number))

    def _shares(self, number: int) -> list[float]:
        begun = self._every * number
        return [
            min(len(own) - begun, self._every) / self._every for own in self.stepped
        ]


@pytest.mark.parametrize(
    ("code", "method", "ends"),
    crossed(
        3,
        [SPARSE, RESIDUALS, "int4:error_feedback=true"],
        [f"diloco:sync_every=3,{PLAIN}", "local-sgd:sync_every=3"],
        [((12, 12, 12), 1.0), ((12, 12, 12), 0.9), ((8, 9, 9), 1.0)],
    ),
)
def test_what_was_applied_and_what_is_kept_back_is_all_that_was_moved(
    code: str, method: str, ends: tuple[tuple[int, ...], float]
) -> None:
    """After each round, up to rounding; also where somebody leaves in the middle of one. Not
    where residuals fade."""
    steps, decay = ends
    seen = Seen(len(steps), 3)
    keys = WIDE | {"optimizer": seen.optimizer, "watch": seen.watch}
    keys["compression"] = f"{code},decay={decay}"
    *_, last = train(method, len(steps), steps, **keys)

    anchors = [flat(wide()), *last.steps[2::3]]
    moved, applied = torch.zeros_like(anchors[0]), torch.zeros_like(anchors[0])
    wrong = []
    for number, left in enumerate(seen.left):
        moved += seen.moved(anchors[number], number)
        applied += seen.weight(number) * (anchors[number] - anchors[number + 1])
        wrong.append((applied + left - moved).abs().max().item())
        assert left.abs().max() > 1e-6
    assert len(wrong) == max(steps) // 3
    assert max(wrong) < CLOSE if decay == 1 else wrong[-1] > 1e-6


@pytest.mark.parametrize("method", ["diloco:sync_every=4", "local-sgd:sync_every=4"])
def test_a_last_round_that_is_not_full_goes_without_a_code(method: str) -> None:
    """What that would leave out of it no other round would bring."""
    first, second = train(method, 2, 7, **WIDE, compression=SPARSE)
    plain = (first.steps[-1] + second.steps[-1]) / 2
    assert apart([first.end, second.end], [plain, plain]) < CLOSE


# ---- restarts ----


@pytest.mark.parametrize(
    ("method", "then"),
    crossed(
        2,
        ["diloco:sync_every=4", "streaming-diloco:sync_every=6,fragments=2,delay=2"],
        [(2, "ddp"), (3, "wfbp")],
    ),
)
def test_residuals_go_on_in_other_buckets_and_among_other_workers(
    method: str, then: tuple[int, str], tmp_path: Path
) -> None:
    """In as many workers bit for bit, where codes are those of tensors. (What a worker owns is a
    part of a bucket: in another one what int8 loses of a sum is in another's residual.)"""
    workers, buckets = then
    folder = tmp_path / "checkpoint"
    keys: dict[str, Any] = {"method": method, "compression": "ef-sign"}
    straight = simulate(2, lambda rank: restarted(rank, 0, 12, folder, **keys))
    simulate(2, lambda rank: restarted(rank, 0, 6, folder, **keys))
    keys["buckets"] = buckets
    ends = simulate(workers, lambda rank: restarted(rank, 6, 12, folder, **keys))
    assert all(torch.equal(end, ends[0]) for end in ends)
    assert torch.equal(ends[0], straight[0]) == (workers == 2)


@pytest.mark.parametrize(
    ("of", "at"),
    crossed(
        2,
        [
            ("diloco:sync_every=4", "int4"),
            (
                "streaming-diloco:sync_every=6,fragments=2,delay=2",
                "int4:error_feedback=true",
            ),
            ("sel-sync:delta=0.01,window=2", RESIDUALS),
            ("sparse-loco:sync_every=4", None),
        ],
        [3, 5],
    ),
)
def test_a_restart_anywhere_in_a_round_changes_no_bit(
    of: tuple[str, str | None], at: int, tmp_path: Path
) -> None:
    method, code = of
    folder = tmp_path / "checkpoint"
    keys: dict[str, Any] = {"method": method, "compression": code}
    straight = simulate(2, lambda rank: restarted(rank, 0, 9, folder, **keys))
    simulate(2, lambda rank: restarted(rank, 0, at, folder, **keys))
    ends = simulate(2, lambda rank: restarted(rank, at, 9, folder, **keys))
    for end in ends:
        assert torch.equal(end, straight[0])


def restarted(
    rank: int, first: int, last: int, folder: Path, **options: Any
) -> torch.Tensor:
    """Parameters of a training's end after steps *first* to *last*, of a save before that
    where it is not the whole."""
    model = wide()
    optimizer = paceline.distribute(
        model, momentum(model.parameters()), **{"buckets": "wfbp"} | options
    )
    if first:
        paceline.load(folder)
    for step in range(first, last):
        optimizer.zero_grad()
        to_own(model, rank, step).backward()
        optimizer.step()
    if not first:
        paceline.save(folder)
    optimizer.finish()
    return flat(model)


# ---- bytes ----


@pytest.mark.parametrize(
    ("code", "workers"),
    crossed(2, ["int8", "int4", "top-k:density=0.1", "bf16"], [2, 4]),
)
def test_a_round_costs_what_the_code_says(code: str, workers: int) -> None:
    """Each of a bucket's legs, and what says who weighs what."""
    parameters = list(wide().parameters())
    one, *_ = train("diloco:sync_every=3", workers, 6, **WIDE, compression=code)
    expected = 0.0
    for parameter in parameters:  # under wfbp each is a bucket
        legs = make(code).code.wire_bytes([parameter.shape], parameter.dtype, workers)
        expected += sum(leg_bytes(leg, workers) for leg in legs)
    beside = 3 * 16 * 2 * (workers - 1) / workers
    assert one.sent[0] == one.sent[1] == 0
    assert expected <= one.sent[2] <= expected + beside + 8 * len(parameters)


def leg_bytes(leg: Any, workers: int) -> float:
    """What each worker sends for a collective over links between all."""
    others = workers - 1
    size: float = leg.size
    return {
        "sum": 2 * others / workers * size,
        "gather": others * size,
        "all-to-all": others / workers * size,
    }[leg.kind]


def test_what_stands_for_a_large_tensor_costs_what_that_ones_code_does() -> None:
    large = (1000, 500)

    def make_model() -> nn.Module:
        model = Counting()
        stand_in_for(4 * 1000 * 500, model.matrix, large)
        return model

    keys: dict[str, Any] = {"make": make_model, "loss": count, "optimizer": sgd}
    one, *_ = train("sparse-loco:sync_every=2", 2, 2, **keys)
    (leg,) = make(SparseLoCo.default_compression).code.wire_bytes(
        [large], torch.float32, 2
    )
    assert leg_bytes(leg, 2) <= one.sent[1] <= leg_bytes(leg, 2) + 100
    assert leg.size < 4 * 1000 * 500 / 100
