"""Trainings in virtual time whose pushes are codes, and whose answers may be."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import paceline
from paceline.cluster import Cluster, Rack, ServerHost
from paceline.cluster.workload import Workload
from paceline.compression import COMPRESSORS, make
from paceline.errors import UsageError, WorkerFailedError
from paceline.parameter_server.state_machine.compression import code_bytes
from paceline.runtimes.simulated import ComputeModel, Simulation
from paceline.testing import inspect
from paceline.transport.protocol import HEADER_BYTES
from tests.compression.test_training import counted
from tests.compression.test_training import step as do_step
from tests.compression.toys import Halves
from tests.parameter_server.state_machine.test_compression import Largest, alone
from tests.support.tables import crossed

SHAPES = ((40, 30), (300, 200), (50,), ())
LR = 0.5


@dataclass(frozen=True, kw_only=True)
class Wild(Largest):
    """What its codes leave out is larger than what they are of."""

    name: ClassVar[str] = "wild"
    unbiased: ClassVar[bool] = True

    def _decode(self, code, parts, dtype, add):
        super()._decode(code, parts, dtype, add)
        for part in parts:
            part *= part.numel()


@dataclass(frozen=True, kw_only=True)
class Unknown(Largest):
    """Not registered."""

    name: ClassVar[str] = "unknown"


@pytest.fixture(autouse=True)
def largest(monkeypatch):
    for toy in (Largest, Halves, Wild):
        monkeypatch.setitem(COMPRESSORS, toy.name, toy)


class Given(torch.nn.Module):
    """Its gradient is what it is given, whatever its parameters are."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        for number, shape in enumerate(SHAPES):
            parameter = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
            self.register_parameter(f"p{number}", parameter)

    def forward(self, gradients):
        pairs = zip(self.parameters(), gradients, strict=True)
        return sum((p * g).sum() for p, g in pairs)


def gradients_of(rank, step, dtype=torch.float64):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in SHAPES
    ]


def residuals_of(optimizer):
    """By the name of a tensor, or of a part of one."""
    (own,) = inspect(optimizer).worker_states
    return {name: state["residual"] for name, state in own.save().items()}


def simulation(workers, servers=1, compute=None, link=1e9):
    rack = Rack(workers=workers, link=link, latency=1e-4)
    cluster = Cluster((rack,), servers=(ServerHost(),) * servers)
    return Simulation(cluster, compute=compute or ComputeModel())


def machines(runtime):
    """The servers' state machines."""
    return [service.server for service in runtime._services[0]]


def train(
    runtime,
    method,
    steps=6,
    after=lambda *_: None,
    dtype=torch.float64,
    given=gradients_of,
    momentum=0.0,
    samples=0,
    **options,
):
    """Every worker's end: parameters, residuals, gradients that it made, times its weight.

    *after* each step it is called with rank, step, model and optimizer; *given*: makes a step's
    gradients; *samples*: of a data set, cut into shares of batches.
    """
    ends = {}

    def body(rank):
        model = Given(dtype)
        plain = torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum)
        batches, own = range(steps), {}
        if samples:
            batches = paceline.Sampler(range(samples), batch_size=11, shuffle=False)
            own = {"sampler": batches}
        optimizer = paceline.distribute(model, plain, method=method, **options, **own)
        made = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
        for step, _ in zip(range(steps), itertools.cycle(batches), strict=False):
            paceline.pace(0.01 * (1 + rank))
            gradients = given(rank, step, dtype)
            optimizer.zero_grad()
            model(gradients).backward()
            weight = inspect(optimizer).run.weight
            optimizer.step()
            for total, gradient in zip(made, gradients, strict=True):
                total += gradient.double() * weight
            after(rank, step, model, optimizer)
        corrects = "error_feedback=true" in str(options).lower()
        left = residuals_of(optimizer) if corrects else {}
        left = {name: value.clone() for name, value in left.items()}
        optimizer.finish()
        ends[rank] = [p.detach().clone() for p in model.parameters()], left, made

    runtime.run(body)
    return [ends[rank] for rank in range(runtime.cluster.workers)]


# ---- laws ----


