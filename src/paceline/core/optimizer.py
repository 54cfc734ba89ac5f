"""What `distribute` gives back: the user's optimizer, in step with all other workers."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch

from paceline.core.training import Training
from paceline.errors import UsageError
from paceline.interfaces import Endpoint, Runtime
from paceline.interfaces.buckets import match_strides
from paceline.torch_internals import inside_scaler, note_step


class TrainingEnded(SystemExit):
    """Ends the script after ``--steps N``: exit status 0, wherever the script loops.
    ``finally`` blocks and exit handlers run, what follows the loop does not, unless it is one over
    `paceline.steps`, which ends by itself."""


class MethodSwitcher(Protocol):
    """Switches a training to another method between two steps."""

    @property
    def spec(self) -> str:
        """The full spec of the present training."""
        ...

    def change(self, spec: str, *, together: bool = False) -> str:
        """Train by *spec* from the next step on. Returns "", or why that is impossible here.

        Collective, between two steps. With *together* all workers take part, and know it; else
        some may be out of data.
        """
        ...

    def after_step(self) -> None:
        """A step has ended. Collective where the method switches now."""
        ...

    def finish(self) -> None:
        """This worker is out of data: take part in whatever the others switch to, to the end."""
        ...


class ActiveTraining:
    """The training that goes on under one `DistributedOptimizer`: a `TrainingStatus`.

    A model may be trained by several, one after the other. All copies that trainers make of an
    optimizer share this object.
    """

    def __init__(self, training: Training, endpoints: Sequence[Endpoint]) -> None:
        self.training, self.endpoints = training, endpoints
        self.switcher: MethodSwitcher | None = None
        """Under ``method="auto"``, what switches the method."""
        self.finished = False
        """Whether this worker has no more steps to do."""
        self.uses_grad_scaler = False
        """Whether a GradScaler was seen to step the optimizer."""
        self._failure = ""

    @property
    def first_step(self) -> int:
        """How many steps the job had done when this worker joined it."""
        return self.training.first_step

    @property
    def broken_by(self) -> str:
        """The error after which the training cannot go on, or nothing."""
        return self.training.broken_by or self._failure

    def record_failure(self, error: BaseException) -> None:
        """One training has ended, and the next one could not start: there is none to go on."""
        self.finished = True
        self._failure = self.broken_by or f"{type(error).__name__}: {error}"

    def finish(self) -> None:
        """This worker is out of data. Collective over the ranks, each in its own time."""
        if self.finished:
            return
        self.finished = True
        if self.switcher is None:
            self.end()
        else:
            self.switcher.finish()

    def end(self, *, together: bool = False) -> None:
        """End the present training; the model may be trained by another one. *together*: see
        `Training.finish`."""
        self.training.finish(together=together)
        for endpoint in self.endpoints:
            endpoint.close()


class DistributedOptimizer(torch.optim.Optimizer):
    """The user's optimizer, in step with all other workers.

    It is a `torch.optim.Optimizer` whose groups, state and defaults are those of the one
    that was wrapped, so schedulers, scalers and checkpoints work as they did. Made by
    `distribute`, not by hand.
    """

    _inner: torch.optim.Optimizer
    _active: ActiveTraining
    _runtime: Runtime
    # Whatever changes is kept behind these: trainers wrap optimizers by copying what
    # is in `__dict__`, and each face must know what another one was told.

    @classmethod
    def _wrap(
        cls,
        inner: torch.optim.Optimizer,
        active: ActiveTraining,
        runtime: Runtime,
    ) -> DistributedOptimizer:
        self = cls.__new__(cls)
        self._inner, self._active, self._runtime = inner, active, runtime
        # Not __init__: it would copy the groups. What unpickling does sets up the rest.
        self.__setstate__({})
        return self

    @property
    def _training(self) -> Training:
        """The present one."""
        return self._active.training

    # ---- the wrapped optimizer's own ----

    @property
    def unwrapped(self) -> torch.optim.Optimizer:
        """The optimizer that was given to `distribute`. Its state is in its `state_dict`
        and, after `finish`, in itself; its ``step()`` is not to be called before."""
        return self._inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._inner.param_groups = groups

    @property
    def state(self) -> Any:
        return self._inner.state

    @state.setter
    def state(self, value: Any) -> None:
        self._inner.state = value

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self._inner.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, as torch's optimizers do."""
        self._inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, in torch's own form; asked of the servers, where these
        update."""
        if not self._training.updates_on_server or self._training.finished:
            with self._settled():
                return self._inner.state_dict()
        loaded = self._training.loading.state
        state_now = self._training.remote.state() if loaded is None else loaded
        self._inner.state.update(state_now)
        state: dict[str, Any] = self._inner.state_dict()
        self._inner.state.clear()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict`, or the unwrapped optimizer's, gave. Where servers update,
        they take that of the lowest rank that trains, before the next step; every rank calls
        this, after the same step. What a worker that was started again loads before its first step
        is not used: the job goes on with what the servers have."""
        with self._settled():
            self._inner.load_state_dict(state_dict)
            match_strides(self._inner)
        if self._training.updates_on_server and not self._training.finished:
            self._training.loading.take_state(dict(self._inner.state))
            self._inner.state.clear()

    def _settled(self) -> AbstractContextManager[None]:
        """Within it the state here is that of all steps until now."""
        training = self._training
        elsewhere = training.optimizer_steps or training.updates_on_server
        return nullcontext() if elsewhere else self.consolidated()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the parameters' buckets are made when training begins."""
        raise UsageError(
            "add_param_group after distribute: gradients of new parameters would not be "
            "averaged. Add the group first, then call distribute"
        )

    def __repr__(self) -> str:
        return f"Distributed[{self._runtime.journal.method}]({self._inner!r})"

    # ---- training ----

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, *, loss: Any = None
    ) -> float | None:
        """Update the parameters.

        *closure* computes the loss and its gradients, as torch's optimizers have it; its
        loss is returned. *loss* is this worker's loss, where a method wants to see it; it
        is logged as ``loss``. Raises `UsageError` after `finish`, `TrainingEnded` with the last step that
        ``--steps`` asks for, or after it in a loop over `paceline.steps`.
        """
        job, active = self._runtime.job, self._active
        if active.finished and job.ended:
            if job.options.steps:
                raise self._ended()
            # Another life has done the step: the script goes on to what follows its loop.
            return None if closure is None else closure()
        if active.finished:
            raise UsageError(
                "step() after finish(): the other workers no longer wait for this one"
            )
        if self._training.looking and not self._training.optimizer_steps:
            raise UsageError(
                "step() inside consolidated(): what it changed would be taken back; train "
                "outside, evaluate and save inside"
            )
        if active.switcher is not None and not active.uses_grad_scaler:
            active.uses_grad_scaler = inside_scaler()
        if loss is not None:
            self._runtime.journal.log({"loss": loss})
        result = self._update(closure)
        self._training.after_update()
        if self._sets_the_pace() and not job.ended:
            self._count_step()
            if job.options.steps and self._done >= job.options.steps:
                self._end_script()
        if not active.finished and active.switcher is not None:
            active.switcher.after_step()
        return result

    @property
    def _done(self) -> int:
        """Steps of the job."""
        return self.first_step + self._runtime.journal.step_count

    def _count_step(self) -> None:
        journal = self._runtime.journal
        figures = self._training.figures() if journal.wants_figures else {}
        journal.step(self.first_step, figures)

    def _end_if_complete(self) -> None:
        """Of a worker that was started again: the job's steps may be done by now. It has the finished
        model then, and its script's steps change nothing."""
        job, rank = self._runtime.job, self._runtime.rank
        steps = job.options.steps or math.inf
        if not self._training.was_left and self.first_step < steps:
            return
        self.finish()
        job.ended = True
        print(
            f"paceline: worker {rank} was started again after its last step: it has the finished model, and "
            "further steps of its script change nothing (loops over paceline.steps() end at once)",
            file=sys.stderr,
        )

    def _end_script(self) -> None:
        """Let its loops come to their end, if they can: else leave them."""
        self.finish()
        job = self._runtime.job
        if not job.loops:
            raise self._ended()
        job.ended = True
        self._say("; the script goes on after its loop over paceline.steps()")

    def _ended(self) -> TrainingEnded:
        """Other loops can be left by an exception only, so what follows them does not run: nobody
        is to find that out by a file that is missing."""
        self._say(
            f", in optimizer.step(){_where_in_script()}; what stands after the training "
            "loop was not run (for batch in paceline.steps(loader): that loop ends by itself)"
        )
        return TrainingEnded(0)

    def _say(self, how: str) -> None:
        options = self._runtime.job.options
        if self._runtime.rank == 0 and options.tells and options.profile is None:
            words = f"paceline: ended after {self._done} steps, as --steps asked{how}"
            print(words, file=sys.stderr)

    def _update(self, closure: Callable[[], float] | None) -> float | None:
        """Evaluate, see to it that the gradients were delivered, and update."""
        if closure is None:
            is_left_out = self._is_left_out()
            self._training.before_update()
            if is_left_out:
                return None
            if not self._training.optimizer_steps:
                note_step(self._inner)
                return None
            return self._inner.step()
        evaluations = 0

        def evaluate() -> float:
            nonlocal evaluations
            if evaluations:  # LBFGS looks at several points in one step
                self._training.evaluates_again()
            evaluations += 1
            with torch.enable_grad():
                loss: float = closure()
            self._training.before_update()
            return loss

        if not self._training.optimizer_steps:
            note_step(self._inner)
            return evaluate()
        result: float | None = self._inner.step(evaluate)
        if not evaluations:
            raise UsageError(
                f"step(closure): {type(self._inner).__name__} never called the closure; "
                "call backward(), then step()"
            )
        return result

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by a GradScaler, and by whoever looks at all attributes: changes nothing."""
        return self._training.takes_scaled_gradients

    def _is_left_out(self) -> bool:
        """Whether a GradScaler has told, by the attributes that torch gives optimizers then,
        that a gradient is not finite; else gradients become what they are without its
        scale."""
        told = vars(self)
        if "found_inf" in told:
            self._active.uses_grad_scaler = True
            self._training.check_scaler()
        if float(told.get("found_inf", 0.0)):
            return True
        if told.get("grad_scale") is not None:
            inverse = told["grad_scale"].double().reciprocal().float()
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(inverse.to(parameter.grad.device))
        return False

    @property
    def first_step(self) -> int:
        """How many steps the job had done when this worker joined it: 0, but for a worker
        that was started again (``paceline run --survive``)."""
        return self._training.first_step

    @property
    def steps_of_all(self) -> float:
        """How many steps of all workers are in the model, as this worker knows it: gradients,
        divided by workers. Where groups of workers do not wait for each other that is neither
        one's own steps nor another's, and what a schedule by samples follows. Elsewhere it is
        this worker's own steps."""
        known: float | None = getattr(self._training.worker, "steps_of_all", None)
        own = self.first_step + self._runtime.journal.step_count
        return float(own) if known is None else known

    def _sets_the_pace(self) -> bool:
        """Of several optimizers the first one's steps are counted and measured: the others
        step within them."""
        others = self._runtime.job.unfinished
        return not others or others[0].training is self._active

    def no_sync(self) -> Any:
        """``with optimizer.no_sync():`` backward passes only accumulate, nothing is sent.

        The first backward pass outside it averages what was accumulated.
        """
        return self._training.no_sync()

    def finish(self) -> None:
        """This worker is out of data: keep the others company until all are.

        Afterwards all models are equal; the optimizer's state is that of this worker's own
        last step, or, where servers update, theirs. Called at exit if the script does not; again is harmless.
        """
        self._active.finish()

    @property
    def broken_by(self) -> str:
        """The error after which this training cannot go on, if any; `finish` only ends it then."""
        return self._active.broken_by

    @contextmanager
    def join(self) -> Iterator[None]:
        """``with optimizer.join():`` around a loop that is shorter on some workers."""
        yield
        self.finish()

    @contextmanager
    def consolidated(self) -> Iterator[None]:
        """Within it the model holds the method's documented result, to evaluate or save.

        For bsp that is what it holds anyway, buffers included.
        """
        with self._training.consolidated():
            yield


def _where_in_script() -> str:
    """ " at FILE:LINE" of the innermost caller that is neither ours nor torch's: schedulers
    and scalers wrap ``step``."""
    packages = (Path(__file__).parent.parent, Path(torch.__file__).parent)
    ours = tuple(f"{package}{os.sep}" for package in packages)
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(ours):
        frame = frame.f_back
    return "" if frame is None else f" at {frame.f_code.co_filename}:{frame.f_lineno}"


def active_training(optimizer: torch.optim.Optimizer) -> ActiveTraining:
    """The active training of an optimizer that `distribute` has returned."""
    assert isinstance(optimizer, DistributedOptimizer)
    return optimizer._active


def training_of(optimizer: torch.optim.Optimizer) -> Training:
    """The present training of an optimizer that `distribute` has returned."""
    return active_training(optimizer).training
