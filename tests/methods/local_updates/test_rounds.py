"""When workers meet, what they send then, compressed or not, and what becomes of it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import paceline
from paceline.cluster import Cluster, Rack
from paceline.compression import NoCompression, make
from paceline.errors import WorkerFailedError
from paceline.interfaces.buckets import stand_in_for
from paceline.methods.local_updates import SparseLoCo, StreamingDiLoCo
from paceline.methods.local_updates.fragments import deal_out
from paceline.testing import inspect
from paceline.testing.problems import Counting, Quadratic, centers_of
from tests.methods.local_updates.helpers import (
    CLOSE,
    apart,
    count,
    double,
    mean,
    momentum,
    sgd,
    spread,
    train,
)
from tests.support.tables import crossed
from tests.support.training import flat, loss_of, simulate

PLAIN = "outer_learning_rate=1,outer_momentum=0,nesterov=false"
WEIGHTS = 16
"""Bytes that each of two workers sends to say what it weighs, and whether it trains."""
MODEL = 4 * 18
"""Bytes that each of two sends to form a mean of the model of `Counting`."""


def two_racks(each: int = 2, **keys: Any) -> Cluster:
    rack = Rack(workers=each, link=125e6, latency=50e-6, uplink=62.5e6, **keys)
    return Cluster((rack, rack))


def counting() -> nn.Module:
    return Counting().double()


# ---- means ----


@pytest.mark.parametrize("every", [2, 7])
@pytest.mark.parametrize("optimizer", [sgd, momentum])
def test_with_equal_curvatures_the_mean_of_models_is_that_of_bsp(
    every: int, optimizer: Any
) -> None:
    """Whatever the length of rounds: gradients are linear in parameters there."""
    keys = {
        "make": lambda: Quadratic((torch.float64,) * 3),
        "loss": lambda model, rank, step: model(centers_of(rank, step + 1)),
        "optimizer": optimizer,
    }
    local = train(f"local-sgd:sync_every={every}", 3, 8, **keys)
    bsp = train("bsp", 3, 8, **keys)
    assert spread(local, 0) > 0.01
    for step in range(8):
        assert apart([mean(local, step)], [bsp[0].steps[step]]) < CLOSE


def test_each_worker_clips_its_own_gradient() -> None:
    local = train("local-sgd:sync_every=1", 2, 3, optimizer=sgd, clip_norm=0.1)
    bsp = train("bsp", 2, 3, optimizer=sgd, clip_norm=0.1)
    assert apart(local[0].steps, bsp[0].steps) > 1e-6


def test_a_round_leaves_the_mean_of_all_models_where_it_is() -> None:
    together = train("local-sgd:sync_every=4", 3, 4)
    apart_still = train("local-sgd:sync_every=100", 3, 4)
    assert spread(apart_still, 3) > 1e-3
    assert spread(together, 3) == 0
    assert apart([mean(together, 3)], [mean(apart_still, 3)]) < CLOSE


class Samples(nn.Module):
    """A loss that is a mean over samples, each with a target of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2).double()

    def forward(self, samples: list[int]) -> torch.Tensor:
        drawn = [torch.Generator().manual_seed(sample) for sample in samples]
        x = torch.stack([torch.randn(3, generator=one).double() for one in drawn])
        return (self.layer(x).tanh() - x[:, :2]).square().sum(1).mean()


