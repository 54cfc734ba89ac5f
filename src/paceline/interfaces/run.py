"""What a method sees of one worker's training: a `Run`, and more where the method updates.

`paceline.core` implements these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from paceline.buckets import Bucket
from paceline.cluster import Cluster
from paceline.interfaces.communication import Comm, Pending, Scattered
from paceline.interfaces.message import Message
from paceline.interfaces.partial_optimizer import Updater
from paceline.interfaces.remote_model import Remote
from paceline.interfaces.timing import Stopwatch


class Run(Protocol):
    """One worker's training as its method sees it."""

    @property
    def comm(self) -> Comm:
        """The group of all workers."""
        ...

    @property
    def parameters(self) -> Sequence[torch.nn.Parameter]:
        """The trainable parameters, in the model's order."""
        ...

    @property
    def own_buffers(self) -> Sequence[torch.Tensor]:
        """The model's buffers (BatchNorm's statistics) that a method with
        ``averages_buffers`` is to average itself; none where the user wants each worker to
        keep its own."""
        ...

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The user's optimizer, where workers update: its learning rates, and its state,
        which a method may average. A method never steps it."""
        ...

    @property
    def cluster(self) -> Cluster | None:
        """The network, where it is known: equal on all ranks, and of as many workers."""
        ...

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The gradient's pieces, in the order in which every rank delivers them."""
        ...

    @property
    def sending(self) -> Sequence[Message] | None:
        """In which messages the gradients of this step travel, in the order of issue, where
        they are waited for past backward; None where they are waited for when it ends.
        Equal on all ranks. Only for methods that declare ``waits_in_forward``."""
        ...

    @property
    def active(self) -> bool:
        """False once this worker is out of data: it only keeps the others company."""
        ...

    @property
    def weight(self) -> float:
        """This worker's part in the mean: 1/n, or its part of the samples."""
        ...

    @property
    def participants(self) -> Sequence[int]:
        """Ranks that took part in the last round, equal on all ranks."""
        ...

    @property
    def step_is_due(self) -> bool:
        """Whether gradients were delivered and ``step()`` has not followed: in `finish`,
        that the script left its loop between the two."""
        ...

    @property
    def step(self) -> int:
        """The number of this step, from 0; those that only keep company count on."""
        ...

    @property
    def meets(self) -> bool:
        """Whether workers exchange something in this step, as the method's `Rounds` say."""
        ...

    @property
    def stopwatch(self) -> Stopwatch:
        """What times this training's work."""
        ...

    @property
    def loss(self) -> float | None:
        """What the script last reported as its loss, if it did."""
        ...

    def say(self, sentence: str) -> None:
        """Tell people something, once for all workers: now, and beside the run's figures."""
        ...

    def set_period(self, steps: int) -> None:
        """Tell that what steps take and send repeats after so many (by default after those
        from one round to the next): what people are shown are means over so many."""
        ...

    def mean(
        self,
        gradients: Bucket | torch.Tensor,
        *,
        of: Bucket | None = None,
        among: Comm | None = None,
        channel: str = "",
        parts: Mapping[str, torch.Tensor] | None = None,
    ) -> Pending:
        """Form the mean of *gradients*, in place, over the workers that train.

        The buffer holds this worker's share of the mean already (gradient times
        `weight`), as a bucket's does. *of*: the bucket that a tensor is a part of.
        *among*: a group instead of all workers. *channel*: a
        queue of its own, for what may be late. *parts*: what a tensor that is no bucket consists of, by
        the names under which a compressor keeps its state: a parameter's, or ``weight[0:4096]`` for
        these elements of one.

        In a step's means workers learn who trains and what was used. So a mean is not
        waited for before the step's last bucket was delivered: `UsageError`. Where rounds
        are rarer than steps, and of all workers, they are held in `after_update`: a mean
        among all before that is a `UsageError`, too. What a worker that is out of data has
        in the buffer counts as zeros.
        """
        ...

    def scatter_mean(
        self, gradients: Bucket | torch.Tensor, *, of: Bucket | None = None
    ) -> Scattered:
        """Form the mean of *gradients* as `mean` does, in two halves: a reduce-scatter now, an
        all-gather when `Scattered.gather` asks for it. Together they give the bits of the
        all-reduce by the same collective (native: of `ring`), and send as much.

        The step's last bucket is gathered before any mean of the step is waited for: who
        takes part, and what was used, travels in that half. Each is gathered once. Refused
        under compression, and under collectives without halves: a method that calls this
        declares ``sends_halves = True``, so that `distribute` refuses them.
        """
        ...

    def average(
        self,
        tensor: torch.Tensor,
        *,
        among: Comm | None = None,
        channel: str = "",
        name: str = "",
        parts: Mapping[str, torch.Tensor] | None = None,
    ) -> Pending:
        """Form the mean of anything else, parameters for example, in place: every worker
        that takes part counts once. *name*: what the state of a compressor is kept under,
        for what may be compressed, differences of parameters for example; without a name
        it is sent as it is. *parts*, instead: of a contiguous *tensor*, the views that each
        are coded by themselves, in order, by such names; a parameter's name lets its state
        go on in other buckets, and among other workers. A worker that is out of data takes part in one more
        round if it has trained since the last one; between groups it always does.
        *tensor* is of floating point."""
        ...

    def participate_until_all_finish(self) -> int | None:
        """This worker is out of data: contribute nothing, in step with the others, until
        all are out of data. Each step's hooks come as always, with `active` False.

        Returns whose model all are to take then, if models differ: somebody stopped
        earlier than others, or a step short of them, and this rank trained to the end.
        """
        ...

    def broadcast_model(self, source: int) -> None:
        """Give every rank the parameters and buffers of rank *source*. Collective."""
        ...


class UpdatingRun(Run, Protocol):
    """The run of a method with ``updates_on="method"``: it applies the optimizer."""

    def partition_optimizer(self, most_bytes: int) -> Updater:
        """The optimizer, in pieces of at most so many bytes each; once."""
        ...

    def clip(self, gradients: Sequence[torch.Tensor]) -> None:
        """Scale a step's mean gradients in place, if they are to be clipped: with
        ``clips="mean"``, before they are applied."""
        ...


class ServerRun(Run, Protocol):
    """The run of a method with ``updates_on="server"``."""

    @property
    def remote(self) -> Remote:
        """The parameters on their servers."""
        ...
