"""A toy kind of service: a sum over two levels, as racks with aggregators form it.

Each aggregator adds up a part of each worker of its rack, and asks the root for the sum of all
racks' sums. One class is both: the root is a level without a parent.
"""

import os
import signal

import torch

from paceline.interfaces import Answer, Ask, Service, ServiceJob, Work
from paceline.interfaces.server_messages import Refused, Said, Say

KIND = f"{__name__}:Level"
DIE = b"die"


class Level:
    """Waits in each round for a part of every member: senders, as the spec numbers them."""

    def __init__(self, start):
        self.start = start
        self.members = [int(number) for number in start.spec.split("+")]
        self.rounds = {}
        self.given_up = ""
        self.added = 0

    def on_message(self, sender, message, payload, now):
        if self.given_up:
            return [Answer(sender, Refused(reason=self.given_up))]
        if message.words == DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        parts = self.rounds.setdefault(message.words, {})
        parts[sender.worker] = sender, payload
        if len(parts) < len(self.members):
            return []
        total = sum(parts[member][1] for member in self.members)
        self.added += total.nbytes * len(self.members)
        if not self.start.peers:
            return self.answer(message.words, Said(), total)
        [parent] = self.start.peers
        number, into = int(message.words), torch.empty_like(total)
        return [Ask(parent, number, message, total, into)]

    def on_reply(self, peer, number, reply, payload, now):
        return self.answer(b"%d" % number, reply, payload)

    def on_peer_lost(self, peer, reason, now):
        return self.give_up(reason)

    def on_lost(self, worker, incarnation, now):
        return self.give_up(f"{self.start.name_of(worker)} is lost")

    def give_up(self, reason):
        self.given_up = self.given_up or f"{self.start.name}: {reason}"
        refused = Refused(reason=self.given_up)
        return [a for words in [*self.rounds] for a in self.answer(words, refused)]

    def answer(self, words, reply, payload=None):
        to_all = self.rounds.pop(words, {}).values()
        return [Answer(to, reply, payload) for to, _ in to_all]

    def next_deadline(self):
        return None

    def on_timer(self, now):
        return []

    def take_work(self):
        added, self.added = self.added, 0
        return Work(added=added)


def job_of(racks, aggregators, root):
    """A job: *racks* are ranks, *aggregators* the places of their services."""
    workers = sum(map(len, racks))
    services = [
        Service(
            f"aggregator {number}",
            KIND,
            place,
            "+".join(map(str, ranks)),
            peers=("root",),
        )
        for number, (ranks, place) in enumerate(zip(racks, aggregators, strict=True))
    ]
    members = "+".join(str(workers + number) for number in range(len(racks)))
    return ServiceJob((*services, Service("root", KIND, root, members)))


def add(endpoint, number, part):
    """Round *number*: replace *part* by the sum over all workers."""
    endpoint.request(Say(words=b"%d" % number), part, into=part).wait()
