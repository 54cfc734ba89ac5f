"""What `distribute` gives back, as scripts and trainers handle it: closures, other faces."""

import contextlib
import copy
from inspect import getmembers

import pytest
import torch
from torch import nn

import paceline
from paceline.core.optimizer import TrainingEnded
from paceline.errors import UsageError
from paceline.run_options import RunOptions
from paceline.runtimes.join import join_runtime
from paceline.testing import inspect
from tests.support.simulations import run
from tests.support.training import flat, inputs, network, sgd

EVERY_PLACE = ["bsp", "asp", "ssp", "osp", "osp:collective=native"]
"""Methods whose worker updates, whose server does, and that update by themselves."""


def given(model, optimizer=sgd, method="bsp"):
    return paceline.distribute(
        model, optimizer(model.parameters()), method=method, buckets="wfbp"
    )


def loss_of(model, rank, step):
    return model(inputs(rank, step)).square().mean()


@pytest.mark.parametrize("method", EVERY_PLACE)
def test_a_closure_that_reaches_no_parameter_on_one_rank(method):
    """The others wait for this rank's gradient all the same: it is zero."""

    def body(rank, with_closure):
        model = network()
        optimizer = given(model, method=method)
        for step in range(4):

            def closure(step=step):
                optimizer.zero_grad()
                loss = loss_of(model, rank, step)
                if (rank, step) != (1, 2):
                    loss.backward()
                return loss

            if with_closure:
                with torch.no_grad():  # torch's optimizers turn gradients on for it
                    assert optimizer.step(closure).requires_grad
            else:
                closure()
                assert optimizer.step() is None
        optimizer.finish()
        return flat(model)

    ends = run(2, lambda rank: body(rank, True))
    assert torch.equal(ends[0], ends[1])
    for one, other in zip(ends, run(2, lambda rank: body(rank, False)), strict=True):
        assert torch.equal(one, other)


def test_checks_are_made_with_a_closure_too():
    def body(rank):
        model = network()
        model[0].weight.requires_grad_(False)
        optimizer = given(model)
        model[0].weight.requires_grad_(True)

        def closure():
            loss = loss_of(model, rank, 0)
            loss.backward()
            return loss

        before = flat(model)
        with pytest.raises(UsageError, match=r"'0\.weight' was frozen"):
            optimizer.step(closure)
        optimizer.finish()
        return torch.equal(flat(model), before)

    assert run(2, body) == [True, True]


def lbfgs(parameters):
    return torch.optim.LBFGS(parameters, lr=0.3, max_iter=4)


def test_an_optimizer_that_evaluates_several_times_uses_means():
    """Each of LBFGS's looks is at the mean over the workers, as in one process on all
    samples; and a rank whose loss reaches no parameter takes part in each."""

    def alone():
        model = network()
        optimizer = lbfgs(model.parameters())
        for step in range(3):

            def closure(step=step):
                optimizer.zero_grad()
                loss = sum(loss_of(model, r, step) for r in range(3)) / 3
                loss.backward()
                return loss

            optimizer.step(closure)
        return flat(model)

    def body(rank, unused):
        model = network()
        optimizer = given(model, lbfgs)
        for step in range(3):

            def closure(step=step):
                optimizer.zero_grad()
                loss = loss_of(model, rank, step)
                if not (unused and rank == 1):
                    loss.backward()
                return loss

            optimizer.step(closure)
        optimizer.finish()
        return flat(model)

    expected = alone()
    for end in run(3, lambda rank: body(rank, False)):
        torch.testing.assert_close(end, expected, rtol=1e-4, atol=1e-5)
    one, *others = run(3, lambda rank: body(rank, True))
    assert all(torch.equal(one, other) for other in others)


