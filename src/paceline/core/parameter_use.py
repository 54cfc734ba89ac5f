"""Tensors that tell somebody before they are used.

A parameter whose update is still under way must not be read, and Python has many ways to do
so: a module's call, a function of torch, a penalty in the loss, a moving average of weights,
a ``state_dict``. All of them hand the tensor to torch, and torch asks a tensor's class first
(``__torch_function__``). So the class of such a tensor is another one until it is used, with
the same memory, the same hooks, and the same place in the model.

What is not seen: code in C++ that is given tensors past torch's own functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from paceline.torch_internals import without_overrides

Tell = Callable[[torch.Tensor], None]

_TELL = "_paceline_tell"
"""Where a watched tensor keeps what it calls."""

_PROPERTIES = (
    *("grad", "requires_grad", "is_leaf", "grad_fn", "retains_grad", "output_nr"),
    *("shape", "dtype", "device", "layout", "ndim", "names", "itemsize", "nbytes"),
    *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_mkldnn"),
    *("is_nested", "is_mps", "is_xpu", "_version", "_backward_hooks"),
    *("_post_accumulate_grad_hooks", "name", "volatile"),
)
_SETTABLE = (
    "grad",
    "requires_grad",
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
)
_FUNCTIONS = (
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride"),
    *("storage_offset", "is_contiguous", "is_floating_point", "is_complex"),
    *("is_signed", "get_device", "requires_grad_", "register_hook", "__hash__"),
    *("register_post_accumulate_grad_hook", "retain_grad", "__len__"),
)


def _harmless() -> Iterator[Any]:
    """What neither reads nor writes a tensor's numbers."""
    for name in _PROPERTIES:
        descriptor: Any = getattr(torch.Tensor, name, None)
        if hasattr(descriptor, "__get__"):
            yield descriptor.__get__
        if name in _SETTABLE:
            yield from (descriptor.__set__, descriptor.__delete__)
    for name in _FUNCTIONS:
        for place in (torch.Tensor, torch):
            if hasattr(place, name):
                yield getattr(place, name)


HARMLESS = frozenset(_harmless())


class _Watched:
    """What both kinds of watched tensors do."""

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if function not in HARMLESS:
            for tensor in _found((args, kwargs or {})):
                tensor.__dict__[_TELL](tensor)
        with without_overrides():
            return function(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        release(self, told=True)
        return self.__deepcopy__(memo)  # of what it is now

    def __reduce_ex__(self, protocol: Any) -> Any:
        release(self, told=True)
        return self.__reduce_ex__(protocol)


class _WatchedParameter(_Watched, torch.nn.Parameter):
    """A parameter that tells."""


class _WatchedTensor(_Watched, torch.Tensor):
    """A tensor that tells."""


_KINDS: dict[type, type] = {
    torch.nn.Parameter: _WatchedParameter,
    torch.Tensor: _WatchedTensor,
}
_PLAIN = {watched: plain for plain, watched in _KINDS.items()}


def watch(tensor: torch.Tensor, tell: Tell) -> bool:
    """From now on call *tell* with *tensor* before anything reads or writes it, until it
    is released. Returns False, and does nothing, for a tensor of another class than
    torch's own, which may have its own idea of functions."""
    kind = _KINDS.get(type(tensor))
    if kind is None:
        return type(tensor) in _PLAIN
    tensor.__dict__[_TELL] = tell
    tensor.__class__ = kind
    return True


def release(tensor: Any, told: bool = False) -> None:
    """Make *tensor* what it was. *told*: it is about to be used."""
    kind = _PLAIN.get(type(tensor))
    if kind is None:
        return
    if told:
        tensor.__dict__[_TELL](tensor)
    if type(tensor) in _PLAIN:
        tensor.__class__ = kind
        del tensor.__dict__[_TELL]


def _found(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, _Watched):
        yield value  # type: ignore[misc]
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _found(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from _found(one)
