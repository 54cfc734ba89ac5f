"""What one training is made of, made and joined."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch

from paceline.bucketing import MEASURED
from paceline.bucketing.tuner import GoesPast, Planner
from paceline.buckets import Bucket, kind_of, wire_bytes
from paceline.collectives.communicator import TorchComm
from paceline.collectives.no_collectives import AloneComm
from paceline.compression import Identity
from paceline.core.averages import Means
from paceline.core.backward_passes import Passes
from paceline.core.batch_weights import Weights
from paceline.core.compressed_average import Codes
from paceline.core.delayed_participation import Agreement
from paceline.core.group_participation import GroupCalls
from paceline.core.lazy_parameters import Uses
from paceline.core.method_hooks import MethodHooks
from paceline.core.own_state import own_states
from paceline.core.participation import RollCall
from paceline.core.presence import Presence
from paceline.core.reducer import Arrivals
from paceline.core.run import WorkerRun, run_for
from paceline.core.same_data_check import SameData
from paceline.core.sampler import Sampler
from paceline.core.sent_gradient_check import SentGradients
from paceline.core.settings import Settings
from paceline.core.step import Steps
from paceline.core.step_listeners import Observers
from paceline.core.sync import SharedBuffers, broadcast_tensors
from paceline.core.training_errors import Faults
from paceline.interfaces import CodingStage, Compressor, Message, Method, Runtime
from paceline.parameter_server.client.compression import Charge
from paceline.parameter_server.client.load_hooks import Loading
from paceline.parameter_server.client.remote_model import RemoteParameters
from paceline.parameter_server.optim.clipping import clip
from paceline.torch_internals import Uncopied, moves_host_tensors

MakeRemote = Callable[[list[Bucket], Callable[[], float], Charge], RemoteParameters]
"""From buckets, this worker's weight as of now, and what is told of codes."""


