"""DASO: averages gradients inside each node, and parameters between nodes with a delay.

Coquelin et al., "Accelerating neural network training with distributed asynchronous and selective
optimization (DASO)" (J. Big Data 9, 2022); its code is Heat's ``heat/optim/dp_optimizer.py``.
Inside a node all workers average their gradients in each step, as bsp does. Every S steps
one worker of each node, in turn, begins an all-reduce of the parameters w among the nodes. B steps
later it is waited for, and its result broadcast inside the node:

    w <- (2B*w + sum_p w_p(t-B)) / (2B + P)

P is the number of nodes; the weight of 2B for the own parameters is Heat's choice. In the first
`warmup_steps` steps nodes average after each step and wait for it.

Differences from Heat:

- S and B are constant; Heat's follow the loss.
- Warm-up is counted in steps, not in epochs, and there is no cool-down.
- The last exchange's result is merged before the next exchange begins, not after it.
- Gradients are averaged in a node in each step; Heat skips some steps after a cycle.
- Nothing is cast to bf16.

A node's weight is the number of samples that it has trained on since the last exchange. BatchNorm's
statistics are averaged in the node, and sent with the parameters. Optimizers keep their state: it is
equal inside a node, and differs between nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from paceline.errors import UsageError
from paceline.interfaces import (
    Bucket,
    Clips,
    Consistency,
    GradientSeen,
    MethodSummary,
    Pending,
    Rounds,
    Run,
    UpdatesOn,
)
from paceline.methods.contrib.daso_nodes import (
    Exchange,
    Nodes,
    Progress,
    begin,
    end,
    mean_of_nodes,
)
from paceline.methods.local_updates.fragments import (
    TrainedSince,
    copy_into,
    message_tensors,
)
from paceline.methods.local_updates.options import check_group, places_of
from paceline.methods.model_averaging import ModelAverager


@dataclass(frozen=True, kw_only=True)
class DASO:
    """Average gradients in each *group* in every step, and parameters between groups every few steps.

    Attributes:
        sync_every: Steps from one exchange between groups to the next.
        delay: Steps from the start of an exchange to the use of its result, at most *sync_every*.
        group: Workers of a node: ``rack`` or ``host`` of the cluster file, or a number of workers.
        warmup_steps: First steps, in each of which nodes average and wait for the result.
    """

    name: ClassVar[str] = "daso"
    summary: ClassVar[MethodSummary] = MethodSummary(
        purpose="Averages gradients inside a node, and parameters between nodes with a delay.",
        source="Coquelin et al., DASO (J. Big Data 9, 2022)",
        use_when="nodes or racks share a thin link, and links inside a node are fast",
        waits_for=(
            "the workers of its own node, in every step, and for other nodes only if an exchange "
            "takes longer than `delay` steps"
        ),
        sends=(
            "the gradient inside the node, and one worker's parameters between nodes once in "
            "`sync_every` steps"
        ),
        guarantees=(
            "Workers of a node hold equal parameters. Updates of other nodes arrive `delay` steps "
            "late."
        ),
        limits=(
            "With one node daso equals bsp. With several nodes it equals bsp under SGD with `sync_every=1,delay=0`.",
            "`sync_every` and `delay` stay constant. In the authors' code they follow the loss.",
            "`.grad` has, and `clip_norm` limits, the mean over the workers of one node.",
            "If another number of workers loads a checkpoint, the exchange in flight is lost.",
        ),
    )
    consistency: ClassVar[Consistency] = "local"
    updates_on: ClassVar[UpdatesOn] = "worker"
    visible_gradient: ClassVar[GradientSeen] = "mean"
    clips: ClassVar[Clips] = "mean"
    averages_buffers: ClassVar[bool] = True
    consolidates_together: ClassVar[bool] = True
    rounds: ClassVar[Rounds] = Rounds(groups=True)

    sync_every: int = 4
    delay: int = 1
    group: str = "rack"
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        if self.sync_every < 1:
            raise self._wrong("sync_every", "1 or more steps")
        if self.warmup_steps < 0:
            raise self._wrong("warmup_steps", "0 or more steps")
        if not 0 <= self.delay <= self.sync_every:
            raise self._wrong(
                "delay",
                f"0 to sync_every={self.sync_every} steps: then the next exchange begins",
            )
        check_group(self.name, self.group)

    @property
    def learns_for(self) -> int:
        """Steps until it averages as seldom as it will, and until the first late mean is used."""
        return self.warmup_steps + (self.sync_every + self.delay if self.delay else 0)

    def _wrong(self, key: str, expected: str) -> UsageError:
        return UsageError(f"daso:{key}={getattr(self, key)}: expected {expected}")

    def compressed_by(self, compressor: str) -> DASO:
        """Refuse compression: raises `UsageError`."""
        raise UsageError(
            f"compression {compressor!r} with method 'daso': parameters are never compressed, only "
            "changes since a common model, and nodes have none while averages are delayed. Leave compression out, or use hierarchical-local-sgd or streaming-diloco"
        )

    def start(self, run: Run) -> DASOWorker:
        nodes = Nodes(run, places_of(self.name, self.group, run))
        run.set_period(self.sync_every)
        if nodes.count == 1 and run.comm.size > 1:
            run.report(
                f"daso: all workers are in one {self.group}, so there is nobody to exchange "
                "parameters with: this is bsp"
            )
        return DASOWorker(run, self, nodes)


class DASOWorker:
    """Runs one worker: averages gradients inside its node, and parameters between nodes."""

    def __init__(self, run: Run, method: DASO, nodes: Nodes) -> None:
        self.run, self.method, self.nodes = run, method, nodes
        self.model = ModelAverager.of_model(run)
        self.progress = Progress()
        self.turn = 0
        """How many exchanges there were."""
        self.exchange: Exchange | None = None
        self._gradients: list[Pending] = []

    # ---- inside the node, in each step ----

    def bucket_ready(self, bucket: Bucket) -> None:
        self._gradients.append(self.run.mean(bucket, among=self.nodes.inside))

    def backward_ended(self) -> None:
        for pending in self._gradients:
            pending.wait()
        self._gradients.clear()

    # ---- between nodes ----

    @torch.no_grad()
    def after_update(self) -> None:
        run = self.run
        if run.active and not run.step_pending:
            self.progress.count(run.weight * run.comm.size)
        every, delay = self._pace()
        begins = (run.step + 1) % every == 0
        if self.exchange is not None and (begins or run.step >= self.exchange.due):
            self._end_exchange()
        if begins:
            self.exchange = begin(
                self.nodes, self.model, run, self.progress, self.turn, delay
            )
            self.turn += 1
            if not delay:
                self._end_exchange()

    def _pace(self) -> tuple[int, int]:
        """S and B in this step."""
        method = self.method
        warms_up = self.run.step < method.warmup_steps
        return (1, 0) if warms_up else (method.sync_every, method.delay)

    def _end_exchange(self) -> None:
        assert self.exchange is not None
        exchange, self.exchange = self.exchange, None
        end(self.nodes, self.model, exchange)

    # ---- the end, and what is shown in between ----

    @torch.no_grad()
    def finish(self) -> None:
        source = self.run.participate_until_all_finish()
        if self.exchange is not None:
            self._end_exchange()
        self._average(self.model)
        if source is not None:
            self.run.broadcast_model(source)

    @torch.no_grad()
    def consolidate(self) -> Callable[[], None]:
        # In the buffers of the other one an exchange may be under way.
        model = ModelAverager.of_model(self.run)
        restore = model.snapshot()
        self._average(model)
        return restore

    def _average(self, model: ModelAverager) -> None:
        _, delay = self._pace()
        mean_of_nodes(self.nodes, model, self.run, self.progress, were_equal=not delay)

    def parameters_replaced(self) -> None:
        """Drop the exchange in flight, which has the former parameters."""
        self._drop_exchange()
        self.progress.since.begin(self.run.step)

    def _drop_exchange(self) -> None:
        """Wait for the exchange in flight, and discard its result."""
        if self.exchange is not None:
            self.exchange.wait()
            self.exchange = None

    # ---- restarts ----

    def save_state(self) -> dict[str, Any]:
        since, exchange = self.progress.since, self.exchange
        saved: dict[str, Any] = {
            "turn": self.turn,
            "since": [since.begins, since.weight],
            "steps": self.progress.steps,
            "exchange": {},
        }
        if exchange is not None:
            exchange.wait()
            saved["exchange"] = {
                "due": exchange.due,
                "turn": exchange.turn,
                "delay": exchange.delay,
                "weights": exchange.weights,
                "sums": message_tensors(self.run, self.model),
            }
        return saved

    @torch.no_grad()
    def load_state(self, saved: dict[str, Any]) -> None:
        self._drop_exchange()
        device = self.run.parameters[0].device
        self.turn = saved["turn"]
        self.progress = Progress(TrainedSince(*saved["since"]), saved["steps"])
        there = saved["exchange"]
        if there:
            copy_into(message_tensors(self.run, self.model), there["sums"])
            self.exchange = Exchange(
                there["due"],
                there["turn"],
                there["delay"],
                there["weights"].to(device),
            )

    def redistribute_state(self, parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """Drop the exchange and the progress since it: all workers continue from one model."""
        saved = dict(next(iter(parts)))
        begins, _ = saved["since"]
        return saved | {"since": [begins, 0.0], "steps": 0, "exchange": {}}