def test_a_scheduler_that_steps_first_is_warned_of():
    """As torch's optimizers do; the kit's law of schedules has those that step afterwards."""

    def body(rank):
        model = network()
        inner = sgd(model.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(inner, 1)
        optimizer = paceline.distribute(model, inner, method="asp")
        schedule.step()
        optimizer.finish()

    with pytest.warns(UserWarning, match="before `optimizer.step"):
        run(1, body)


def test_an_optimizer_that_ignores_its_closure_is_refused():
    class Deaf(torch.optim.SGD):
        def step(self, closure=None):
            return super().step()

    def body(rank):
        optimizer = given(network(), lambda parameters: Deaf(parameters, lr=0.1))
        with pytest.raises(UsageError, match="Deaf"):
            optimizer.step(lambda: 0.0)
        optimizer.finish()

    run(1, body)


# ---- faces: trainers wrap optimizers in copies of what is in their `__dict__` ----


class Face:
    def __init__(self, optimizer):
        self.__dict__ = dict(optimizer.__dict__)
        self.__class__ = type("Face", (Face, type(optimizer)), {})


@pytest.mark.parametrize("method", EVERY_PLACE)
def test_another_face_of_the_optimizer_is_the_same_optimizer(method):
    def body(rank):
        model = network()
        optimizer = given(model, method=method)
        early = Face(optimizer)
        for step in range(3):
            early.zero_grad()
            loss_of(model, rank, step).backward()
            early.step()
        late = Face(optimizer)
        early.finish()
        for face in (early, late, optimizer):
            with pytest.raises(UsageError, match=r"step\(\) after finish\(\)"):
                face.step()
            face.finish()
        end = flat(model)
        state = copy.deepcopy(late.state_dict()["state"])
        assert state.keys() == optimizer.state_dict()["state"].keys() != set()
        # the model is free for another training, whichever face has finished
        given(model).finish()
        # steps through any face are the job's
        return end, join_runtime().recorder.step_count

    ends = run(2, body)
    assert torch.equal(ends[0][0], ends[1][0])
    assert [steps for _, steps in ends] == [3, 3]


@pytest.mark.parametrize("method", ["asp", "osp:collective=native"])
def test_a_look_through_one_face_is_known_to_the_other(method):
    def body(rank):
        model = nn.Linear(6, 2)
        optimizer = given(model, method=method)
        with Face(optimizer).consolidated():
            loss_of(model, rank, 0)
            with pytest.raises(UsageError, match="inside consolidated"):
                optimizer.step()
        optimizer.finish()

    run(1, body)


def five_steps(rank):
    """Steps, up to the fifth, and how far it came."""
    model = network()
    optimizer = given(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)  # it wraps step()
    done = 0
    with contextlib.suppress(TrainingEnded):
        for step in range(5):
            loss_of(model, rank, step).backward()
            optimizer.step()
            scheduler.step()
            done += 1
    return done


def test_who_ends_a_script_says_where_and_what_is_not_run(capsys):
    assert run(2, five_steps, options=RunOptions(steps=3)) == [2, 2]
    said = capsys.readouterr().err
    line = five_steps.__code__.co_firstlineno + 9
    assert said == (
        "paceline: ended after 3 steps, as --steps asked, in optimizer.step() at "
        f"{__file__}:{line}; code after the training loop was not run "
        "(a loop `for batch in paceline.steps(loader)` ends by itself)\n"
    )


def train(rank, epochs, batches):
    """Two epochs of three batches; what was done, and after how many steps it was evaluated."""
    model = network()
    optimizer = given(model)
    done, evaluated = [], []
    for epoch in epochs(range(2)):
        for step in batches(range(3)):
            loss_of(model, rank, step).backward()
            optimizer.step()
            done.append((epoch, step))
        evaluated.append(len(done))
    return done, evaluated


ALL = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


@pytest.mark.parametrize(
    ("steps", "done", "evaluated"),
    [
        (2, 2, [2]),
        (3, 3, [3]),
        (4, 4, [3, 4]),
        (6, 6, [3, 6]),
        (9, 6, [3, 6]),
        (None, 6, [3, 6]),
    ],
)
def test_loops_over_steps_end_by_themselves(steps, done, evaluated, capsys):
    def body(rank):
        return train(rank, paceline.steps, paceline.steps)

    first, second = run(2, body, options=RunOptions(steps=steps))
    assert first == second == (ALL[:done], evaluated)
    said = capsys.readouterr().err
    assert said == (
        f"paceline: ended after {steps} steps, as --steps asked; the script continues after "
        "its loop over paceline.steps()\n"
    ) * bool(steps and steps <= 6)


def test_a_loop_of_another_kind_within_is_left_as_ever(capsys):
    def body(rank):
        try:
            return train(rank, paceline.steps, iter)
        except TrainingEnded:
            return "left"

    assert run(2, body, options=RunOptions(steps=2)) == ["left", "left"]
    assert "; code after the training loop was" in capsys.readouterr().err


def test_without_anything_to_go_through_steps_are_counted():
    def body(rank):
        model = network()
        optimizer = given(model)
        for step in paceline.steps():
            loss_of(model, rank, step).backward()
            optimizer.step()
        return step, list(paceline.steps([1]))

    assert run(2, body, options=RunOptions(steps=4)) == [(3, [])] * 2


def test_of_two_optimizers_both_make_their_last_step(capsys):
    def body(rank):
        models = network(), network()
        optimizers = [given(model) for model in models]
        done = [0, 0]
        for step in paceline.steps():
            for number, (model, optimizer) in enumerate(
                zip(models, optimizers, strict=True)
            ):
                loss_of(model, rank, step).backward()
                optimizer.step()
                done[number] += 1
        return done

    assert run(2, body, options=RunOptions(steps=3)) == [[3, 3]] * 2
    assert capsys.readouterr().err.count("ended after 3 steps") == 1


@pytest.mark.parametrize(
    "options",
    [RunOptions(steps=9), RunOptions(steps=3, tells=False), RunOptions()],
    ids=["not reached", "not asked by the user", "not asked"],
)
def test_nothing_is_said_of_other_ends(options, capsys):
    run(2, five_steps, options=options)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("method", [*EVERY_PLACE, "local-sgd"])
def test_who_looks_at_all_attributes_changes_nothing(method):
    """A debugger, say: one asks whether a GradScaler steps the optimizer."""

    def body(rank):
        model = network()
        optimizer = paceline.distribute(
            model, sgd(model.parameters()), method=method, clip_norm=1.0
        )
        found = dict(getmembers(optimizer))
        assert not inspect(optimizer).uses_grad_scaler
        loss_of(model, rank, 0).backward()
        optimizer.step()
        optimizer.finish()
        return found["_step_supports_amp_scaling"]

    supports = method != "bsp"
    assert run(2, body) == [supports, supports]


@pytest.mark.parametrize("steps_alone", [False, True])
def test_a_scaler_is_seen_where_it_steps_the_optimizer(steps_alone):
    def body(rank):
        model = network()
        optimizer = paceline.distribute(model, sgd(model.parameters()), method="auto")
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(2):
            optimizer.zero_grad()
            loss = loss_of(model, rank, step)
            (loss if steps_alone else scaler.scale(loss)).backward()
            if steps_alone:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
        seen = inspect(optimizer).uses_grad_scaler
        optimizer.finish()
        return seen

    assert run(2, body) == [not steps_alone] * 2
