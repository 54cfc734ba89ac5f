"""Group servers that cannot go on say so to their workers, and do not end."""

import random

import pytest

from paceline.errors import UsageError
from paceline.interfaces.server_messages import (
    Agree,
    Copy,
    Done,
    Drain,
    Enter,
    Refused,
    Stand,
)
from paceline.parameter_server.groups import state_transfer
from paceline.parameter_server.state_machine.store import Store
from tests.support.mesh_net import Case, MeshNet

MEETS = Case((0, 0, 1, 1), 2, (5, 5, 5, 5), meets=frozenset({2}))
DIES = Case((0, 0, 1, 1), 2, (5, 5, 5, 5), kills=1, peril=0.05)


def refuse(*_):
    raise UsageError("bucket 0: what comes does not fit")


class Faulty(MeshNet):
    """Workers that were refused do not come back. *tampers*: the replies to these requests are
    *reply* instead."""

    tampers = None
    reply = None

    def deliver_to_worker(self, server, worker):
        answer, life = self.to_worker[server, worker][0], self.lives[worker]
        if life.over:
            self.to_worker[server, worker].popleft()
            return
        super().deliver_to_worker(server, worker)
        if isinstance(answer.message, Refused) and life.dead:
            life.dead, life.over = False, True

    def deliver_reply(self, a, b):
        way = self.ways[a, b]
        number, _, payload = way.replies[0]
        if self.tampers and isinstance(way.asked[number].message, self.tampers):
            way.replies[0] = number, self.reply, payload
        super().deliver_reply(a, b)


def run(case, tampers=None, reply=None):
    """Returns why workers were refused; nobody waits for ever."""
    net = Faulty(case, random.Random(0))
    net.tampers, net.reply = tampers, reply
    net.run()
    assert not any(life.waits for life in net.lives.values()), "waits for ever"
    assert net.refusals
    return net.refusals


def test_a_copy_that_does_not_fit_at_a_meeting_ends_the_training(monkeypatch):
    monkeypatch.setattr(state_transfer, "_check", refuse)
    reasons = run(MEETS)
    assert any("bucket 0: what comes does not fit" in reason for reason in reasons)


@pytest.mark.parametrize("case", [MEETS, DIES], ids=["meets", "dies"])
def test_a_state_that_does_not_fit_ends_the_training(case, monkeypatch):
    monkeypatch.setattr(Store, "fitting_state", refuse)
    reasons = run(case)
    assert any("bucket 0: what comes does not fit" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("kind", "case", "reply", "words"),
    [
        (Stand, DIES, Done(), "got Done"),
        (Stand, DIES, Refused(reason="not here"), "not here"),
        (Enter, DIES, Done(), "got Done"),
        (Copy, DIES, Done(), "got Done"),
        (Drain, MEETS, Done(), "got Done"),
        (Drain, MEETS, Refused(reason="not here"), "not here"),
        (Agree, MEETS, Refused(reason="not here"), "not here"),
    ],
)
def test_a_reply_of_another_kind_is_a_fault_with_a_reason(kind, case, reply, words):
    reasons = run(case, kind, reply)
    assert any("server " in reason and words in reason for reason in reasons)