class Parts:
    """Of one worker's training, as `Training` has it. *looking*: whether the script is
    inside `consolidated`, where it writes what is taken back."""

    def __init__(
        self,
        runtime: Runtime,
        model: torch.nn.Module,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        method: Method,
        settings: Settings,
        comm: TorchComm | AloneComm,
        sampler: Sampler | None,
        remote: MakeRemote | None,
        optimizer: torch.optim.Optimizer | None,
        looking: Callable[[], bool],
    ) -> None:
        self.comm, self.sampler = comm, sampler
        self.parameters = list(parameters)
        self._runtime, self._model, self._method = runtime, model, method
        self._settings, self._looking = settings, looking
        self.rounds = method.rounds
        runtime.journal.set_period(self.rounds.every)
        runtime.journal.learning = _learning(method, settings)
        self.presence = Presence(comm.size, weight=1.0 / comm.size)
        self.faults = Faults()
        by_others = remote is not None or getattr(method, "averages_buffers", False)
        own_buffers = () if by_others else tuple(model.buffers())
        self.shared = SharedBuffers(comm, own_buffers, settings.buffers)
        self.sent = SentGradients(self.say)
        self.steps, means = self._make_steps(on_servers=remote is not None)
        self.arrivals = self.steps.arrivals
        self.remote: RemoteParameters | None = None
        if remote is not None:
            self.remote = remote(
                self.buckets, lambda: self.presence.weight, self._charge
            )
        self.run = self.steps.run = self._make_run(means, optimizer)
        self.hooks = MethodHooks(method, self.run, self.faults.failed)
        self.steps.hooks = self.hooks
        self.loading = self.steps.loading = self._make_loading()
        try:
            self.hooks.begin()
        except BaseException:
            if self.loading is not None:
                self.loading.detach()
            raise
        encoding = None if self.remote is None else self.remote.encoding
        self.own_states = own_states(
            method,
            self.hooks,
            encoding or self.codes,
            encoding.tensors() if encoding else self.parameters,
            comm.rank,
            self.parameters,
            optimizer,
        )
        self.steps.observers = self._make_observers()
        self._hook_into_model()

    def detach(self) -> None:
        """Take the hooks out of the model."""
        self.passes.detach()
        for handle in self._handles:
            handle.remove()
        if self.steps.uses is not None:
            self.steps.uses.detach()
        if self.loading is not None:
            self.loading.detach()

    @property
    def buckets(self) -> list[Bucket]:
        """The gradient's pieces, in plan order."""
        return self.arrivals.buckets

    def _make_steps(self, on_servers: bool) -> tuple[Steps, Means]:
        """What buckets go through, and what means are formed with."""
        comm, presence, method = self.comm, self.presence, self._method
        rounds, settings = self.rounds, self._settings
        device = self.parameters[0][1].device
        self.stopwatch = self._runtime.stopwatch(device)
        compressed = settings.compression != Identity()
        beside = compressed or device.type != "cpu" or rounds.is_nonblocking
        waits_in_forward = getattr(method, "waits_in_forward", False)
        control = None
        if beside and comm.size > 1 and rounds.every:
            control = comm.channel("control")
        roll_call = RollCall(
            presence,
            comm,
            control,
            lambda: self.buckets if rounds.is_every_step else (),
            _where_control_is(comm, device),
            # Answered at another place in the program by those who are out of data.
            comm.channel("ballots") if waits_in_forward and control is None else None,
        )
        agreement = None
        if rounds.agree_every is not None:
            agreement = Agreement(presence, control or comm, rounds.agree_every)
        self.codes = None
        if compressed and not on_servers:
            self.codes = Codes(settings.compression, presence, comm.rank, self._charge)
        group_calls = GroupCalls(
            presence, lambda: self.buckets, _where_control_is(comm, device)
        )
        means = Means(comm, presence, rounds, roll_call, group_calls, self.codes)
        planner = self.planner = Planner(
            comm,
            settings.buckets,
            [wire_bytes(parameter) for _, parameter in self.parameters],
            [kind_of(parameter) for _, parameter in self.parameters],
            device,
            self.stopwatch,
            self._runtime.blank,
            self._runtime.journal.planned,
            self.say,
            partial(means.try_out, in_halves=getattr(method, "sends_halves", False)),
            lock_step=rounds.is_every_step,
            goes_past=self._goes_past(waits_in_forward),
            starts_after=settings.compression.first_steps if compressed else 0,
        )
        self.clips_own = method.clips == "own" and settings.clip_norm < math.inf
        steps = Steps(
            *(rounds, settings, waits_in_forward, self.clips_own, presence),
            planner,
            *(roll_call, group_calls, agreement, self.shared, self.faults),
        )
        # A bucket holds this rank's share of the mean, where workers form the mean:
        # the division costs nothing beside the copy that has to be made anyway.
        averages = method.visible_gradient == "mean" or method.updates_on == "method"
        steps.arrivals = Arrivals(
            self.parameters,
            presence.weight,
            averages,
            steps.deliver,
            self.clips_own,
            self.faults.refused,
        )
        steps.arrivals.make_buckets(planner.groups)
        return steps, means

    def _charge(
        self, compressor: Compressor, workers: int, size: float, stage: CodingStage
    ) -> None:
        self.steps.observers.coded(compressor, workers, size, stage)

    def _make_run(
        self, means: Means, optimizer: torch.optim.Optimizer | None
    ) -> WorkerRun:
        return run_for(
            self._method,
            optimizer is not None,
            self.clip_mean,
            self.remote,
            self.comm,
            self.rounds,
            self.presence,
            means,
            [parameter for _, parameter in self.parameters],
            self.stopwatch,
            self.say,
            self._runtime.journal.set_period,
            lambda: self.buckets,
            self._runtime.journal.metrics.get,
            self.steps.keep_company,
            self.broadcast_model,
            optimizer if self.remote is None else None,
            [] if self._settings.buffers == "local" else list(self._model.buffers()),
            self._runtime.cluster,
            self._sending,
        )

    def _goes_past(self, waits_in_forward: bool) -> GoesPast:
        """Who looks at all means where backward ends waits for them there."""
        if self._settings.use_gradients or not waits_in_forward:
            return "no"
        return "halves" if getattr(self._method, "sends_halves", False) else "whole"

    def _sending(self) -> Sequence[Message] | None:
        sending = self.planner.sending
        if sending is not None and self.codes is not None:
            # Codes are of whole buckets.
            return [Message(n) for n in dict.fromkeys(m.bucket for m in sending)]
        return sending

    def _make_loading(self) -> Loading | None:
        if self.remote is None:
            return None
        return Loading(
            self.comm.rank,
            self._method.name,
            self._model,
            self.remote,
            lambda: self.hooks.call("loaded"),
            self._looking,
        )

    def _make_observers(self) -> Observers:
        """Those who only watch."""
        # A mean within a group may be that of one worker.
        of_all = self._method.rounds.is_every_step
        sees_means = of_all and self._method.visible_gradient == "mean"
        one_of_many = self.comm.rank == 0 and self.comm.size > 1
        same_data = SameData(
            sees_means and self.sampler is None and one_of_many,
            self.comm.size,
            self.say,
            lambda: self.buckets,
            lambda: self.arrivals.share,
        )
        samples = None if self.sampler is None else self.sampler.mean_samples
        compute = self._runtime.compute(self._model, self.parameters, samples)
        watchers = [
            one
            for watcher in self._runtime.job.watchers
            for one in watcher(self._model, self.parameters)
        ]
        observers = Observers([compute, self.planner, same_data, *watchers])
        encoding = None if self.remote is None else self.remote.encoding
        if encoding is not None or (self.codes is not None and self.comm.size > 1):
            observers.codes_with(self._settings.compression)
        return observers

    def _hook_into_model(self) -> None:
        method, steps = self._method, self.steps
        self.passes = Passes(
            self._model,
            self.parameters,
            method.name,
            method.visible_gradient,
            None if self.sampler is None else Weights(self.sampler),
            self.presence,
            steps,
            self.faults,
            self._note_life,
            self.end_backward,
        )
        self._handles = [
            self._model.register_load_state_dict_pre_hook(
                Uncopied(lambda *_: self.shared.put())
            )
        ]
        if self.remote is None and self.hooks.has("loaded"):
            self._handles += [
                module.register_load_state_dict_post_hook(Uncopied(self._note_load))
                for module in self._model.modules()
            ]
        if self.hooks.has("before_use"):
            steps.uses = Uses(
                self._model,
                [parameter for _, parameter in self.parameters],
                self.arrivals.bucket_of,
                lambda: self.buckets,
                lambda bucket: self.hooks.call("before_use", bucket),
                steps.observers,
                gradients=getattr(method, "waits_in_forward", False),
            )
            steps.uses.begin_anew()

    # ---- what they call ----

    def say(self, sentence: str) -> None:
        """Tell people something, once for all workers: now, and beside the run's figures."""
        known = sentence in self._runtime.journal.notes
        self._runtime.journal.note(sentence)
        if self.comm.rank == 0 and not known:
            print(f"paceline: {sentence}", file=sys.stderr)

    def broadcast_model(self, source: int) -> None:
        self.shared.put()
        tensors = [*self._model.parameters(), *self._model.buffers()]
        broadcast_tensors(self.comm, tensors, source)

    def _note_load(self, *_: object) -> None:
        """The script has loaded parameters; inside `consolidated` they are taken back."""
        if not self._looking():
            self.hooks.is_loaded = True

    def _note_life(self) -> None:
        """A forward pass begins. An evaluation takes long, and sends nothing else."""
        if self.remote is not None and self._runtime.alone:
            self.remote.note(self._runtime.now())

    def end_backward(self) -> None:
        self.steps.end_backward()
        if self._method.visible_gradient == "sent":
            self.sent.remember(self.buckets)

    def clip_mean(self, gradients: Sequence[torch.Tensor]) -> None:
        if self._method.clips == "mean":
            clip(gradients, self._settings.clip_norm)


def _learning(method: Method, settings: Settings) -> int:
    """Steps after those that plan buckets, until the method does what it will. Rules that measure buckets wait
    until codes are sent."""
    steps: int = getattr(method, "learns_for", 0)
    early = settings.compression.first_steps
    return steps if settings.buckets in MEASURED else steps + early


def _where_control_is(
    comm: TorchComm | AloneComm, device: torch.device
) -> torch.device:
    """Control goes between hosts' processors, while the device computes; where only NCCL
    was initialized it has to go between devices."""
    on_host = isinstance(comm, AloneComm) or moves_host_tensors(comm.process_group)
    return torch.device("cpu") if on_host else device
