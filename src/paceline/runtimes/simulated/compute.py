"""Charges compute time in virtual time: by a workload, a speed and seeded jitter.

`SeenInputs` records the shapes of inputs with which a workload was measured.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from paceline.cluster.workload import Workload
from paceline.compression import GradientCompression, full_spec
from paceline.errors import UsageError
from paceline.interfaces import CompressionStage
from paceline.torch_internals import Uncopied
from paceline.units import show_seconds

Shapes = list[list[int]]
"""Shapes of a model's input tensors, without their first dimension, the samples."""


class SeenInputs:
    """Observes a *model*'s training calls.

    ``shapes`` are those of the first call. None: there was no call yet, or later ones differed, as
    with padded sequences.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.shapes: Shapes | None = None
        self._vary = False
        self._handle = model.register_forward_pre_hook(
            Uncopied(self._called), with_kwargs=True
        )

    def _called(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._vary or not torch.is_grad_enabled():
            return
        shapes = shapes_of(args, kwargs)
        if self.shapes is not None and self.shapes != shapes:
            self._vary = True
            self.shapes = None
        else:
            self.shapes = shapes


def shapes_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shapes:
    """Return the shapes of one call's tensors."""
    values = (*args, *(kwargs[name] for name in sorted(kwargs)))
    return [list(v.shape[1:]) for v in values if isinstance(v, torch.Tensor)]


class StaleProfileError(UsageError):
    """A cached profile does not fit the present training; a new measurement replaces it."""


class UnmeasuredCodeError(StaleProfileError):
    """A cached profile has no times of the present compressor."""


@dataclass(frozen=True, kw_only=True)
class ComputeModel:
    """The compute cost of a training step on a worker of speed 1.

    Attributes:
        forward: Seconds per step without a *workload*, spread over the tensors by bytes.
        backward: Likewise.
        jitter: Relative standard deviation of a step's compute time (Gaussian, cut off at zero),
            drawn for each worker and step.
        seed: Seed of the jitter.
        workload: Times tensor by tensor.
        memory: Bytes per second that a compressor reads or writes, if the workload has no times of
            it.
        what: The workload's name for the user.
        instead_of_pace: Whether the workload includes the time that the script paces; then
            `paceline.pace` takes no time.
        cached: Whether the workload is a profile that can be measured again. Then
            `StaleProfileError` is raised if it does not fit.
        inputs: The shapes of the model's inputs in the profile, if inputs must have the same.
    """

    forward: float = 0.01
    backward: float = 0.02
    jitter: float = 0.0
    memory: float = 10e9
    seed: int = 0
    workload: Workload | None = None
    what: str = "the workload"
    instead_of_pace: bool = False
    cached: bool = False
    inputs: Shapes | None = None

    def __post_init__(self) -> None:
        for key in ("forward", "backward", "jitter"):
            if not 0 <= getattr(self, key) < float("inf"):
                raise UsageError(
                    f"--{key}: expected zero or more, got {getattr(self, key)}"
                )

    def describe(self, paced_by_script: bool, stand_in: bool = False) -> str:
        """Return the origin of compute times, as one line for the user."""
        if paced_by_script:
            text = "paced by the script"
        elif stand_in:
            text = "that of the workload which the script's model stands for"
        elif self.workload is not None:
            text = (
                f"{self.what}: forward {show_seconds(self.workload.forward_seconds)}, "
                f"backward {show_seconds(self.workload.backward_seconds)}, update "
                f"{show_seconds(self.workload.update)}"
            )
            if self.workload.input:
                text += f", {show_seconds(self.workload.input)} between steps"
            if self.workload.batch is not None:
                text += f", for {self.workload.batch:g} samples"
            if self.workload.source:
                text += f" ({self.workload.source})"
        else:
            text = (
                f"forward {self.forward:g} s, backward {self.backward:g} s a step, "
                "spread over the tensors by bytes (--forward, --backward)"
            )
        return f"{text}; jitter {self.jitter:g}" if self.jitter else text


