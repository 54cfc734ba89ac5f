"""Controllers of several ranks in step, on a clock that the test moves."""

import random
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor, wait

from paceline.tools.auto.controller import Controller, WorkerFinishedError
from tests.support.hanging import SECONDS

RANKS = ThreadPoolExecutor(64)
"""More threads than a test has ranks: one that waits for the others keeps its thread."""


class Mail:
    """What `DeferredMessages` does, for ranks that are taken in turn within a step."""

    def __init__(self, size):
        self.size = size
        self.messages = []  # of each message: what ranks have posted

    def end(self, rank):
        return End(self, rank)


class UnreadError(Exception):
    """A message was read before all had posted it."""


class End:
    def __init__(self, mail, rank):
        self._mail, self._rank = mail, rank
        self._posts, self._reads, self._over = 0, deque(), False

    @property
    def size(self):
        return self._mail.size

    def _post(self, out, content):
        number = self._posts
        self._posts += 1
        if number == len(self._mail.messages):
            self._mail.messages.append({})
        assert self._rank not in self._mail.messages[number]
        self._mail.messages[number][self._rank] = (out, content)
        self._reads.append(number)

    def post(self, values):
        self._post(False, list(values))

    def is_readable(self):
        return len(self._mail.messages[self._reads[0]]) == self.size

    def _take(self):
        if not self.is_readable():
            raise UnreadError
        message = self._mail.messages[self._reads.popleft()]
        if any(out for out, _ in message.values()):
            self._over = True
            raise WorkerFinishedError
        return [content for _, content in message.values()], message

    def take(self):
        contents, _ = self._take()
        assert len({len(content) for content in contents}) == 1, "different messages"
        return [sum(column) for column in zip(*contents, strict=True)]

    def post_text(self, text):
        self._post(False, text)

    def take_text(self):
        _, message = self._take()
        return message[0][1]

    def finish(self):
        if not self._over:
            self._over = True
            self._post(True, [])


class Measurements:
    """One rank of a runtime in which a step with each spec takes so long: `Runtime.seconds`."""

    needs_probe = True

    def __init__(self, runtime, rank):
        self._runtime, self._rank = runtime, rank
        self._times = []
        self._since_change = 0

    def step(self, spec, changed):
        runtime = self._runtime
        if changed:
            self._since_change = 0
        self._since_change += 1
        seconds = runtime.seconds(spec, len(self._times))
        seconds *= 1 + runtime.noise * runtime.random[self._rank].gauss(0, 1)
        if changed:
            seconds += runtime.change_seconds
        self._times.append(max(1e-6, seconds))

    @property
    def steady(self):
        return self._since_change > self._runtime.settles_after

    period = 1

    def last(self, steps):
        self._runtime.most_asked = max(self._runtime.most_asked, steps)
        return self._times[-steps:]

    def exposed(self):
        return self._runtime.exposed

    def recall(self):
        return self._runtime.recalled if self._rank == 0 else ("", 0.0)

    def network_is_as_recalled(self):
        return self._runtime.as_recalled

    def begin_plan(self, present, probe_seconds):
        self._runtime.probes[self._rank].append(probe_seconds)
        self._planned_at = len(self._times) + self._runtime.plan_steps

    def plan_is_there(self):
        return self._rank == 0 and len(self._times) >= self._planned_at

    def candidates(self):
        return list(self._runtime.candidates) if self._rank == 0 else []


class Log:
    def __init__(self):
        self.decisions, self.sentences = [], []
        self.decided, self.report = self.decisions.append, self.sentences.append


class Runtime:
    """What happens to all ranks. *seconds* gives a step's, by spec and by its number."""

    def __init__(self, size, seconds, candidates=(), **options):
        self.size, self.seconds, self.candidates = size, seconds, candidates
        self.noise = options.pop("noise", 0.0)
        self.exposed = options.pop("exposed", 0.5)
        self.settles_after = options.pop("settles_after", 20)
        self.most_asked = 0
        """For how many steps' times a rank has asked at once, at most."""
        self.plan_steps = options.pop("plan_steps", 30)
        self.change_seconds = options.pop("change_seconds", 0.1)
        self.recalled = options.pop("recalled", ("", 0.0))
        self.as_recalled = options.pop("as_recalled", True)
        self.refuses = options.pop("refuses", ())
        seed = options.pop("seed", 0)
        assert not options, options
        self.random = [random.Random(f"{seed}/{rank}") for rank in range(size)]
        self.probes = [[] for _ in range(size)]
        self.mail = Mail(size)
        self.ends = [self.mail.end(rank) for rank in range(size)]
        self.measurements = [Measurements(self, rank) for rank in range(size)]
        self.logs = [Log() for _ in range(size)]
        self.controllers = [
            Controller(self.measurements[rank], self.ends[rank], "bsp", self.logs[rank])
            for rank in range(size)
        ]
        self.runs = [controller.run() for controller in self.controllers]
        self.replies = [None] * size
        self.specs = ["bsp"] * size
        self.history = []
        self.changed = [False] * size
        self.left = set()
        self.turns = random.Random(f"{seed}/turns")

    def step(self):
        """One step of all, in any order; a rank that must wait for others comes again."""
        wanted = {}
        ranks = [rank for rank in range(self.size) if rank not in self.left]
        self.history.append(self.specs[ranks[0]] if ranks else "")
        for rank in ranks:
            self.measurements[rank].step(self.specs[rank], self.changed[rank])
        waiting = list(ranks)
        self.turns.shuffle(waiting)
        wanted = self._run(waiting)
        assert len(set(wanted.values())) <= 1, f"ranks decide differently: {wanted}"
        for rank, spec in wanted.items():
            refused = spec in self.refuses
            self.replies[rank] = "not with this one" if refused else ""
            self.changed[rank] = spec is not None and not refused
            if self.changed[rank]:
                self.specs[rank] = spec
        return wanted

    def _run(self, waiting):
        """Run the ranks in threads: a message that all wait for is in once the last has posted it."""
        wanted, lock = {}, threading.Condition()
        failed = []

        def go(rank):
            end = self.ends[rank]
            take = end._take

            def patient():
                while not end.is_readable():
                    assert lock.wait(SECONDS), "waits for ever"
                return take()

            end._take = patient
            try:
                with lock:
                    wanted[rank] = self.runs[rank].send(self.replies[rank])
                    lock.notify_all()
            except BaseException as error:
                failed.append(error)
            finally:
                end._take = take

        post = End._post

        def noisy(end, out, content):
            post(end, out, content)
            lock.notify_all()

        End._post = noisy
        try:
            wait([RANKS.submit(go, rank) for rank in waiting])
        finally:
            End._post = post
        if failed:
            raise failed[0]
        return wanted

    def leave(self, rank):
        self.ends[rank].finish()
        self.left.add(rank)
