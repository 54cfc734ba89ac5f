"""The user's optimizer, applied piece by piece: on a worker, or on a server.

Theory of operation
-------------------
Each piece is a `torch.nn.Parameter` of its own that views the storage of the user's
parameter. All of them live in a shallow copy of the user's optimizer, which has its own
``param_groups`` and ``state``; one step of that copy over the pieces of a call *is* the
update, with torch's own arithmetic and its foreach and fused kernels. (A copy, because
``type(optimizer)(groups, **optimizer.defaults)`` fails for AdamW.)

A piece that is a whole parameter has the parameter's shape and strides, so that any
optimizer may be given it. Smaller pieces are flat, and need an elementwise optimizer.

To everybody else the user's optimizer still owns its state: hooks on its ``state_dict``
merge the pieces' states into torch's form, and hooks on its ``load_state_dict`` split
what was loaded, so checkpoints go to plain torch and back.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import torch

from paceline.errors import UsageError
from paceline.interfaces import Hyperparameters, Piece

ELEMENTWISE = {
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
}
"""Every element is updated from its own gradient and state: may be split and sharded."""

WHOLE_TENSOR = {
    torch.optim.Muon: "orthogonalizes the update of a whole matrix",
    torch.optim.Adafactor: "keeps a mean per row and per column",
}
"""An element's update depends on the rest of its tensor: whole tensors only."""

REFUSED = {
    torch.optim.LBFGS: "searches along a line, with several passes over all parameters",
    torch.optim.SparseAdam: "takes sparse gradients, and only dense ones travel",
}

IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}
"""Entries of ``param_groups`` that say how to compute, not what: not in a snapshot, so
that a server or another worker computes in its own way."""

_UPDATED: WeakSet[torch.optim.Optimizer] = WeakSet()


