"""Hooks in the user's model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Uncopied:
    """A hook of this model alone: its deep copies (a moving average of the weights, say)
    and pickles get one that does nothing."""

    def __init__(self, hook: Callable[..., None] = lambda *arguments: None) -> None:
        self._hook = hook

    def __call__(self, *arguments: Any) -> None:
        self._hook(*arguments)

    def __reduce__(self) -> tuple[type[Uncopied], tuple[()]]:
        return Uncopied, ()
