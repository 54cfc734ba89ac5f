"""What is particular about dear: in which messages it sends, and what it refuses."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import pytest

from paceline.errors import WorkerFailedError
from paceline.interfaces import Message
from paceline.methods.forward_overlap import DeAR, HalvesWorker
from tests.methods.forward_overlap.helpers import adamw, same, train
from tests.methods.forward_overlap.test_exact import in_a_twist

BUCKETS = [SimpleNamespace(index=number) for number in range(3)]


def sent(plan):
    """Bucket, and half, of each message."""
    run = SimpleNamespace(
        messages=plan, buckets=BUCKETS, partition_optimizer=lambda most_bytes: None
    )
    messages = HalvesWorker(run)._messages()
    return [(message.bucket, message.half[0]) for message in messages]


def test_second_halves_go_in_the_opposite_order_where_the_plan_has_none():
    whole = [Message(number) for number in range(3)]
    assert sent(whole) == [(0, "s"), (1, "s"), (2, "s"), (2, "g"), (1, "g"), (0, "g")]


def test_a_plan_of_halves_is_followed():
    halves = [(0, "scatter"), (1, "scatter"), (0, "gather"), (1, "gather")]
    plan = [Message(number, half=half) for number, half in halves]
    assert sent(plan) == [(0, "s"), (1, "s"), (0, "g"), (1, "g")]


def test_halves_follow_each_other_where_backward_waits_for_both():
    assert sent(None) == [(0, "s"), (0, "g"), (1, "s"), (1, "g"), (2, "s"), (2, "g")]


def in_pieces(run):
    """Unequal ones, that are gathered in another order."""
    cuts = ((0.0, 0.25), (0.25, 1.0))
    for bucket in run.buckets:
        for cut in cuts:
            yield Message(bucket.index, *cut, half="scatter")
    for cut in reversed(cuts):
        for bucket in reversed(run.buckets):
            yield Message(bucket.index, *cut, half="gather")


@dataclass(frozen=True, kw_only=True)
class InPieces(DeAR):
    """Sends buckets in parts."""

    name: ClassVar[str] = "in-pieces"

    def start(self, run):
        return InPiecesWorker(run)


class InPiecesWorker(HalvesWorker):
    def _messages(self):
        return in_pieces(self.run)


@pytest.mark.parametrize("steps", [8, [4, 9]])
def test_parts_of_buckets_may_go_one_by_one(steps):
    """Of two numbers the order does not matter: the bits are those of whole buckets."""
    keys = {"steps": steps, "make": in_a_twist, "optimizer": adamw, "buckets": "single"}
    assert same(train(InPieces(), 2, **keys), train("bsp", 2, **keys))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"compression": "bf16"}, "compression 'bf16' with method 'dear'"),
        ({"collective": "parameter-server"}, "'parameter-server' has no halves"),
    ],
)
def test_what_has_no_halves_is_refused(keys, words):
    with pytest.raises(WorkerFailedError, match=words):
        train("dear", 2, **keys)
