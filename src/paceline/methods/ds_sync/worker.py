"""One worker under DS-Sync, from step to step.

A step, after the optimizer's: who is in this worker's group follows from the plan; what is
shared is copied into flat buffers, and these are averaged in the group. When the means are put
into the model is what `overlap` says:

- ``none``: at once; the step ends when they are in;
- ``forward``: each bucket's when a module is about to use its parameters: the same numbers;
- ``step``: when the next backward pass has ended, before the update: gradients were then
  computed with the worker's own parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from paceline.interfaces import Bucket, Run
from paceline.methods.ds_sync.averaged_tensors import Shares
from paceline.methods.ds_sync.current_plan import CurrentPlan
from paceline.methods.ds_sync.group_times import GroupTimes
from paceline.methods.ds_sync.model_mean import Weighted, copies
from paceline.methods.ds_sync.options import DSSyncOptions
from paceline.methods.ds_sync.swa_average import Trajectory, together


class DSSyncWorker:
    """One worker, from step to step."""

    def __init__(self, run: Run, options: DSSyncOptions) -> None:
        self.run, self._options = run, options
        self.current = CurrentPlan(
            options, run, sum(bucket.bytes for bucket in run.buckets)
        )
        self._shares = self._make_shares()
        self._trajectory = Trajectory()
        self._snapshot_due = False
        self._times: GroupTimes | None = None
        if options.adjust_every and run.comm.size > 1:
            self._times = GroupTimes(run, options.adjust_every)

    def _make_shares(self) -> Shares:
        self.run.set_period(len(self.current.plan.phases))
        return Shares(self.run, self.current.largest)

    # ---- a step ----

    def step_begins(self) -> None:
        if self._options.overlap == "forward":
            self._shares.put_buffers()

    def before_use(self, bucket: Bucket) -> None:
        if self._options.overlap == "forward":
            self._shares.put_buffers()
            self._shares.parameters[bucket.index].put()

    def backward_ended(self) -> None:
        self._settle()

    def _settle(self) -> None:
        """All means that are due are put into the model."""
        self._shares.put()
        if self._snapshot_due:
            self._snapshot_due = False
            self._trajectory.take(self.run.parameters)

    def after_update(self) -> None:
        self._settle()
        self._plan_anew()
        self._send()
        self._snapshot_due = self.run.active and self._options.snapshot(self.run.step)
        if self._options.overlap == "none":
            self._settle()

    def _plan_anew(self) -> None:
        """Nothing is under way, and all workers are in the same step."""
        is_new = self.current.renew(self.run)
        if self._times is not None:
            heard = self._times.exchange(self.run, self.current.plan)
            is_new |= heard is not None and self.current.adjust(self.run, heard)
        if is_new:
            self._shares = self._make_shares()

    def _send(self) -> None:
        plan = self.current.plan
        if self.run.comm.rank not in plan.members:
            return  # all know that it is gone
        mine = plan.mine(self.run.step, self.run.comm.rank)
        if len(mine) > 1:
            group, when_in = self.run.comm.group(mine), None
            if self._times is not None:
                when_in = self._times.sends(self.run, plan)
            self._shares.send(self.run, group, when_in)

    def buckets_rebuilt(self) -> None:
        self._settle()
        self._shares = self._make_shares()

    def parameters_replaced(self) -> None:
        """What was on its way, and what the weights were so far, is of another model."""
        self._shares.drop()
        self._snapshot_due = False
        self._trajectory.forget()

    # ---- all together ----

    def finish(self) -> None:
        self.run.participate_until_all_finish()
        self._settle()
        if self._times is not None:
            self._times.wait()
        if self.run.comm.size == 1:
            self._end_trajectory(self._trajectory.count)
            return
        counts = torch.tensor([float(self._trajectory.count)], dtype=torch.float64)
        counts = counts.to(self.run.parameters[0].device)
        self.run.comm.all_reduce(counts, "sum").wait()
        weight = int(self.run.comm.rank in self.current.members)
        Weighted(self.run, self.run.comm, weight, len(self.current.members)).model()
        self._end_trajectory(int(counts.item()))

    def _end_trajectory(self, total: int) -> None:
        """The result is the mean of all weights that all workers have counted, if any."""
        if not total:
            if self._options.swa_from >= 0:
                self.run.report(
                    f"ds-sync:swa_from={self._options.swa_from}: no weights were counted "
                    "from that step on (training has ended before it, or has loaded a "
                    "model since), so the model is the mean of all workers' last ones"
                )
            return
        trajectory = self._trajectory
        trajectory.prepare(self.run.parameters)
        mean = Weighted(self.run, self.run.comm, trajectory.count, total)
        averages = {
            id(parameter): average
            for parameter, average in zip(
                self.run.parameters, trajectory.averages, strict=True
            )
        }
        into = [bucket.parameters for bucket in self.run.buckets]
        mean.mean([[averages[id(p)] for p in some] for some in into], into)
        text = f"ds-sync: the model is the mean of {total} that workers have had (SWA)"
        if self.run.own_buffers:
            text += (
                "; its buffers are of the last ones: estimate BatchNorm's statistics anew "
                "before you evaluate, torch.optim.swa_utils.update_bn(loader, model)"
            )
        self.run.report(text)

    def consolidate(self) -> Callable[[], None]:
        if self._options.overlap == "step":
            self._shares.wait()
        else:
            self._settle()
        if len(self.current.members) == 1:
            return lambda: None
        before = copies(self.run)
        comm = self.run.comm
        if len(self.current.members) < comm.size:
            comm = comm.group(self.current.members)
        Weighted(self.run, comm, 1, comm.size).model()

        def undo() -> None:
            with torch.no_grad():
                for tensor, value in before:
                    tensor.copy_(value)
            self._shares.stamp()

        return undo

    # ---- restarts ----

    def save_state(self) -> dict[str, Any]:
        return {
            "means": self._shares.save(),
            "plan": self.current.save(),
            "trajectory": self._trajectory.save(),
            "snapshot": self._snapshot_due,
            "times": {} if self._times is None else self._times.save(),
        }

    def load_state(self, saved: dict[str, Any]) -> None:
        self._shares.drop()
        if "plan" in saved:
            self.current.load(self.run, saved["plan"])
            self._shares = self._make_shares()
            self._shares.load(saved["means"])
            if self._times is not None and saved["times"]:
                self._times.load(saved["times"])
        self._trajectory.load(saved["trajectory"], self.run.parameters)
        self._snapshot_due = saved["snapshot"]

    def redistribute_state(self, parts: Iterable[Any]) -> dict[str, Any]:
        """A plan of its own, and the trajectories of all."""
        trajectory = together(part["trajectory"] for part in parts)
        return {"trajectory": trajectory, "snapshot": False}