def check_applicable(optimizer: torch.optim.Optimizer) -> None:
    """Raise `UsageError` unless *optimizer* may be applied to some tensors at a time.

    Only torch's own classes may: a subclass can read more than its piece.
    """
    kind, advice = type(optimizer), "use a method whose worker updates, such as bsp"
    if kind in REFUSED:
        raise UsageError(
            f"{kind.__name__} cannot be applied piece by piece: it {REFUSED[kind]}; {advice}"
        )
    if kind not in ELEMENTWISE and kind not in WHOLE_TENSOR:
        raise UsageError(
            f"{kind.__module__}.{kind.__qualname__} is not known to work piece by piece, "
            f"which this method does; {advice}, or one of torch.optim's optimizers"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise UsageError(
            f"{kind.__name__}(differentiable=True) cannot be applied piece by piece: "
            f"pieces are not part of autograd's graph; {advice}"
        )


def check_splittable(optimizer: torch.optim.Optimizer) -> None:
    """Raise `UsageError` unless *optimizer* may be applied to parts of a tensor."""
    check_applicable(optimizer)
    kind = type(optimizer)
    if kind in WHOLE_TENSOR:
        raise UsageError(
            f"{kind.__name__} cannot be applied to parts of a tensor: it "
            f"{WHOLE_TENSOR[kind]}; use whole_pieces, or a method whose worker updates, "
            "such as bsp"
        )


def whole_pieces(optimizer: torch.optim.Optimizer) -> list[Piece]:
    """One piece for each trainable parameter that has elements."""
    return [
        Piece(number, 0, parameter.numel())
        for number, parameter in enumerate(_parameters(optimizer))
        if parameter.requires_grad and parameter.numel()
    ]


def split_pieces(optimizer: torch.optim.Optimizer, most_bytes: int) -> list[Piece]:
    """Pieces of at most *most_bytes* bytes, as equal as a parameter's elements allow.

    A parameter stays whole where the optimizer is not elementwise, where it is not
    contiguous, and where it is of a 16-bit type on a CPU. Raises `UsageError` if
    not even one element fits.
    """
    parameters, pieces = _parameters(optimizer), []
    for whole in whole_pieces(optimizer):
        parameter, size = parameters[whole.parameter], whole.stop
        if type(optimizer) not in ELEMENTWISE or _why_whole(parameter):
            pieces.append(whole)
            continue
        if most_bytes < parameter.element_size():
            raise UsageError(
                f"split_pieces(..., most_bytes={most_bytes}): expected at least one "
                f"element's {parameter.element_size()} bytes ({parameter.dtype})"
            )
        count = -(-size // (most_bytes // parameter.element_size()))
        pieces += [
            Piece(whole.parameter, size * i // count, size * (i + 1) // count)
            for i in range(count)
        ]
    return pieces


class TorchUpdater:
    """The `Updater` over a torch optimizer; from now on only this applies *optimizer*.

    *pieces* hold every element of every parameter that is trainable now, once; the
    optimizer's present state is split onto them. ``optimizer.state_dict()`` gives a
    merged copy in torch's own form and refuses in the middle of a step, when a
    parameter's pieces differ; ``optimizer.load_state_dict()`` takes what any optimizer
    of this class gave. In between ``optimizer.state`` is empty.

    Raises `UsageError` for an optimizer that cannot be applied piece by piece, for pieces
    that do not fit, and for an optimizer that another updater applies.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, pieces: Sequence[Piece]
    ) -> None:
        check_applicable(optimizer)
        if optimizer in _UPDATED:
            raise UsageError("another TorchUpdater applies this optimizer: close() it")
        self._optimizer = optimizer
        self._parameters = _parameters(optimizer)
        self._group_of = [
            number
            for number, group in enumerate(optimizer.param_groups)
            for _ in group["params"]
        ]
        self._pieces_of: dict[int, list[Piece]] = defaultdict(list)
        for piece in sorted(pieces, key=lambda piece: piece.start):
            self._pieces_of[piece.parameter].append(piece)
        self._check_pieces()
        self._targets = {
            piece: torch.nn.Parameter(_view(self._parameters[piece.parameter], piece))
            for piece in pieces
        }
        self._inner = copy.copy(optimizer)
        # Torch's copy forgets the flags that constructors set; a scheduler's patched
        # `step` and the user's hooks are better forgotten: they run once a step.
        for name, value in vars(optimizer).items():
            if name.startswith("_"):
                vars(self._inner).setdefault(name, value)
        self._inner.state = defaultdict(dict)
        self._take_state(optimizer)
        register = optimizer.register_load_state_dict_post_hook
        self._hooks = [
            optimizer.register_state_dict_pre_hook(self._give_state, prepend=True),
            optimizer.register_state_dict_post_hook(self._forget_state),
            register(self._take_state, prepend=True),
        ]
        _UPDATED.add(optimizer)

    def apply(
        self,
        pieces: Sequence[Piece],
        gradients: Sequence[torch.Tensor],
        hyperparameters: Hyperparameters,
        commit: bool = True,
    ) -> list[torch.Tensor]:
        """Do one optimizer step on just these pieces: see `Updater.apply`.

        *hyperparameters* may be another worker's, of the same groups. Raises
        `UsageError`, with nothing changed, where an argument does not fit.
        """
        # Together, since a step's fixed cost is paid per call: 40 pieces of 1,000
        # elements on a CPU, SGD with momentum: together TOGETHER, one by one ONE.
        self._check_hyperparameters(hyperparameters)
        targets = [self._target(piece) for piece in pieces]
        if len(set(pieces)) < len(pieces) or len(gradients) != len(pieces):
            raise UsageError(
                "apply(pieces, gradients, ...): expected different pieces and a gradient "
                f"for each, got {len(pieces)} pieces, {len(set(pieces))} different ones, "
                f"and {len(gradients)} gradients"
            )
        shaped = [_shaped(*pair) for pair in zip(gradients, targets, strict=True)]
        state = self._inner.state
        if not commit:
            copies = [torch.nn.Parameter(t.detach().clone()) for t in targets]
            self._inner.state = defaultdict(dict)
            for target, clone in zip(targets, copies, strict=True):
                if target in state:
                    self._inner.state[clone] = copy.deepcopy(state[target])
            targets = copies
        self._inner.param_groups = []
        for number, group in enumerate(self._optimizer.param_groups):
            members = [
                target
                for piece, target in zip(pieces, targets, strict=True)
                if self._group_of[piece.parameter] == number
            ]
            if members:
                own = {name: group[name] for name in IMPLEMENTATION & group.keys()}
                self._inner.param_groups.append(
                    {**hyperparameters[number], **own, "params": members}
                )
        try:
            for target, gradient in zip(targets, shaped, strict=True):
                target.grad = gradient
            self._inner.step()
        finally:
            for target in targets:
                target.grad = None
            self._inner.state = state
        return [] if commit else [target.detach() for target in targets]

    def hyperparameters(self) -> list[dict[str, Any]]:
        """A copy of what each of ``param_groups`` holds as of now, in their order.

        Without parameters, their names, and what says how to compute (`IMPLEMENTATION`).
        """
        left_out = {"params", "param_names"} | IMPLEMENTATION
        return [
            {
                name: copy.deepcopy(value)
                for name, value in group.items()
                if name not in left_out
            }
            for group in self._optimizer.param_groups
        ]

    def state(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """The live state of each piece, by name: see `Updater.state`.

        Tensors have the piece's shape, those of a part of a parameter are flat; what
        torch keeps once per parameter, such as ``step``, each piece has for itself.
        """
        return [self._inner.state[self._target(piece)] for piece in pieces]

    def close(self) -> None:
        """Give the state back to the optimizer, which is plain torch's again."""
        self._give_state(self._optimizer)
        for hook in self._hooks:
            hook.remove()
        _UPDATED.discard(self._optimizer)

    # ---- the optimizer's state, in torch's form and back ----

    def _give_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Merge the pieces' states into the optimizer's."""
        merged = {}
        for number, pieces in self._pieces_of.items():
            states = self.state(pieces)
            if any(states):
                merged[number] = self._merge(number, states)
        for number, state in merged.items():
            optimizer.state[self._parameters[number]] = state

    def _forget_state(self, optimizer: torch.optim.Optimizer, _: object = None) -> None:
        """Nothing that could be taken for the state, and would grow old, stays."""
        for number in self._pieces_of:
            optimizer.state.pop(self._parameters[number], None)

    def _take_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Split the optimizer's state onto the pieces."""
        self._inner.state.clear()
        for number, pieces in self._pieces_of.items():
            parameter = self._parameters[number]
            for name, value in optimizer.state.get(parameter, {}).items():
                for piece in pieces:
                    part = _part(name, value, parameter, piece)
                    self._inner.state[self._targets[piece]][name] = part
        self._forget_state(optimizer)

    def _merge(self, number: int, states: list[dict[str, Any]]) -> dict[str, Any]:
        """One parameter's state, from its pieces'; shares no memory with them."""
        if len(states) == 1:
            return copy.deepcopy(states[0])
        shape = self._parameters[number].shape
        merged: dict[str, Any] = {}
        for name in dict.fromkeys(name for state in states for name in state):
            values: list[Any] = [state.get(name) for state in states]
            if all(isinstance(value, torch.Tensor) and value.dim() for value in values):
                merged[name] = torch.cat(values).view(shape)
            elif any(name not in state for state in states) or any(
                value != values[0] for value in values
            ):
                raise UsageError(
                    f"the pieces of parameter {number} (shape {tuple(shape)}) differ in "
                    f"{name!r}: some had their step and others not. Take the state_dict "
                    "between steps"
                )
            else:
                merged[name] = copy.deepcopy(values[0])
        return merged

    # ---- checks ----

    def _target(self, piece: Piece) -> torch.nn.Parameter:
        """The piece's tensor; follows a parameter whose storage was replaced."""
        target = self._targets.get(piece)
        if target is None:
            raise UsageError(
                f"{piece} is none of this updater's {len(self._targets)} pieces, which "
                "are fixed when it is made"
            )
        parameter = self._parameters[piece.parameter]
        offset = piece.start * parameter.element_size()
        if parameter.data_ptr() + offset != target.data_ptr():
            now, then = parameter, target
            if (now.dtype, now.device) != (then.dtype, then.device):
                raise UsageError(
                    f"parameter {piece.parameter} was {then.dtype} on {then.device} when "
                    f"the updater was made, and is {now.dtype} on {now.device} now: "
                    "convert and move the model before"
                )
            self._check_piece(piece)
            target.data = _view(parameter, piece)
        return target

    def _check_piece(self, piece: Piece) -> None:
        """Raise `UsageError` unless the piece is a part that can be updated."""
        known = range(len(self._parameters))
        parameter = (
            self._parameters[piece.parameter] if piece.parameter in known else None
        )
        if parameter is None or not parameter.requires_grad:
            raise UsageError(
                f"{piece}: the optimizer has no trainable parameter {piece.parameter}; "
                f"it has {len(known)} parameters, numbered from 0"
            )
        if not 0 <= piece.start < piece.stop <= parameter.numel():
            raise UsageError(
                f"{piece}: expected 0 <= start < stop <= {parameter.numel()}, the "
                f"elements of parameter {piece.parameter} (shape {tuple(parameter.shape)})"
            )
        if not _is_whole(piece, parameter):
            check_splittable(self._optimizer)
            if reason := _why_whole(parameter):
                raise UsageError(
                    f"{piece}: parameter {piece.parameter} (shape "
                    f"{tuple(parameter.shape)}) {reason}, and so cannot be split; give "
                    "it one piece, as split_pieces does"
                )

    def _check_pieces(self) -> None:
        """Raise `UsageError` unless the pieces tile every trainable parameter."""
        for piece in (p for pieces in self._pieces_of.values() for p in pieces):
            self._check_piece(piece)
        wrong = []
        for whole in whole_pieces(self._optimizer):
            reached = 0
            for piece in [
                *self._pieces_of[whole.parameter],
                Piece(whole.parameter, whole.stop, whole.stop),
            ]:
                if piece.start != reached:
                    low, high = sorted((piece.start, reached))
                    what = "in no piece" if piece.start > reached else "in two pieces"
                    # Of an overlap, what the later piece does not reach is in it once.
                    high = high if what == "in no piece" else min(high, piece.stop)
                    wrong.append(
                        f"elements [{low}, {high}) of parameter {whole.parameter} {what}"
                    )
                reached = max(reached, piece.stop)
        if wrong:
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise UsageError(
                "expected every element of every trainable parameter in exactly one "
                f"piece, got {'; '.join(wrong[:3])}{more}. whole_pieces and split_pieces "
                "make pieces that fit"
            )

    def _check_hyperparameters(self, given: Hyperparameters) -> None:
        """Raise `UsageError` unless a snapshot has what each group needs."""
        groups = len(self._optimizer.param_groups)
        if len(given) != groups:
            raise UsageError(
                f"expected the hyperparameters of {groups} parameter groups, got "
                f"{len(given)}; hyperparameters() takes a snapshot of all"
            )
        for number, group in enumerate(given):
            missing = self._optimizer.defaults.keys() - IMPLEMENTATION - group.keys()
            if missing or "params" in group:
                what = (
                    f"without {', '.join(sorted(missing))}" if missing else "'params'"
                )
                raise UsageError(
                    f"group {number}: expected {type(self._optimizer).__name__}'s "
                    f"hyperparameters as hyperparameters() gives them, got {what}"
                )


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _is_whole(piece: Piece, parameter: torch.Tensor) -> bool:
    return piece.start == 0 and piece.stop == parameter.numel()


def _why_whole(parameter: torch.Tensor) -> str:
    """Why a parameter must not be split; empty where it may be."""
    if not parameter.is_contiguous():
        return "is not contiguous"
    # On CPUs torch's vector loops compute `a + alpha * b` in float32, and the loops over
    # the elements that are left over round alpha * b to 16 bits: an element's bits depend
    # on where in its tensor it stands. 32 and 64 bits agree, and so does CUDA.
    if parameter.element_size() < 4 and parameter.device.type == "cpu":
        return f"is {parameter.dtype} on a CPU, where bits depend on an element's place"
    return ""


def _view(parameter: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The piece's elements: the parameter as it is, or a flat part of it."""
    data = parameter.detach()
    return data if _is_whole(piece, data) else data.view(-1)[piece.start : piece.stop]


def _shaped(gradient: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The gradient in the shape of its target, and laid out as autograd would.

    Fused kernels rely on equal strides.
    """
    expected = target.dtype, target.device, torch.strided
    got = gradient.dtype, gradient.device, gradient.layout
    if got != expected or gradient.shape not in (target.shape, (target.numel(),)):
        raise UsageError(
            f"expected a gradient of shape {tuple(target.shape)} or ({target.numel()},), "
            f"{target.dtype}, dense, on {target.device}; got shape "
            f"{tuple(gradient.shape)}, {gradient.dtype}, {gradient.layout}, on "
            f"{gradient.device}"
        )
    gradient = gradient.detach().view(target.shape)
    if gradient.stride() != target.stride():
        gradient = torch.empty_like(target).copy_(gradient)
    return gradient


def _part(name: str, value: Any, parameter: torch.Tensor, piece: Piece) -> Any:
    """A piece's own copy of one entry of its parameter's state."""
    if not isinstance(value, torch.Tensor) or _is_whole(piece, parameter):
        return copy.deepcopy(value)
    if value.shape == parameter.shape:
        return value.detach().reshape(-1)[piece.start : piece.stop].clone()
    if value.numel() == 1:
        return value.detach().reshape(()).clone()
    raise UsageError(
        f"parameter {piece.parameter}: expected its state {name!r} to have its shape "
        f"{tuple(parameter.shape)} or one element, got shape {tuple(value.shape)}; is "
        "this the state of another model?"
    )
