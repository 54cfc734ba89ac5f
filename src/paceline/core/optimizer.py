"""The optimizer that `distribute` returns, and the training that it drives."""

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
    """Ends the script after ``--steps N``, with exit status 0, wherever the script loops.

    ``finally`` blocks and exit handlers run. Code after the loop does not, unless the loop is one
    over `paceline.steps`, which ends by itself.
    """


class MethodSwitcher(Protocol):
    """Switches a training to another method between two steps."""

    @property
    def spec(self) -> str:
        """The full spec of the present training."""
        ...

    def switch_to(self, spec: str, *, together: bool = False) -> str:
        """Train by *spec* from the next step on. Returns "", or the reason why that is impossible.

        Collective, between two steps. *together*: all workers are active; otherwise some may be out
        of data.
        """
        ...

    def after_step(self) -> None:
        """Called after each step. Collective if the method switches now."""
        ...

    def finish(self) -> None:
        """Called when this worker is out of data: take part in the others' switches to the end."""
        ...


class ActiveTraining:
    """The present training of one `DistributedOptimizer`: a `TrainingStatus`.

    Several trainings may train a model, one after the other. All copies that trainers make of an
    optimizer share this object.
    """

    def __init__(self, training: Training, endpoints: Sequence[Endpoint]) -> None:
        """Drive *training*, which uses the connections *endpoints* to servers."""
        self.training, self.endpoints = training, endpoints
        self.switcher: MethodSwitcher | None = None
        """Switches the method under ``method="auto"``; else None."""
        self.finished = False
        """Whether this worker has no more steps to do."""
        self.uses_grad_scaler = False
        """Whether a GradScaler was seen to step the optimizer."""
        self._failure = ""

    @property
    def first_step(self) -> int:
        """Number of steps that the job had done when this worker joined it."""
        return self.training.first_step

    @property
    def broken_by(self) -> str:
        """The error after which the training cannot continue; empty if there is none."""
        return self.training.broken_by or self._failure

    def record_failure(self, error: BaseException) -> None:
        """Record why the next training could not start after the last one ended."""
        self.finished = True
        self._failure = self.broken_by or f"{type(error).__name__}: {error}"

    def finish(self) -> None:
        """End this worker's training. Collective, but ranks may call it at different times."""
        if self.finished:
            return
        self.finished = True
        if self.switcher is None:
            self.end()
        else:
            self.switcher.finish()

    def end(self, *, together: bool = False) -> None:
        """End the present training; another one may train the model after it.

        *together*: see `Training.finish`.
        """
        self.training.finish(together=together)
        for endpoint in self.endpoints:
            endpoint.close()


