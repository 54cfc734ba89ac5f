"""Compressed means in whole trainings, in virtual time."""

from __future__ import annotations

import pytest
import torch

import paceline
from paceline.cluster.workload import Workload
from paceline.collectives.schedules import Ring
from paceline.compression import (
    BF16,
    GradientCompression,
    Int4,
    Int8,
    make,
)
from paceline.core.settings import Settings, parse_method
from paceline.errors import UsageError
from paceline.runtimes.join import join_runtime
from paceline.runtimes.simulated import ComputeModel
from tests.support.one_worker import OneWorker, compressed_average
from tests.support.simulations import run

FLAG = 4
"""Bytes of the control message of each step."""


class Model(torch.nn.Module):
    """Two tensors, of which the second one is used only where *both*."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Parameter(torch.zeros(20, 10))
        self.second = torch.nn.Parameter(torch.zeros(50))

    def forward(self, targets, both=True):
        loss = (self.first - targets).square().mean()
        return loss + (self.second.square().sum() + self.second.sum() if both else 0)


def counted(train):
    """Bytes that this worker sends in *train*."""
    recorder, sent = join_runtime().recorder, []
    before = recorder.count_bytes
    recorder.count_bytes = lambda count: (sent.append(count), before(count))
    try:
        train()
    finally:
        recorder.count_bytes = before
    return sum(sent)


def begin(compression, **options):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"buckets": "single", "buffers": "local"} | options
    return model, paceline.distribute(
        model, optimizer, compression=compression, **options
    )


def step(model, optimizer, *inputs):
    optimizer.zero_grad()
    model(*inputs).backward()
    optimizer.step()


# ---- bytes and times ----


def ring(workers, size, **options):
    """What each worker sends of *size* bytes in a ring."""
    schedule = Ring(workers, size, **options)
    return [schedule.bytes_sent(rank) for rank in range(workers)]


def exchanged(workers, code):
    """What each worker sends of a code that goes to its owners, and comes back."""
    return [2 * (workers - 1) * code // workers] * workers


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize(
    ("compression", "sent_of"),
    [
        ("bf16", lambda n: ring(n, 2 * 250)),
        ("fp16:error_feedback=true", lambda n: ring(n, 2 * 250)),
        ("int8", lambda n: exchanged(n, {2: 10, 3: 9}[n] * (4 + 32))),  # padded
        (
            GradientCompression(Int4(), error_feedback=True),
            lambda n: exchanged(n, 6 * (4 + 32)),
        ),
        ("qsgd", lambda n: ring(n, n * 9 * (4 + 32), rounds=1)),
        ("ef-sign", lambda n: ring(n, n * (2 * 4 + 25 + 7), rounds=1)),
    ],
    ids=lambda value: "legs" if callable(value) else str(value),
)
def test_what_is_sent_is_the_codes_bytes(compression, sent_of, workers):
    def body(rank):
        model, optimizer = begin(compression)
        step(model, optimizer, torch.tensor(1.0))  # the planner learns an order

        def train():
            for _ in range(3):
                step(model, optimizer, torch.tensor(float(rank)))

        sent = counted(train)
        optimizer.finish()
        return sent

    expected = zip(sent_of(workers), ring(workers, FLAG), strict=True)
    assert run(workers, body) == [3 * (code + flag) for code, flag in expected]


def test_one_worker_sends_and_loses_nothing():
    def body(rank):
        model, optimizer = begin("int8")
        sent = counted(lambda: step(model, optimizer, torch.randn(20, 10)))
        return sent, model.first.detach().clone()

    ((sent, first),) = run(1, body)
    assert sent == 0
    assert len(first.unique()) > 100


@pytest.mark.parametrize(
    ("compression", "part"),
    [("none", 1), ("bf16", 1 / 2), ("int8", 1 / 4), ("int4", 1 / 8)],
)
def test_a_large_models_stand_in_sends_a_large_models_codes(compression, part):
    sizes = (400_000, 4_000_000, 40_000)
    workload = Workload(
        names=("a", "b", "c"),
        sizes=sizes,
        forward=(0.0,) * 3,
        backward=(0.0,) * 3,
        order=(2, 1, 0),
        update=0.0,
        batch=1,
    )

    def body(rank):
        model = paceline.stand_in(workload)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = paceline.distribute(
            model, plain, compression=compression, buckets="single"
        )
        step(model, optimizer, torch.zeros(1))
        sent = counted(lambda: step(model, optimizer, torch.zeros(1)))
        optimizer.finish()
        return sent

    dense = Ring(2, sum(sizes)).bytes_sent(0)
    assert run(2, body) == pytest.approx([part * dense] * 2, rel=0.04)  # scales


def duration(compression, memory):
    def body(rank):
        model, optimizer = begin(compression)
        step(model, optimizer, torch.tensor(1.0))
        start = paceline.now()
        step(model, optimizer, torch.tensor(1.0))
        return paceline.now() - start

    compute = ComputeModel(forward=0.0, backward=0.0, memory=memory)
    (seconds, _) = run(2, body, compute=compute)
    return seconds


@pytest.mark.parametrize("spec", ["bf16", "int8", "int8:error_feedback=true"])
def test_coding_takes_virtual_time(spec):
    """As many passes over a gradient of 1,000 bytes as it declares."""
    quick, slow = duration(spec, memory=1e15), duration(spec, memory=1e6)
    assert slow - quick == pytest.approx(
        sum(make(spec).memory_passes(2)) * 1e-3, rel=1e-3
    )
    assert duration("none", 1e15) == duration("none", 1e6)


def test_the_planner_measures_compressed_means():
    """In the step that it measures in it sends half as much where 16 bits travel."""

    def body(rank):
        most = {}
        for compression in ("none", "bf16"):
            model, optimizer = begin(compression, buckets="optimal")
            most[compression] = max(
                counted(lambda m=model, o=optimizer: step(m, o, torch.tensor(1.0)))
                for _ in range(8)
            )
            optimizer.finish()
        return most

    for most in run(2, body):
        assert most["none"] > 10 * 1000
        assert most["bf16"] == pytest.approx(most["none"] / 2, rel=0.02)


# ---- who takes part ----


UNEVEN = [
    *("bf16", "int8", "int8:error_feedback=true", "qsgd"),
    "int8:error_feedback=true,warmup_steps=6",
]
SPARSE = [
    *("top-k:density=0.3,small=0", "ef21:density=0.3,small=0"),
    "gd-top-k:epoch_steps=3,small=0",
    "dgc:density=0.3,momentum=0.5,warm_up_steps=4,small=0",
    "dgc:density=0.3,warmup_steps=5,small=0",
]
"""These end elsewhere than without compression."""


@pytest.mark.parametrize("compression", [*UNEVEN, *SPARSE])
def test_uneven_data(compression):
    """A worker out of data keeps in step and changes nothing; all end with one model."""

    def body(rank):
        model, optimizer = begin(compression)
        with optimizer.join():
            for number in range(4 + 3 * rank):
                step(model, optimizer, torch.tensor(1.0 + number))
        return model.first.detach().clone()

    first, *others = run(3, body)
    assert first.isfinite().all()
    assert all(torch.equal(first, other) for other in others)
    if compression in SPARSE:
        return

    def alone(rank):
        model, optimizer = begin("none")
        for number in range(10):
            step(model, optimizer, torch.tensor(1.0 + number))
        return model.first.detach().clone()

    (expected,) = run(1, alone)
    torch.testing.assert_close(first, expected, rtol=0.02, atol=0)


@pytest.mark.parametrize("compression", ["bf16", "int8", "int8:error_feedback=true"])
def test_unused_parameters(compression):
    """Used nowhere: no gradient, and what was left out of earlier ones is kept. Used on one
    worker: its share of the mean, everywhere."""

    def body(rank):
        model, optimizer = begin(compression)
        step(model, optimizer, torch.tensor(1.0), True)
        seen = []
        for both in (False, rank == 0, False):
            step(model, optimizer, torch.tensor(1.0), both)
            seen.append(model.second.grad is None)
        return seen, model.second.detach().clone()

    (seen, second), (also, other) = run(2, body)
    assert seen == also == [True, False, True]
    assert torch.equal(second, other)
    exact = -0.1 - 0.1 * (1 - 0.2) / 2
    torch.testing.assert_close(second, torch.full((50,), exact), rtol=0.02, atol=0)


def test_new_buckets_keep_each_tensors_state():
    """State belongs to a tensor's name: no residual is lost where plans change."""
    codes = compressed_average(GradientCompression(Int8(), error_feedback=True))
    names, total = ["first", "second"], torch.zeros(2, 10)
    given = torch.stack([torch.linspace(-1, 1, 10), torch.linspace(0, 3, 10)])

    def send(bucket):
        buffer = given[bucket].clone()
        codes.sum(OneWorker(), buffer, list(buffer), [names[i] for i in bucket])
        total[bucket] += buffer

    for plan in ([[0, 1]], [[1], [0]], [[1, 0]]):
        for bucket in plan:
            send(bucket)
    left = torch.stack([codes.states[name]["residual"] for name in names])
    assert left.any()
    torch.testing.assert_close(total + left, 3 * given)


