"""Measures the compute times of a model's training step, tensor by tensor."""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from paceline.cluster.profiling.timers import waited_for_processor
from paceline.cluster.workload import Workload
from paceline.compression import GradientCompression
from paceline.errors import UsageError
from paceline.interfaces import CompressionStage, Stopwatch
from paceline.interfaces.buckets import stands_in, wire_bytes
from paceline.torch_internals import Uncopied, notify_before_use, stop_notifying

MOST_STEPS = 64
"""Steps that are watched for habits of the script. Later steps are not watched, so they cost no
time."""


class StepHabits:
    """Counts a script's habits from a training's events (`paceline.core.step_listeners`).

    - *passes*: the passes that accumulate into one update: those under ``no_sync`` and the last
      one, whose gradients are sent.
    - *uses_gradients*: whether the script reads or changes gradients between the end of backward
      and ``step()``, for example to clip. ``distribute(check_finite=True)`` does so, too.

    A use in fewer than half of the steps, such as a norm that is logged now and then, does not
    count.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._came: Counter[int] = Counter()
        self._left: Counter[int] = Counter()
        self._watched: list[torch.Tensor] = []
        self._ended = self._used = False
        self._steps = 0
        self._passes: list[int] = []
        self._uses: list[bool] = []

    @property
    def passes(self) -> int | None:
        """The passes of a typical step; None if there was no step."""
        return statistics.median_low(self._passes) if self._passes else None

    @property
    def uses_gradients(self) -> bool | None:
        """Whether most steps use gradients; None if no step was watched."""
        if not self._uses:
            return None
        return 2 * sum(self._uses) > len(self._uses)

    def step_begins(self) -> None:
        """Stop watching gradients: the pass that begins changes them itself."""
        self._release()

    def gradient(self, index: int) -> None:
        if self._steps < MOST_STEPS:
            self._came[index] += 1

    def gradient_ready(self, index: int) -> None:
        if self._steps < MOST_STEPS:
            self._left[index] += 1

    def means_are_there(self) -> None:
        """Start watching gradients: from here on the script may use them."""
        if self._steps >= MOST_STEPS:
            return
        self._ended = True
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is not None and notify_before_use(gradient, self._is_used):
                self._watched.append(gradient)

    def step_is_called(self) -> None:
        self._release()

    def step_ended(self) -> None:
        self._steps += 1
        if self._came:
            passes = (
                count - max(0, self._left[index] - 1)
                for index, count in self._came.items()
            )
            self._passes.append(max(passes))
        if self._ended:
            self._uses.append(self._used)
        self._came.clear()
        self._left.clear()
        self._ended = self._used = False

    def end(self) -> None:
        """Stop counting."""
        self._release()

    def _is_used(self, gradient: torch.Tensor) -> None:
        self._used = True
        stop_notifying(gradient)

    def _release(self) -> None:
        for gradient in self._watched:
            stop_notifying(gradient)
        self._watched.clear()


Named = list[tuple[str, torch.Tensor]]
"""A gradient, tensor by tensor, in the order in which tensors become ready."""


class GradientDump:
    """Stores one worker's own gradients of its first steps in an existing *folder*.

    *wanted* is the number of steps to store.
    """

    def __init__(self, folder: str | Path, wanted: int = 1) -> None:
        self._folder, self.wanted = Path(folder), wanted

    def __len__(self) -> int:
        return len(list(self._folder.glob("*.pt")))

    @property
    def is_full(self) -> bool:
        """Whether *wanted* gradients are stored."""
        return len(self) >= self.wanted

    def keep(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        """Store the gradient of a step, in ready order."""
        content = {
            "names": list(names),
            "gradients": list(tensors),
            "threads": torch.get_num_threads(),
        }
        torch.save(content, self._folder / f"{len(self)}.pt")

    def read(self, step: int) -> tuple[Named, int]:
        """Return the gradient of a step, on its device, and the number of threads of the training.

        Raises `UsageError` if no gradient was stored.
        """
        if not len(self):
            raise UsageError(
                "no gradients were seen: expected a script that trains with "
                "paceline.distribute, calls the model itself and then backward()"
            )
        content = torch.load(self._folder / f"{step}.pt", weights_only=True)
        named = list(zip(content["names"], content["gradients"], strict=True))
        return named, int(content["threads"])

    def keep_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Store the optimizer's class name and its groups' options."""
        groups = [
            {key: value for key, value in group.items() if _is_plain(value)}
            for group in optimizer.param_groups
        ]
        content = {"name": type(optimizer).__name__, "groups": groups}
        (self._folder / _OPTIMIZER).write_text(json.dumps(content))

    def optimizer(self) -> torch.optim.Optimizer | None:
        """Return an optimizer of the stored name and options, without the model's parameters.

        None if no optimizer was stored.
        """
        file = self._folder / _OPTIMIZER
        if not file.exists():
            return None
        content = json.loads(file.read_text())
        cls: Any = type(content["name"], (torch.optim.Optimizer,), {})
        groups = [{"params": [torch.zeros(1)], **group} for group in content["groups"]]
        made: torch.optim.Optimizer = cls(groups, {})
        return made


