"""The server's laws, and disciplines that break one each."""

import pytest

from paceline import methods
from paceline.errors import UsageError
from paceline.methods.asp import ApplyOnArrival
from paceline.spec import parse
from paceline.testing import CheckFailedError
from paceline.testing.server_checks import check_server

METHODS = (
    *("asp", "ssp:staleness=1", "ssp", "ssp:staleness=0", "dssp", "r2sp:warm_up=2"),
    *("backup", "sync-switch:bsp_steps=2", "sync-switch:bsp_steps=0"),
)


WORKERS = [1, 2, pytest.param(3, marks=pytest.mark.slow)]


def discipline_of(spec, workers):
    method, _ = methods.make(parse(spec), set())
    return method.server(workers)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("spec", METHODS)
def test_a_method_keeps_its_servers_laws(spec, workers):
    check_server(lambda: discipline_of(spec, workers), (workers,))


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_so_does_one_group(staleness, workers):
    members = f"0-{workers - 1}" if workers > 1 else "0"
    spec = f"gssp:members={members},staleness={staleness}"
    check_server(lambda: discipline_of(spec, workers), (workers,))


class AppliesAgain(ApplyOnArrival):
    """Does not look whether a gradient is in the parameters already."""

    def pushed(self, shard, push):
        super().pushed(shard, push._replace(applied=False))


class Loses(ApplyOnArrival):
    """Says that all steps have ended that anybody has begun."""

    def ended(self, shard):
        return shard.fastest()


class CountsWhatItRefuses(ApplyOnArrival):
    """Takes no reports, and is changed by each."""

    reports = 0

    def read_report(self, shard, report):
        self.reports += 1
        raise UsageError("no reports")

    def tells(self, bucket):
        return b""


@pytest.mark.parametrize(
    ("mutant", "law", "words"),
    [
        (AppliesAgain, "every_gradient_is_applied_once", "is 2.000 times"),
        (Loses, "every_gradient_is_applied_once", "is 0.000 times"),
        (CountsWhatItRefuses, "what_is_refused_changes_nothing", "a refused Push"),
    ],
)
def test_a_broken_law_is_caught(mutant, law, words):
    with pytest.raises(CheckFailedError, match=words) as caught:
        check_server(mutant, (3,))
    [note] = caught.value.__notes__
    assert law in note
