"""Predictions are those of `simulate`: settled steps, whole rounds, no warm-ups."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from paceline.cluster import Cluster, Rack, Workload
from paceline.tools.plan.estimates import Estimate, Infeasible, lower_bound_seconds
from paceline.tools.plan.predict import (
    FEW,
    SHORTENED,
    TrainingJob,
    merge_tensors,
    predict,
)
from tests.support.tables import sampled
from tests.tools.plan.helpers import cluster, layers


def predicted(spec, fidelity="full", **job):
    made = {"cluster": cluster(), "workload": layers()} | job
    found = predict(TrainingJob(**made), spec, fidelity)
    assert isinstance(found, Estimate), found
    return found


def test_one_bucket_takes_what_a_ring_takes():
    work = layers()
    found = predicted("bsp:buckets=single")
    size, n, rate = sum(work.sizes), 4, 12.5e6
    ring = 2 * (n - 1) / n * size / rate + 2 * (n - 1) * 50e-6
    assert found.step_seconds == pytest.approx(0.09 + ring, rel=1e-6)
    assert found.bytes_sent == pytest.approx(2 * (n - 1) / n * size)
    assert found.compute_seconds == pytest.approx(0.09)


@pytest.mark.parametrize("spec", ["bsp", "dear", "priority"])
def test_no_exact_step_is_below_the_limit(spec):
    """Few steps could show a network that has not filled yet."""
    found = predicted(spec)
    assert found.step_seconds >= lower_bound_seconds(cluster(), layers()) * (1 - 1e-9)
    assert found.bytes_sent == pytest.approx(1.5 * sum(layers().sizes))


def test_the_limit_counts_what_passes_at_once():
    racks = tuple(replace(rack, burst=0.005) for rack in cluster().racks)
    bursting = replace(cluster(), racks=racks)
    found = predicted("bsp", cluster=bursting)
    limit = lower_bound_seconds(bursting, layers())
    assert limit < lower_bound_seconds(cluster(), layers())
    assert found.step_seconds >= limit * (1 - 1e-9)


@pytest.mark.parametrize(
    ("passes", "job", "loaded"),
    [
        (None, {}, 1),
        (None, {"accumulate": 4}, 4),
        (None, {"batches": 3}, 3),
        (2, {}, 1),
    ],
)
def test_each_batch_is_made_ready(passes, job, loaded):
    """A step's input is of as many batches as the script has."""
    with_input, without = (
        predicted("bsp", workload=replace(layers(), input=one, passes=passes), **job)
        for one in (0.01, 0.0)
    )
    more = with_input.compute_seconds - without.compute_seconds
    assert more == pytest.approx(loaded * 0.01)


def test_equal_questions_have_equal_answers():
    assert predicted("dear") == predicted("dear")


@pytest.mark.parametrize("every", [SHORTENED + 1, 40])
def test_rounds_that_are_run_with_fewer_steps_are_as_whole_ones(every):
    """Between two rounds a worker only computes."""
    found = predicted(f"local-sgd:sync_every={every}")
    whole = predicted(f"local-sgd:sync_every={SHORTENED}")
    wait = whole.exposed_seconds * SHORTENED
    assert found.step_seconds == pytest.approx(0.09 + wait / every, rel=1e-6)
    assert found.bytes_sent == pytest.approx(whole.bytes_sent * SHORTENED / every)


@pytest.mark.parametrize(
    "spec",
    sampled(
        3,
        [
            "local-sgd:sync_every=48",
            "diloco:sync_every=40",
            "slowmo",
            "sparse-loco",
            "streaming-diloco",
            "daso:group=2",
        ],
    ),
)
def test_at_the_end_of_a_long_round_all_wait_for_the_slowest(spec):
    """A round that is run with fewer steps is as one that is run whole."""
    rack = Rack(workers=4, link=12.5e6, latency=0.0, speed=(1.0, 0.8, 1.0, 0.5))
    uneven = {"cluster": Cluster((rack,)), "workload": layers(4, 0.4)}
    brief = predicted(spec, **uneven)
    whole = predicted(spec, **uneven, brief=False)
    # Who is hardly faster runs ahead for a while, where means are used late.
    near = 2e-3 if spec == "streaming-diloco" else 1e-6
    assert brief.step_seconds == pytest.approx(whole.step_seconds, rel=near)
    assert brief.exposed_seconds == pytest.approx(whole.exposed_seconds, rel=5 * near)
    assert brief.step_seconds >= 0.18 * (1 - near)


def test_a_warm_up_is_left_out():
    assert predicted("post-local-sgd:sync_every=8").step_seconds == pytest.approx(
        predicted("local-sgd:sync_every=8").step_seconds
    )


def test_what_osp_defers_is_seen():
    """It needs to have looked at some steps before."""
    osp = predicted("osp:collective=native", workload=layers(8, 1.0))
    assert (
        osp.step_seconds < 0.97 * predicted("bsp", workload=layers(8, 1.0)).step_seconds
    )


