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
    """Another server of the job has taken this incarnation of *worker* for lost."""

    worker: int
    incarnation: int


class Listening(msgspec.Struct, tag="listening", kw_only=True):
    """A server listens at *port*, and goes on with *step*; or, with *fault*, why it does not."""

    port: int = 0
    step: int = 0
    fault: str = ""


class WorkerEvicted(msgspec.Struct, tag="evicted", kw_only=True):
    """A server has taken this incarnation of *worker* for lost: nothing is heard of it."""

    worker: int
    incarnation: int


class TrainingOver(msgspec.Struct, tag="over", kw_only=True):
    """All workers have said goodbye to a server; it holds what they have trained until its input
    ends, for another incarnation of one of them."""


class HoldsModel(msgspec.Struct, tag="holds", kw_only=True):
    """Whether a group server holds the model. It *holds* it once it has taken over what its peers
    hold. It does so no more when its group has no workers: its peers pass on nothing to it then."""

    holds: bool


LineToServer = WorkerFinished | WorkerLost | Describe
LineFromServer = WorkerEvicted | HoldsModel | TrainingOver