class SimulatedCompute:
    """Charges one worker's compute time: by its speed, its jitter, and the part that is still due.

    *Forward.* A forward pass is charged when its first gradient (or a wait) shows that it has run.
    If it may wait for tensors, it is charged as it uses them. Its time is in proportion to its
    samples, relative to the first training batch. Evaluation is charged, too.

    *Pace.* From the first `pace` on the script paces itself, and nothing else is charged.

    *spend* lets seconds pass under a name, with the number of cores that are busy.
    """

    def __init__(
        self,
        model: ComputeModel,
        rank: int,
        speed: float,
        spend: Callable[[float, str, int], None],
    ) -> None:
        self.costs = model
        self._rank = rank
        self._speed = speed
        self._spend = spend
        # Use one generator per worker, so that its times do not depend on the number of workers.
        self._random = random.Random(f"{model.seed}/{rank}")
        self._factor = self._draw()
        self._owed = 0.0
        self.inside_forward = False
        """Whether a forward pass waits for a tensor: its uncharged compute time has not passed yet."""
        self._models = 0
        # It is the first model's.
        self.workload: Workload | None = None
        self.estimated_compressors: set[str] = set()
        """Messages about compressors whose times are estimated, as no workload has measured them."""
        self.paced_by_script = False
        # This says whether a built-in workload replaces the model's times.
        self.stand_in = False

    def of_model(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        samples: float | None,
        own: Workload | None = None,
        model: torch.nn.Module | None = None,
    ) -> ModelCompute:
        """Return the object that charges the passes of one *model*.

        *own* is the workload that a stand-in model has. The workload is the first trained model's;
        a later model is charged as if there were no workload.
        """
        costs = self.costs
        workload = costs.workload
        if workload is None and own is not None:
            # The script's model sleeps.
            workload = replace(own, cores=0)
        self._models += 1
        try:
            if workload is not None:
                workload.check_matches(names, sizes, costs.what)
        except UsageError as error:
            if self._models == 1 and costs.cached:
                raise StaleProfileError(str(error)) from None
            if self._models == 1 or own is not None:
                raise
            if self._rank == 0:
                print(
                    f"compute: of model {self._models}, which is charged forward "
                    f"{costs.forward:g} s and backward {costs.backward:g} s: {error}",
                    file=sys.stderr,
                )
            workload = None
        if workload is None:
            workload = Workload.spread(names, sizes, costs.forward, costs.backward)
        self.workload = self.workload or workload
        if model is not None and costs.inputs is not None and self._models == 1:
            self._expect(model, costs.inputs)
        self.stand_in = own is not None and costs.workload is None
        return ModelCompute(self, workload, samples)

    def _expect(self, model: torch.nn.Module, profiled: Shapes) -> None:
        """Compare the first training pass's inputs with those of the profile."""

        def called(
            module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> None:
            if not torch.is_grad_enabled():
                return
            handle.remove()
            shapes = shapes_of(args, kwargs)
            if shapes != profiled:
                raise StaleProfileError(
                    f"{self.costs.what}: the model's inputs have other shapes, samples "
                    f"of {_shapes(shapes)} instead of {_shapes(profiled)}"
                )

        handle = model.register_forward_pre_hook(Uncopied(called), with_kwargs=True)

    def defer_forward(self, seconds: float) -> None:
        """Note that a forward pass of *seconds* has begun."""
        if not self.paced_by_script:
            self._owed += seconds

    def charge_forward(self, seconds: float) -> None:
        """Charge *seconds* of a forward pass."""
        part = min(seconds, self._owed)
        if part:
            self._owed -= part
            self._take(part, "forward", self._cores)

    def charge(self, seconds: float, name: str) -> None:
        """Charge a gradient, or an update."""
        if not self.paced_by_script:
            self.flush()
            self._take(seconds, name, self._cores)

    def charge_thread(self, seconds: float, name: str) -> None:
        """Charge the computing of one thread: it made a batch ready, or ran hooks."""
        if not self.paced_by_script:
            self.flush()
            self._take(seconds, name, min(1, self._cores))

    def spend(self, seconds: float, name: str, cores: int) -> None:
        """Charge paceline's own work, which keeps *cores* busy."""
        self._take(seconds, name, cores)

    def flush(self) -> None:
        """Charge the rest of a forward pass."""
        if self._owed and not self.inside_forward:
            owed, self._owed = self._owed, 0.0
            self._take(owed, "forward", self._cores)

    def pace(self, seconds: float) -> None:
        """Charge the time that the script paces."""
        if self.costs.instead_of_pace:
            return
        self.paced_by_script = True
        self._owed = 0.0
        self._take(seconds, "paced", 0)

    def step_ended(self) -> None:
        """Draw the jitter of the next step."""
        self.flush()
        self._factor = self._draw()

    def _draw(self) -> float:
        if not self.costs.jitter:
            return 1.0
        return max(0.0, self._random.gauss(1.0, self.costs.jitter))

    @property
    def _cores(self) -> int:
        """Number of the host's cores that a model's passes keep busy."""
        return 0 if self.workload is None else self.workload.cores

    def _take(self, seconds: float, name: str, cores: int) -> None:
        if seconds:
            self._spend(seconds * self._factor / self._speed, name, cores)


class ModelCompute:
    """A `Compute` for one model, which takes its worker's time."""

    def __init__(
        self, worker: SimulatedCompute, workload: Workload, samples: float | None
    ) -> None:
        self._worker = worker
        self._workload = workload
        self._reference = samples if workload.batch is None else workload.batch
        self._scale = 1.0
        self._bytes = max(1, sum(workload.sizes))
        gradients = len(workload.names) * (workload.passes or 1)
        self._hook_seconds = workload.overhead / gradients
        self._begun = 0.0
        """Forward seconds of tensors that were used, and not charged yet."""
        self._inside_step = False
        """Whether a pass of this step has begun."""

    def step_begins(self) -> None:
        if self._workload.input and not self._inside_step:
            self._worker.charge_thread(self._workload.input, "input")
        self._inside_step = True

    def forward(self, samples: int | None, training: bool) -> None:
        if self._reference is None and training:
            self._reference = samples
        self._scale = samples / self._reference if samples and self._reference else 1.0
        self._begun = 0.0
        self._worker.defer_forward(self._workload.forward_seconds * self._scale)

    def used(self, index: int) -> None:
        # Charge earlier compute before a wait that follows now.
        self._worker.inside_forward = True
        self._worker.charge_forward(self._begun)
        self._begun = self._workload.forward[index] * self._scale

    def usable(self) -> None:
        self._worker.inside_forward = False

    def gradient(self, index: int) -> None:
        self._worker.charge(self._workload.backward[index] * self._scale, "backward")
        if self._hook_seconds:
            self._worker.charge_thread(self._hook_seconds, "hooks")

    def gradient_taken(self) -> None:
        pass

    def uses_compressor(self, compression: GradientCompression) -> None:
        costs, spec = self._worker.costs, _spec_of(compression)
        if spec in self._workload.coding:
            return
        if costs.cached and self._workload is costs.workload:
            raise UnmeasuredCodeError(
                f"{costs.what}: it does not say what compression {spec} takes"
            )
        self._worker.estimated_compressors.add(
            f"the time of compression {spec} is estimated from bytes, as it was not profiled: "
            f"paceline profile SCRIPT --compression {spec} measures it"
        )

    def compressed(
        self,
        compression: GradientCompression,
        workers: int,
        size: float,
        stage: CompressionStage,
    ) -> None:
        times = self._workload.coding.get(_spec_of(compression))
        if times is None:
            passes = compression.memory_passes(workers)
            read = passes[0] if stage == "encode" else passes[1]
            seconds = read * size / self._worker.costs.memory
        else:
            whole = times.encode if stage == "encode" else times.after(workers)
            seconds = whole * size / self._bytes
        # Also if the script paces itself: its times do not include compression.
        self._worker.flush()
        self._worker.spend(seconds, "coding", 1)

    def update_begins(self) -> None:
        self._worker.charge(self._workload.update, "update")

    def step_ended(self) -> None:
        self._inside_step = False
        self._worker.step_ended()


_spec_of: Callable[[GradientCompression], str] = cache(full_spec)


def _shapes(shapes: Shapes) -> str:
    return " and ".join(" x ".join(map(str, shape)) or "1" for shape in shapes)