def test_rates_of_workers_that_wait_for_nobody_add_up():
    rack = Rack(workers=2, link=1e12, latency=0.0, speed=(1.0, 0.5))
    both = predicted("asp:servers=per-node", cluster=Cluster((rack,)))
    # In one of the fast worker's steps of 90 ms 1.5 gradients are computed.
    assert both.step_seconds == pytest.approx(2 * 0.09 / 1.5, rel=0.1)
    slow = predicted("bsp:buckets=ddp", cluster=Cluster((rack,)))
    assert slow.step_seconds == pytest.approx(0.18, rel=0.01)


def test_what_cannot_run_says_why():
    def momentum(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    job = TrainingJob(cluster=cluster(), workload=layers(), optimizer=momentum)
    found = predict(job, "bsp:compression=dgc")
    assert isinstance(found, Infeasible)
    assert "momentum" in found.reason
    assert isinstance(
        predict(job, "bsp:compression=dgc,compression.momentum=0"), Estimate
    )


def test_accumulated_passes_are_computed_and_sent_once():
    once = predicted("bsp:buckets=ddp")
    thrice = predicted("bsp:buckets=ddp", accumulate=3)
    assert thrice.bytes_sent == once.bytes_sent
    assert thrice.step_seconds == pytest.approx(once.step_seconds + 2 * 0.09, rel=1e-6)
    assert math.isclose(
        predicted("bsp", batches=3).compute_seconds, 3 * 0.09, rel_tol=1e-6
    )


def test_a_larger_batch_takes_longer_also_where_nobody_knows_how_large_it_is():
    unknown = replace(layers(), batch=None)
    twice = predicted("bsp:buckets=ddp", "short", workload=unknown, batches=2)
    assert twice.compute_seconds == pytest.approx(2 * 0.09, rel=1e-6)


def test_fewer_tensors_have_the_same_bytes_and_times():
    resnet = Workload.load("resnet50")
    few = merge_tensors(resnet)
    assert len(few.names) == FEW
    assert sum(few.sizes) == sum(resnet.sizes)
    assert few.forward_seconds == pytest.approx(resnet.forward_seconds)
    assert few.backward_seconds == pytest.approx(resnet.backward_seconds)
    assert few.gradient_bytes[0] > 0.5 * sum(few.sizes) / FEW
    # A prefix of the parts is one of the tensors, ready when they are.
    ready = dict(
        zip(
            itertools.accumulate(resnet.gradient_bytes),
            resnet.ready_seconds,
            strict=True,
        )
    )
    for size, seconds in zip(
        itertools.accumulate(few.gradient_bytes), few.ready_seconds, strict=True
    ):
        assert ready[size] == pytest.approx(seconds)
    assert merge_tensors(layers()) == layers()


def test_a_short_run_has_few_tensors():
    many = layers(3 * FEW)
    few = predicted("bsp:buckets=wfbp", "short", workload=many)
    assert few.buckets == FEW
    assert predicted("bsp:buckets=wfbp", workload=many).buckets == 3 * FEW


@pytest.mark.parametrize(
    "spec",
    [
        "gssp:number_of_groups=9",
        "grouping-sgd:members=0-3+4-7",
        "bsp:compression=nobody",
    ],
)
def test_a_spec_that_four_workers_refuse_is_infeasible(spec):
    job = TrainingJob(cluster=cluster(4), workload=layers(2))
    assert isinstance(predict(job, spec, "short"), Infeasible)


@pytest.mark.parametrize("spec", ["bsp:buckets=ddp", "asp:servers=per-node"])
def test_work_grows_with_workers_and_tensors_and_does_not_depend_on_links(spec):
    events = predicted(spec, "short").events
    assert predicted(spec, "short", cluster=cluster(8)).events > 1.5 * events
    assert predicted(spec, "short", workload=layers(8)).events > events
    assert predicted(spec).events >= events
    tensor_steps = 4 * 4 * 3
    assert events > tensor_steps


def test_only_methods_that_wait_in_the_next_forward_pass_run_until_the_network_is_full():
    def more(spec):
        events = predicted(spec, steady_steps=8).events
        return events - predicted(spec).events

    assert more("bsp:buckets=ddp") == 0 < more("dear:buckets=ddp")


def test_who_waits_for_its_batch_makes_all_wait():
    rack = Rack(workers=2, link=1e12, latency=0.0, speed=(1.0, 0.5))
    job = {"cluster": Cluster((rack,))}
    assert predicted("bsp:buckets=ddp", **job).step_seconds == pytest.approx(
        0.18, rel=0.01
    )
    late = predicted("bsp:buckets=ddp", inputs=(0.0, 0.05), **job)
    assert late.step_seconds == pytest.approx(0.23, rel=0.01)
    hidden = predicted("bsp:buckets=ddp", inputs=(0.05, 0.0), **job)
    assert hidden.step_seconds == pytest.approx(0.18, rel=0.01)
