"""Tells a method that the script is about to use parameters, or gradients under way."""

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

    That is once between two updates. Listeners are told of each parameter by itself. A module's
    call is a use of its own parameters; the tensor itself notifies of any other
    (`notify_before_use`). Where it cannot (a class of its own, code that was compiled whole), its
    bucket counts as used at once. Where the method waits in forward, uses of gradients in
    ``.grad`` count, too, from the end of backward.
    """

    def __init__(
        self, context: TrainingContext, reducer: Reducer, hooks: MethodHooks
    ) -> None:
        self._context, self._reducer, self._hooks = context, reducer, hooks
        self._parameters = parameters = [p for _, p in context.parameters]
        self._index = {id(parameter): i for i, parameter in enumerate(parameters)}
        self._told: set[int] = set()
        """Buckets that the method was told of."""
        self._used: set[int] = set()
        self._unseen: set[int] = set()
        self._tells = self._watches = True
        self._awaits_step = False  # gradients were sent, and no update has followed yet
        self.used_since_backward = True
        """Whether anything was used since the last backward pass."""
        self._blind: set[int] = set()
        """Parameters whose use nothing tells in time: by id."""
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
        """An update has changed the parameters, or is about to: the next use counts again.
        Without *watch* only modules' calls count, and no tensor notifies."""
        self._told.clear()
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
        """Gradients are under way: who looks at them waits for them."""
        self._told.clear()
        self._watch_gradients()
        self._awaits_step, self.used_since_backward = True, False

    def backward_begins(self) -> None:
        """Gradients are about to come: reports the use of all parameters that were not used yet."""
        if self._watches and len(self._used) < len(self._parameters):
            self._unseen = {
                index
                for index, parameter in enumerate(self._parameters)
                if index not in self._used
                and self._bucket(parameter).index not in self._told
            }
            for parameter in self._parameters:
                stop_notifying(parameter)
        self._tell_all()

    @property
    def some_unseen(self) -> bool:
        """Whether the gradient of a parameter is not expected in this step (`was_unseen`)."""
        return bool(self._unseen)

    def was_unseen(self, index: int) -> bool:
        """Whether nothing has told, in this step, that parameter number *index* would be
        used, when its gradient came."""
        return index in self._unseen

    def detach(self) -> None:
        """Take the hooks out of the model."""
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
                self._tell_all()
            self.used_since_backward = True
            for parameter in own:
                self._parameter_is_used(parameter)

        return is_called

    def _watch_gradients(self) -> None:
        for bucket in self._context.buckets:
            tell = partial(self._gradient_is_used, bucket)
            for view in bucket.views:
                notify_before_use(view, tell)

    def _gradient_is_used(self, bucket: Bucket, view: torch.Tensor) -> None:
        if self._tells:
            stop_notifying(view)
            self._tell_of(bucket)

    def _parameter_is_used(self, parameter: torch.Tensor) -> None:
        if not self._tells:
            return  # the method itself uses it, in *before_use*
        stop_notifying(parameter)
        self.used_since_backward = True
        index = self._index[id(parameter)]
        if index in self._used:
            return
        self._used.add(index)
        self._context.listeners.used(index)
        self._tell_of(self._bucket(parameter))
        self._context.listeners.usable()

    def _bucket(self, parameter: torch.Tensor) -> Bucket:
        bucket = self._reducer.bucket_of(parameter)
        assert bucket is not None, "it is trained"
        return bucket

    def _tell_all(self) -> None:
        for bucket in self._context.buckets:
            self._tell_of(bucket)

    def _tell_of(self, bucket: Bucket) -> None:
        if bucket.index in self._told:
            return
        self._told.add(bucket.index)
        for view in bucket.views:
            stop_notifying(view)
        self._tells = False
        try:
            self._hooks.call("before_use", bucket)
        finally:
            self._tells = True
