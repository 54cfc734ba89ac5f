"""DASO against the same program in plain torch: nodes that exchange parameters, late."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from paceline.cluster import Cluster, Rack
from tests.methods.local_updates.helpers import double, momentum, spread, train
from tests.support.tables import crossed
from tests.support.training import Trained, flat, loss_of

STEPS = 14
CLOSE = {"rtol": 0.0, "atol": 1e-12}


# ---- the program in plain torch ----


class Alone:
    """All workers of *nodes*, whose sizes these are, in one process. *data*: how many steps
    each worker has data for."""

    def __init__(
        self,
        nodes: Sequence[int],
        every: int,
        delay: int,
        data: Sequence[int],
        optimizer: Any = momentum,
    ) -> None:
        ranks = iter(range(sum(nodes)))
        self.members = [[next(ranks) for _ in range(size)] for size in nodes]
        self.every, self.delay, self.data = every, delay, data
        self.models = [double() for _ in nodes]
        self.inner = [optimizer(model.parameters()) for model in self.models]
        self.sent: tuple[int, list[torch.Tensor], list[float]] | None = None
        self.since = [0.0] * len(nodes)

    def step(self, number: int) -> list[torch.Tensor]:
        """Each node's parameters after it."""
        rows = zip(self.members, self.models, self.inner, strict=True)
        for node, (ranks, model, inner) in enumerate(rows):
            here = [rank for rank in ranks if number < self.data[rank]]
            if not here:
                continue
            inner.zero_grad()
            for rank in here:
                (loss_of(model, rank, number) / len(here)).backward()
            inner.step()
            self.since[node] += len(here)
        begins = (number + 1) % self.every == 0
        if self.sent is not None and (begins or number >= self.sent[0]):
            self.merge()
        if begins:
            scale = len(self.models) / (len(self.data) * self.every)
            weights = [samples * scale for samples in self.since]
            models = [flat(model) for model in self.models]
            self.sent = number + self.delay, models, weights
            self.since = [0.0] * len(self.models)
            if not self.delay:
                self.merge()
        return [flat(model) for model in self.models]

    def merge(self) -> None:
        """w <- (2B*w + sum_p a_p w_p(t-B)) / (2B + sum_p a_p)."""
        assert self.sent is not None
        _, theirs, weights = self.sent
        self.sent = None
        if not sum(weights) or len(self.models) == 1:
            return
        total = sum(w * x for w, x in zip(weights, theirs, strict=True))
        for node, model in enumerate(self.models):
            kept = 2 * self.delay if weights[node] else 0
            merged = (kept * flat(model) + total) / (kept + sum(weights))
            position = 0
            for parameter in model.parameters():
                part = merged[position : position + parameter.numel()]
                parameter.data.copy_(part.view(parameter.shape))
                position += parameter.numel()


def assert_as_alone(
    trained: Sequence[Trained], alone: Alone, steps: int, but: Sequence[int] = ()
) -> None:
    """After each step, on each worker that is not out of data."""
    for number in range(steps):
        expected = alone.step(number)
        for node, ranks in enumerate(alone.members):
            for rank in ranks:
                if number < alone.data[rank]:
                    found = trained[rank].steps[number]
                    torch.testing.assert_close(found, expected[node], **CLOSE)


# ---- laws ----


@pytest.mark.parametrize(
    ("nodes", "pace"),
    crossed(
        3,
        [(2, 2), (2, 2, 2), (2, 1), (2,)],
        [(1, 0), (3, 0), (1, 1), (2, 2), (4, 2)],
    ),
)
def test_what_arrives_late_is_merged_as_the_formula_says(
    nodes: tuple[int, ...], pace: tuple[int, int]
) -> None:
    """The last row is one node: it exchanges nothing, and trains as bsp does."""
    every, delay = pace
    workers = sum(nodes)
    trained = train(f"daso:sync_every={every},delay={delay},group=2", workers, STEPS)
    assert_as_alone(trained, Alone(nodes, every, delay, [STEPS] * workers), STEPS)
    assert all(torch.equal(one.end, trained[0].end) for one in trained)


@pytest.mark.parametrize(
    ("data", "delay"),
    crossed(2, [(STEPS, 4, STEPS, STEPS), (5, 5, STEPS, 9), (1, STEPS, 6, 3)], [0, 2]),
)
def test_who_is_out_of_data_does_not_hold_its_node_back(
    data: tuple[int, ...], delay: int
) -> None:
    """Nor does it speak for it with old parameters."""
    trained = train(f"daso:sync_every=3,delay={delay},group=2", 4, data)
    assert_as_alone(trained, Alone((2, 2), 3, delay, data), max(data))
    assert all(torch.equal(one.end, trained[0].end) for one in trained)


def test_nodes_wait_for_each_other_while_warming_up() -> None:
    method = "daso:sync_every=4,delay=1,group=2,warmup_steps=3"
    trained = train(method, 4, STEPS)
    equal = [step for step in range(STEPS) if spread(trained, step) == 0.0]
    assert equal == [0, 1, 2]


def test_nothing_leaves_the_node_between_exchanges() -> None:
    sent = train("daso:sync_every=4,delay=1,group=2", 4, 12)
    inside = train("bsp", 2, 12)[0].sent[5]
    # One worker of each node speaks, in turn: in steps 3, 7 and 11.
    model = sum(p.numel() for p in double().parameters()) * 8
    for turn, step in enumerate((3, 7, 11)):
        own = [one.sent[step] for one in sent]
        speaks = [rank for rank in range(4) if own[rank] - min(own) >= model / 2]
        assert speaks == [turn % 2, 2 + turn % 2]
    for step in (5, 6, 9, 10):
        assert max(one.sent[step] for one in sent) < 1.5 * inside


def test_nobody_waits_for_an_uplink_that_is_fast_enough_for_the_delay() -> None:
    """An exchange takes a step and a half: it is hidden by a delay of two."""
    size, step = 8 * sum(p.numel() for p in double().parameters()), 0.1
    rack = Rack(workers=2, link=1e9, latency=1e-6, uplink=size / (1.5 * step))
    seconds = {
        (every, delay): train(
            f"daso:sync_every={every},delay={delay}",
            Cluster((rack, rack)),
            13,
            pace=step,
        )[0].seconds
        for every, delay in ((1000, 0), (4, 2), (4, 0))
    }
    alone = seconds[1000, 0]
    assert seconds[4, 2] == pytest.approx(alone, abs=0.1 * step)
    assert seconds[4, 0] == pytest.approx(alone + 3 * 1.5 * step, rel=0.05)