_OPTIMIZER = "optimizer.json"


def _is_plain(value: object) -> bool:
    # Adam has a tuple, its betas.
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


WARM_UP_STEPS = 1

_LITTLE = 0.1
"""The part of a step for which a thread may be idle and still count as computing all the time."""

_THIS_THREAD = "/proc/thread-self"


Mark = tuple[Any, float]
"""A time stamp: a stopwatch's mark, and this thread's processor time."""


class StepTimes:
    """Seconds of the profiled steps: forward and backward by tensor, and updates."""

    def __init__(self) -> None:
        self.forwards: list[list[float]] = []
        self.backwards: list[list[float]] = []
        self.updates: list[float] = []
        self.overheads: list[float] = []
        """Seconds of a step outside its passes and its update."""

    def medians(self) -> list[float]:
        """Return the medians over steps, in the order of `times_of`."""
        update = statistics.median(self.updates)
        return [*_medians(self.forwards), *_medians(self.backwards), update]


class StepProfiler:
    """A `Compute` that measures, and makes a `Workload` of medians over steps.

    *Forward.* A module's part of the forward pass is the time from its own start to that of the
    next module with parameters, spread over its tensors by bytes.

    *Backward.* A tensor's part of the backward pass is the time from the hook before its own,
    without paceline's own work in hooks. The first tensor's part starts at the end of the forward
    pass, so it includes the loss.

    Of several passes in one step the last counts; their number is recorded, too. *keep* receives
    the gradients of the first steps after the warm-up, until it is full.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        stopwatch: Stopwatch,
        keep: GradientDump | None = None,
    ) -> None:
        self._names = [name for name, _ in parameters]
        self._sizes = [wire_bytes(parameter) for _, parameter in parameters]
        self._stopwatch = stopwatch
        self._parameters = [parameter for _, parameter in parameters]
        self._keep = keep
        self._habits = habits = StepHabits(self._parameters)
        self.step_begins = habits.step_begins
        self.gradient_ready = habits.gradient_ready
        self.means_are_there = habits.means_are_there
        self.step_is_called = habits.step_is_called
        self.compressors: list[GradientCompression] = []
        """The compressors that training will use."""
        index = {id(parameter): i for i, (_, parameter) in enumerate(parameters)}
        # These are each module's own tensors, as indices.
        self._owned: list[list[int]] = []
        self._handles: list[RemovableHandle] = []
        for module in model.modules():
            own = [index.pop(id(p), -1) for p in module.parameters(recurse=False)]
            own = [i for i in own if i >= 0]
            if own:
                hook = Uncopied(self._module_hook(len(self._owned)))
                self._handles.append(module.register_forward_pre_hook(hook))
                self._owned.append(own)
        ended = Uncopied(self._forward_ended)
        self._handles.append(model.register_forward_hook(ended))
        self._forget_pass(None)
        self._update_start: Mark | None = None
        self._batches: list[int] = []
        self._steps = 0
        self._times = StepTimes()
        self._own_times = StepTimes()
        """The same times in processor time of this thread."""
        self._forward_ran = [0.0, 0.0]
        """Processor time of forward passes: of all threads, and of this one."""
        self._forward_began = (0.0, 0.0)
        self._waited = 0.0
        """Seconds for which this thread waited for a core, from the beginning of passes to the end
        of steps."""
        self._waited_before = 0.0
        self._ended_at: float | None = None
        """This thread's processor time at the end of the last step. None: there was no step, or an
        evaluation since."""
        self._inputs: list[float] = []
        self.order: list[int] = []

    def detach(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._habits.end()

    # ---- events of the training ----

    def forward(self, samples: int | None, training: bool) -> None:
        ended_at, self._ended_at = self._ended_at, None
        if not training:
            return
        if ended_at is not None:
            self._inputs.append(time.thread_time() - ended_at)
        keeps = self._wants_gradient()
        self._waited_before = waited_for_processor(_THIS_THREAD)
        self._forward_began = time.process_time(), time.thread_time()
        self._forget_pass(self._mark())
        self._keeps = keeps
        if samples is not None:
            self._batches.append(samples)

    def used(self, index: int) -> None:
        """Do nothing: the modules' own times include it."""

    def usable(self) -> None:
        """Do nothing: a profile has one worker, which waits for no other."""

    def gradient(self, index: int) -> None:
        self._habits.gradient(index)
        if self._start is not None:
            self._gradients.append((index, self._mark()))
            if self._keeps:
                gradient = self._parameters[index].grad
                if gradient is not None:
                    self._own[index] = gradient.detach().clone()

    def gradient_taken(self) -> None:
        if self._start is not None:
            self._taken.append(self._mark())

    def uses_compressor(self, compression: GradientCompression) -> None:
        self.compressors.append(compression)
        # Store one gradient, to time the compressor with.
        if self._keep is not None:
            self._keep.wanted = max(1, self._keep.wanted)

    def compressed(
        self,
        compression: GradientCompression,
        workers: int,
        size: float,
        stage: CompressionStage,
    ) -> None:
        """Do nothing: its time has really passed."""

    def update_begins(self) -> None:
        self._update_start = self._mark()

    def step_ended(self) -> None:
        self._steps += 1
        self._habits.step_ended()
        if self._steps <= WARM_UP_STEPS:
            self._batches.clear()
        elif self._start is not None and self._end is not None and self._gradients:
            self._note_step(self._start, self._end, self._mark())
            self._waited += waited_for_processor(_THIS_THREAD) - self._waited_before
            self._keep_gradient()
        self._update_start = None
        self._forget_pass(None)
        if self._steps >= WARM_UP_STEPS:
            self._ended_at = time.thread_time()

    def _forget_pass(self, start: Mark | None) -> None:
        self._start = start
        self._end: Mark | None = None
        self._modules: list[tuple[int, Mark]] = []
        self._gradients: list[tuple[int, Mark]] = []
        self._taken: list[Mark] = []
        self._keeps = False
        self._own: dict[int, torch.Tensor] = {}

    def _wants_gradient(self) -> bool:
        keep = self._keep
        return keep is not None and self._steps >= WARM_UP_STEPS and not keep.is_full

    def _keep_gradient(self) -> None:
        if self._keep is None or not self._own:
            return
        own = [
            self._own[i] if i in self._own else torch.zeros_like(self._parameters[i])
            for i in self.order
        ]
        self._keep.keep([self._names[i] for i in self.order], own)

    def _module_hook(self, number: int) -> Callable[..., None]:
        def starts(*_: Any) -> None:
            if torch.compiler.is_compiling():
                # Reading a clock would split a compiled block.
                return
            if self._start is not None and self._end is None:
                self._modules.append((number, self._mark()))

        return starts

    def _forward_ended(self, *_: Any) -> None:
        if self._start is not None and self._end is None:
            self._end = self._mark()
            if self._steps >= WARM_UP_STEPS:
                ends = time.process_time(), time.thread_time()
                for i, (end, begin) in enumerate(
                    zip(ends, self._forward_began, strict=True)
                ):
                    self._forward_ran[i] += end - begin

    # ---- results ----

    def _note_step(self, start: Mark, forward_end: Mark, stepped: Mark) -> None:
        starts = [mark for _, mark in self._modules]
        entries = [mark for _, mark in self._gradients]
        marks = [*starts, forward_end, *entries, *self._taken, stepped]
        if self._update_start is not None:
            marks.append(self._update_start)
        begun, began_at = start
        seconds = self._stopwatch.seconds(begun, [mark for mark, _ in marks])
        self._note_times(self._times, seconds)
        self._note_times(self._own_times, [own - began_at for _, own in marks])
        seen = list(dict.fromkeys(index for index, _ in self._gradients))
        unseen = [i for i in reversed(range(len(self._names))) if i not in set(seen)]
        self.order = seen + unseen

    def _note_times(self, times: StepTimes, at: Sequence[float]) -> None:
        """Add one step's times, computed from its time stamps."""
        seconds = iter(at)
        at_start = [next(seconds) for _ in self._modules]
        forward_end = next(seconds)
        at_entry = [next(seconds) for _ in self._gradients]
        at_exit = [next(seconds) for _ in self._taken]
        step_end = next(seconds)
        update_start = next(seconds, step_end)
        times.updates.append(step_end - update_start)

        forward = [0.0] * len(self._names)
        edges = [0.0, *at_start[1:], forward_end]
        for i, (number, _) in enumerate(self._modules):
            own = self._owned[number]
            total = sum(self._sizes[t] for t in own)
            for t in own:
                forward[t] += (edges[i + 1] - edges[i]) * self._sizes[t] / total
        # No module's forward was called for these parameters.
        if not self._modules:
            forward = [forward_end / len(forward)] * len(forward)
        backward = [0.0] * len(self._names)
        begins = [forward_end, *at_exit]
        for i, (index, _) in enumerate(self._gradients):
            backward[index] += max(0.0, at_entry[i] - begins[i])
        in_hooks = (out - into for into, out in zip(at_entry, at_exit, strict=False))
        times.overheads.append(sum(in_hooks) + update_start - begins[-1])
        times.forwards.append(forward)
        times.backwards.append(backward)

    @property
    def profiled_steps(self) -> int:
        """The number of timed steps."""
        return len(self._times.updates)

    def _mark(self) -> Mark:
        return self._stopwatch.mark(), time.thread_time()

    def workload(self, source: str) -> Workload:
        """Return a workload of medians over the steps. Raises `UsageError` if there was no step."""
        if not self.profiled_steps:
            raise UsageError(
                f"nothing to profile: expected more than {WARM_UP_STEPS} training steps "
                f"that call the model itself, got {self._steps}"
            )
        return Workload(
            names=tuple(self._names),
            sizes=tuple(self._sizes),
            forward=_medians(self._times.forwards),
            backward=_medians(self._times.backwards),
            order=tuple(self.order),
            update=statistics.median(self._times.updates),
            batch=statistics.median(self._batches) if self._batches else None,
            source=source,
            shapes=self._shapes(),
            passes=self._habits.passes,
            uses_gradients=self._habits.uses_gradients,
        )

    def workload_alone(self, source: str, *, idle_counts: bool = True) -> Workload:
        """Return the workload of a worker that has cores of its own.

        It includes `cores`, `input` and `overhead`.

        If a thread that does not run mostly waits for a core, its processor time is its time alone.
        A thread that sleeps or reads files takes its measured time. If it does so most of the time,
        it keeps no core busy; nor does a model on another device.

        Args:
            source: Origin of the figures, for the user.
            idle_counts: Whether the time of a sleeping thread counts. If not, all times are
                processor time.

        Raises:
            UsageError: There was no step.
        """
        workload = self.workload(source)
        if any(parameter.device.type != "cpu" for parameter in self._parameters):
            return workload
        overhead = statistics.median(self._own_times.overheads)
        workload = replace(workload, overhead=max(0.0, overhead))
        if self._inputs:
            workload = replace(workload, input=statistics.median(self._inputs))
        alone = with_times(workload, self._own_times.medians())
        taken, ran = (sum(times_of(one)) for one in (workload, alone))
        idle, waited = taken - ran, self._waited / self.profiled_steps
        if idle_counts and idle > max(2 * waited, _LITTLE * taken):
            return workload if 2 * ran < taken else replace(workload, cores=self._cores)
        return replace(alone, cores=self._cores)

    @property
    def _cores(self) -> int:
        """Return the number of cores that compute, at most as many as torch may use."""
        everywhere, here = self._forward_ran
        pool = torch.get_num_threads()
        return min(pool, max(1, round(everywhere / here))) if here else 1

    def _shapes(self) -> tuple[tuple[int, ...], ...]:
        if any(stands_in(parameter) for parameter in self._parameters):
            return ()
        return tuple(tuple(parameter.shape) for parameter in self._parameters)


def with_times(workload: Workload, times: Sequence[float]) -> Workload:
    """Return *workload* with other *times*, in the order of `times_of`."""
    count = len(workload.names)
    return replace(
        workload,
        forward=tuple(times[:count]),
        backward=tuple(times[count : 2 * count]),
        update=times[-1],
    )


def times_of(workload: Workload) -> list[float]:
    """Return all times of a workload, in one list."""
    return [*workload.forward, *workload.backward, workload.update]


def _medians(steps: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(statistics.median(times) for times in zip(*steps, strict=True))
