"""Runs one worker of DS-Sync: averages its parameters with a group after each step.

- `DSSyncWorker`: the steps of a worker; start here.
- `ParameterExchange`, `BufferExchange`: the averages of parameters and of BatchNorm statistics.
- `SwaAverage`: an average of the weights over time (SWA).

After the optimizer's step a worker copies its parameters and BatchNorm statistics into flat
buffers, and averages them with its group of this step. The option `overlap` determines when the
means replace the model's tensors:

- ``none``: at once; the step ends when the means have arrived.
- ``forward``: before a module uses the parameters of a bucket. The numbers are those of ``none``.
- ``step``: after the next backward pass, before its update. So gradients are those of the worker's
  own parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.swa_utils import get_swa_multi_avg_fn

from paceline.errors import UsageError
from paceline.interfaces import Bucket, Comm, Pending, Run
from paceline.interfaces.buckets import stamps, stand_for_the_same
from paceline.methods.ds_sync.adjust import CurrentPlan, GroupTimes
from paceline.methods.ds_sync.options import DSSyncOptions
from paceline.methods.model_averaging import FlatTensors, ModelAverager, widen_half


class DSSyncWorker:
    """Runs the steps of one worker, in hooks that `DistributedOptimizer` calls."""

    def __init__(self, run: Run, options: DSSyncOptions) -> None:
        self.run, self._options = run, options
        self.current = CurrentPlan(run, options)
        self._make_exchanges()
        self._swa = SwaAverage()
        self._swa_due = False
        self._times: GroupTimes | None = None
        if options.adjust_every and run.comm.size > 1:
            self._times = GroupTimes(run, options.adjust_every)

    def _make_exchanges(self) -> None:
        """Create the exchanges for the current plan and buckets."""
        run, largest = self.run, self.current.largest
        run.set_period(len(self.current.plan.phases))
        self._parameters = [
            ParameterExchange(run, _flat(bucket.parameters, largest), bucket.names)
            for bucket in run.buckets
        ]
        """One for each bucket, by its index."""
        model = ModelAverager([], run.own_buffers)
        self._buffers = [
            BufferExchange(
                run, flat, [f"buffers {number}.{i}" for i in range(len(flat.of))]
            )
            for number, flat in enumerate(model.statistics)
        ]

    @property
    def _exchanges(self) -> list[ParameterExchange]:
        """The exchanges in the order of sending: those that a forward pass needs first come first.

        The buckets themselves are in the order of the backward pass.
        """
        return [*self._buffers, *reversed(self._parameters)]

    # ---- a step ----

    def step_begins(self) -> None:
        if self._options.overlap == "forward":
            self._apply_buffers()

    def before_use(self, bucket: Bucket) -> None:
        if self._options.overlap == "forward":
            self._apply_buffers()
            self._parameters[bucket.index].apply()

    def _apply_buffers(self) -> None:
        for exchange in self._buffers:
            exchange.apply()

    def backward_ended(self) -> None:
        self._apply()

    def _apply(self) -> None:
        """Write all means that are due into the model, and count the model in SWA if that is due."""
        for exchange in self._exchanges:
            exchange.apply()
        if self._swa_due:
            self._swa_due = False
            self._swa.update(self.run.parameters)

    def after_update(self) -> None:
        self._apply()
        self._renew_plan()
        self._send()
        self._swa_due = self.run.active and self._options.snapshot(self.run.step)
        if self._options.overlap == "none":
            self._apply()

    def _renew_plan(self) -> None:
        """Take a new plan if workers or contention have changed.

        This is safe only here: no average is under way, and all workers are in the same step.
        """
        is_new = self.current.renew()
        if self._times is not None:
            times = self._times.exchange(self.current.plan)
            is_new |= times is not None and self.current.adjust(times)
        if is_new:
            self._make_exchanges()

    def _send(self) -> None:
        run, plan = self.run, self.current.plan
        if run.comm.rank not in plan.members:
            # This worker is out of data, and the others' plan does not have it.
            return
        members = plan.mine(run.step, run.comm.rank)
        if len(members) == 1:
            return
        group, exchanges = run.comm.group(members), self._exchanges
        stop = None if self._times is None else self._times.begin(plan)
        for exchange in exchanges:
            exchange.send(group)
        if stop is not None:
            exchanges[-1].then(stop)

    def buckets_rebuilt(self) -> None:
        self._apply()
        self._make_exchanges()

    def parameters_replaced(self) -> None:
        """Drop means and the SWA average: they belong to the previous model."""
        self._drop_exchanges()
        self._swa_due = False
        self._swa = SwaAverage()

    def _drop_exchanges(self) -> None:
        for exchange in self._exchanges:
            exchange.drop()

    # ---- all workers together ----

    def finish(self) -> None:
        run = self.run
        run.participate_until_all_finish()
        self._apply()
        if self._times is not None:
            self._times.wait()
        if run.comm.size == 1:
            self._finish_swa(self._swa.count)
            return
        counts = torch.tensor([float(self._swa.count)], dtype=torch.float64)
        counts = counts.to(run.parameters[0].device)
        run.comm.all_reduce(counts, "sum").wait()
        members = self.current.plan.members
        share = 1 / len(members) if run.comm.rank in members else 0.0
        ModelAverager.of_model(run).mean(run.comm, share)
        self._finish_swa(int(counts.item()))

    def _finish_swa(self, total: int) -> None:
        """Set the model to the mean of the *total* models that all workers have counted in SWA."""
        run, swa = self.run, self._swa
        if not total:
            if self._options.swa_from >= 0:
                run.report(
                    f"ds-sync:swa_from={self._options.swa_from}: no weights were averaged "
                    "over time: training ended before that step, or loaded a model after it. The "
                    "model is the mean of all workers' last models"
                )
            return
        swa.allocate(run.parameters)
        average_of = {
            id(parameter): average
            for parameter, average in zip(run.parameters, swa.averages, strict=True)
        }
        by_bucket = [[average_of[id(p)] for p in b.parameters] for b in run.buckets]
        ModelAverager(by_bucket).mean(run.comm, swa.count / total)
        with torch.no_grad():
            for parameter, average in zip(run.parameters, swa.averages, strict=True):
                parameter.copy_(average)
        text = f"ds-sync: the model is the mean of {total} earlier models of the workers (SWA)"
        if run.own_buffers:
            text += (
                ". Its BatchNorm statistics are of the last models: before you evaluate, call "
                "torch.optim.swa_utils.update_bn(loader, model)"
            )
        run.report(text)

    def consolidate(self) -> Callable[[], None]:
        if self._options.overlap == "step":
            for exchange in self._exchanges:
                exchange.wait()
        else:
            self._apply()
        members, comm = self.current.plan.members, self.run.comm
        if len(members) == 1:
            return lambda: None
        if len(members) < comm.size:
            comm = comm.group(members)
        model = ModelAverager.of_model(self.run)
        restore = model.snapshot()
        model.mean(comm, 1 / comm.size)

        def undo() -> None:
            restore()
            for exchange in self._parameters:
                exchange.stamp()

        return undo

    # ---- restarts ----

    def save_state(self) -> dict[str, Any]:
        means = [exchange.save() for exchange in self._exchanges]
        return {
            "means": {name: tensor for one in means for name, tensor in one.items()},
            "plan": self.current.save(),
            "swa": self._swa.save(),
            "swa_due": self._swa_due,
            "times": {} if self._times is None else self._times.save(),
        }

    def load_state(self, saved: dict[str, Any]) -> None:
        self._drop_exchanges()
        if "plan" in saved:
            self.current.load(saved["plan"])
            self._make_exchanges()
            for exchange in self._exchanges:
                exchange.load(saved["means"])
            if self._times is not None and saved["times"]:
                self._times.load(saved["times"])
        self._swa.load(saved["swa"], self.run.parameters)
        self._swa_due = saved["swa_due"]

    def redistribute_state(self, parts: Iterable[Any]) -> dict[str, Any]:
        """Combine the SWA averages of all workers; the new job makes a new plan."""
        return {
            "swa": combine_averages(part["swa"] for part in parts),
            "swa_due": False,
        }


def _flat(parameters: Sequence[torch.Tensor], largest: int) -> FlatTensors:
    """Return a flat buffer, in float32 if it is needed: only a mean of two is rounded once in any type."""
    dtype = parameters[0].dtype
    return FlatTensors(parameters, widen_half(dtype) if largest > 2 else None)


class ParameterExchange:
    """Averages some parameters with a group: sends them, waits, and applies the mean.

    Attributes:
        flat: The parameters, and the flat buffer that is averaged.
        due: Whether a mean was sent for, and neither applied nor dropped yet.
    """

    def __init__(self, run: Run, flat: FlatTensors, names: Sequence[str]) -> None:
        self._run, self.flat, self._names = run, flat, list(names)
        self.due = False
        self._pending: Pending | None = None
        self._stamps: list[int] = []
        """Versions of the tensors when they were sent; empty after a load."""

    def send(self, group: Comm) -> None:
        """Start averaging the current tensors in *group*."""
        self._gather_in()
        self.due = True
        self.stamp()
        self._pending = self._run.average(self.flat.buffer, among=group)

    def then(self, work: Callable[[], None]) -> None:
        """Call *work* when the mean has arrived."""
        if self._pending is not None:
            self._pending = self._pending.then(work)

    def wait(self) -> None:
        """Wait until the mean is in the buffer."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def apply(self) -> None:
        """Write the mean into the tensors, if one is due.

        Raises:
            UsageError: The script has written to a tensor since it was sent.
        """
        if self.due:
            self.wait()
            self.due = False
            self._scatter_out()

    def drop(self) -> None:
        """Discard the mean, since the tensors were replaced."""
        self.wait()
        self.due = False

    def stamp(self) -> None:
        """Treat the current versions of the tensors as those that were sent."""
        self._stamps = stamps(self.flat.of)

    def _gather_in(self) -> None:
        self.flat.gather_in()

    def _scatter_out(self) -> None:
        now = stamps(self.flat.of)
        for name, here, then in zip(self._names, now, self._stamps, strict=False):
            if here != then:
                raise UsageError(
                    f"{name!r} was written to after step(), while its average was under way: the new value "
                    "would be lost. Use ds-sync:overlap=none, or load_state_dict"
                )
        self.flat.scatter_out()

    # ---- restarts ----

    def _state(self) -> Mapping[str, torch.Tensor]:
        """Return the tensors of a mean that is due, by name."""
        return dict(zip(self._names, self.flat.views, strict=True))

    def save(self) -> dict[str, torch.Tensor]:
        """Return the mean that is due, by name; empty if none is."""
        self.wait()
        return dict(self._state()) if self.due else {}

    def load(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Load the mean from *saved*: the results of `save` of all exchanges together."""
        state = self._state()
        self._stamps = []
        self.due = all(name in saved for name in state)
        if self.due:
            for name, tensor in state.items():
                tensor.copy_(saved[name])


class BufferExchange(ParameterExchange):
    """Averages buffers, which a forward pass may change while the average is under way.

    Changes since the buffers were sent are added to the mean.
    """

    def __init__(self, run: Run, flat: FlatTensors, names: Sequence[str]) -> None:
        super().__init__(run, flat, names)
        self._sent = torch.zeros_like(flat.buffer)

    def _gather_in(self) -> None:
        super()._gather_in()
        self._sent.copy_(self.flat.buffer)

    def _scatter_out(self) -> None:
        mean = self.flat.buffer.clone()
        self.flat.gather_in()
        now, sent = self.flat.buffer, self._sent
        now.copy_(torch.where(now == sent, mean, mean + (now - sent)))
        self.flat.scatter_out()

    def _state(self) -> Mapping[str, torch.Tensor]:
        return {**super()._state(), f"{self._names[0]} and others, sent": self._sent}


class SwaAverage:
    """Keeps the running average of one worker's weights, with torch's SWA arithmetic.

    Izmailov et al., "Averaging weights leads to wider optima and better generalization" (2018),
    section 3.2. Half-precision weights have averages in float32.

    Attributes:
        count: Number of models in the average.
        averages: The average of each parameter; empty before the first model.
    """

    def __init__(self) -> None:
        self.count = 0
        self.averages: list[torch.Tensor] = []

    def update(self, parameters: Sequence[torch.Tensor]) -> None:
        """Add the current weights to the average."""
        self.allocate(parameters)
        weights = [
            parameter.detach().to(average.dtype)
            for parameter, average in zip(parameters, self.averages, strict=True)
        ]
        get_swa_multi_avg_fn()(self.averages, weights, self.count)
        self.count += 1

    def allocate(self, parameters: Sequence[torch.Tensor]) -> None:
        """Create the averages, as zeros, if there are none yet."""
        if not self.averages:
            self.averages = [
                torch.zeros_like(parameter, dtype=widen_half(parameter.dtype)).detach()
                for parameter in parameters
            ]
            for average, parameter in zip(self.averages, parameters, strict=True):
                stand_for_the_same(average, parameter)

    def save(self) -> dict[str, Any]:
        """Return the average's state for a checkpoint."""
        return {"count": self.count, "averages": list(self.averages)}

    def load(self, saved: dict[str, Any], parameters: Sequence[torch.Tensor]) -> None:
        """Load the state that `save` returned."""
        self.count = saved["count"]
        self.averages = []
        if self.count:
            self.allocate(parameters)
            for average, there in zip(self.averages, saved["averages"], strict=True):
                average.copy_(there)


def combine_averages(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Combine the SWA averages of all workers, for a job with another number of workers.

    Args:
        parts: The state of each worker's `SwaAverage`.

    Returns:
        The state for every new worker: the mean of all models in *parts*, with the mean of their counts.
    """
    total, workers = 0, 0
    averages: list[torch.Tensor] = []
    for part in parts:
        workers += 1
        count = part["count"]
        if not count:
            continue
        total += count
        if not averages:
            averages = [one.clone() for one in part["averages"]]
            continue
        for average, there in zip(averages, part["averages"], strict=True):
            average.add_(there - average, alpha=count / total)
    return {
        "count": max(bool(total), round(total / max(workers, 1))),
        "averages": averages,
    }