@pytest.mark.parametrize(
    ("method", "servers", "answers"),
    crossed(
        2,
        ["asp", "ssp:staleness=1", "backup", "r2sp"],
        [1, 3],
        ["full", "deltas"],
    ),
)
def test_what_was_applied_and_what_is_left_are_all_gradients(method, servers, answers):
    runtime = simulation(3, servers)
    ends = train(
        runtime, method, compression="largest:error_feedback=true", replies=answers
    )
    check_all_is_there(ends)
    parts = set().union(*(left for _, left, _ in ends))
    assert any("[" in name for name in parts) == (servers > 1)


def test_shares_of_samples_lose_nothing():
    """Each step's gradient counts by its samples, and so does what is sent of it later."""
    options = {"compression": "largest:error_feedback=true"}
    check_all_is_there(train(simulation(3), "asp", samples=61, **options))


def check_all_is_there(ends):
    """All workers end alike; what was applied and what is left are all gradients."""
    first = ends[0][0]
    for parameters, _, _ in ends:
        assert all(map(torch.equal, parameters, first))
    for number, parameter in enumerate(first):
        applied = -parameter / LR
        made = sum(total[number] for _, _, total in ends)
        left = torch.zeros_like(applied)
        for _, kept, _ in ends:
            for part, residual in kept.items():
                if part.split("[")[0] == f"p{number}":
                    _add_part(left, part, residual)
        assert left.any() or left.numel() == 1
        torch.testing.assert_close(applied + left, made, rtol=1e-9, atol=1e-9)


def _add_part(whole, part, residual):
    flat = whole.view(-1)
    if "[" in part:
        start, stop = map(int, part.split("[")[1].rstrip("]").split(":"))
        flat = flat[start:stop]
    flat += residual.reshape(-1)


def test_without_residuals_that_law_fails():
    """The law's control."""
    ends = train(simulation(3), "asp", compression="largest")
    applied = -ends[0][0][1] / LR
    made = sum(total[1] for _, _, total in ends)
    assert (applied - made).abs().max() > 1


@pytest.mark.parametrize(
    ("method", "servers", "dtype"),
    crossed(
        3,
        ["asp", "ssp:staleness=1", "backup"],
        [1, 2],
        [torch.float64, torch.float32, torch.bfloat16],
    ),
)
def test_servers_know_what_a_worker_holds_to_the_bit(method, servers, dtype):
    runtime, looked = simulation(3, servers), []

    def look(rank, step, model, optimizer):
        if step == 3:  # what is shown in between is not what is held
            with optimizer.consolidated():
                shown = [p.detach().clone() for p in model.parameters()]
            held = [p.detach() for p in model.parameters()]
            looked.append(
                all(torch.equal(a, b) for a, b in zip(shown, held, strict=True))
            )
        partition = inspect(optimizer).remote.partition
        for part in partition.pulled():
            shadows = machines(runtime)[part.shard].shard.compression.replicas
            shadow = shadows[rank, part.bucket].values
            assert torch.equal(shadow, partition.received_part(part))
            flat = torch.cat(
                [p.detach().view(-1) for p in partition.buckets[part.bucket].parameters]
            )
            assert torch.equal(shadow, flat[part.start : part.stop])
        now = [machine.shard.store.flats for machine in machines(runtime)]
        assert len(now) == servers

    train(
        runtime,
        method,
        after=look,
        dtype=dtype,
        compression="largest",
        replies="deltas",
    )
    assert looked == [False] * 3
    for machine in machines(runtime):
        assert not machine.shard.compression.replicas  # all have left


def test_looking_changes_nothing():
    def look(rank, step, model, optimizer):
        with optimizer.consolidated():
            pass

    options = {"compression": "largest:error_feedback=true", "replies": "deltas"}
    straight, looked = (
        train(simulation(3), "ssp:staleness=0", after=after, **options)
        for after in (lambda *_: None, look)
    )
    assert all(map(torch.equal, straight[0][0], looked[0][0]))


def test_one_worker_alone_loses_nothing():
    ((parameters, _, made),) = train(simulation(1), "asp", compression="largest")
    for parameter, total in zip(parameters, made, strict=True):
        torch.testing.assert_close(-parameter / LR, total)


# ---- bytes, and time ----


