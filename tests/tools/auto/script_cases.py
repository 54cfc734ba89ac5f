"""What scripts do around steps, under a method that changes; each runs on all workers."""

import math
from functools import partial

import pytest
import torch

import paceline
from paceline.errors import GradientError
from paceline.runtimes.join import join_runtime
from paceline.testing import method_checks, script_checks
from paceline.testing.cases import Case
from tests.support.training import inputs, sgd
from tests.tools.auto.cases import (
    Scripted,
    assert_equal_everywhere,
    begun,
    changing,
    flat,
    follows,
    one_step,
)

TURNS = {1: "dear", 2: "bsp:collective=tree", 4: "osp:collective=native,defer=nothing"}
SWITCHES = Case(method=changing(TURNS, meets=True))
LAWS = {
    law.__name__: partial(law, SWITCHES, "ddp")
    for law in (
        script_checks.script_idioms,
        script_checks.a_scaler_leaves_out_infinite_gradients,
        script_checks.gradients_are_clipped_once,
        script_checks.buffers_follow_the_policy,
        method_checks.evaluations_lose_nothing,
    )
}
"""The conformance kit's laws about scripts, of a method that changes after steps 1, 2 and 4."""


def same_as_bsp(train, scripted, optimizer=sgd):
    """*train* does the same under bsp and under the methods that *scripted* names."""
    ends = []
    for method in ("bsp", follows(scripted)):
        net, wrapped = begun(method, optimizer)
        train(net, wrapped)
        wrapped.finish()
        assert_equal_everywhere(flat(net))
        ends.append(flat(net))
    assert torch.allclose(*ends, atol=1e-6)


def schedulers_count_all_steps():
    def train(net, wrapped):
        schedule = torch.optim.lr_scheduler.StepLR(wrapped, 3, gamma=0.5)
        for step in range(9):
            one_step(net, wrapped, step)
            schedule.step()
        assert wrapped.param_groups[0]["lr"] == pytest.approx(0.1 / 8)
        assert wrapped.steps_of_all >= 9

    same_as_bsp(train, Scripted(TURNS, meets=True))


