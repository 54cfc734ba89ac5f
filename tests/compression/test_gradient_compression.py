"""`GradientCompression`: error feedback, its decay, and uncompressed first steps."""

import torch

import paceline
from paceline.compression import GradientCompression
from paceline.runtimes.join import join_runtime
from paceline.runtimes.simulated import ComputeModel
from paceline.testing.compressor_checks import Workers, gradients
from tests.compression.toys import RankOne, TopK
from tests.support.simulations import run


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
