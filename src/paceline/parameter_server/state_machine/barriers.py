"""Where all workers that train wait for each other: to load, and to be at one moment.

A worker *arrives*: its request is answered when all that train are there. Then nothing is
under way: each has the answers to all that it sent, and sends nothing.

- At a *meet* that is all. The lowest rank is told that it leads.
- At a *load* the lowest rank of those that bring something leads. It is answered first, and
  sends what all go on from. When that is whole it takes effect, the gradients of workers that
  died are dropped, and the others are answered. If the leader dies before, the next one leads.
  Each worker then takes what was loaded, and arrives once more: nobody sends a gradient before
  all have it.

Workers that come back
----------------------
A worker that comes back while others have arrived joins when they have met. One that has joined
and has no parameters yet is given them then; earlier, if the workers that have yet to arrive
wait for its gradients. A meet does not wait for a worker that has come back at a step which
those that meet have yet to do: it may have missed the point where they met. Example: workers 0
and 1 meet after step 4; worker 2 died before, and has come back with step 5.

A point at which only some arrive
---------------------------------
Workers that have left are not waited for. Any other may still come, and is waited for, with two
exceptions:

- All that are missing wait for those that have arrived: then none will come. A meet ends with
  the workers that are there; a load is refused. (Where a step may end without some workers, it
  ends without those that have arrived, and the others come, too.)
- One that has not done a step waits to load, and another one does steps: its script does not
  load there. That is refused, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.errors import UsageError
from paceline.interfaces import Sender
from paceline.interfaces.server_messages import Arrive, Met
from paceline.parameter_server.state_machine.pulls import Pulls
from paceline.parameter_server.state_machine.pushes import Pushes
from paceline.parameter_server.state_machine.replies import Answers
from paceline.parameter_server.state_machine.shard import HeldShard

HOW_TO_LOAD = "every worker that trains calls paceline.load, or load_state_dict, after the same step"


class Meetings:
    """The one that is under way, if any."""

    def __init__(
        self,
        shard: HeldShard,
        pushes: Pushes,
        pulls: Pulls,
        answers: Answers,
    ) -> None:
        self.loads = 0
        """How many loads there were since the first one."""
        self.leader: int | None = None
        self.follows = False
        """Another server decides what pushes wait for: they may be answered without anybody
        else's."""
        self.sees_all = True
        """All workers push to this server: it knows who has trained."""
        self._shard = shard
        self._members = shard.members
        self._pushes = pushes
        self._pulls = pulls
        self._answers = answers
        self._arrived: dict[int, tuple[Sender, Arrive]] = {}
        self._members.meeting = self._arrived.keys()
        self._pulling: set[int] = set()
        """Workers that have yet to say that they have taken what was loaded."""
        self._lets_pull = False
        """A worker that has joined is given parameters though others have arrived."""
        self._joining: dict[int, Callable[[], None]] = {}

    # ---- what happens ----

    def arrive(self, sender: Sender, arrive: Arrive) -> None:
        """A worker is there. Raises `UsageError` for one that takes a load at which it was
        not."""
        if arrive.purpose == "pulled" and sender.worker not in self._pulling:
            raise UsageError(f"arrive: worker {sender.worker} was not at a load")
        self._arrived[sender.worker] = sender, arrive

    def check_not_there(self, what: str, worker: int) -> None:
        """Raise `UsageError` for a worker that has arrived, and wants to do something else."""
        if worker in self._arrived:
            raise UsageError(f"{what}: worker {worker} is where all meet")

    def step(self) -> int:
        """The latest of the next steps of those that have arrived."""
        return max(self._members[worker].clock for worker in self._arrived)

    def is_under_way(self) -> bool:
        return bool(self._arrived or self._pulling)

    def may_pull(self, worker: int) -> bool:
        """Whether a worker may be given parameters now. Those that were at a load come first;
        a worker that has joined while others had arrived waits until they have met."""
        if self._pulling:
            return worker in self._pulling
        member = self._members[worker]
        held = self._arrived and member.guest and not member.settled
        return self._lets_pull or not held

    def put_off(self, worker: int, join: Callable[[], None]) -> None:
        """A worker that comes back joins when the others have met. Raises `UsageError` for one
        that has asked before."""
        if worker in self._joining:
            raise UsageError(f"join: worker {worker} has asked to join before")
        self._joining[worker] = join

    def forget(self, worker: int) -> None:
        """This worker is lost."""
        self._arrived.pop(worker, None)
        self._joining.pop(worker, None)
        self._members.resting.discard(worker)
        self._pulling.discard(worker)
        if worker == self.leader:
            self.leader = None

    def has_loaded(self) -> None:
        """What the leader has sent has taken effect."""
        self.loads += 1
        self._pulling = set(self._arrived)
        if self.leader is not None:
            del self._arrived[self.leader]  # was answered before
            self.leader = None
        self._answer()

    # ---- who is there ----

    def look(self) -> bool:
        """Something has changed: see whether all are there. Returns True where they are there
        to load, and nobody has brought anything: then the load is complete."""
        if self.leader is not None or not self._pulling.issubset(self._arrived):
            return False
        if self._pulling or not self._arrived:
            self._end()
            return False
        purposes: set[str] = {arrive.purpose for _, arrive in self._arrived.values()}
        missing = self._missing(purposes)
        if missing:
            self._look_for_mistakes(missing, purposes)
            return False
        if not all(self._pushes.owes_nothing(worker) for worker in self._arrived):
            return False  # late units of their last steps are on their way
        if len(purposes) > 1:
            self.give_up(self._different_purposes())
        elif "meet" in purposes:
            self._end()
        else:
            return self._choose_leader()
        return False

    def _missing(self, purposes: set[str]) -> list[int]:
        return [w for w in self._members.trains() if self._is_awaited(w, purposes)]

    def _is_awaited(self, worker: int, purposes: set[str]) -> bool:
        if worker in self._arrived:
            return False
        if not self._members.has_joined(worker):
            return True
        member = self._members[worker]
        if member.guest and not member.settled:
            return False  # it gets its first parameters afterwards
        missed = member.guest and member.first_step >= self.step()
        return not (missed and purposes == {"meet"})

    def _choose_leader(self) -> bool:
        brings = [w for w, (_, arrive) in self._arrived.items() if arrive.brings]
        if not brings:
            return True
        self.leader = min(brings)
        sender, _ = self._arrived[self.leader]
        self._answers.send(sender, Met(leads=True, load=self.loads))
        return False

    def _end(self) -> None:
        """All have met."""
        self._pulling, self._lets_pull = set(), False
        self._answer()
        self._let_join()

    def _answer(self) -> None:
        """Answer those that were not answered before."""
        self._members.resting = set()
        arrived = self._taken()
        for worker, (sender, arrive) in arrived.items():
            leads = arrive.purpose == "meet" and worker == min(arrived)
            self._answers.send(sender, Met(leads=leads, load=self.loads))

    def _taken(self) -> dict[int, tuple[Sender, Arrive]]:
        """Those who have arrived, who are not here any more."""
        arrived = dict(self._arrived)
        self._arrived.clear()
        return arrived

    def _let_join(self) -> None:
        joining, self._joining = self._joining, {}
        for join in joining.values():
            join()

    # ---- who is not there ----

    def _look_for_mistakes(self, missing: Sequence[int], purposes: set[str]) -> None:
        if purposes == {"meet"} and self._shard.spares:
            # A step ends without those who are here, so that the others come here too.
            if self._members.resting != self._arrived.keys():
                self._members.resting = set(self._arrived)
                self._shard.changed()
            return
        if all(self._waits_for_others(worker) for worker in missing):
            if self._shard.next_deadline() is not None or self.follows:
                return
            if self._shard.waits_for_norm():
                return
            if purposes == {"meet"}:
                self._end()
                return
            if not self._lets_pull:  # they may wait for who has joined
                self._lets_pull = True
                self._pulls.let_go()
                self._look_for_mistakes(self._missing(purposes), purposes)
                return
            self.give_up(
                f"{self._here()} to load, and {_workers(missing)} for them, in the middle "
                f"of training: {HOW_TO_LOAD}"
            )
            return
        if not self.sees_all:
            return
        fresh = [w for w in self._arrived if not self._has_trained(w)]
        passed = [w for w in missing if self._has_trained(w)]
        fresh = [w for w in fresh if not self._members[w].guest]
        if fresh and passed and purposes == {"load"}:
            self.give_up(
                f"{self._here()} to load before the first step, and "
                f"{_workers(passed, 'has', 'have')} begun to train without it: {HOW_TO_LOAD}"
            )

    def _waits_for_others(self, worker: int) -> bool:
        return self._members.has_joined(worker) and (
            self._pushes.can_only_wait(worker) or self._pulls.waits(worker)
        )

    def _has_trained(self, worker: int) -> bool:
        if not self._members.has_joined(worker):
            return False
        member = self._members[worker]
        return bool(member.begun) or member.clock > member.first_step

    def _here(self) -> str:
        return _workers(sorted(self._arrived), "waits", "wait")

    def _different_purposes(self) -> str:
        said = {"load": "to load", "meet": "to save"}
        parts = []
        for purpose, words in said.items():
            here = [w for w, (_, a) in self._arrived.items() if a.purpose == purpose]
            parts.append(f"{_workers(sorted(here), 'waits', 'wait')} {words}")
        return f"{' and '.join(parts)}: all have to do the same after the same step"

    def give_up(self, reason: str) -> None:
        """The meeting cannot end: tell all that wait, there or for an answer to a push."""
        self._members.resting = set()
        arrived = self._taken()
        self._lets_pull = False
        waiting = [sender for sender, _ in arrived.values()] + self._pushes.give_up()
        for sender in waiting:
            self._answers.refuse(sender, reason)
        self._let_join()


def _workers(workers: Sequence[int], one: str = "waits", more: str = "wait") -> str:
    named = ", ".join(map(str, workers))
    several = len(workers) > 1
    return f"worker{'s' if several else ''} {named} {more if several else one}"
