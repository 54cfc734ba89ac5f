"""Attacks on each port find nothing, and each check has a control: a port with a defect, which it reports."""

import re

import pytest

from tests.chaos.ports import PORTS, EchoPort, attack_port
from tests.support.tables import sampled

CONTROLS = {
    "dies of a byte": "the process has ended with status 1",
    "a thread fails": "a fault: .*ValueError",
    "keeps what it receives": "memory grew by",
    "answers wrong": "the job: AssertionError",
    "leaks descriptors": "descriptors are",
    "waits for each connection": "the job: TimeoutError",
}


@pytest.mark.parametrize("defect", sampled(len(CONTROLS), CONTROLS))
def test_a_port_with_a_defect_is_caught(defect):
    seconds = 5 if defect == "waits for each connection" else 60
    outcome = attack_port(
        EchoPort, 500, 0, defect, seconds=seconds, memory_bytes=2 << 20
    )
    found = "\n".join(outcome.violations)
    assert re.search(CONTROLS[defect], found, re.DOTALL), outcome


@pytest.mark.parametrize("name", sampled(2, PORTS))
def test_a_few_messages_harm_no_job(name):
    check(name, 100, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", PORTS)
def test_thousands_of_messages_harm_no_job(name):
    check(name, 2000, seed=1)


def check(name, messages, seed):
    if name == "metrics":
        pytest.importorskip("prometheus_client")
    outcome = attack_port(PORTS[name], messages, seed)
    assert outcome.violations == [], outcome
    assert outcome.messages == {"random": messages, "mutated": messages}