class DistributedOptimizer(torch.optim.Optimizer):
    """The user's optimizer, with steps that are synchronized with all other workers.

    `distribute` makes it. It is a `torch.optim.Optimizer` with the groups, state and defaults of
    the wrapped one, so schedulers, scalers and checkpoints work as before.

    Example:
        ::

            optimizer = paceline.distribute(model, optimizer)
            with optimizer.join():
                for inputs, labels in loader:
                    optimizer.zero_grad()
                    loss_of(model(inputs), labels).backward()
                    optimizer.step()
    """

    _inner: torch.optim.Optimizer
    _active: ActiveTraining
    _runtime: Runtime
    # All mutable state is in these objects. Trainers wrap optimizers by copying `__dict__`, and
    # all copies must share the state.

    @classmethod
    def _wrap(
        cls,
        inner: torch.optim.Optimizer,
        active: ActiveTraining,
        runtime: Runtime,
    ) -> DistributedOptimizer:
        self = cls.__new__(cls)
        self._inner, self._active, self._runtime = inner, active, runtime
        # Not __init__, which would copy the groups. Unpickling's method sets up the rest.
        self.__setstate__({})
        return self

    @property
    def _training(self) -> Training:
        """The present training."""
        return self._active.training

    # ---- attributes of the wrapped optimizer ----

    @property
    def unwrapped(self) -> torch.optim.Optimizer:
        """The optimizer that was given to `distribute`.

        Do not call its ``step()`` before `finish`. Its state is complete after `finish`; before,
        take `state_dict` of this object.
        """
        return self._inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's parameter groups."""
        return self._inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state, by parameter."""
        return self._inner.state

    @state.setter
    def state(self, value: Any) -> None:
        self._inner.state = value

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's default options."""
        return self._inner.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, as torch's optimizers do.

        Args:
            set_to_none: Set ``.grad`` to None; otherwise, fill it with zeros.
        """
        self._inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state in torch's form. If servers update, it comes from them."""
        training = self._training
        if training.remote is None or training.loads is None or training.finished:
            with self._complete_state():
                return self._inner.state_dict()
        loaded, remote = training.loads.state, training.remote
        state_now = remote.optimizer_state.pull() if loaded is None else loaded
        self._inner.state.update(state_now)
        state: dict[str, Any] = self._inner.state_dict()
        self._inner.state.clear()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `state_dict`, or the unwrapped optimizer's, returned.

        If servers update, every rank calls this after the same step. Before the next step the
        servers take the state of the lowest active rank. They ignore the loads of a restarted
        worker before its first step: the job continues with the servers' state.

        Args:
            state_dict: The state, of an optimizer with the same parameter groups.
        """
        with self._complete_state():
            self._inner.load_state_dict(state_dict)
            match_strides(self._inner)
        loads = self._training.loads
        if loads is not None and not self._training.finished:
            loads.take_state(dict(self._inner.state))
            self._inner.state.clear()

    def _complete_state(self) -> AbstractContextManager[None]:
        """Return a context in which the wrapped optimizer has the state after all steps until now."""
        training = self._training
        elsewhere = training.optimizer_steps or training.remote is not None
        return nullcontext() if elsewhere else self.consolidated()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise an error: buckets are made when training begins.

        Raises:
            UsageError: Always. Add the group before `distribute`.
        """
        raise UsageError(
            "add_param_group after distribute: gradients of new parameters would not be "
            "averaged. Add the group first, then call distribute"
        )

    def __repr__(self) -> str:
        """Name the method and the wrapped optimizer."""
        return f"Distributed[{self._runtime.recorder.method}]({self._inner!r})"

    # ---- training ----

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, *, loss: Any = None
    ) -> float | None:
        """Update the parameters.

        Args:
            closure: Computes the loss and its gradients, as for torch's optimizers.
            loss: This worker's loss. Some methods use it, and it is logged as ``loss``.

        Returns:
            The closure's loss; None without a closure.

        Raises:
            UsageError: It was called after `finish`, or inside `consolidated`.
            TrainingEnded: The job has done the steps that ``--steps`` asks for. Loops over
                `paceline.steps` end by themselves, without this error.
        """
        job, active = self._runtime.registry, self._active
        if active.finished and job.ended:
            if job.options.steps:
                raise self._ended()
            # Another incarnation has done the step: the script continues after its loop.
            return None if closure is None else closure()
        if active.finished:
            raise UsageError(
                "step() after finish(): the other workers no longer wait for this one"
            )
        if self._training.context.evaluating and not self._training.optimizer_steps:
            raise UsageError(
                "step() inside consolidated(): its changes would be undone. Train outside, "
                "evaluate and save inside"
            )
        if active.switcher is not None and not active.uses_grad_scaler:
            active.uses_grad_scaler = inside_scaler()
        if loss is not None:
            self._runtime.recorder.log({"loss": loss})
        result = self._update(closure)
        self._training.after_update()
        if self._counts_steps() and not job.ended:
            self._count_step()
            if job.options.steps and self._done >= job.options.steps:
                self._end_script()
        if not active.finished and active.switcher is not None:
            active.switcher.after_step()
        return result

    @property
    def _done(self) -> int:
        """Number of steps that the job has done."""
        return self.first_step + self._runtime.recorder.step_count

    def _count_step(self) -> None:
        recorder = self._runtime.recorder
        figures = self._training.figures() if recorder.wants_figures else {}
        recorder.step(self.first_step, figures)

    def _end_if_complete(self) -> None:
        """End the training of a worker that was restarted after the job's last step.

        It has the finished model, and further steps of its script change nothing.
        """
        job, rank = self._runtime.registry, self._runtime.rank
        steps = job.options.steps or math.inf
        remote = self._training.remote
        was_left = remote is not None and remote.synchronizer.had_finished
        if not was_left and self.first_step < steps:
            return
        self.finish()
        job.ended = True
        print(
            f"paceline: worker {rank} was restarted after its last step: it has the finished model, and "
            "further steps of its script change nothing (loops over paceline.steps() end at once)",
            file=sys.stderr,
        )

    def _end_script(self) -> None:
        """End loops over `paceline.steps`; raise `TrainingEnded` if there are none."""
        self.finish()
        job = self._runtime.registry
        if not job.loops:
            raise self._ended()
        job.ended = True
        self._report("; the script continues after its loop over paceline.steps()")

    def _ended(self) -> TrainingEnded:
        """The exception that leaves the script's loop.

        Code after the loop does not run. The printed line says so, before a user misses a file.
        """
        self._report(
            f", in optimizer.step(){_where_in_script()}; code after the training loop was "
            "not run (a loop `for batch in paceline.steps(loader)` ends by itself)"
        )
        return TrainingEnded(0)

    def _report(self, how: str) -> None:
        options = self._runtime.registry.options
        if self._runtime.rank == 0 and options.tells and options.profile is None:
            words = f"paceline: ended after {self._done} steps, as --steps asked{how}"
            print(words, file=sys.stderr)

    def _update(self, closure: Callable[[], float] | None) -> float | None:
        """Evaluate the closure, deliver the gradients, and update."""
        if closure is None:
            skips_update = self._skips_update()
            self._training.before_update()
            if skips_update:
                return None
            if not self._training.optimizer_steps:
                note_step(self._inner)
                return None
            return self._inner.step()
        evaluations = 0

        def evaluate() -> float:
            nonlocal evaluations
            if evaluations:  # LBFGS evaluates several points in one step
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
                f"step(closure): {type(self._inner).__name__} never called the closure. "
                "Call backward(), then step() without one"
            )
        return result

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Read by GradScaler, and by code that reads all attributes; has no side effect."""
        return self._training.takes_scaled_gradients

    def _skips_update(self) -> bool:
        """Whether a GradScaler has found a gradient that is not finite; if not, unscale gradients.

        torch passes the finding in attributes of the optimizer.
        """
        from_scaler = vars(self)
        if "found_inf" in from_scaler:
            self._active.uses_grad_scaler = True
            self._training.check_scaler()
        if float(from_scaler.get("found_inf", 0.0)):
            return True
        if from_scaler.get("grad_scale") is not None:
            inverse = from_scaler["grad_scale"].double().reciprocal().float()
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(inverse.to(parameter.grad.device))
        return False

    @property
    def first_step(self) -> int:
        """Steps that the job had done when this worker joined it.

        It is 0, except for a restarted worker (``paceline run --survive``).
        """
        return self._training.first_step

    @property
    def steps_of_all(self) -> float:
        """Steps of all workers that this worker's model contains, as far as it knows.

        In units of global steps: gradients divided by workers. Use it for a schedule by samples. It
        differs from this worker's own steps if groups of workers do not wait for each other.
        """
        known: float | None = getattr(self._training.hooks.worker, "steps_of_all", None)
        own = self.first_step + self._runtime.recorder.step_count
        return float(own) if known is None else known

    def _counts_steps(self) -> bool:
        """Whether this optimizer's steps are counted and measured: the first of several."""
        others = self._runtime.registry.unfinished
        return not others or others[0].training is self._active

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes only accumulate, and send nothing.

        The first backward pass outside it averages the accumulated gradients.

        Example:
            ::

                with optimizer.no_sync():
                    loss_of(model(first)).backward()
                loss_of(model(second)).backward()
                optimizer.step()
        """
        return self._training.no_sync()

    def finish(self) -> None:
        """End this worker's training: it is out of data. Collective, but ranks may call it at different times.

        It takes part in the others' collectives until all workers have called it, as under DDP's
        Join. Afterwards all models are equal. The optimizer's state is that of this worker's own
        last step or, if servers update, the servers'. It is called at exit if the script does not
        call it. Calling it again does nothing.
        """
        self._active.finish()

    @property
    def broken_by(self) -> str:
        """The error after which this training cannot continue, or "". `finish` only ends it then."""
        return self._active.broken_by

    @contextmanager
    def join(self) -> Iterator[None]:
        """Call `finish` at the end of a ``with`` block, around a loop that is shorter on some workers.

        Example:
            ::

                with optimizer.join():
                    for batch in loader:
                        train_on(batch)
        """
        yield
        self.finish()

    @contextmanager
    def consolidated(self) -> Iterator[None]:
        """Put the method's documented result into the model within a ``with`` block.

        Evaluate and save inside, train outside. Under bsp the model holds the result anyway,
        including buffers. If workers form the result together, all enter after the same step.

        Example:
            ::

                with optimizer.consolidated():
                    accuracy = evaluate(model)
        """
        with self._training.consolidated():
            yield


def _where_in_script() -> str:
    """Format `` at FILE:LINE`` of the script's call: schedulers and scalers wrap ``step``."""
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
