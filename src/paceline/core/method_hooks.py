"""Calls a method's hooks, and refuses those that there are not."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from paceline.errors import UsageError, unknown
from paceline.interfaces import HOOKS, Method, Run

DECLARED = ("name", "rounds", "updates_on", "visible_gradient", "clips")


def check_declared(method: Method) -> None:
    """Raise `UsageError` for a method that does not say all that training has to know."""
    missing = [name for name in DECLARED if not hasattr(method, name)]
    if missing:
        raise UsageError(
            f"method {type(method).__name__} does not declare {', '.join(missing)}: "
            "expected class variables or properties of these names "
            "(paceline.interfaces.Method says what they mean)"
        )


def check_hooks(method: Method) -> None:
    """Raise `UsageError` for a public function with a hook's arguments that is none: it
    would never be called, and training would go wrong without a word."""
    for name, function in inspect.getmembers(type(method), inspect.isfunction):
        if name.startswith("_") or name in HOOKS:
            continue
        arguments = list(inspect.signature(function).parameters)
        if arguments[1:3] == ["state", "run"]:
            message = unknown("hook", name, HOOKS)
            raise UsageError(f"method {method.name!r} defines {message}")


class MethodHooks:
    """The hooks of *method* in one training; *failed* is told of an error in one."""

    def __init__(
        self, method: Method, run: Run, failed: Callable[[BaseException], None]
    ) -> None:
        self._run, self._failed = run, failed
        found = {name: getattr(method, name, None) for name in HOOKS}
        self._hooks: dict[str, Any] = {n: h for n, h in found.items() if h is not None}
        self.consolidates_together: bool = getattr(
            method, "consolidates_together", False
        )
        self.state: Any = None
        """The method's own."""
        self.is_loaded = False
        """Whether the script has loaded parameters, and the method was not told."""

    def begin(self) -> None:
        """Make the method's state. Collective."""
        self.state = self._hooks["init"](self._run)

    def has(self, name: str) -> bool:
        """Whether the method defines a hook."""
        return name in self._hooks

    def ask(self, name: str, *arguments: Any) -> Any:
        """Call a hook that the method has and that changes nothing: training can go on
        after its errors."""
        self._tell_of_load()
        return self._hooks[name](self.state, self._run, *arguments)

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a hook, if the method has it; returns what it returns."""
        if name not in ("loaded", "load_state"):
            self._tell_of_load()
        hook = self._hooks.get(name)
        if hook is None:
            return None
        try:
            return hook(self.state, self._run, *arguments)
        except BaseException as error:
            self._failed(error)
            raise

    def _tell_of_load(self) -> None:
        if self.is_loaded:
            self.is_loaded = False
            self.call("loaded")
