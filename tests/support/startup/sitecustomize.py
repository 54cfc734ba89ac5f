"""What Python does at the start of each process of the tests: it spares itself a second or two.

The folder stands on ``PYTHONPATH`` (tests/conftest.py). Tests start thousands of processes, each of
which imports torch. Two parts of that serve none of them:

- The first optimizer imports ``torch._dynamo``, the compiler, to tell it not to compile optimizers.
  Here that waits until something else has imported it.
- Garbage collection looks through the modules while they grow.

The tests of the installed package and of README's demo run without this.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

Function = Callable[..., Any]


def _unless_loaded(decorated: Function, plain: Function) -> Function:
    """*plain* while ``torch._dynamo`` is not loaded, *decorated* from then on."""

    @functools.wraps(decorated)
    def call(*args: Any, **kwargs: Any) -> Any:
        function = decorated if "torch._dynamo" in sys.modules else plain
        return function(*args, **kwargs)

    return call


def _patch_compile(module: ModuleType) -> None:
    disable = module._disable_dynamo

    def disable_if_loaded(fn: Function | None = None, recursive: bool = True) -> Any:
        if fn is None:
            return functools.partial(disable_if_loaded, recursive=recursive)
        return _unless_loaded(disable(fn, recursive), fn)

    module._disable_dynamo = disable_if_loaded  # type: ignore[attr-defined]


def _patch_optimizer(module: ModuleType) -> None:
    use_grad = module._use_grad_for_differentiable

    def use_grad_if_loaded(step: Function) -> Function:
        def plain(self: Any, *args: Any, **kwargs: Any) -> Any:
            with module.torch.set_grad_enabled(self.defaults["differentiable"]):
                return step(self, *args, **kwargs)

        return _unless_loaded(use_grad(step), plain)

    module._use_grad_for_differentiable = use_grad_if_loaded  # type: ignore[attr-defined]


PATCHES = {
    "torch._compile": _patch_compile,
    "torch.optim.optimizer": _patch_optimizer,
}


class PatchingFinder(MetaPathFinder):
    """Changes each of `PATCHES` when it is imported."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """The module as it is found without this, with the change behind its own code."""
        if fullname not in PATCHES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_patch(module: ModuleType) -> None:
                execute(module)
                PATCHES[fullname](module)

            spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, PatchingFinder())
gc.set_threshold(50_000)