def seconds_of_a_step(answers, compression="largest", link=1e5, memory=1e15):
    """Two workers that wait for each other, with nothing to compute."""
    took = {}
    compute = ComputeModel(forward=0.0, backward=0.0, memory=memory)
    rack = Rack(workers=2, link=link, latency=0.0)
    runtime = Simulation(Cluster((rack,), servers=(ServerHost(),)), compute=compute)

    def body(rank):
        model = Given()
        plain = torch.optim.SGD(model.parameters(), lr=LR)
        options = {"replies": answers} if compression != "none" else {}
        optimizer = paceline.distribute(
            model,
            plain,
            method="backup",
            buckets="single",
            compression=compression,
            buffers="local",
            **options,
        )
        for step in range(4):
            if step == 1:
                start = paceline.now()
            optimizer.zero_grad()
            model(gradients_of(rank, step)).backward()
            optimizer.step()
        took[rank] = (paceline.now() - start) / 3
        optimizer.finish()

    runtime.run(body)
    return max(took.values())


MODEL_BYTES = 8 * sum(torch.Size(shape).numel() for shape in SHAPES)


def test_the_bytes_of_codes_count_both_ways():
    code = code_bytes(make("largest"), SHAPES, torch.float64)
    assert code == len(SHAPES) * 16
    for answers, back in (("full", MODEL_BYTES), ("deltas", code)):
        each = 2 * (code + HEADER_BYTES) + 2 * (back + HEADER_BYTES)
        took = seconds_of_a_step(answers)
        assert took == pytest.approx(each / 1e5, rel=1e-4)


def test_coding_takes_virtual_time():
    """A worker codes and its server decodes two; where answers are differences the server
    codes and decodes two, and a worker decodes one."""
    before, after = make("largest").memory_passes(1)
    for answers, passes in (
        ("full", before + 2 * after),
        ("deltas", before + 2 * after + 2 * (before + after + 6) + after),
    ):
        slow = seconds_of_a_step(answers, link=1e12, memory=1e6)
        assert slow == pytest.approx(passes * MODEL_BYTES / 1e6, rel=1e-3)


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("answers", ["full", "deltas"])
def test_a_large_models_stand_in_is_priced_at_a_large_models_codes(answers, servers):
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
    rack = Rack(workers=2, link=1e7, latency=0.0)
    cluster = Cluster((rack,), servers=(ServerHost(),) * servers)
    compute = ComputeModel(forward=0.0, backward=0.0, memory=1e15)
    took, sent = {}, [0]

    def body(rank):
        model = paceline.stand_in(workload)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = paceline.distribute(
            model,
            plain,
            method="backup",
            compression="halves",
            replies=answers,
            buckets="single",
        )
        for _ in range(3):
            start = paceline.now()
            sent[0] = counted(lambda: do_step(model, optimizer, torch.zeros(1)))
        took[rank] = paceline.now() - start
        optimizer.finish()

    Simulation(cluster, compute=compute).run(body)
    assert sent[0] == pytest.approx(sum(sizes) / 2 + servers * HEADER_BYTES, rel=1e-5)
    if servers == 1:  # its link carries two codes, and what is answered to both
        back = 1 if answers == "deltas" else 2
        each = (1 + back) * sum(sizes)
        assert max(took.values()) == pytest.approx(each / 1e7, rel=1e-3)


# ---- what is not finite ----


@pytest.mark.parametrize("answers", ["full", "deltas"])
def test_a_gradient_that_is_not_finite_is_seen_by_all(answers):
    def given(rank, step, dtype):
        gradients = gradients_of(rank, step, dtype)
        if rank and step:
            gradients[1][3, 4] = torch.nan
        return gradients

    options = {"compression": "largest", "replies": answers}
    ends = train(simulation(2), "backup", steps=2, given=given, **options)
    finite = [[bool(p.isfinite().all()) for p in end[0]] for end in ends]
    assert finite == [[True, False, True, True]] * 2


# ---- checkpoints ----


