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

from paceline.interfaces import Run
from paceline.methods.ds_sync.options import DSSyncOptions
from paceline.methods.ds_sync.plan import Plan, make_plan
from paceline.methods.ds_sync.shares import Shares, state_keys
from paceline.methods.ds_sync.together import Weighted, copies
from paceline.methods.ds_sync.trajectory import Trajectory, together
from paceline.tensors import Bucket


class GroupWorker:
    """*members*: who has a part in the plan, equal on all workers."""

    def __init__(self, options: DSSyncOptions, run: Run) -> None:
        self._options = options
        self._keys = state_keys(run.optimizer) if options.state == "average" else []
        self._members = tuple(range(run.comm.size))
        self._bytes = sum(bucket.bytes for bucket in run.buckets)
        self.plan = self._make_plan(run, 0)
        self._shares = self._make_shares(run)
        self._trajectory = Trajectory()
        self._snapshot_due = False

    # ---- the plan ----

    def _make_plan(self, run: Run, version: int) -> Plan:
        options = self._options
        few = min(options.size, len(self._members)) if version else options.size
        return make_plan(
            self._members,
            shuffle=options.shuffle,
            size=max(2, few),
            seed=options.seed,
            cluster=run.cluster,
            bytes=self._bytes,
            version=version,
            begins=run.step,
        )

    def _renew_plan(self, run: Run) -> None:
        """Somebody is gone, as all have agreed: those who remain go on among themselves."""
        if tuple(run.participants) == self._members or not run.participants:
            return
        self._members = tuple(run.participants)
        self._use(run, self._make_plan(run, self.plan.version + 1))

    def _use(self, run: Run, plan: Plan) -> None:
        """From this step on; nothing is under way."""
        self.plan = plan
        self._shares = self._make_shares(run)

    def _make_shares(self, run: Run) -> Shares:
        largest = max(len(group) for phase in self.plan.sample for group in phase)
        return Shares(run, self._keys, largest)

    # ---- a step ----

    def step_begins(self, run: Run) -> None:
        if self._options.overlap == "forward":
            self._shares.put_buffers()

    def before_use(self, run: Run, bucket: Bucket) -> None:
        if self._options.overlap == "forward":
            self._shares.put_buffers()
            self._shares.parameters[bucket.index].put()

    def settle(self, run: Run) -> None:
        """All means that are due are put into the model."""
        self._shares.put()
        if self._snapshot_due:
            self._snapshot_due = False
            self._trajectory.take(run.parameters)

    def after_update(self, run: Run) -> None:
        self.settle(run)
        self._renew_plan(run)
        self._send(run)
        self._snapshot_due = run.active and self._options.snapshot(run.step)
        if self._options.overlap == "none":
            self.settle(run)

    def _send(self, run: Run) -> None:
        if run.comm.rank not in self._members:
            return  # all know that it is gone
        mine = self.plan.mine(run.step, run.comm.rank)
        if len(mine) > 1:
            changes = not self.plan.phases
            self._shares.send(run, run.comm.group(mine, once=changes), None)

    def buckets_changed(self, run: Run) -> None:
        self.settle(run)
        self._shares = self._make_shares(run)

    def loaded(self, run: Run) -> None:
        """What was on its way, and what the weights were so far, is of another model."""
        self._shares.drop()
        self._snapshot_due = False
        self._trajectory.forget()

    # ---- all together ----

    def finish(self, run: Run) -> None:
        run.keep_company_to_the_end()
        self.settle(run)
        if run.comm.size == 1:
            self._end_trajectory(run, self._trajectory.count)
            return
        counts = torch.tensor([float(self._trajectory.count)], dtype=torch.float64)
        counts = counts.to(run.parameters[0].device)
        run.comm.all_reduce(counts, "sum").wait()
        weight = int(run.comm.rank in self._members)
        Weighted(run, run.comm, weight, len(self._members)).model()
        self._end_trajectory(run, int(counts.item()))

    def _end_trajectory(self, run: Run, total: int) -> None:
        """The result is the mean of all weights that all workers have counted, if any."""
        if not total:
            return
        trajectory = self._trajectory
        trajectory.prepare(run.parameters)
        mean = Weighted(run, run.comm, trajectory.count, total)
        averages = {
            id(parameter): average
            for parameter, average in zip(
                run.parameters, trajectory.averages, strict=True
            )
        }
        into = [bucket.parameters for bucket in run.buckets]
        mean.mean([[averages[id(p)] for p in some] for some in into], into)
        text = f"ds-sync: the model is the mean of {total} that workers have had (SWA)"
        if run.own_buffers:
            text += (
                "; its buffers are of the last ones: estimate BatchNorm's statistics anew "
                "before you evaluate, torch.optim.swa_utils.update_bn(loader, model)"
            )
        run.say(text)

    def consolidate(self, run: Run) -> Callable[[], None]:
        if self._options.overlap == "step":
            self._shares.wait()
        else:
            self.settle(run)
        if len(self._members) == 1:
            return lambda: None
        before = copies(run)
        comm = run.comm
        if len(self._members) < comm.size:
            comm = comm.group(self._members)
        Weighted(run, comm, 1, comm.size).model()

        def undo() -> None:
            with torch.no_grad():
                for tensor, value in before:
                    tensor.copy_(value)
            self._shares.stamp()

        return undo

    # ---- restarts ----

    def save_state(self, run: Run) -> dict[str, Any]:
        return {
            "means": self._shares.save(),
            "members": list(self._members),
            "version": self.plan.version,
            "begins": self.plan.begins,
            "phases": [[list(group) for group in phase] for phase in self.plan.phases],
            "trajectory": self._trajectory.save(),
            "snapshot": self._snapshot_due,
        }

    def load_state(self, run: Run, saved: dict[str, Any]) -> None:
        self._shares.drop()
        options = self._options
        if "members" in saved:
            self._members = tuple(saved["members"])
            phases = tuple(
                tuple(tuple(group) for group in phase) for phase in saved["phases"]
            )
            plan = Plan(
                phases,
                saved["version"],
                saved["begins"],
                self._members,
                options.shuffle,
                min(options.size, max(2, len(self._members))),
                options.seed,
            )
            self._use(run, plan)
            self._shares.load(saved["means"])
        self._trajectory.load(saved["trajectory"], run.parameters)
        self._snapshot_due = saved["snapshot"]

    def redistribute_state(self, run: Run, parts: Iterable[Any]) -> dict[str, Any]:
        """A plan of its own, and the trajectories of all."""
        trajectory = together(part["trajectory"] for part in parts)
        return {"trajectory": trajectory, "snapshot": False}
