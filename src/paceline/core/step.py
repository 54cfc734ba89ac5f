"""The steps of a training: what a method is told, and what training itself sends.

What training sends (buffers, who still trains) follows the method's rounds:
at the end of backward where all meet in every step, else after the update.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.bucketing.tuner import Planner
from paceline.buckets import Bucket
from paceline.core.delayed_participation import Agreement
from paceline.core.group_participation import GroupCalls
from paceline.core.lazy_parameters import Uses
from paceline.core.method_hooks import MethodHooks
from paceline.core.participation import RollCall
from paceline.core.presence import Presence
from paceline.core.reducer import Arrivals
from paceline.core.run import WorkerRun
from paceline.core.settings import Settings
from paceline.core.step_listeners import Observers
from paceline.core.sync import SharedBuffers
from paceline.core.training_errors import Faults
from paceline.interfaces import Rounds
from paceline.parameter_server.client.load_hooks import Loading
from paceline.parameter_server.optim.clipping import clip


class Steps:
    """One worker's. *rounds*: the method's. *waits_in_forward*: the method waits for means when
    something uses them, not where backward ends. *clips_own*: the worker's own gradient is
    clipped before any of it is sent; *agreement*: of workers that meet in groups.

    The parts that refer back to this one are set once they are made: *arrivals*, *run*,
    *hooks*, *observers*, and *loading* and *uses*, where there are such.
    """

    arrivals: Arrivals
    run: WorkerRun
    hooks: MethodHooks
    observers: Observers
    loading: Loading | None = None
    uses: Uses | None = None
    goes_on: Callable[[int], None] | None = None
    """Called with the next `place` before anything is sent that leads there."""

    def __init__(
        self,
        rounds: Rounds,
        settings: Settings,
        waits_in_forward: bool,
        clips_own: bool,
        presence: Presence,
        planner: Planner,
        roll_call: RollCall,
        group_calls: GroupCalls,
        agreement: Agreement | None,
        shared: SharedBuffers,
        faults: Faults,
    ) -> None:
        self._rhythm = rounds
        self._settings, self._clips_own = settings, clips_own
        self._waits_late = waits_in_forward
        self._presence, self._planner = presence, planner
        self._roll_call, self._agreement = roll_call, agreement
        self._group_calls = group_calls
        self._shared, self._faults = shared, faults
        self._may_begin = True
        self._backward_of = -1
        """The last step whose backward pass has ended."""
        self._done = 0
        self.delivered = False
        """Whether the gradients of the step under way were given to the method."""
        self.accumulated = False
        """Whether gradients wait, since ``no_sync``, for a pass that delivers them."""
        self.rounds = 0
        """Those after which models agree, or are nearer to it, that this worker has been in."""

    # ---- from forward to the end of backward ----

    def begin(self) -> None:
        """The first forward after a backward that ended; or, where the model itself is not
        called, the first gradient; or a step without either."""
        if not self._may_begin:
            return
        self._may_begin = False
        if self.loading is not None:
            self.loading.before_step()
        self._group_calls.begin()
        if self._rhythm.is_every_step and not self._waits_late:
            self._roll_call.begin()
        self._roll_call.is_later = (
            self._rhythm.after_update and not self._rhythm.is_nonblocking
        )
        self.hooks.call("step_begins")

    def begin_backward(self) -> None:
        """The first gradient of a pass that is sent, or such a pass without one."""
        self.begin()  # where the model itself was not called
        self._go_on(in_step=True)
        if self.uses is not None:
            self.uses.backward_begins()
        if self._waits_late:
            self._roll_call.answer()  # of the step before
            self._roll_call.begin()
        self.arrivals.begin()

    def deliver(self, bucket: Bucket) -> None:
        """All gradients of a bucket are in it, and its turn has come."""
        if bucket.last and self._rhythm.is_every_step:
            self._roll_call.all_is_known()
        self.observers.bucket_leaves(bucket)
        self.hooks.call("bucket_ready", bucket)
        if bucket.last:
            self._group_calls.all_is_known()

    def end_backward(self) -> None:
        """The backward pass is over: deliver what is left, and let the method wait."""
        arrivals = self.arrivals
        if not arrivals.in_backward:
            self.begin_backward()
        all_used = arrivals.fill_rest()
        if self._clips_own:
            # Buckets hold shares of the mean, and the gradient itself is to be clipped.
            limit = self._settings.clip_norm * arrivals.share
            clip([bucket.buffer for bucket in arrivals.buckets], limit)
        arrivals.deliver_complete()
        arrivals.in_backward = False
        self._meet_after_backward(all_used)
        if not self._is_under_way:
            self.observers.means_are_there()
        if not all_used:
            arrivals.show()
        if self._settings.check_finite:
            arrivals.require_finite(self._done + 1)
        self.delivered = self._presence.step_is_due = True
        self.accumulated = False
        self._plan_anew()

    def _meet_after_backward(self, all_used: bool = True) -> None:
        self.hooks.call("backward_ended")
        self._backward_of = self.run.step
        if self._rhythm.is_every_step:
            # Who takes part may be learned with the means, unless somebody needs it now.
            late = self._is_under_way and all_used and not self._shared.has_any
            if not late:
                self._roll_call.answer()
            self._share_buffers()
        if self.uses is not None and self._is_under_way:
            self.uses.backward_ended()
        self._may_begin = True

    @property
    def _is_under_way(self) -> bool:
        """Whether the method has not waited for this step's means."""
        is_late = self._waits_late and self._presence.active
        return is_late and self.run.sending is not None

    def _plan_anew(self) -> None:
        """A backward pass is over, on all ranks: the planner may have changed its mind."""
        if self._planner.backward_ended():
            if self._waits_late:
                self._roll_call.answer()  # it knows the buckets of before
            self.arrivals.make_buckets(self._planner.groups)
            self.hooks.call("buckets_rebuilt")

    # ---- after the update ----

    def end(self) -> None:
        """The user's optimizer has stepped, or would have."""
        self.delivered = self._presence.step_is_due = False
        self._done += 1
        if self._rhythm.models_may_differ:
            self._presence.unsent += 1
        self._after_update()
        self.observers.step_ended()
        self.put_buffers()

    @property
    def adds_to_what_is_under_way(self) -> bool:
        """Whether a gradient that comes now was added to one that is on its way."""
        is_late = self._waits_late and self.run.sending is not None
        return is_late and self.uses is not None and not self.uses.some_since

    @property
    def waits_for_update(self) -> bool:
        """Whether the others wait for what this step's update sends."""
        sends = self._rhythm.is_every_step and self.hooks.has("after_update")
        return self.delivered and sends

    def leave_before_update(self) -> None:
        """The script left its loop between ``backward()`` and ``step()``. The others go on
        with that step, in which this worker still counts, with the model that it has."""
        if self._rhythm.is_every_step:
            self._after_update()

    def keep_company(self) -> None:
        """One step without data, or, where rounds are rarer, that of the next round."""
        self._shared.put()
        run, rounds = self.run, self._rhythm
        run.step = rounds.next_round(run.step)
        if self._backward_of != run.step:  # else the script left before step()
            self.begin_backward()
            self.arrivals.deliver_nothing()
            self._meet_after_backward()
            if rounds.is_every_step:
                self._plan_anew()
        self._after_update()

    def _after_update(self) -> None:
        """The method's hook; and a round's own messages, where that is when workers
        meet."""
        run, rounds = self.run, self._rhythm
        self._go_on(in_step=False)
        self._roll_call.is_later = False
        if rounds.models_may_differ and run.meets:
            self._hold_round()
        else:
            self.hooks.call("after_update")
        if self.uses is not None and self._presence.active:
            # Watching costs a step some microseconds a tensor.
            waited = self._waits_late and run.sending is None
            self.uses.begin_anew(not waited or self._planner.listening)
        run.step += 1

    def _hold_round(self) -> None:
        """A round of a method whose models differ between rounds."""
        self.rounds += 1
        if self._agreement is not None:
            before = self._presence.participants
            if self._agreement.round_begins():
                self._shared.put()
                # At the last one nobody trains any more, and all end with the same.
                source, *_ = self._presence.participants or before
                self._shared.send(source)
            if self._presence.somebody_trains:
                self.hooks.call("after_update")
        else:
            self._roll_call.begin()
            self._roll_call.all_is_known()
            self.hooks.call("after_update")
            self._roll_call.answer()
            self._share_buffers()
        self._presence.unsent = 0

    # ---- the model's buffers ----

    def _share_buffers(self) -> None:
        """DDP's semantics: every step starts from rank 0's buffers; where rank 0 is out of
        data, from the first rank that still has some."""
        if self._presence.participants:
            self._shared.send(source=self._presence.participants[0])

    def put_buffers(self) -> None:
        """Groups do not wait for all others: what was sent at one agreement of all is put
        into the model at the next one."""
        if self._agreement is None:
            self._shared.put()

    # ---- where this worker is ----

    @property
    def place(self) -> int:
        """Where this worker is, for all alike: twice its steps, and one more between
        ``backward()`` and ``step()``."""
        return 2 * self.run.step + self._presence.step_is_due

    def _go_on(self, *, in_step: bool) -> None:
        """To the end of the backward pass of this step, or of the step."""
        if self.goes_on is None or not self._presence.active:
            return
        self.goes_on(2 * (self.run.step + 1) - in_step)

    # ---- what a restart goes on from ----

    @property
    def progress(self) -> dict[str, int]:
        """Where in its rounds this training is, equal on all workers between steps."""
        rounds = 0 if self._agreement is None else self._agreement.rounds
        unsent, step = self._presence.unsent, self.run.step
        return {"step": step, "unsent": unsent, "rounds": rounds}

    @progress.setter
    def progress(self, saved: dict[str, int]) -> None:
        self.run.step = saved["step"]
        self._backward_of = -1
        if self._rhythm.models_may_differ:
            self._presence.unsent = saved["unsent"]
        if self._agreement is not None:
            self._agreement.rounds = saved["rounds"]