@pytest.mark.parametrize(("servers", "answers"), crossed(2, [1, 2], ["full", "deltas"]))
def test_a_checkpoint_in_the_middle_changes_nothing(servers, answers, tmp_path):
    """Each worker's residuals are in its own part. (All hold the same when it is loaded: so
    differences begin anew, and are those of a training that was straight only where they
    left nothing out.)"""

    def save_and_load(rank, step, model, optimizer):
        if step == 2:
            paceline.save(tmp_path / "checkpoint")
            paceline.load(tmp_path / "checkpoint")

    options = {"compression": "largest:error_feedback=true", "replies": answers}
    straight, again = (
        train(simulation(2, servers), "backup", after=after, momentum=0.9, **options)
        for after in (lambda *_: None, save_and_load)
    )
    for (mine, left, _), (theirs, also_left, _) in zip(straight, again, strict=True):
        assert all(map(torch.equal, mine, theirs))
        assert left.keys() == also_left.keys()
        assert all(torch.equal(left[name], also_left[name]) for name in left)


def test_residuals_of_other_parts_are_refused_in_words():
    """Servers that hold other parts of tensors than those of the job that has saved."""
    kept = {}

    def save(rank, step, model, optimizer):
        (own,) = inspect(optimizer).worker_states
        kept[rank] = dict(own.save())

    def load(rank, step, model, optimizer):
        (own,) = inspect(optimizer).worker_states
        with pytest.raises(UsageError, match=r"of 'p\d\[.*with as many servers"):
            own.load(kept[rank])
        with pytest.raises(UsageError, match="which is no parameter"):
            own.redistribute([kept[0], kept[1]], 2)

    options = {"compression": "largest:error_feedback=true"}
    train(simulation(2, servers=3), "backup", steps=1, after=save, **options)
    train(simulation(2, servers=2), "backup", steps=1, after=load, **options)


# ---- refusals ----


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("asp:compression=powersgd", "needs those of all workers"),
        ("asp:compression=ef21", "needs those of all workers"),
        ("asp:compression=largest,compression.warmup_steps=5", "or begins later"),
        ("osp:compression=largest", "pushes parts of buckets"),
        ("asp:replies=deltas", "replies=deltas without compression"),
        ("asp:compression=wild,replies=deltas", "differences would grow"),
        ("asp:compression=largest,replies=some", "unknown value for replies 'some'"),
        ("bsp:collective=parameter-server,compression=largest", "servers only add"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(spec, said):
    check_refused(said, method=spec)


def test_what_is_given_as_an_argument_is_refused_too():
    check_refused("has none, or another one", method="asp", compression=Unknown())
    options = {"compression": "bf16", "replies": "deltas"}
    check_refused("'bsp': its workers update", method="bsp", **options)


def check_refused(said, **options):
    def body(rank):
        model = Given()
        plain = torch.optim.SGD(model.parameters(), lr=LR)
        with pytest.raises(UsageError) as caught:
            paceline.distribute(model, plain, **options)
        assert said in str(caught.value)

    simulation(2).run(body)


def test_keys_of_a_spec_say_it_too():
    spec = "ssp:staleness=1,compression=largest,replies=deltas"
    runtime = simulation(2)
    train(runtime, spec)
    (machine,) = machines(runtime)
    assert machine.shard.compression is not None
    assert machine.shard.compression.replicas == {}


def test_workers_that_differ_are_refused_before_training():
    def body(rank):
        model = Given()
        plain = torch.optim.SGD(model.parameters(), lr=LR)
        compression = "largest:error_feedback=true" if rank else "largest"
        paceline.distribute(model, plain, method="asp", compression=compression)

    with pytest.raises(WorkerFailedError, match="error_feedback"):
        simulation(2).run(body)


# ---- each code ----


@pytest.mark.parametrize("name", alone())
def test_each_code_that_stands_alone_goes_both_ways(name):
    runtime = simulation(2)

    def look(rank, step, model, optimizer):
        partition = inspect(optimizer).remote.partition
        for part in partition.pulled():
            shadows = machines(runtime)[0].shard.compression.replicas
            held = shadows[rank, part.bucket].values
            assert torch.equal(held, partition.received_part(part))

    (one, _, made), (other, _, more) = train(
        runtime,
        "ssp:staleness=1",
        after=look,
        dtype=torch.float32,
        compression=name,
        replies="deltas",
    )
    for mine, theirs, a, b in zip(one, other, made, more, strict=True):
        assert torch.equal(mine, theirs)
        applied, whole = -mine.double().flatten() / LR, (a + b).flatten()
        assert applied.dot(whole) > 0.1 * whole.dot(whole)
