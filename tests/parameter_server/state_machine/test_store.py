"""A server's parameters: torch's own optimizer, split over servers, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec import structs

from paceline.errors import UsageError
from paceline.interfaces import Work
from paceline.interfaces.buckets import Bucket, make_buckets
from paceline.interfaces.server_messages import Join, Unit
from paceline.parameter_server.client.partition import (
    NOT_SENT,
    BucketPart,
    split_buckets,
)
from paceline.parameter_server.state_machine.store import Store

SHAPES = [(300, 64), (64, 33), (512, 128), (17, 40), (256, 256)]
SMALL = [(30, 8), (8, 5), (64, 16), (17, 4), (32, 32)]
"""For an optimizer that multiplies matrices, whose tensors stay whole."""
GROUPS = [[0, 1], [2, 3, 4]]
"""Of the optimizer; `BUCKETS` cuts across them."""
BUCKETS = [[1, 0, 2], [4, 3]]

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "SGD, nesterov": lambda groups: torch.optim.SGD(
        groups, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "Adam": lambda groups: torch.optim.Adam(groups, lr=0.01, amsgrad=True),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.01),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, momentum=0.9),
    "Muon": lambda groups: torch.optim.Muon(groups, lr=0.01),
}


class Model:
    """Parameters, their optimizer and buckets."""

    def __init__(self, make: Make, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(5)
        shapes = SMALL if make is OPTIMIZERS["Muon"] else SHAPES
        self.parameters = [
            torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
            for shape in shapes
        ]
        self.optimizer = make(
            [
                {"params": [self.parameters[i] for i in group], "lr": 0.01 * (1 + g)}
                for g, group in enumerate(GROUPS)
            ]
        )
        named = [(str(i), p) for i, p in enumerate(self.parameters)]
        self.buckets = make_buckets(named, BUCKETS)

    @property
    def hyperparameters(self) -> list[dict[str, Any]]:
        return [
            {
                name: list(value) if isinstance(value, tuple) else value
                for name, value in group.items()
                if name not in NOT_SENT
            }
            for group in self.optimizer.param_groups
        ]

    def join(self, plan: list[list[BucketPart]], shard: int) -> Join:
        return Join(
            options="",
            units=[
                [u for part in parts if part.shard == shard for u in part.units]
                for parts in plan
            ],
            dtypes=[str(b.buffer.dtype).removeprefix("torch.") for b in self.buckets],
            optimizer=type(self.optimizer).__name__,
            hyperparameters=self.hyperparameters,
        )

    def flat(self, bucket: Bucket) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in bucket.parameters])

    def set_gradients(self, step: int) -> None:
        generator = torch.Generator().manual_seed(100 + step)
        for parameter in self.parameters:
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = gradient.to(parameter.dtype)

    def flat_gradient(self, bucket: Bucket) -> torch.Tensor:
        return torch.cat(
            [p.grad.reshape(-1) for p in bucket.parameters if p.grad is not None]
        )


class Servers:
    """Stores that together hold a model."""

    def __init__(self, model: Model, shards: int, load: bool = True) -> None:
        self.model = model
        self.plan = split_buckets(model.buckets, model.optimizer, shards)
        self.stores = [Store(model.join(self.plan, s)) for s in range(shards)]
        for part, bucket in self.parts() if load else ():
            store = self.stores[part.shard]
            store.load(bucket.index, model.flat(bucket)[part.start : part.stop])

    def parts(self) -> list[tuple[BucketPart, Bucket]]:
        return [
            (part, bucket)
            for bucket in self.model.buckets
            for part in self.plan[bucket.index]
        ]

    def step(self, factor: float = 1.0) -> None:
        for part, bucket in self.parts():
            gradient = self.model.flat_gradient(bucket)[part.start : part.stop].clone()
            used = [True] * len(part.units)
            how = self.model.hyperparameters
            self.stores[part.shard].apply(bucket.index, gradient, used, how, factor)

    def check_equal(self, model: Model) -> None:
        for part, bucket in self.parts():
            mine = self.stores[part.shard].flats[bucket.index]
            theirs = model.flat(model.buckets[bucket.index])
            assert torch.equal(mine, theirs[part.start : part.stop])


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_split_over_servers_it_is_one_optimizer(name: str, shards: int) -> None:
    torch_model, model = Model(OPTIMIZERS[name]), Model(OPTIMIZERS[name])
    servers = Servers(model, shards)
    if name != "Muon" and shards > 1:
        assert any(u.shape is None for p, _ in servers.parts() for u in p.units)
    for step in range(4):
        for one in (torch_model, model):
            one.set_gradients(step)
            for group in one.optimizer.param_groups:
                group["lr"] *= 0.9
        torch_model.optimizer.step()
        servers.step()
        servers.check_equal(torch_model)


def test_16_bit_parameters_stay_whole() -> None:
    torch_model, model = (Model(OPTIMIZERS["AdamW"], torch.bfloat16) for _ in range(2))
    servers = Servers(model, 2)
    for step in range(3):
        for one in (torch_model, model):
            one.set_gradients(step)
        torch_model.optimizer.step()
        servers.step()
        servers.check_equal(torch_model)


@pytest.mark.parametrize("name", ["SGD", "Adam", "Muon"])
def test_a_factor_scales_the_learning_rate(name: str) -> None:
    torch_model, model = Model(OPTIMIZERS[name]), Model(OPTIMIZERS[name])
    servers = Servers(model, 2)
    for step in range(3):
        for one in (torch_model, model):
            one.set_gradients(step)
        for group in torch_model.optimizer.param_groups:
            group["lr"] *= 0.25
        torch_model.optimizer.step()
        for group in torch_model.optimizer.param_groups:
            group["lr"] /= 0.25
        servers.step(factor=0.25)
        servers.check_equal(torch_model)


def test_what_was_not_used_stays() -> None:
    torch_model, model = Model(OPTIMIZERS["AdamW"]), Model(OPTIMIZERS["AdamW"])
    servers = Servers(model, 1)
    for one in (torch_model, model):
        one.set_gradients(0)
    for index in BUCKETS[1]:
        torch_model.parameters[index].grad = None
    torch_model.optimizer.step()
    first, second = model.buckets
    store, how = servers.stores[0], model.hyperparameters
    store.apply(0, model.flat_gradient(first), [True] * 3, how)
    store.apply(1, model.flat_gradient(second), [False] * 2, how)
    servers.check_equal(torch_model)
    assert store.versions == [1, 1]
    assert store.state(1)[0] == [[], []]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_moves_to_another_store(name: str) -> None:
    model = Model(OPTIMIZERS[name])
    ones, others = Servers(model, 2), Servers(model, 2, load=False)
    for step in range(2):
        model.set_gradients(step)
        ones.step()
    for part, bucket in ones.parts():
        old, new = ones.stores[part.shard], others.stores[part.shard]
        new.load(bucket.index, old.flats[bucket.index])
        new.put_state(
            bucket.index, new.fitting_state(bucket.index, *old.state(bucket.index))
        )
    model.set_gradients(2)
    ones.step()
    others.step()
    for part, bucket in ones.parts():
        old, new = ones.stores[part.shard], others.stores[part.shard]
        assert torch.equal(old.flats[bucket.index], new.flats[bucket.index])
        (entries, flat), (moved, moved_flat) = (
            store.state(bucket.index) for store in (old, new)
        )
        assert entries == moved
        assert torch.equal(flat, moved_flat)


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    model = Model(OPTIMIZERS["Adam"])
    store = Servers(model, 1).stores[0]
    model.set_gradients(0)
    store.apply(
        0, model.flat_gradient(model.buckets[0]), [True] * 3, model.hyperparameters
    )
    entries, payload = store.state(0)
    wrong = [entries[0], entries[1], [("exp_avg", payload.numel())]]
    with pytest.raises(UsageError, match="exp_avg"):
        store.fitting_state(0, wrong, payload)
    with pytest.raises(UsageError, match="the state of 1 units"):
        store.fitting_state(0, entries[:1], payload)
    with pytest.raises(UsageError, match=r"torch\.float32"):
        store.fitting_state(0, entries, payload.double())
    after, payload_after = store.state(0)
    assert after == entries
    assert torch.equal(payload_after, payload)


def test_state_that_is_not_by_element_stays_where_it_is() -> None:
    model = Model(lambda groups: torch.optim.Adafactor(groups))
    store = Servers(model, 1).stores[0]
    model.set_gradients(0)
    store.apply(
        0, model.flat_gradient(model.buckets[0]), [True] * 3, model.hyperparameters
    )
    with pytest.raises(UsageError, match="Adafactor's state 'row_var' cannot leave"):
        store.state(0)


def test_snapshots_are_shared_and_never_written() -> None:
    model = Model(OPTIMIZERS["SGD"])
    store = Servers(model, 1).stores[0]
    first = store.parameters(0)
    assert store.take_work() == Work(added=store.bytes[0])  # it was copied
    assert store.parameters(0) is first
    assert store.take_work() == Work()
    kept = first.clone()
    model.set_gradients(0)
    store.apply(
        0, model.flat_gradient(model.buckets[0]), [True] * 3, model.hyperparameters
    )
    store.load(1, torch.zeros_like(store.flats[1]))
    assert torch.equal(first, kept)
    assert not torch.equal(store.parameters(0), kept)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": "LBFGS"}, "'LBFGS'"),
        ({"units": []}, "0 buckets with 1 dtypes"),
        ({"dtypes": ["float8"]}, "expected a dtype of"),
        ({"dtypes": ["int64"]}, "got int64"),
        ({"units": [[Unit(0, 3, 3, 0)]]}, "a part of"),
        ({"units": [[Unit(0, 0, 3, 1)]]}, "a part of"),
        ({"units": [[Unit(0, 0, 3, 0, (2, 2))]]}, "a part of"),
        ({"optimizer": "Muon"}, "Muon cannot be made"),
        ({"units": [], "dtypes": [], "hyperparameters": []}, "SGD cannot be made"),
    ],
)
def test_descriptions_without_sense(changes: dict[str, Any], words: str) -> None:
    join = Join(
        options="",
        optimizer="SGD",
        units=[[Unit(0, 0, 3, 0)]],
        dtypes=["float32"],
        hyperparameters=[{"lr": 0.1}],
    )
    Store(join)
    with pytest.raises(UsageError, match=words):
        Store(structs.replace(join, **changes))


def test_hyperparameters_must_be_all_there() -> None:
    store = Servers(Model(OPTIMIZERS["SGD"]), 1).stores[0]
    with pytest.raises(UsageError, match="2 parameter groups, got 1"):
        store.check_hyperparameters([{"lr": 0.1}])
    with pytest.raises(UsageError, match="hyperparameters without dampening, "):
        store.check_hyperparameters([{"lr": 0.1}] * 2)