@pytest.mark.parametrize("method", ["local-sgd:sync_every=3", "diloco:sync_every=3"])
def test_a_worker_with_twice_the_samples_is_two_workers(method: str) -> None:
    def on(workers: int, shares: Any, own: Any) -> Any:
        def body(rank: int) -> torch.Tensor:
            sampler = paceline.Sampler(range(21), 3, shares=shares, shuffle=False)
            model = Samples()
            optimizer = paceline.distribute(
                model, sgd(model.parameters()), method=method, sampler=sampler
            )
            for number, batch in enumerate(sampler):
                optimizer.zero_grad()
                model(own(rank, number, batch)).backward()
                optimizer.step()
            optimizer.finish()
            return flat(model)

        return simulate(workers, body)

    def doubled(rank: int, number: int, batch: list[int]) -> list[int]:
        """The first worker's two samples are one, twice."""
        assert len(batch) == 2 - rank
        return [2 * number + rank] * len(batch)

    def in_three(rank: int, number: int, batch: list[int]) -> list[int]:
        assert len(batch) == 1
        return [2 * number + rank // 2]

    (two, _), (three, *_) = on(2, (2, 1), doubled), on(3, None, in_three)
    assert apart([two], [three]) < CLOSE


def test_who_is_out_of_data_weighs_what_it_has_done_since_the_last_round() -> None:
    """A round after step 4; one with 4 and 1 more; the rest is the first worker's own."""
    keys = {"make": Counting, "loss": count}
    keys["optimizer"] = lambda parameters: torch.optim.SGD(parameters, lr=1.0)
    for one in train("local-sgd:sync_every=4", 2, (10, 5), **keys):
        assert one.end.tolist() == pytest.approx([-((8 * 4 + 5 * 1) / 5 + 2)] * 18)


# ---- bytes, and groups ----


@pytest.mark.parametrize(
    ("method", "bytes_sent"),
    [
        ("local-sgd:sync_every=4", [0, 0, 0, MODEL + WEIGHTS] * 2),
        ("diloco:sync_every=4", [0, 0, 0, MODEL + WEIGHTS] * 2),
        ("slowmo:sync_every=4", [0, 0, 0, MODEL + WEIGHTS] * 2),
        (
            "post-local-sgd:sync_every=3,sync_each_step_until=2",
            [1, 1, 0, 0, 1, 0, 0, 1],
        ),
    ],
)
def test_a_round_costs_one_mean_of_the_model_and_steps_in_between_nothing(
    method: str, bytes_sent: list[int]
) -> None:
    keys = {"make": Counting, "loss": count, "optimizer": sgd}
    for one in train(method, 2, 8, **keys):
        if max(bytes_sent) > 1:
            assert one.sent == bytes_sent
        assert [size > 0 for size in one.sent] == [size > 0 for size in bytes_sent]


def test_a_fragment_travels_in_its_turn() -> None:
    """Of 12, 5 and 1 elements."""
    method = "streaming-diloco:sync_every=6,fragments=3,delay=0,keep_local=0"
    for one in train(method, 2, 12, make=Counting, loss=count, optimizer=sgd):
        assert one.sent[::2] == [0] * 6
        small = [size - WEIGHTS for size in one.sent[1::2]]
        # With each round all say who still trains: that waits for nobody.
        said = small[0] - 4 * 12
        assert small == [4 * n + said for n in (12, 5, 1)] * 2
        assert 0 < said <= 16


def test_means_of_a_group_stay_in_it() -> None:
    """Only every fourth step is anything sent to the other rack."""
    method = "hierarchical-local-sgd:sync_every=4,group=rack,group_every=2"
    trained = train(method, two_racks(), 8)
    inside = [spread(trained[:2], step) == 0 for step in range(8)]
    across = [spread(trained, step) == 0 for step in range(8)]
    assert inside == [False, True] * 4
    assert across == [False, False, False, True] * 2


@pytest.mark.parametrize("group", ["rack", "host", "2"])
def test_groups_are_racks_or_hosts_or_so_many_workers(group: str) -> None:
    cluster = two_racks(4, workers_per_host=2)
    method = f"hierarchical-local-sgd:sync_every=4,group={group},group_every=1"
    trained = train(method, cluster, 1)
    size = 4 if group == "rack" else 2
    for first in range(0, 8, size):
        assert spread(trained[first : first + size], 0) == 0
    assert spread(trained[size - 1 : size + 1], 0) > 0


def test_a_group_that_averages_in_each_step_is_one_worker() -> None:
    """Two racks of two under SGD: local SGD of two, each with the data of both."""

    def of_both(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return (loss_of(model, 2 * rank, step) + loss_of(model, 2 * rank + 1, step)) / 2  # type: ignore[operator]

    racks = train("hierarchical-local-sgd:sync_every=3,group=rack", two_racks(), 8)
    two = train("local-sgd:sync_every=3", 2, 8, loss=of_both)
    assert apart(racks[0].steps, two[0].steps) < CLOSE
    assert apart([racks[0].end], [two[0].end]) < CLOSE


# ---- fragments, delay, mixing ----


def test_one_fragment_without_delay_and_mixing_is_diloco() -> None:
    outer = "outer_learning_rate=0.7,outer_momentum=0.9"
    streaming = train(
        f"streaming-diloco:sync_every=3,fragments=1,delay=0,keep_local=0,{outer}", 3, 8
    )
    diloco = train(f"diloco:sync_every=3,{outer}", 3, 8)
    for one, other in zip(streaming, diloco, strict=True):
        assert apart([*one.steps, one.end], [*other.steps, other.end]) == 0


def test_who_mixes_in_nothing_is_never_synchronised() -> None:
    mixing = train(
        "streaming-diloco:sync_every=2,fragments=2,delay=0,keep_local=1", 2, 6
    )
    never = train("local-sgd:sync_every=100", 2, 6)
    for one, other in zip(mixing, never, strict=True):
        assert apart(one.steps, other.steps) == 0


def test_each_parameter_is_synchronised_once_in_a_round() -> None:
    """Four tensors, two of them in a fragment; each is equal on both workers just after its
    turn, and at no other time."""
    method = "streaming-diloco:sync_every=4,fragments=2,delay=0,keep_local=0"
    first, second = train(method, 2, 12)
    sizes = [p.numel() for p in first.model.parameters()]
    equal = [
        [torch.equal(x, y) for x, y in zip(a.split(sizes), b.split(sizes), strict=True)]
        for a, b in zip(first.steps, second.steps, strict=True)
    ]
    times = [tuple(n + 1 for n in range(12) if equal[n][i]) for i in range(4)]
    assert set(times) == {(2, 6, 10), (4, 8, 12)}


def test_fragments_are_of_about_one_size_and_neighbours_in_different_ones() -> None:
    method = StreamingDiLoCo(sync_every=4, fragments=2, delay=0)

    def dealt(*sizes: int) -> list[list[int]]:
        order = [nn.Parameter(torch.zeros(size)) for size in sizes]
        number = {id(parameter): n for n, parameter in enumerate(order)}
        return [[number[id(p)] for p in part] for part in deal_out(method, order)]

    assert dealt(8, 8, 8, 8, 8, 8) == [[0, 2, 4], [1, 3, 5]]
    sizes = (90, 10, 40, 20, 30, 10)
    assert [sum(sizes[n] for n in part) for part in dealt(*sizes)] == [100, 100]


def test_a_mean_is_used_so_many_steps_after_it_was_sent() -> None:
    """Workers walk by 0.1 and 0.3 a step. After step 4 both have sent what they have moved;
    the mean is there after step 6, and a half of each one's own stays."""

    def loss(model: nn.Module, rank: int, step: int) -> Any:
        return model() * (1 + 2 * rank)

    method = f"streaming-diloco:sync_every=4,fragments=1,delay=2,keep_local=0.5,{PLAIN}"
    slow, fast = train(method, 2, 6, make=counting, loss=loss, optimizer=sgd)
    before = [places[0].item() for places in slow.steps[:5]]
    assert before == pytest.approx([-0.1 * n for n in range(1, 6)])
    anchor = -(0.4 + 1.2) / 2
    assert slow.steps[5][0].item() == pytest.approx((anchor - 0.6) / 2)
    assert fast.steps[5][0].item() == pytest.approx((anchor - 1.8) / 2)


def test_nobody_waits_for_a_mean_that_has_time() -> None:
    """A model of 2 MB takes about 17 ms to be averaged at 1 Gbit/s, and a step 10 ms."""

    def make() -> nn.Module:
        model = Counting()
        for parameter in model.parameters():
            stand_in_for(2_000_000 * parameter.numel() // 18, parameter)
        return model

    def trained(method: str) -> Any:
        keys = {"make": make, "loss": count, "optimizer": sgd, "pace": 0.01}
        return train(method, 2, 16, **keys)[0]

    waits = trained("streaming-diloco:sync_every=4,fragments=1,delay=0")
    late = trained("streaming-diloco:sync_every=4,fragments=1,delay=3")
    never = trained("local-sgd:sync_every=100")
    assert late.seconds == pytest.approx(never.seconds, rel=1e-6)
    assert waits.seconds > never.seconds + 4 * 0.015
    assert sum(late.sent) >= 4 * 2_000_000 * 0.99


# ---- the end, looks and loads ----


@pytest.mark.parametrize(
    "method",
    [
        "post-local-sgd:sync_every=3,sync_each_step_until=3",
        "hierarchical-local-sgd:sync_every=6,group=2,group_every=2",
        "diloco:sync_every=3",
        "streaming-diloco:sync_every=3,fragments=1,delay=0,keep_local=0",
    ],
)
def test_where_nobody_has_trained_since_the_last_mean_the_end_moves_nothing(
    method: str,
) -> None:
    for one in train(method, 2, 6):
        assert torch.equal(one.end, one.steps[-1])


SPARSE = "top-k:density=0.1,error_feedback=true"


@pytest.mark.parametrize(
    ("method", "compression"),
    [
        ("slowmo:sync_every=4", "none"),
        ("diloco:sync_every=4", "none"),
        ("diloco:sync_every=4", SPARSE),
        ("local-sgd:sync_every=4", SPARSE),
    ],
)
def test_a_last_round_that_is_not_full_is_a_plain_mean(
    method: str, compression: str
) -> None:
    """And is not compressed: what that left out no other round would bring."""
    first, second = train(method, 2, 7, **WIDE, compression=compression)
    plain = (first.steps[-1] + second.steps[-1]) / 2
    assert apart([first.end, second.end], [plain, plain]) < CLOSE


def test_what_is_under_way_at_the_end_is_used() -> None:
    """Sent after step 4, it would be there after step 7; training ends after step 5."""
    method = "streaming-diloco:sync_every=4,fragments=1,delay=3,keep_local=0"
    gone_on = train(method, 2, 7)
    for ended in train(method, 2, 5):
        assert not torch.equal(ended.end, ended.steps[-1])
        assert torch.equal(ended.end, gone_on[0].steps[6])


def test_an_evaluation_sees_the_anchor_or_the_mean_of_all() -> None:
    """The anchor, and the statistics of its round, whoever looks alone; the mean where no outer
    optimizer keeps an anchor."""
    seen: dict[Any, list[torch.Tensor]] = {}

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).double()

    def tensors(model: nn.Module) -> list[torch.Tensor]:
        return [t.clone() for t in model.state_dict().values() if t.is_floating_point()]

    def watch(rank: int, step: int, model: nn.Module, optimizer: Any) -> None:
        seen[rank, step] = before = tensors(model)
        if step == 5 and rank >= first_that_looks:
            with optimizer.consolidated():
                seen[rank, "shown"] = tensors(model)
            assert apart(before, tensors(model)) == 0

    first_that_looks = 1
    train("diloco:sync_every=4", 2, 6, make=make, watch=watch)
    assert apart(seen[1, "shown"], seen[0, 3]) == 0
    first_that_looks = 0
    train("local-sgd:sync_every=4", 2, 6, make=make, watch=watch)
    assert apart(seen[0, 5], seen[1, 5]) > 0
    for rank in range(2):
        means = [(a + b) / 2 for a, b in zip(seen[0, 5], seen[1, 5], strict=True)]
        assert apart(seen[rank, "shown"], means) < CLOSE


def test_parameters_that_a_script_loads_begin_a_round() -> None:
    """The anchor is theirs, and there is no momentum from before."""

    def watch(rank: int, step: int, model: nn.Module, optimizer: Any) -> None:
        if step == 4:
            model.load_state_dict(double().state_dict())

    def later(model: nn.Module, rank: int, step: int) -> Any:
        return loss_of(model, rank, step + 5)

    loaded = train("diloco:sync_every=2", 2, 8, watch=watch, optimizer=sgd)
    # Steps 6 and 8 hold rounds: the first of these after one step.
    first, second = train("diloco:sync_every=2", 2, 1, loss=later, optimizer=sgd)
    moved = (first.steps[0] + second.steps[0]) / 2 - flat(double())
    expected = flat(double()) + 0.7 * 1.9 * moved
    assert apart([loaded[0].steps[5]], [expected]) < CLOSE


@pytest.mark.parametrize(
    "method",
    [
        "streaming-diloco:sync_every=4,fragments=1,delay=3",
        "daso:group=2,sync_every=4,delay=3",
    ],
)
def test_what_is_under_way_is_over_before_a_checkpoint_takes_its_place(
    method: str, tmp_path: Any
) -> None:
    """Until it is in, whoever moves it writes into the buffers that the checkpoint's goes to."""
    left = []

    def watch(rank: int, step: int, model: nn.Module, optimizer: Any) -> None:
        worker = inspect(optimizer).worker
        if step == 0:
            paceline.save(tmp_path / "checkpoint")
        if step == 4:
            flying = worker.exchange if "daso" in method else worker.pending[0]
            sent = [*flying.pending]
            paceline.load(tmp_path / "checkpoint")
            left.append((len(sent), len(flying.pending)))

    train(method, 4, 6, watch=watch)
    assert any(sent for sent, _ in left)
    assert all(not pending for _, pending in left)


# ---- compression: of what has moved, tensor by tensor, and never of parameters ----

COMPRESSED = [
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


@pytest.mark.parametrize("method", crossed(2, COMPRESSED))
def test_a_code_that_loses_nothing_changes_nothing(method: str) -> None:
    """Rounding apart, where the mean would have been assigned as it is."""
    dense = train(method, 3, 11, **WIDE, compression="none")
    coded = train(method, 3, 11, **WIDE, compression=Exact())
    for plain, one in zip(dense, coded, strict=True):
        assert apart([*plain.steps, plain.end], [*one.steps, one.end]) < CLOSE


@pytest.mark.parametrize("method", crossed(2, COMPRESSED))
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
    for one in train(method, 2, 9, **keys, compression="int8"):
        assert (one.end - 1e6).abs().max() < 10


class TwoRates(nn.Module):
    """Two tensors, of which one moves ten thousand times as far as the other."""

    def __init__(self) -> None:
        super().__init__()
        self.fast = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.slow = nn.Parameter(torch.zeros(3, dtype=torch.float64))


def test_a_tensor_that_moves_little_is_not_lost_beside_one_that_moves_far() -> None:
    """They share a bucket. Codes have 127 levels."""
    for one in train(
        "diloco:sync_every=2,outer_learning_rate=0.5,outer_momentum=0,nesterov=false",
        2,
        4,
        make=TwoRates,
        loss=lambda model, rank, step: (model.fast + 1e-4 * model.slow).sum(),
        optimizer=sgd,
        compression="int8",
        buckets="single",
    ):
        assert one.end.tolist() == pytest.approx([-0.2] * 3 + [-0.2e-4] * 3)


@pytest.mark.parametrize(
    ("method", "instead"),
    [("daso:group=2", "hierarchical-local-sgd"), ("ds-sync", "local-sgd or diloco")],
)
def test_where_workers_share_no_parameters_compression_is_refused(
    method: str, instead: str
) -> None:
    with pytest.raises(paceline.PacelineError, match=f"never .*compressed.* {instead}"):
        train(method, 2, 1, compression="bf16")


class Ledger:
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
        rows = zip(self._shares(number), ends, strict=True)
        return torch.stack([share * (anchor - end) for share, end in rows]).mean(0)

    def weight(self, number: int) -> float:
        """What a worker counts in that round, in the mean."""
        return statistics.fmean(self._shares(number))

    def _shares(self, number: int) -> list[float]:
        begun, every = self._every * number, self._every
        return [min(len(own) - begun, every) / every for own in self.stepped]


def kept_back(optimizer: Any) -> torch.Tensor:
    """A worker's residuals, in the order of parameters."""
    (states,) = (
        state.save()
        for state in inspect(optimizer).worker_states
        if state.name.startswith("compression.")
    )
    rows = [states[name] for name in ("0.weight", "0.bias", "2.weight", "2.bias")]
    return torch.cat([row["residual"].reshape(-1) for row in rows])


@pytest.mark.parametrize(
    ("code", "method", "ends"),
    crossed(
        3,
        [SPARSE, "int8:error_feedback=true", "int4:error_feedback=true"],
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
    seen = Ledger(len(steps), 3)
    keys = WIDE | {"optimizer": seen.optimizer, "watch": seen.watch}
    keys["compression"] = f"{code},decay={decay}"
    *_, last = train(method, len(steps), steps, **keys)
    anchors = [flat(wide()), *last.steps[2::3]]
    moved, applied = torch.zeros_like(anchors[0]), torch.zeros_like(anchors[0])
    wrong = []
    for number, left in enumerate(seen.left):
        moved += seen.moved(anchors[number], number)
        applied += seen.weight(number) * (anchors[number] - anchors[number + 1])
        wrong.append(apart([applied + left], [moved]))
        assert left.abs().max() > 1e-6
    assert len(wrong) == max(steps) // 3
    assert max(wrong) < CLOSE if decay == 1 else wrong[-1] > 1e-6


def leg_bytes(leg: Any, workers: int) -> float:
    """What each worker sends for a collective over links between all."""
    others = workers - 1
    size: float = leg.size
    return {
        "sum": 2 * others / workers * size,
        "gather": others * size,
        "all-to-all": others / workers * size,
    }[leg.kind]


@pytest.mark.parametrize(
    ("code", "workers"),
    crossed(2, ["int8", "int4", "top-k:density=0.1", "bf16"], [2, 4]),
)
def test_a_round_costs_what_the_code_says(code: str, workers: int) -> None:
    """Each of a bucket's legs, and what says who weighs what."""
    one, *_ = train("diloco:sync_every=3", workers, 6, **WIDE, compression=code)
    expected = 0.0
    parameters = list(wide().parameters())
    for parameter in parameters:  # under wfbp each is a bucket
        legs = make(code).code.wire_bytes([parameter.shape], parameter.dtype, workers)
        expected += sum(leg_bytes(leg, workers) for leg in legs)
    beside = 3 * 16 * 2 * (workers - 1) / workers
    assert one.sent[0] == one.sent[1] == 0
    assert expected <= one.sent[2] <= expected + beside + 8 * len(parameters)


def test_what_stands_for_a_large_tensor_costs_what_that_ones_code_does() -> None:
    large = (1000, 500)

    def make_model() -> nn.Module:
        model = Counting()
        stand_in_for(4 * 1000 * 500, model.matrix, large)
        return model

    keys: dict[str, Any] = {"make": make_model, "loss": count, "optimizer": sgd}
    one, *_ = train("sparse-loco:sync_every=2", 2, 2, **keys)
    code = make(SparseLoCo.default_compression).code
    (leg,) = code.wire_bytes([large], torch.float32, 2)
    assert leg_bytes(leg, 2) <= one.sent[1] <= leg_bytes(leg, 2) + 100
    assert leg.size < 4 * 1000 * 500 / 100


def test_an_own_gradient_that_was_clipped_with_its_scale_is_refused() -> None:
    def scaled(rank: int, step: int, model: nn.Module, optimizer: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(loss_of(model, rank, step)).backward()
        scaler.step(optimizer)
        scaler.update()

    with pytest.raises(WorkerFailedError, match="clip_norm with a GradScaler"):
        train("local-sgd:sync_every=4", 2, 1, script=scaled, clip_norm=1.0)
    train("daso:group=2", 4, 1, script=scaled, clip_norm=1.0)  # of the node's mean
