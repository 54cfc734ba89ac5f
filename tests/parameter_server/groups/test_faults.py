"""Group servers that cannot go on say so to their workers, and do not end."""

import random

import pytest

from paceline.errors import UsageError
from paceline.interfaces.server_messages import (
    AdoptState,
    Done,
    Enter,
    GetState,
    GetStatus,
    Quiesce,
    Rejected,
)
from paceline.parameter_server.groups import state_transfer
from paceline.parameter_server.state_machine.store import Store
from tests.support.group_server_trial import Case, GroupServerTrial

MEETS = Case((0, 0, 1, 1), 2, (5, 5, 5, 5), meets=frozenset({2}))
DIES = Case((0, 0, 1, 1), 2, (5, 5, 5, 5), kills=1, peril=0.05)


def refuse(*_):
    raise UsageError("bucket 0: what comes does not fit")


class Faulty(GroupServerTrial):
    """Workers that were refused do not come back. *tampers*: the replies to these requests are
    *reply* instead."""

    tampers = None
    reply = None

    def deliver_to_worker(self, server, worker):
        answer, process = self.to_worker[server, worker][0], self.processes[worker]
        if process.over:
            self.to_worker[server, worker].popleft()
            return
        super().deliver_to_worker(server, worker)
        if isinstance(answer.message, Rejected) and process.dead:
            process.dead, process.over = False, True

    def deliver_reply(self, a, b):
        link = self.links[a, b]
        number, _, payload = link.replies[0]
        if self.tampers and isinstance(link.asked[number].message, self.tampers):
            link.replies[0] = number, self.reply, payload
        super().deliver_reply(a, b)


def run(case, tampers=None, reply=None):
    """Returns why workers were refused; nobody waits for ever."""
    trial = Faulty(case, random.Random(0))
    trial.tampers, trial.reply = tampers, reply
    trial.run()
    assert not any(process.waits for process in trial.processes.values()), (
        "waits for ever"
    )
    assert trial.refusals
    return trial.refusals


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
        (GetStatus, DIES, Done(), "got Done"),
        (GetStatus, DIES, Rejected(reason="not here"), "not here"),
        (Enter, DIES, Done(), "got Done"),
        (GetState, DIES, Done(), "got Done"),
        (Quiesce, MEETS, Done(), "got Done"),
        (Quiesce, MEETS, Rejected(reason="not here"), "not here"),
        (AdoptState, MEETS, Rejected(reason="not here"), "not here"),
    ],
)
def test_a_reply_of_another_kind_is_a_fault_with_a_reason(kind, case, reply, words):
    reasons = run(case, kind, reply)
    assert any("server " in reason and words in reason for reason in reasons)
