"""The order of events in a step: hooks of the method, and messages of the training itself.

The training's own messages (buffers, active workers) follow the method's rounds: at the end of backward
if all workers communicate in every step, else after the update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from paceline.bucketing.tuner import BucketTuner
from paceline.core.broadcast import broadcast_tensors
from paceline.core.context import TrainingContext
from paceline.core.lazy_parameters import LazyParameters
from paceline.core.load_hooks import LoadTracker
from paceline.core.method_hooks import MethodHooks
from paceline.core.misuse import SentGradientCheck
from paceline.core.module_buffers import BufferSync
from paceline.core.participation import (
    DelayedParticipation,
    GroupParticipation,
    Participation,
)
from paceline.core.reducer import Reducer
from paceline.interfaces import Bucket, Message
from paceline.optim.clipping import clip_


class StepDriver:
    """Takes one worker through its steps; the hooks in the model and the wrapped optimizer call it.

    `Training` sets the attributes after their creation. *hooks* are the method's. *loads* is None
    unless servers update. *lazy* is None unless the method has the hook `before_use`.
    """

    hooks: MethodHooks
    loads: LoadTracker | None = None
    lazy: LazyParameters | None = None
    before_place: Callable[[int], None] | None = None
    """Called with the next `place`, before this worker sends anything for the step up to it."""

    def __init__(
        self,
        context: TrainingContext,
        reducer: Reducer,
        tuner: BucketTuner,
        participation: Participation,
        groups: GroupParticipation,
        buffers: BufferSync,
    ) -> None:
        self._context, self._workers = context, context.workers
        self._rounds, self._listeners = context.rounds, context.listeners
        self._waits_in_forward = context.waits_in_forward
        self.reducer, self.tuner, self.buffers = reducer, tuner, buffers
        self._participation, self._groups = participation, groups
        self._delayed: DelayedParticipation | None = None
        if context.rounds.agree_every is not None:
            control = participation.control or context.comm
            every = context.rounds.agree_every
            self._delayed = DelayedParticipation(context, control, every)
        self._sent = SentGradientCheck(context)
        self._may_begin = True
        self._backward_of = -1
        """The last step whose backward pass has ended."""
        self._done = 0
        self.delivered = False
        """Whether the method has the gradients of the current step."""
        self.accumulated = False
        """Whether gradients from ``no_sync`` wait for a pass that delivers them."""
        self.rounds_done = 0
        """Number of rounds of this worker: models are averaged in a round."""

    # ---- from the forward pass to the end of backward ----

    def begin(self) -> None:
        """Begin a step: at the first forward pass after a backward pass that ended.

        If the script does not call the model itself, the first gradient begins it. A step without
        either begins at its end of backward.
        """
        if not self._may_begin:
            return
        self._may_begin = False
        if self.loads is not None:
            self.loads.before_step()
        self._groups.begin_step()
        if self._rounds.is_every_step and not self._waits_in_forward:
            self._participation.begin_round()
        self._participation.is_later = (
            self._rounds.after_update and not self._rounds.is_nonblocking
        )
        self.hooks.call("step_begins")

    def begin_backward(self) -> None:
        """Begin a backward pass that synchronizes: at its first gradient, or at its end without one."""
        self.begin()  # for scripts that do not call the model itself
        self._announce_place(in_step=True)
        if self.lazy is not None:
            self.lazy.backward_begins()
        if self._waits_in_forward:
            self._participation.resolve()  # of the previous step
            self._participation.begin_round()
        self.reducer.begin()

    def deliver_complete(self) -> None:
        """Give the method the complete buckets, in plan order.

        If this worker's own gradient is clipped, none is delivered before backward has ended.
        """
        if not self._context.clips_own:
            self._deliver_complete()

    def _deliver_complete(self) -> None:
        while (bucket := self.reducer.next_complete()) is not None:
            self._deliver(bucket)

    def _deliver(self, bucket: Bucket) -> None:
        """Give the method a bucket that is complete and next in plan order."""
        if bucket.last and self._rounds.is_every_step:
            self._participation.flags_complete()
        self._listeners.bucket_leaves(bucket)
        self.hooks.call("bucket_ready", bucket)
        if bucket.last:
            self._groups.flags_complete()

    def end_backward(self) -> None:
        """End the backward pass: deliver the remaining buckets, and let the method wait."""
        context, reducer = self._context, self.reducer
        if not reducer.in_backward:
            self.begin_backward()
        all_used = reducer.fill_unused()
        if context.clips_own:
            # Buckets hold shares of the mean, but the limit is for the gradient itself.
            limit = context.settings.clip_norm * reducer.share
            clip_([bucket.buffer for bucket in context.buckets], limit)
        self._deliver_complete()
        reducer.in_backward = False
        self._end_hooks_of_backward(all_used)
        if not self._is_under_way:
            self._listeners.means_are_there()
        if not all_used:
            reducer.expose_gradients()
        if context.settings.check_finite:
            reducer.require_finite(self._done + 1)
        self.delivered = self._workers.step_pending = True
        self.accumulated = False
        self._rebuild_buckets()
        if context.method.visible_gradient == "sent":
            self._sent.remember()

    def _end_hooks_of_backward(self, all_used: bool = True) -> None:
        self.hooks.call("backward_ended")
        self._backward_of = self._context.step
        if self._rounds.is_every_step:
            # Participation may be learned later, with the averages, unless it is needed now.
            late = self._is_under_way and all_used and not self.buffers.has_any
            if not late:
                self._participation.resolve()
            self._share_buffers()
        if self.lazy is not None and self._is_under_way:
            self.lazy.backward_ended()
        self._may_begin = True

    @property
    def _is_under_way(self) -> bool:
        """Whether the method has not waited for this step's means."""
        is_late = self._waits_in_forward and self._workers.active
        return is_late and self.tuner.plan.messages is not None

    def _rebuild_buckets(self) -> None:
        """Rebuild the buckets if the tuner has changed the plan. A backward pass is over on all ranks."""
        if self.tuner.backward_ended():
            if self._waits_in_forward:
                # The exchange refers to the present buckets.
                self._participation.resolve()
            self.reducer.make_buckets(self.tuner.plan.buckets)
            self.hooks.call("buckets_rebuilt")
        self._listeners.pass_ended()

    def clip_mean(self, gradients: Sequence[torch.Tensor]) -> None:
        """Clip mean gradients in place, if the method clips the mean."""
        if self._context.method.clips == "mean":
            clip_(gradients, self._context.settings.clip_norm)

    def messages(self, whole_buckets: bool) -> Sequence[Message] | None:
        """The messages that carry this step's gradients beyond the backward pass: `Run.messages`."""
        messages = self.tuner.plan.messages
        if messages is not None and whole_buckets:
            return [Message(n) for n in dict.fromkeys(m.bucket for m in messages)]
        return messages

    # ---- after the update ----

    def require_unchanged(self) -> None:
        """Raise `GradientError` if the script has changed gradients that were sent."""
        if self._context.method.visible_gradient == "sent":
            self._sent.require_unchanged()

    def end(self) -> None:
        """End the step: the user's optimizer has stepped, or a server or the method has."""
        self.delivered = self._workers.step_pending = False
        self._done += 1
        if self._rounds.models_may_differ:
            self._workers.unsent_steps += 1
        self._after_update()
        self._listeners.step_ended()
        self.apply_buffers()

    @property
    def adds_to_what_is_under_way(self) -> bool:
        """Whether a gradient that arrives now was added to one that is in flight."""
        is_late = self._waits_in_forward and self.tuner.plan.messages is not None
        return is_late and self.lazy is not None and not self.lazy.used_since_backward

    @property
    def waits_for_update(self) -> bool:
        """Whether the other workers wait for messages that follow this step's update."""
        sends = self._rounds.is_every_step and self.hooks.has("after_update")
        return self.delivered and sends

    def abandon_step(self) -> None:
        """End a step that the script left between ``backward()`` and ``step()``.

        The other workers take the step. This worker still counts in it, with its present model.
        """
        if self._rounds.is_every_step:
            self._after_update()

    def shadow_step(self) -> None:
        """Do one step without data, which PyTorch DDP's ``Join`` calls shadowing.

        If not every step is a round, it is the step of the next round.
        """
        self.buffers.apply()
        context, rounds = self._context, self._rounds
        context.step = rounds.next_round(context.step)
        if self._backward_of != context.step:  # else the script stopped before step()
            self.begin_backward()
            self.reducer.zero()
            for bucket in context.buckets:
                self._deliver(bucket)
            self._end_hooks_of_backward()
            if rounds.is_every_step:
                self._rebuild_buckets()
        self._after_update()

    def _after_update(self) -> None:
        """Call the method's hook; in a round after the update, also send the training's messages."""
        context, rounds = self._context, self._rounds
        self._announce_place(in_step=False)
        self._participation.is_later = False
        if rounds.models_may_differ and rounds.is_round(context.step):
            self._hold_round()
        else:
            self.hooks.call("after_update")
        if self.lazy is not None and self._workers.active:
            # Watching costs some microseconds per tensor and step.
            waited = self._waits_in_forward and self.tuner.plan.messages is None
            self.lazy.reset(not waited or self.tuner.timer.listening)
        context.step += 1

    def _hold_round(self) -> None:
        """Hold a round of a method whose models differ between rounds."""
        workers = self._workers
        self.rounds_done += 1
        if self._delayed is not None:
            before = workers.participants
            if self._delayed.begin_round():
                self.buffers.apply()
                # After the last round no worker is active, so the last active ones' buffers stay:
                # all workers end with the same ones.
                source, *_ = workers.participants or before
                self.buffers.start(source)
            if workers.anyone_active:
                self.hooks.call("after_update")
        else:
            self._participation.begin_round()
            self._participation.flags_complete()
            self.hooks.call("after_update")
            self._participation.resolve()
            self._share_buffers()
        workers.unsent_steps = 0

    # ---- the model's buffers ----

    def _share_buffers(self) -> None:
        """Send rank 0's buffers to all, as DDP does: every step starts from them.

        If rank 0 is out of data, they are those of the first active rank.
        """
        if self.buffers.has_any and self._workers.participants:
            self.buffers.start(source=self._workers.participants[0])

    def apply_buffers(self) -> None:
        """Put the buffers that were sent into the model.

        Groups do not wait for all workers: they apply the buffers of one vote at the next vote.
        """
        if self._delayed is None:
            self.buffers.apply()

    def broadcast_model(self, source: int) -> None:
        """Give every rank the parameters and buffers of rank *source*. Collective."""
        self.buffers.apply()
        model = self._context.model
        tensors = [*model.parameters(), *model.buffers()]
        broadcast_tensors(self._context.comm, tensors, source)

    # ---- this worker's position in its steps ----

    @property
    def place(self) -> int:
        """This worker's position, comparable between workers: twice its number of steps.

        It is one more between ``backward()`` and ``step()``.
        """
        return 2 * self._context.step + self._workers.step_pending

    def _announce_place(self, *, in_step: bool) -> None:
        """Announce the next place: the end of this step's backward pass, or the end of the step."""
        if self.before_place is None or not self._workers.active:
            return
        self.before_place(2 * (self._context.step + 1) - in_step)

    # ---- progress that a restart continues from ----

    @property
    def progress(self) -> dict[str, int]:
        """The training's position in its rounds, equal on all workers between steps."""
        rounds = 0 if self._delayed is None else self._delayed.rounds
        unsent = self._workers.unsent_steps
        return {"step": self._context.step, "unsent": unsent, "rounds": rounds}

    @progress.setter
    def progress(self, saved: dict[str, int]) -> None:
        self._context.step = saved["step"]
        self._backward_of = -1
        if self._rounds.models_may_differ:
            self._workers.unsent_steps = saved["unsent"]
        if self._delayed is not None:
            self._delayed.rounds = saved["rounds"]
