"""Calls the hooks of a method's worker, and refuses functions with unknown names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from paceline.core.context import TrainingContext
from paceline.errors import UsageError, unknown
from paceline.interfaces import HOOKS, Method, Run, WorkerHooks

DECLARED = ("name", "rounds", "updates_on", "visible_gradient", "clips", "start")


def check_declared(method: Method) -> None:
    """Check that a method declares all required attributes, and has no hooks itself.

    Raises `UsageError` otherwise: only hooks of the method's worker are called.
    """
    hooks = [name for name, _ in _public(type(method)) if name in HOOKS]
    if hooks:
        raise UsageError(
            f"method {type(method).__name__} defines the hook {hooks[0]!r} itself: expected "
            f"it in the worker that start(run) returns. {_how_to_write(hooks[0])}"
        )
    missing = [name for name in DECLARED if not hasattr(method, name)]
    if missing:
        raise UsageError(
            f"method {type(method).__name__} does not declare {', '.join(missing)}: "
            "expected class variables or properties with these names, and a function "
            "start(run). paceline.interfaces.Method documents them"
        )


def check_symmetric(method: Method) -> None:
    """Raise `UsageError` unless *method* declares that all workers send alike."""
    if not getattr(method, "symmetric", False):
        raise UsageError(
            f"representatives with method {method.name!r}: it does not declare symmetric = True, so "
            "its workers may differ in what they send, or when; simulate all workers"
        )


def check_hooks(method: Method, worker: object) -> None:
    """Check that each public function of *worker* is a hook and has the hook's arguments.

    Raises `UsageError` otherwise: it would never be called, or fail during a step.
    """
    kind = type(worker).__name__
    for name, function in _public(type(worker)):
        if name not in HOOKS:
            raise UsageError(
                f"method {method.name!r}: its worker {kind} defines "
                f"{unknown('hook', name, HOOKS)} A worker's public functions are its "
                "hooks: begin a helper's name with an underscore"
            )
        expected = len(inspect.signature(getattr(WorkerHooks, name)).parameters)
        try:
            inspect.signature(function).bind(*range(expected))
        except TypeError:
            raise UsageError(
                f"method {method.name!r}: the hook {kind}.{name}"
                f"{inspect.signature(function)} has other arguments than expected. "
                f"{_how_to_write(name)}"
            ) from None


def _public(cls: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, function in inspect.getmembers(cls, inspect.isfunction):
        if not name.startswith("_"):
            yield name, function


def _how_to_write(hook: str) -> str:
    names = ", ".join(inspect.signature(getattr(WorkerHooks, hook)).parameters)
    return (
        f"Write it as def {hook}({names}); the worker keeps the run and all its state in "
        "attributes"
    )


class MethodHooks:
    """The hooks of a method's worker in one training. The worker sees the training as *run*."""

    def __init__(self, context: TrainingContext, run: Run) -> None:
        self._context, self._method, self._run = context, context.method, run
        self._hooks: dict[str, Callable[..., Any]] = {}
        self.consolidates_together: bool = getattr(
            context.method, "consolidates_together", False
        )
        self.worker: Any = None
        """The method's worker, after `begin`."""
        self.is_loaded = False
        """Whether the script has loaded parameters since the method's last hook."""

    def begin(self) -> None:
        """Make the method's worker. Collective."""
        self.worker = self._method.start(self._run)
        check_hooks(self._method, self.worker)
        found = {name: getattr(self.worker, name, None) for name in HOOKS}
        self._hooks = {n: hook for n, hook in found.items() if hook is not None}

    def has(self, name: str) -> bool:
        """Whether the method's worker defines a hook."""
        return name in self._hooks

    def ask(self, name: str, *arguments: Any) -> Any:
        """Call a defined hook that changes nothing: training can continue after its errors."""
        self._report_load()
        return self._hooks[name](*arguments)

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a hook, if the worker defines it, and return its result."""
        if name not in ("parameters_replaced", "load_state"):
            self._report_load()
        hook = self._hooks.get(name)
        if hook is None:
            return None
        try:
            return hook(*arguments)
        except BaseException as error:
            self._context.record_failure(error)
            raise

    def _report_load(self) -> None:
        if self.is_loaded:
            self.is_loaded = False
            self.call("parameters_replaced")
