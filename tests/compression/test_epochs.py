"""Codes that count in epochs, and send more in the first of them: how long epochs are, what is sent,
and what is said of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import paceline
from paceline.cluster import Workload
from paceline.cluster.stand_in import stand_in
from paceline.compression import full_spec, make, warm_up_message
from paceline.compression.gd_top_k import EPOCH_STEPS
from paceline.runtimes.join import join_runtime
from paceline.tools.auto.planner_process import predict_present
from paceline.tools.plan.predict import TrainingJob, predict
from paceline.tools.plan.script import analyze_script
from tests.support.simulations import run
from tests.tools.plan.helpers import cluster

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


@pytest.mark.parametrize("code", ["gd-top-k", "dgc,compression.warm_up_steps=10"])
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
            code.code.warm_up_wire_bytes([(SIDE, SIDE)], torch.float32, WORKERS)[0][1],
            code.code.wire_bytes([(SIDE, SIDE)], torch.float32, WORKERS),
        )
    )
    said = warm_up_message(code, [(SIDE, SIDE)], torch.float32, WORKERS)
    assert f"{late / DENSE:.1%} later" in said
    assert early > 2 * late
    settled = code.steady_state()
    assert not warm_up_message(settled, [(SIDE, SIDE)], torch.float32, WORKERS)
    assert warm_up_message(make("dgc"), [(SIDE, SIDE)], torch.float32, WORKERS)
    assert not warm_up_message(make("top-k"), [(SIDE, SIDE)], torch.float32, WORKERS)


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