def a_script_that_clips_by_itself_is_not_sent_to_what_sends_gradients_early():
    scripted = Scripted({3: "osp", 4: "osp:collective=native", 6: "dear"})

    def train(net, wrapped):
        for step in range(9):
            wrapped.zero_grad()
            net(inputs(paceline.rank(), step)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
            wrapped.step()

    same_as_bsp(train, scripted)
    assert [spec for spec, _ in scripted.refused] == ["osp", "osp:collective=native"]
    assert all("clip" in why for _, why in scripted.refused)


def a_scaled_training_is_not_sent_to_what_updates_by_itself():
    scripted = Scripted({2: "local-sgd:sync_every=2", 5: "osp:collective=native"})

    def train(net, wrapped):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(9):
            wrapped.zero_grad()
            loss = net(inputs(paceline.rank(), step)).square().mean()
            if step in (3, 5) and paceline.rank() == 0:
                loss = loss * math.inf
            scaler.scale(loss).backward()
            scaler.step(wrapped)
            scaler.update()
        assert scaler.get_scale() == 2.0

    same_as_bsp(train, scripted)
    assert ["GradScaler" in why for _, why in scripted.refused] == [True, True]


def an_optimizer_that_evaluates_again_is_not_sent_to_what_sends_late():
    scripted = Scripted({2: "dear", 3: "bsp:buckets=wfbp"})

    def train(net, wrapped):
        for step in range(8):

            def closure(step=step):
                wrapped.zero_grad()
                loss = net(inputs(paceline.rank(), step)).square().mean()
                loss.backward()
                return loss

            wrapped.step(closure)

    same_as_bsp(train, scripted, lambda p: torch.optim.LBFGS(p, max_iter=3))
    assert [spec for spec, _ in scripted.refused] == ["dear"]


def a_look_in_between_finds_one_model_on_all_workers():
    net, wrapped = begun(changing({2: "diloco:sync_every=2", 6: "bsp"}))
    for step in range(9):
        one_step(net, wrapped, step)
        if step in (1, 2, 5):
            with wrapped.consolidated(), torch.no_grad():
                assert_equal_everywhere(flat(net))
                net(inputs(0, 99))
    wrapped.finish()


def two_optimizers_change_by_themselves():
    ends = []
    for methods in (("bsp", "bsp"), (changing({2: "dear"}), changing({3: "osp"}))):
        pairs = [begun(method) for method in methods]
        for step in range(6):
            for number, (net, wrapped) in enumerate(pairs):
                one_step(net, wrapped, step + 10 * number)
        for _, wrapped in pairs:
            wrapped.finish()
        ends.append(torch.cat([flat(net) for net, _ in pairs]))
    assert torch.allclose(*ends, atol=1e-6)
    join_runtime().registry.trainings.clear()


def samplers_weigh_uneven_shares():
    def train(method, specs=None):
        data = torch.randn(29, 6, generator=torch.Generator().manual_seed(1))
        sampler = paceline.Sampler(
            data, batch_size=7, shares=[1.0] * (paceline.world_size() - 1) + [2.0]
        )
        net, wrapped = begun(method, sampler=sampler)
        for _ in range(3):
            for rows in sampler:
                wrapped.zero_grad()
                net(data[rows]).square().mean().backward()
                wrapped.step()
        wrapped.finish()
        return flat(net)

    assert torch.allclose(train("bsp"), train(changing(TURNS)), atol=1e-6)


def a_loop_is_left_before_the_last_step():
    """By one worker, in the step after which the others change."""
    net, wrapped = begun(changing({4: "dear", 6: "bsp"}))
    for step in range(8):
        wrapped.zero_grad()
        net(inputs(paceline.rank(), step)).square().mean().backward()
        if step == 3 and paceline.rank() == 0:
            break
        wrapped.step()
    wrapped.finish()
    assert_equal_everywhere(flat(net))


def controllers_that_disagree_are_an_error():
    other = "dear" if paceline.rank() else "priority"
    net, wrapped = begun(changing({2: other}))
    one_step(net, wrapped, 0)
    with pytest.raises(paceline.PacelineError, match="dear and prio"):
        one_step(net, wrapped, 1)
    assert "different specs" in wrapped.broken_by
    with pytest.raises(paceline.PacelineError, match="finish"):
        wrapped.step()
    wrapped.finish()
    join_runtime().registry.trainings.clear()


def a_gradient_that_is_not_finite_is_named_under_each_method():
    for spec in ("bsp:buckets=wfbp", "dear"):
        net, wrapped = begun(changing({2: spec}), check_finite=True)
        for step in range(3):
            one_step(net, wrapped, step)
        wrapped.zero_grad()
        loss = net(inputs(paceline.rank(), 3)).sum() * math.nan
        with pytest.raises(GradientError, match="not finite"):
            loss.backward()
        wrapped.finish()
    join_runtime().registry.trainings.clear()


CASES = LAWS | {
    case.__name__: case
    for case in (
        schedulers_count_all_steps,
        a_script_that_clips_by_itself_is_not_sent_to_what_sends_gradients_early,
        a_scaled_training_is_not_sent_to_what_updates_by_itself,
        an_optimizer_that_evaluates_again_is_not_sent_to_what_sends_late,
        a_look_in_between_finds_one_model_on_all_workers,
        two_optimizers_change_by_themselves,
        samplers_weigh_uneven_shares,
        a_loop_is_left_before_the_last_step,
    )
}
MISTAKES = {
    case.__name__: case
    for case in (
        controllers_that_disagree_are_an_error,
        a_gradient_that_is_not_finite_is_named_under_each_method,
    )
}
"""After each of them a real job is over: these are for virtual time."""
