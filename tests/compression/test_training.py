"""Compressed means in whole trainings, in virtual time: bytes, times, error feedback, uncompressed
first steps, and the epochs of `gd-top-k`.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import paceline
from paceline.cluster import Workload
from paceline.cluster.stand_in import stand_in
from paceline.collectives.schedules import Ring
from paceline.compression import (
    BF16,
    GradientCompression,
    Int4,
    Int8,
    full_spec,
    make,
    warmup_message,
)
from paceline.compression.gd_top_k import EPOCH_STEPS
from paceline.core.settings import Settings, parse_method
from paceline.errors import UsageError
from paceline.runtimes.join import join_runtime
from paceline.runtimes.simulated import ComputeModel
from paceline.testing.compressor_checks import Workers, gradients
from paceline.tools.auto.planner_process import predict_present
from paceline.tools.plan.predict import TrainingJob, predict
from paceline.tools.plan.script import analyze_script
from tests.compression.toys import RankOne, TopK
from tests.support.one_worker import OneWorker, compressed_average
from tests.support.simulations import run
from tests.tools.plan.helpers import cluster

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


def test_first_steps_are_dense_and_then_the_code_begins_anew():
    shape = gradients()[0]
    late = Workers(
        GradientCompression(TopK(), error_feedback=True, warmup_steps=2), shape, 3
    )
    for step in range(2):
        given = gradients(seed=step)
        mean = late.mean(given)
        for number, result in enumerate(mean.results[0]):
            exact = given[0][number] + given[1][number] + given[2][number]
            assert torch.equal(result, exact)
    fresh = Workers(GradientCompression(TopK(), error_feedback=True), shape, 3)
    for step in range(2, 5):
        given = gradients(seed=step)
        pairs = zip(
            late.mean(given).results[0], fresh.mean(given).results[0], strict=True
        )
        assert all(torch.equal(a, b) for a, b in pairs)


def test_a_bucket_may_hold_both_kinds_of_tensors():
    """A new bucket may join tensors of which one has been summed more often."""
    shape = gradients()[0]
    workers = Workers(GradientCompression(RankOne(), warmup_steps=3), shape, 2)
    for states in workers.states:
        states[3]["common"]["sums"] = 3
    given = gradients(2)
    mean = workers.mean(given)
    kinds = [leg.kind for leg in mean.legs]
    assert kinds == ["sum", "sum", "sum"]
    for number, result in enumerate(mean.results[0]):
        exact = given[0][number] + given[1][number]
        assert torch.equal(result, exact) == (number != 3)


def test_a_job_of_another_size_does_not_begin_anew():
    shape = gradients()[0]
    three, two = (
        Workers(GradientCompression(TopK(), warmup_steps=2), shape, n) for n in (3, 2)
    )
    for _ in range(5):
        three.mean(gradients(3))
    two.inherit(three)
    assert two.mean(gradients(2)).legs[0].kind == "gather"


def test_a_decayed_residual_fades():
    values = torch.linspace(-1, 1, 50)
    kept = Workers(GradientCompression(TopK(), error_feedback=True), [values], 1)
    fading = Workers(
        GradientCompression(TopK(), error_feedback=True, decay=0.5), [values], 1
    )
    for workers in (kept, fading):
        workers.mean([[values]])
    one, half = (w.states[0][0]["residual"] for w in (kept, fading))
    assert one.any()
    assert torch.equal(half, 0.5 * one)


def test_residuals_are_wider_than_16_bits():
    for dtype, wide in [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float64, torch.float64),
        (torch.complex64, torch.complex64),
    ]:
        compression = GradientCompression(TopK(), error_feedback=True)
        state = compression.init_state(torch.zeros(3, dtype=dtype), "x", 0)
        assert state["residual"].dtype == wide


def test_plans_are_made_for_what_follows_first_steps():
    """A trial in steps without a code would say nothing of those with one."""

    def body(rank):
        notes = []
        for first in (0, 9):
            model = torch.nn.Sequential(*(torch.nn.Linear(200, 200) for _ in range(4)))
            optimizer = paceline.distribute(
                model,
                torch.optim.SGD(model.parameters(), lr=1e-3),
                buckets="optimal",
                compression=f"bf16:warmup_steps={first}",
            )
            for _ in range(60):
                optimizer.zero_grad()
                model(torch.full((1, 200), 1.0 + rank)).sum().backward()
                optimizer.step()
            optimizer.finish()
            notes.append(list(join_runtime().recorder.notes))
        return notes

    compute = ComputeModel(forward=0.002, backward=0.004)
    for at_once, later in run(2, body, compute=compute):
        assert len(at_once) == 1
        assert set(later) == set(at_once), "the second training's is another one"


WORKERS, EPOCH, SIDE = 4, 5, 64
DENSE = 4 * SIDE * SIDE
WARM_UP = 4 * EPOCH
SPEC = "bsp:compression=gd-top-k,buckets=single"
NO_PLAN = SimpleNamespace(estimate=lambda spec: None)
WORKLOAD = Workload(
    names=("weight",), sizes=(DENSE,), forward=(0.01,), backward=(0.01,),
    shapes=((SIDE, SIDE),),
)  # fmt: skip


def sent(epochs, sampled=True, spec=SPEC, stands_in=False):
    """Bytes that rank 0 sends in each step of so many epochs."""

    def body(rank):
        runtime, data = join_runtime(), torch.zeros(EPOCH * WORKERS, SIDE)
        model = stand_in(WORKLOAD) if stands_in else torch.nn.Linear(SIDE, SIDE, False)
        sampler = paceline.Sampler(data, WORKERS)
        optimizer = paceline.distribute(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            method=spec,
            sampler=sampler if sampled else None,
        )
        for _ in range(epochs):
            for batch in sampler:
                inputs = torch.ones(1) if stands_in else torch.randn(len(batch), SIDE)
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
        optimizer.finish()
        return [step.bytes_sent for step in runtime.recorder.steps]

    return run(cluster(WORKERS), body)[0]


def sends_all(bytes_sent):
    """Whether a step sends what it does without compression, and a few bytes who takes part."""
    whole = 2 * (WORKERS - 1) / WORKERS * DENSE
    return whole <= bytes_sent <= whole + 100


def test_epochs_are_the_sampler_s_and_the_last_step_of_each_sends_all(capsys):
    steps = sent(6)
    whole = [number for number, size in enumerate(steps) if sends_all(size)]
    assert whole == list(range(EPOCH - 1, 6 * EPOCH, EPOCH))
    within = [steps[first : first + EPOCH - 1] for first in range(0, 6 * EPOCH, EPOCH)]
    assert all(max(epoch) - min(epoch) < 100 for epoch in within)
    firsts = [epoch[1] for epoch in within]
    assert firsts[:5] == sorted(set(firsts[:5]), reverse=True)
    assert firsts[5] == firsts[4]  # the warm-up is over
    (told,) = [
        one for one in capsys.readouterr().err.splitlines() if "sends more" in one
    ]
    assert f"first {WARM_UP} steps" in told
    assert "guess" not in told


def test_without_a_sampler_an_epoch_is_short_and_said_to_be_a_guess(capsys):
    steps = sent(2, sampled=False)
    assert max(steps) - min(steps) < 100  # all are within the first
    told = capsys.readouterr().err
    assert f"first {4 * EPOCH_STEPS} steps" in told
    assert "guess" in told
    assert "compression.epoch_steps" in told


def test_who_says_how_many_steps_an_epoch_has_is_heeded(capsys):
    steps = sent(2, spec=SPEC + ",compression.epoch_steps=3")
    assert [sends_all(size) for size in steps[:6]] == 2 * [False, False, True]
    assert "first 12 steps" in capsys.readouterr().err


@pytest.mark.parametrize("code", ["gd-top-k", "dgc,compression.warmup_steps=10"])
def test_stand_ins_send_in_first_steps_what_real_gradients_do(code):
    """On the mean of an epoch's steps, where codes take turns."""
    spec = f"bsp:compression={code},buckets=single"
    real, stood = (
        sent(6, spec=spec, stands_in=stands_in) for stands_in in (False, True)
    )
    for first in range(0, 6 * EPOCH, EPOCH):
        mine, theirs = (sum(one[first : first + EPOCH]) for one in (stood, real))
        assert mine == pytest.approx(theirs, rel=0.01)
    assert sum(stood[:EPOCH]) > 1.5 * sum(stood[-EPOCH:])


