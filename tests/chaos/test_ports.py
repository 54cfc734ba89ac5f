"""Attacks on each port find nothing, and each check has a control: a port with a defect, which it reports."""

import re

import pytest

from tests.chaos.port_attacks import attack_port
from tests.chaos.ports import PORTS, EchoPort

CONTROLS = {
    "dies of a byte": "the process has ended with status 1",
    "a thread fails": "a fault: .*ValueError",
    "keeps what it receives": "memory grew by",
    "logs what it receives": "it logged",
    "answers wrong": "the job: AssertionError",
    "leaks descriptors": "descriptors are",
    "waits for each connection": "the job: TimeoutError",
}


@pytest.mark.slow
@pytest.mark.parametrize("defect", CONTROLS)
def test_a_port_with_a_defect_is_caught(defect):
    seconds = 5 if defect == "waits for each connection" else 60
    outcome = attack_port(
        EchoPort, 500, 0, defect, seconds=seconds, memory_bytes=2 << 20
    )
    found = "\n".join(outcome.violations)
    assert re.search(CONTROLS[defect], found, re.DOTALL), outcome


@pytest.mark.slow
@pytest.mark.parametrize("name", PORTS)
def test_messages_harm_no_job(name):
    if PORTS[name].needs:
        pytest.importorskip(PORTS[name].needs)
    outcome = attack_port(PORTS[name], 300, 0)
    assert outcome.violations == [], outcome
    assert outcome.messages == {"random": 300, "mutated": 300}
