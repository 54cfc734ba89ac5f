"""Calls a method's hook before the script uses parameters, or gradients that are in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from paceline.core.context import TrainingContext
from paceline.core.method_hooks import MethodHooks
from paceline.core.reducer import Reducer
from paceline.interfaces import Bucket
from paceline.torch_internals import (
    Uncopied,
    has_no_hooks,
    is_compiled_whole,
    notify_before_use,
    stop_notifying,
)

READS_ITS_CHILDREN: tuple[type[torch.nn.Module], ...] = (torch.nn.MultiheadAttention,)
"""Modules that use their children's parameters without calling the children."""


class LazyParameters:
    """Calls the method's *before_use* with a bucket before anything uses one of its parameters.

    It is called once per bucket between two updates; listeners get each parameter. The call of a
    module uses its own parameters. The tensor itself reports any other use (`notify_before_use`).
    If it cannot (a tensor subclass, or a model that was compiled whole), its bucket counts as used
    at once. If the method waits in forward, uses of ``.grad`` count too, from the end of backward.
    """

    def __init__(
        self, context: TrainingContext, reducer: Reducer, hooks: MethodHooks
    ) -> None:
        self._context, self._reducer, self._hooks = context, reducer, hooks
        self._parameters = parameters = [p for _, p in context.parameters]
        self._index = {id(parameter): i for i, parameter in enumerate(parameters)}
        self._reported: set[int] = set()
        """Buckets that the hook was called with."""
        self._used: set[int] = set()
        self._unseen: set[int] = set()
        self._reports = self._watches = True
        self._awaits_step = (
            False  # gradients were sent, and the update has not followed
        )
        self.used_since_backward = True
        """Whether anything was used since the last backward pass."""
        self._blind: set[int] = set()
        """Ids of the parameters whose use is not reported in time."""
        self._handles = []
        for module in context.model.modules():
            deep = isinstance(module, READS_ITS_CHILDREN) or is_compiled_whole(module)
            own = [p for p in module.parameters(recurse=deep) if id(p) in self._index]
            if has_no_hooks(module):
                self._blind |= {id(p) for p in own}
            elif own:
                hook = Uncopied(self._hook(own))
                self._handles.append(module.register_forward_pre_hook(hook))

    def reset(self, watch: bool = True) -> None:
        """Start anew at an update: the next use of each parameter counts again.

        Without *watch* only calls of modules count, and tensors report no use.
        """
        self._reported.clear()
        self._used.clear()
        self._unseen.clear()
        self._watches = watch
        self._awaits_step, self.used_since_backward = False, not watch
        for parameter in self._parameters if watch else ():
            blind = id(parameter) in self._blind
            if blind or not notify_before_use(parameter, self._parameter_is_used):
                self._parameter_is_used(parameter)
        if self._context.waits_in_forward:
            self._watch_gradients()

    def backward_ended(self) -> None:
        """Watch ``.grad``: gradients are in flight, and a use of them must wait."""
        self._reported.clear()
        self._watch_gradients()
        self._awaits_step, self.used_since_backward = True, False

    def backward_begins(self) -> None:
        """Report all parameters that were not used yet, before gradients arrive."""
        if self._watches and len(self._used) < len(self._parameters):
            self._unseen = {
                index
                for index, parameter in enumerate(self._parameters)
                if index not in self._used
                and self._bucket(parameter).index not in self._reported
            }
            for parameter in self._parameters:
                stop_notifying(parameter)
        self._report_all()

    @property
    def some_unseen(self) -> bool:
        """Whether the gradient of a parameter is not expected in this step (`was_unseen`)."""
        return bool(self._unseen)

    def was_unseen(self, index: int) -> bool:
        """Whether parameter number *index* has a gradient although no use was reported in this step."""
        return index in self._unseen

    def detach(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for parameter in self._parameters:
            stop_notifying(parameter)
        for bucket in self._context.buckets:
            for view in bucket.views:
                stop_notifying(view)

    def _hook(self, own: Sequence[torch.nn.Parameter]) -> Callable[..., None]:
        def is_called(*_: Any) -> None:
            if torch.compiler.is_compiling():
                return  # part of a compiled module, whose hook has run already
            if self._awaits_step:  # a skipped step: gradients add up
                self._report_all()
            self.used_since_backward = True
            for parameter in own:
                self._parameter_is_used(parameter)

        return is_called

    def _watch_gradients(self) -> None:
        for bucket in self._context.buckets:
            report = partial(self._gradient_is_used, bucket)
            for view in bucket.views:
                notify_before_use(view, report)

    def _gradient_is_used(self, bucket: Bucket, view: torch.Tensor) -> None:
        if self._reports:
            stop_notifying(view)
            self._report(bucket)

    def _parameter_is_used(self, parameter: torch.Tensor) -> None:
        if not self._reports:
            return  # the method itself uses it, in *before_use*
        stop_notifying(parameter)
        self.used_since_backward = True
        index = self._index[id(parameter)]
        if index in self._used:
            return
        self._used.add(index)
        self._context.listeners.used(index)
        self._report(self._bucket(parameter))
        self._context.listeners.usable()

    def _bucket(self, parameter: torch.Tensor) -> Bucket:
        bucket = self._reducer.bucket_of(parameter)
        assert bucket is not None, "it is trained"
        return bucket

    def _report_all(self) -> None:
        for bucket in self._context.buckets:
            self._report(bucket)

    def _report(self, bucket: Bucket) -> None:
        if bucket.index in self._reported:
            return
        self._reported.add(bucket.index)
        for view in bucket.views:
            stop_notifying(view)
        self._reports = False
        try:
            self._hooks.call("before_use", bucket)
        finally:
            self._reports = True
