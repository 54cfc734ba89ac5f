"""Means in two halves: what methods are told where they cannot be formed, and how trainings
end."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

import paceline
from paceline.errors import UsageError
from paceline.methods.bsp import BSP
from paceline.testing import Case
from paceline.testing.method_checks import CHECKS
from paceline.testing.problems import Counting
from tests.core.halved import Halved, HalvedWorker, halves_train_as_the_whole, train
from tests.support.training import simulate


@pytest.mark.parametrize("workers", [2, 4])
def test_halves_train_as_the_whole_on_more_and_fewer_workers(workers):
    simulate(workers, lambda rank: halves_train_as_the_whole())


@pytest.mark.parametrize("collective", ["hierarchical", "halving-doubling", "tree"])
def test_halves_train_as_their_own_collective(collective):
    def body(rank):
        steps = 3 + rank
        expected, sent = train(BSP(), "wfbp", steps, collective)
        found, also_sent = train(Halved(), "wfbp", steps, collective)
        assert all(map(torch.equal, expected, found))
        assert sent == also_sent

    simulate(3, body)


@pytest.mark.parametrize(
    "law", ["uneven_data_ends", "leaving_after_backward_ends_with_one_model"]
)
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_the_laws_of_ends(law, workers):
    def body(rank):
        paceline.init()
        CHECKS[law](Case(method=Halved()), "ddp")

    simulate(workers, body)


def refusal(method, **options):
    """What is said to one of two workers, and in which call."""

    def body(rank):
        model = Counting()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        options.setdefault("buckets", "wfbp")
        try:
            optimizer = paceline.distribute(model, inner, method=method, **options)
        except UsageError as error:
            return "distribute", str(error)
        try:
            model().backward()
        except UsageError as error:
            return "backward", str(error)
        finally:
            optimizer.finish()
        return None

    return simulate(2, body)[0]


@dataclass(frozen=True, kw_only=True)
class Undeclared(Halved):
    """Does not say beforehand that it forms means in halves."""

    name: ClassVar[str] = "undeclared"
    sends_halves: ClassVar[bool] = False


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compression": "bf16"}, "in two halves"),
        ({"collective": "parameter-server"}, "'ring'"),
    ],
)
def test_what_cannot_be_halved_is_refused(options, words):
    for method, call in ((Halved(), "distribute"), (Undeclared(), "backward")):
        where, said = refusal(method, **options)
        assert where == call
        assert words in said


class OneByOneWorker(HalvedWorker):
    def backward_ended(self):
        for one in self.scattered[:: -1 if self.method.reverse else 1]:
            one.gather().wait()
        self.scattered.clear()


@dataclass(frozen=True, kw_only=True)
class OneByOne(Halved):
    """Gathers a bucket and waits for it before it gathers the next, in ready order."""

    name: ClassVar[str] = "one-by-one"
    reverse: bool = False

    def start(self, run):
        return OneByOneWorker(run, self)


def test_who_takes_part_travels_in_the_gather_of_the_last_bucket():
    where, said = refusal(OneByOne())
    assert where == "backward"
    assert "last bucket of its step was gathered" in said
    assert refusal(replace(OneByOne(), reverse=True)) is None


class TwiceWorker(HalvedWorker):
    def backward_ended(self):
        self.scattered.append(self.scattered[0])
        super().backward_ended()


@dataclass(frozen=True, kw_only=True)
class Twice(Halved):
    """Gathers what it has gathered."""

    name: ClassVar[str] = "twice"

    def start(self, run):
        return TwiceWorker(run, self)


def test_a_mean_is_gathered_once():
    where, said = refusal(Twice())
    assert where == "backward"
    assert "gathered once" in said
