"""Behaviour is what it was: final bits, bytes sent and virtual times of every row."""

from __future__ import annotations

import msgspec
import pytest

from tests.golden.make import FILE
from tests.golden.trainings import Behaviour, behaviour_of, runs

RUNS = list(runs())
SAMPLED = 22
"""Every so manieth run is fast. A row has 5: every other one gets one, of changing kinds."""

MEANING = {
    "parameters": "digests of the final parameters, by worker",
    "first": "the first final parameters of worker 0",
    "buffers": "digests of the final buffers, by worker",
    "looked": "digests of what consolidated() showed, by worker",
    "bytes_sent": "bytes sent, by worker",
    "ended": "seconds until finish() returned, by worker",
    "steps": "seconds at the end of steps, by worker",
}


@pytest.fixture(scope="module")
def golden() -> dict[str, Behaviour]:
    decoder = msgspec.json.Decoder(Behaviour)
    lines = [decoder.decode(line) for line in FILE.read_bytes().splitlines()]
    return {line.run: line for line in lines}


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(
            run, id=run.name, marks=[pytest.mark.slow] if number % SAMPLED else []
        )
        for number, run in enumerate(RUNS)
    ],
)
def test_behaviour_is_what_it_was(run, golden):
    assert run.name in golden, "not in the file: a new row? python -m tests.golden.make"
    difference = differences(golden[run.name], behaviour_of(run))
    assert not difference, "\n".join([f"{run.name}: behaves otherwise", *difference])


def test_the_file_holds_no_row_that_is_gone(golden):
    assert set(golden) <= {run.name for run in RUNS}, "python -m tests.golden.make"


def differences(expected: Behaviour, got: Behaviour) -> list[str]:
    """A line for each quantity that differs."""
    return [
        f"  {words}: expected {getattr(expected, name)}, got {getattr(got, name)}"
        for name, words in MEANING.items()
        if getattr(expected, name) != getattr(got, name)
    ]


def test_a_difference_is_told_by_its_quantity(golden):
    one = next(iter(golden.values()))
    other = msgspec.structs.replace(one, bytes_sent=[1, 2])
    (line,) = differences(one, other)
    assert line == "  bytes sent, by worker: expected [0], got [1, 2]"
    assert set(MEANING) == set(Behaviour.__struct_fields__) - {"run"}
