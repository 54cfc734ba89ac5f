"""Lines between a server process and its parent, a worker or a supervisor.

`LineToServer`s arrive on the process's standard input, after a line with the job's token.
`LineFromServer`s leave on its standard output, `Listening` first.
"""

from __future__ import annotations

import msgspec

from paceline.interfaces.server_messages import Describe


class WorkerFinished(msgspec.Struct, tag="finished", kw_only=True):
    """The script of *worker* has ended well: it does not come back."""

    worker: int


class WorkerLost(msgspec.Struct, tag="lost", kw_only=True):
    """Another server of the job has evicted this incarnation of *worker*."""

    worker: int
    incarnation: int


class Listening(msgspec.Struct, tag="listening", kw_only=True):
    """A server listens at *port* and continues with *step*.

    If it does not listen, *fault* is the reason.
    """

    port: int = 0
    step: int = 0
    fault: str = ""


class WorkerEvicted(msgspec.Struct, tag="evicted", kw_only=True):
    """A server has evicted this incarnation of *worker*, which was silent for too long."""

    worker: int
    incarnation: int


class TrainingOver(msgspec.Struct, tag="over", kw_only=True):
    """All workers have said goodbye to a server.

    It keeps the trained model until its input ends, for another incarnation of a worker.
    """


class HoldsModel(msgspec.Struct, tag="holds", kw_only=True):
    """Whether a group server has the model.

    It *holds* the model once it has taken over its peers' state. It no longer does when its group
    has no workers, because its peers then send it no updates.
    """

    holds: bool


LineToServer = WorkerFinished | WorkerLost | Describe
LineFromServer = WorkerEvicted | HoldsModel | TrainingOver
