"""Momentum in samples: updates of parts of a step do what bsp's step does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.methods.gssp.weighting import Weighted, by_samples, by_updates
from tests.support.gssp_net import SGD
from tests.support.profiles import examples

RATE, MOMENTUM = 0.1, 0.7
Weigh = Callable[[Any, float], Weighted]


def path(
    weigh: Weigh,
    updates: Sequence[tuple[float, float]],
    slope: float = 0.0,
    start: float = 0.0,
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
    **how: Any,
) -> list[float]:
    """Where updates lead, one after the other, each of a weight and of a gradient, to which
    *slope* times the place is added."""
    x = torch.nn.Parameter(torch.tensor([start], dtype=torch.float64))
    if optimizer is torch.optim.SGD:
        how = SGD | {"lr": RATE, "momentum": MOMENTUM} | how
    inner = optimizer([x], **how)  # type: ignore[call-arg]
    plain = {k: v for k, v in inner.param_groups[0].items() if k != "params"}
    places = []
    for weight, gradient in updates:
        (scaled,), rate, factor = weigh([plain], weight)
        inner.param_groups[0].update({**scaled, "lr": scaled["lr"] * rate})
        x.grad = factor * (torch.full_like(x, gradient) + slope * x.detach())
        inner.step()
        places.append(x.item())
    return places


def train(weigh: Weigh, updates: Sequence[tuple[float, float]], **how: Any) -> float:
    """Where updates end."""
    return path(weigh, updates, **how)[-1]


REST = [(1.0, 0.0)] * 80
"""Until momentum has nothing left to move."""
WEIGHTS = st.lists(st.sampled_from([1 / 16, 1 / 4, 0.3, 1.0, 2.0]), max_size=8)


@pytest.mark.parametrize("nesterov", [False, True])
@settings(max_examples=examples(25))
@given(before=WEIGHTS, weight=st.floats(0.01, 3.0), after=WEIGHTS)
def test_a_gradient_moves_as_far_as_under_bsp_whatever_comes_before_and_after(
    nesterov: bool, before: list[float], weight: float, after: list[float]
) -> None:
    rest = [(w, 0.0) for w in after] + REST
    none = [(w, 0.0) for w in before]
    moved = train(by_samples, [*none, (weight, 1.0), *rest], nesterov=nesterov)
    assert moved == pytest.approx(-RATE * weight / (1 - MOMENTUM), rel=1e-9)


def test_as_torch_would_have_it_weights_that_differ_do_not() -> None:
    """A control: the learning rate alone, and m^w."""

    def naive(how: Any, weight: float) -> Weighted:
        momentum = how[0]["momentum"] ** weight
        rate = weight * (1 - momentum) / (1 - how[0]["momentum"])
        return Weighted([{**how[0], "momentum": momentum}], rate)

    moved = train(naive, [(1.0, 1.0), *[(1 / 16, 0.0)] * 1000])
    assert moved != pytest.approx(-RATE / (1 - MOMENTUM), rel=0.5)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("workers", [1, 4, 16])
def test_under_constant_gradients_the_end_is_that_of_bsp(
    workers: int, nesterov: bool
) -> None:
    steps = 7
    bsp = train(by_updates, [(1.0, 1.0)] * steps + REST, nesterov=nesterov)
    alone = [(1 / workers, 1.0)] * (steps * workers)
    assert train(by_samples, alone + REST, nesterov=nesterov) == pytest.approx(bsp)
    # Some as parcels: half of the workers at once.
    mixed = [(1 / workers, 1.0)] * (workers // 2) + [(1 - workers // 2 / workers, 1.0)]
    assert train(by_samples, mixed * steps + REST, nesterov=nesterov) == pytest.approx(
        bsp
    )


def test_a_whole_step_is_bsps_bit_for_bit() -> None:
    updates = [(1.0, g) for g in (1.0, -0.3, 0.7, 0.1)]
    decay = {"weight_decay": 0.1, "slope": 0.3, "start": 1.0}
    assert train(by_samples, updates, **decay) == train(by_updates, updates, **decay)


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_on_a_quadratic_it_follows_bsp_and_momentum_by_updates_does_not(
    decay: float,
) -> None:
    workers, steps = 16, 40

    def places(weigh: Weigh, parts: int) -> list[float]:
        """After each step of all."""
        updates = [(1 / parts, 0.0)] * (steps * parts)
        how = {"weight_decay": decay, "start": 1.0, "lr": 0.02, "momentum": 0.9}
        return path(weigh, updates, slope=1.0 - decay, **how)[parts - 1 :: parts]

    def farthest(others: list[float]) -> float:
        return max(abs(a - b) for a, b in zip(bsp, others, strict=True))

    bsp = places(by_updates, 1)
    samples, updates = places(by_samples, workers), places(by_updates, workers)
    assert farthest(updates) > 3 * farthest(samples)


def test_adam_moves_as_far_as_under_bsp() -> None:
    adam = {"optimizer": torch.optim.Adam, "lr": 0.01}
    bsp = train(by_updates, [(1.0, 1.0)] * 20, **adam)
    assert train(by_samples, [(1 / 4, 1.0)] * 80, **adam) == pytest.approx(bsp)
    (scaled,), _, _ = by_samples([{"lr": 1.0, "betas": [0.9, 0.99]}], 0.5)
    assert scaled["betas"] == pytest.approx([0.9**0.5, 0.99**0.5])


def test_no_momentum_needs_nothing() -> None:
    assert train(by_samples, [(0.25, 1.0)] * 8, momentum=0.0) == pytest.approx(-0.2)


def test_a_group_without_momentum_beside_one_that_has_it() -> None:
    how = [SGD | {"momentum": 0.9}, SGD | {"weight_decay": 0.5}]
    groups, rate, factor = by_samples(how, 0.25)
    plain = groups[1]
    # lr (c g + decay' x) is 0.25 (g + decay x)
    assert plain["lr"] * rate * factor == pytest.approx(0.25)
    assert plain["lr"] * rate * plain["weight_decay"] == pytest.approx(0.125)


def test_what_is_of_many_steps_does_not_overflow() -> None:
    for momentum in (0.1, 0.7, 0.9):
        moved = train(by_samples, [(1e6, 1.0), *REST * 2], momentum=momentum)
        assert moved == pytest.approx(-RATE * 1e6 / (1 - momentum), rel=1e-3)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ([SGD | {"momentum": 0.9}, SGD | {"momentum": 0.8}], "one momentum"),
        ([SGD | {"momentum": 1.0}], "below 1"),
        ([{"lr": 1.0, "momentum": 0.9, "alpha": 0.99}], "expected SGD"),
    ],
)
def test_what_is_not_known_is_refused(how: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        by_samples(how, 0.5)