# ---- who says so ----


def test_keys_of_a_spec():
    text = "bsp:buckets=ddp,compression=int8,compression.rounding=stochastic"
    _, settings = parse_method(text)
    assert settings.compression.code == Int8(rounding="stochastic")
    assert settings.buckets == "ddp"
    keys = settings.as_keys()
    assert keys["compression"] == "int8"
    assert Settings().changed_by(keys) == settings
    assert Settings().compression == GradientCompression()
    assert "compression" not in Settings().as_keys()
    given = Settings(compression=GradientCompression(BF16()))
    assert parse_method("bsp", given)[1].compression.code == BF16()
    assert (
        parse_method("bsp:compression=none", given)[1].compression
        == GradientCompression()
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("bsp:compression.rank=4", "'compression.rank'"),
        ("bsp:compresion=int8", "'compresion'.* 'compression'"),
        ("bsp:buckets.rule=ddp", "'buckets.rule'"),
        ("bsp:overlap.x=true", "'bsp'.* 'overlap.x'"),
    ],
)
def test_what_is_unknown_is_refused(text, words):
    with pytest.raises(UsageError, match=words):
        parse_method(text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "osp"}, "'bf16' .*'osp'"),
        ({"collective": "parameter-server", "compression": "int8"}, "'int8'.*server"),
        ({"compression": "bf15"}, "'bf15'"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused(options, words):
    def body(rank):
        with pytest.raises(UsageError, match=words):
            begin(**{"compression": "bf16"} | options)

    run(2, body)


def test_servers_add_up_linear_codes():
    def body(rank):
        model, optimizer = begin("bf16", collective="parameter-server")
        for _ in range(3):
            step(model, optimizer, torch.tensor(float(rank)))
        optimizer.finish()
        return model.first.detach().clone()

    one, other = run(2, body)
    assert torch.equal(one, other)
    assert one.any()