def test_what_is_said_of_first_steps_is_what_is_sent():
    code = make("gd-top-k").with_epoch(EPOCH)
    early, late = (
        sum(leg.size for leg in legs)
        for legs in (
            code.code.warmup_wire_bytes([(SIDE, SIDE)], torch.float32, WORKERS)[0][1],
            code.code.wire_bytes([(SIDE, SIDE)], torch.float32, WORKERS),
        )
    )
    said = warmup_message(code, [(SIDE, SIDE)], torch.float32, WORKERS)
    assert f"{late / DENSE:.1%} later" in said
    assert early > 2 * late
    settled = code.steady_state()
    assert not warmup_message(settled, [(SIDE, SIDE)], torch.float32, WORKERS)
    assert warmup_message(make("dgc"), [(SIDE, SIDE)], torch.float32, WORKERS)
    assert not warmup_message(make("top-k"), [(SIDE, SIDE)], torch.float32, WORKERS)


def test_how_long_an_epoch_is_makes_no_other_code_of_it():
    """What coding takes is measured once for all."""
    code = make("gd-top-k:speed=fastest")
    assert full_spec(code) == full_spec(code.with_epoch(7))
    assert code.with_epoch(7) != code
    assert make("gd-top-k:epoch_steps=3").with_epoch(7) == make(
        "gd-top-k:epoch_steps=3"
    )


def test_a_plan_counts_the_sampler_s_epochs_and_says_what_it_leaves_out():
    def found(epoch_steps):
        job = TrainingJob(
            cluster=cluster(WORKERS), workload=WORKLOAD, epoch_steps=epoch_steps
        )
        return predict(job, SPEC), predict_present(NO_PLAN, SPEC, job)

    (short, present), (long, later) = found(EPOCH), found(1000)
    assert short.bytes_sent == pytest.approx(sum(sent(6)[-EPOCH:]) / EPOCH, rel=0.01)
    assert short.bytes_sent > 2 * long.bytes_sent
    assert present.seconds > later.seconds
    (note,) = [note for note in short.notes if "sends more" in note]
    assert f"first {WARM_UP} steps" in note
    assert "later steps" in note


SCRIPT = """
import torch, paceline
paceline.init()
data = torch.zeros(20, 4)
sampler = paceline.Sampler(data, 4)
model = torch.nn.Linear(4, 1)
optimizer = paceline.distribute(
    model, torch.optim.SGD(model.parameters(), lr=0.1), {sampler}
)
for batch in sampler:
    optimizer.zero_grad()
    model(data[batch]).mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("given", "steps"), [("sampler=sampler", 5), ("", 0)])
def test_a_script_s_epochs_are_among_its_facts(given, steps, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(sampler=given))
    assert analyze_script(str(script), [], tmp_path).epoch_steps == steps
