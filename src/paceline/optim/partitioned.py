"""Applies the user's optimizer piece by piece, on a worker or on a server.

Each piece is a `torch.nn.Parameter` of its own that views the storage of the user's parameter. All
pieces are in a shallow copy of the user's optimizer, which has its own ``param_groups`` and
``state``. One step of that copy over the pieces of a call *is* the update, with torch's own
arithmetic and its foreach and fused kernels. (It is a copy, because ``type(optimizer)(groups,
**optimizer.defaults)`` fails for AdamW.)

A piece that is a whole parameter has the parameter's shape and strides, so any optimizer can update
it. Smaller pieces are flat, and need an elementwise optimizer.

For all other code, the user's optimizer still owns its state. Hooks on its ``state_dict`` merge the
pieces' states into torch's form, and hooks on its ``load_state_dict`` split a loaded state. So
checkpoints are compatible with plain torch.

The tables `ELEMENTWISE`, `WHOLE_TENSOR` and `REFUSED` list the optimizers that may be applied piece
by piece. `check_pieces` accepts a piece only if its update has the same bits as within an update of
the whole tensor.

- `PartitionedOptimizer`: applies the optimizer, and converts its state; start here.
- `whole_pieces`, `split_pieces`: cut parameters into pieces.
- `check_applicable`, `check_splittable`, `check_servers_can_hold`: check an optimizer.
- `check_pieces`, `check_cuts`: check pieces.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any
from weakref import WeakSet

import torch

from paceline.errors import UsageError
from paceline.interfaces import Hyperparameters, Piece
from paceline.interfaces.buckets import in_strides_of, stands_in, wire_bytes
from paceline.torch_internals import version_of, without_overrides

_t = torch.optim
ELEMENTWISE = {
    *(_t.SGD, _t.Adam, _t.AdamW, _t.NAdam, _t.RAdam, _t.Adamax),
    *(_t.Adagrad, _t.Adadelta, _t.RMSprop, _t.Rprop, _t.ASGD),
}
"""Optimizers that update each element from its own gradient and state, so tensors may be split."""

WHOLE_TENSOR = {
    _t.Muon: "orthogonalizes the update of a whole matrix",
    _t.Adafactor: "keeps a mean per row and per column",
}
"""Optimizers that need whole tensors, since an element's update depends on the rest of its tensor."""

REFUSED = {
    _t.LBFGS: "searches along a line, with several passes over all parameters",
    _t.SparseAdam: "takes sparse gradients, and only dense ones travel",
}
"""Optimizers that cannot be applied piece by piece, and why."""

KEPT_AT_HOME = {
    _t.Adafactor: "has a state that is neither per element nor a number",
}
"""Optimizers that a server could apply, but whose state it could not return.

Checkpoints and the end of a training need that state.
"""

MOST_STATES = 4
"""The largest number of state tensors of a parameter's shape that any torch optimizer keeps."""

_ADVICE = "use a method whose worker updates, such as bsp"

IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}
"""Entries of ``param_groups`` that select an implementation, and do not affect the result.

A snapshot omits them, so that a server or another worker uses its own implementation.
"""

_UPDATED: WeakSet[torch.optim.Optimizer] = WeakSet()
"""The optimizers that a `PartitionedOptimizer` currently applies."""


class PartitionedOptimizer:
    """Applies a torch optimizer piece by piece: the `PartialOptimizer` of torch's optimizers.

    From now on, only this object may apply the optimizer. The optimizer's current state is split
    onto the pieces, so ``optimizer.state`` is empty except in these two calls:

    - ``optimizer.state_dict()`` returns a merged copy in torch's own form. It raises `UsageError`
      in the middle of a step, when a parameter's pieces differ.
    - ``optimizer.load_state_dict()`` accepts the state of any optimizer of the same class.

    Args:
        optimizer: The user's optimizer.
        pieces: Pieces that together hold every element of every trainable parameter once.

    Raises:
        UsageError: The optimizer cannot be applied piece by piece, the pieces do not fit, or
            another `PartitionedOptimizer` applies the optimizer.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, pieces: Sequence[Piece]
    ) -> None:
        check_applicable(optimizer)
        check_pieces(optimizer, pieces)
        if optimizer in _UPDATED:
            raise UsageError(
                "another PartitionedOptimizer already applies this optimizer. Call its close() first"
            )
        self._optimizer = optimizer
        self._parameters = parameters_of(optimizer)
        self._numbers = {id(p): n for n, (p, _) in enumerate(self._parameters)}
        self._pieces_of: dict[int, list[Piece]] = defaultdict(list)
        for piece in sorted(pieces):
            self._pieces_of[piece.parameter].append(piece)
        self._targets = {
            piece: torch.nn.Parameter(
                _view(self._parameters[piece.parameter][0], piece)
            )
            for piece in pieces
        }
        self._inner = copy.copy(optimizer)
        # The copy lacks the user's hooks and a scheduler's patch of `step`. It should: they run
        # once per step of the user's optimizer.
        self._inner.state = defaultdict(dict)
        self._take_state(optimizer)
        self._hooks = [
            optimizer.register_state_dict_pre_hook(self._give_state, prepend=True),
            optimizer.register_state_dict_post_hook(self._forget_state),
            optimizer.register_load_state_dict_post_hook(
                self._take_state, prepend=True
            ),
        ]
        _UPDATED.add(optimizer)

    def apply(
        self,
        pieces: Sequence[Piece],
        gradients: Sequence[torch.Tensor],
        hyperparameters: Hyperparameters,
        commit: bool = True,
    ) -> list[torch.Tensor]:
        """Take one optimizer step on only these pieces: see `PartialOptimizer.apply`.

        Args:
            pieces: Different pieces of this object.
            gradients: One for each piece, in the piece's shape or flat.
            hyperparameters: One entry for each parameter group, possibly from another worker.
            commit: Whether to change the parameters and the state.

        Returns:
            The new values of the pieces if *commit* is False, else an empty list.

        Raises:
            UsageError: An argument does not fit. Nothing has changed then.
        """
        # All pieces share one step of the copy, because its fixed cost is paid per call. Times
        # for 40 pieces of 1,000 elements on one busy core: SGD with momentum 0.4 ms together,
        # 1.4 ms one by one; Adam(fused=True) 0.3 and 1.8 ms.
        self._check_hyperparameters(hyperparameters)
        targets = [self._target(piece) for piece in pieces]
        different = len(set(targets))
        if different < len(pieces) or len(gradients) != len(pieces):
            raise UsageError(
                "apply(pieces, gradients, ...): expected different pieces and a gradient "
                f"for each, got {len(pieces)} pieces, {different} different ones, and "
                f"{len(gradients)} gradients"
            )
        shaped = [_shaped(*pair) for pair in zip(gradients, targets, strict=True)]
        live = state = self._inner.state
        if not commit:
            clones = [torch.nn.Parameter(_copied(target)) for target in targets]
            state = defaultdict(dict)
            for target, clone in zip(targets, clones, strict=True):
                if target in live:
                    state[clone] = _copied(live[target])
            targets = clones
        groups: list[dict[str, Any]] = []
        for given, group in zip(
            hyperparameters, self._optimizer.param_groups, strict=True
        ):
            how = {name: group[name] for name in IMPLEMENTATION & group.keys()}
            groups.append({**given, **how, "params": []})
        for piece, target, gradient in zip(pieces, targets, shaped, strict=True):
            group = groups[self._parameters[piece.parameter][1]]
            # Torch's foreach SGD adds the momentum into the gradient itself.
            target.grad = gradient.clone() if group.get("nesterov") else gradient
            group["params"].append(target)
        try:
            self._inner.state, self._inner.param_groups = state, groups
            self._inner.step()
        finally:
            self._inner.state, self._inner.param_groups = live, []
            for target in targets:
                target.grad = None
        return [] if commit else [target.detach() for target in targets]

    def pieces_of(self, parameter: torch.nn.Parameter) -> list[Piece]:
        """Return the pieces of one parameter, in order: see `PartialOptimizer.pieces_of`."""
        number = self._numbers.get(id(parameter))
        return [] if number is None else self._pieces_of[number]

    def group_of(self, piece: Piece) -> int:
        """Return the number of a piece's parameter group: see `PartialOptimizer.group_of`."""
        return self._parameters[piece.parameter][1]

    def values(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """Return views of the pieces' elements: see `PartialOptimizer.values`."""
        return [self._target(piece).detach() for piece in pieces]

    def stamps(self, pieces: Sequence[Piece]) -> list[int]:
        """Return a number for each piece that every write changes: see `PartialOptimizer.stamps`."""
        return [version_of(self._parameters[p.parameter][0]) for p in pieces]

    def hyperparameters(self) -> list[dict[str, Any]]:
        """Return a copy of the current options of each of ``param_groups``, in their order.

        It omits parameters, their names, and options that select an implementation
        (`IMPLEMENTATION`).
        """
        left_out = {"params", "param_names"} | IMPLEMENTATION
        return [
            {
                name: _copied(value)
                for name, value in group.items()
                if name not in left_out
            }
            for group in self._optimizer.param_groups
        ]

    def state(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """Return the live state of each piece, by name: see `PartialOptimizer.state`.

        Tensors have the piece's shape; those of a part of a parameter are flat. Each piece has its
        own copy of entries that torch keeps once per parameter, such as ``step``.
        """
        return [self._inner.state[self._target(piece)] for piece in pieces]

    def close(self) -> None:
        """Merge the state back into the optimizer, which is then a plain torch optimizer again."""
        self._give_state(self._optimizer)
        for hook in self._hooks:
            hook.remove()
        _UPDATED.discard(self._optimizer)

    # ---- conversion of the state to torch's form and back ----

    def _give_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Merge the pieces' states into the optimizer's."""
        merged = {
            self._parameters[number][0]: self._merge(number, states)
            for number, pieces in self._pieces_of.items()
            if any(states := self.state(pieces))
        }
        optimizer.state.update(merged)

    def _forget_state(self, optimizer: torch.optim.Optimizer, _: object = None) -> None:
        """Remove the merged states from the optimizer, since the next step would make them stale."""
        for number in self._pieces_of:
            optimizer.state.pop(self._parameters[number][0], None)

    def _take_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Split the optimizer's state onto the pieces."""
        self._inner.state.clear()
        for piece, target in self._targets.items():
            parameter, group = self._parameters[piece.parameter]
            # A loaded state may set fused=True.
            check_cuts(optimizer, piece, parameter, group)
            for name, value in optimizer.state.get(parameter, {}).items():
                part = _part(name, value, parameter, piece)
                self._inner.state[target][name] = part
        self._forget_state(optimizer)

    def _merge(self, number: int, states: list[dict[str, Any]]) -> dict[str, Any]:
        """Merge the states of one parameter's pieces into a copy that shares no memory with them."""
        if len(states) == 1:
            copied: dict[str, Any] = _copied(states[0])
            return copied
        shape = self._parameters[number][0].shape
        merged: dict[str, Any] = {}
        for name in dict.fromkeys(name for state in states for name in state):
            values: list[Any] = [state.get(name) for state in states]
            if all(isinstance(value, torch.Tensor) and value.dim() for value in values):
                merged[name] = torch.cat(values).view(shape)
            elif all(name in state for state in states) and all(
                value == values[0] for value in values
            ):
                merged[name] = _copied(values[0])
            else:
                raise UsageError(
                    f"the pieces of parameter {number} (shape {tuple(shape)}) differ in "
                    f"{name!r}, because only some have taken the current step. Call state_dict() "
                    "between steps"
                )
        return merged

    # ---- checks ----

    def _target(self, piece: Piece) -> torch.nn.Parameter:
        """Return the piece's tensor, even after the storage of its parameter was replaced."""
        target = self._targets.get(piece)
        if target is None:
            raise UsageError(
                f"{piece}: expected one of the {len(self._targets)} pieces with which this "
                "PartitionedOptimizer was created. Pass those pieces, or create another one"
            )
        now, group = self._parameters[piece.parameter]
        # A method may treat data_ptr() as a use of the parameter, and this call is not a use.
        with without_overrides():
            address = now.data_ptr() + piece.start * now.element_size()
        if address != target.data_ptr():
            if (now.dtype, now.device) != (target.dtype, target.device):
                raise UsageError(
                    f"parameter {piece.parameter} is {now.dtype} on {now.device}: expected "
                    f"{target.dtype} on {target.device}, as when the PartitionedOptimizer was created. "
                    "Convert and move the model before that"
                )
            check_cuts(self._optimizer, piece, now, group)
            target.data = _view(now, piece)
        return target

    def _check_hyperparameters(self, given: Hyperparameters) -> None:
        """Raise `UsageError` if a snapshot lacks options that a group needs."""
        groups = len(self._optimizer.param_groups)
        if len(given) != groups:
            raise UsageError(
                f"expected the hyperparameters of {groups} parameter groups, got "
                f"{len(given)}; hyperparameters() takes a snapshot of all"
            )
        for number, group in enumerate(given):
            missing = self._optimizer.defaults.keys() - IMPLEMENTATION - group.keys()
            if missing:
                raise UsageError(
                    f"group {number}: expected {type(self._optimizer).__name__}'s "
                    "hyperparameters as hyperparameters() gives them, got none for "
                    + ", ".join(sorted(missing))
                )


def _view(parameter: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Return a view of the piece's elements: the whole parameter, or a flat part of it."""
    data = parameter.detach()
    whole = piece.stop - piece.start == data.numel()
    return data if whole else data.view(-1)[piece.start : piece.stop]


def _shaped(gradient: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the gradient in its target's shape and strides, which fused kernels require."""
    expected = target.dtype, target.device, torch.strided
    got = gradient.dtype, gradient.device, gradient.layout
    if got != expected or gradient.shape not in (target.shape, (target.numel(),)):
        raise UsageError(
            f"expected a gradient of shape {tuple(target.shape)} or ({target.numel()},), "
            f"{target.dtype}, dense, on {target.device}; got shape "
            f"{tuple(gradient.shape)}, {gradient.dtype}, {gradient.layout}, on "
            f"{gradient.device}"
        )
    gradient = gradient.detach()
    if gradient.shape != target.shape:
        gradient = gradient.view(target.shape)
    if gradient.stride() != target.stride():
        gradient = torch.empty_like(target).copy_(gradient)
    return gradient


def _part(name: str, value: Any, parameter: torch.Tensor, piece: Piece) -> Any:
    """Return the piece's own copy of one entry of its parameter's state."""
    whole = piece.stop - piece.start == parameter.numel()
    if whole or not isinstance(value, torch.Tensor):
        own = _copied(value)
        return in_strides_of(parameter, own) if isinstance(own, torch.Tensor) else own
    if value.shape == parameter.shape:
        return value.detach().reshape(-1)[piece.start : piece.stop].clone()
    if value.numel() == 1:
        return value.detach().reshape(()).clone()
    raise UsageError(
        f"parameter {piece.parameter}: expected its state {name!r} to have its shape "
        f"{tuple(parameter.shape)} or one element, got shape {tuple(value.shape)}; is "
        "this the state of another model?"
    )


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {name: _copied(entry) for name, entry in value.items()}
    return copy.deepcopy(value)


# ---- checks of optimizers and pieces ----


def check_applicable(optimizer: torch.optim.Optimizer) -> None:
    """Raise `UsageError` unless *optimizer* may be applied to a few tensors at a time.

    Only torch's own classes are accepted, since a subclass could read more than its piece.
    """
    kind = type(optimizer)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind in REFUSED:
        raise UsageError(
            f"{kind.__name__} cannot be applied piece by piece: it {REFUSED[kind]}; "
            f"{_ADVICE}"
        )
    if kind not in ELEMENTWISE and kind not in WHOLE_TENSOR:
        raise UsageError(
            f"{name} is not known to work piece by piece: {_ADVICE}, or one of "
            "torch.optim's own optimizers"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise UsageError(
            f"{kind.__name__}(differentiable=True) cannot be applied piece by piece: "
            f"pieces have no autograd graph; {_ADVICE}"
        )


def check_servers_can_hold(optimizer: torch.optim.Optimizer) -> None:
    """Raise `UsageError` unless servers can hold *optimizer* with its state."""
    check_applicable(optimizer)
    kind = type(optimizer)
    if kind in KEPT_AT_HOME:
        raise UsageError(
            f"{kind.__name__} cannot live on a server: it {KEPT_AT_HOME[kind]}, so its "
            f"state could not come back; {_ADVICE}"
        )


def check_splittable(optimizer: torch.optim.Optimizer) -> None:
    """Raise `UsageError` unless *optimizer* may be applied to parts of a tensor."""
    check_applicable(optimizer)
    kind = type(optimizer)
    if kind in WHOLE_TENSOR:
        raise UsageError(
            f"{kind.__name__} cannot be applied to parts of a tensor: it "
            f"{WHOLE_TENSOR[kind]}; keep tensors whole (whole_pieces), or {_ADVICE}"
        )


def whole_pieces(optimizer: torch.optim.Optimizer) -> list[Piece]:
    """Return one piece for each trainable parameter that has elements."""
    return [
        Piece(number, 0, parameter.numel())
        for number, (parameter, _) in enumerate(parameters_of(optimizer))
        if parameter.requires_grad and parameter.numel()
    ]


def split_pieces(optimizer: torch.optim.Optimizer, most_bytes: int) -> list[Piece]:
    """Split the trainable parameters into pieces of about equal size.

    A parameter stays whole if the optimizer is not elementwise, if the parameter is not contiguous,
    or if it has a 16-bit type on a CPU. With ``fused=True`` on a CPU, cuts are at multiples of 64
    bytes.

    Args:
        optimizer: The optimizer that updates the pieces.
        most_bytes: The largest size of a piece, in bytes.

    Returns:
        The pieces. Those of one parameter are as equal as its elements allow.

    Raises:
        UsageError: *most_bytes* is smaller than one element, or than the 64 bytes of a fused
            update on a CPU.
    """
    parameters, pieces = parameters_of(optimizer), []
    for whole in whole_pieces(optimizer):
        (parameter, group), size = parameters[whole.parameter], whole.stop
        unit, _ = cut_every(optimizer, parameter, group)
        unit_bytes = unit * max(1, wire_bytes(parameter) // size)
        # A parameter that stands in for a larger one has few elements to cut, though many bytes.
        few = stands_in(parameter)
        if most_bytes < unit_bytes and unit < size and not few:
            raise UsageError(
                f"split_pieces(..., most_bytes={most_bytes}): expected {unit_bytes} bytes "
                f"or more, the least part of parameter {whole.parameter} "
                f"({parameter.dtype}) that can be updated alone"
            )
        units = -(-size // unit)
        count = -(-units // max(1, most_bytes // unit_bytes))
        cuts = [min(size, unit * (units * i // count)) for i in range(count + 1)]
        pieces += [
            Piece(whole.parameter, start, stop) for start, stop in pairwise(cuts)
        ]
    return pieces


def check_pieces(optimizer: torch.optim.Optimizer, pieces: Sequence[Piece]) -> None:
    """Raise `UsageError` unless each piece can be updated alone, and they cover all parameters.

    Together they must hold every element of every trainable parameter once.
    """
    parameters = parameters_of(optimizer)
    reached = dict.fromkeys((p.parameter for p in whole_pieces(optimizer)), 0)
    wrong = []
    for piece in sorted(pieces):
        number = piece.parameter
        if number not in reached:
            raise UsageError(
                f"{piece}: expected the number of a trainable parameter that has "
                f"elements, of the optimizer's {len(parameters)} counted from 0"
            )
        check_cuts(optimizer, piece, *parameters[number])
        both = min(reached[number], piece.stop)
        if piece.start > both:
            wrong.append(f"[{both}, {piece.start}) of parameter {number} in none")
        elif piece.start < both:
            wrong.append(f"[{piece.start}, {both}) of parameter {number} in two")
        reached[number] = max(reached[number], piece.stop)
    for number, stop in reached.items():
        size = parameters[number][0].numel()
        if stop < size:
            wrong.append(f"[{stop}, {size}) of parameter {number} in none")
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise UsageError(
            "expected every element of every trainable parameter in one piece, got "
            f"elements {', '.join(wrong[:3])}{more}; whole_pieces and split_pieces make "
            "pieces that fit"
        )


def check_cuts(
    optimizer: torch.optim.Optimizer, piece: Piece, parameter: torch.Tensor, group: int
) -> None:
    """Raise `UsageError` unless *piece* is a part of *parameter* that can be updated alone.

    Args:
        optimizer: The optimizer that updates the piece.
        piece: The piece.
        parameter: The piece's parameter.
        group: The number of the parameter's group in the optimizer.

    Raises:
        UsageError: The piece is outside the parameter, or has a cut where the optimizer allows none.
    """
    size, shape = parameter.numel(), tuple(parameter.shape)
    if not 0 <= piece.start < piece.stop <= size:
        raise UsageError(
            f"{piece}: expected 0 <= start < stop <= {size}, the number of elements of "
            f"parameter {piece.parameter} (shape {shape})"
        )
    unit, reason = cut_every(optimizer, parameter, group)
    if piece.start % unit or (piece.stop % unit and piece.stop != size):
        check_splittable(optimizer)
        raise UsageError(
            f"{piece}: parameter {piece.parameter} (shape {shape}) {reason} and can be "
            f"cut at multiples of {unit} elements only; split_pieces makes pieces that fit"
        )


def parameters_of(optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, int]]:
    """Return every parameter, trainable or not, with the number of its group."""
    groups = enumerate(optimizer.param_groups)
    return [(parameter, number) for number, g in groups for parameter in g["params"]]


def cut_every(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, group: int
) -> tuple[int, str]:
    """Return where a parameter may be cut.

    Args:
        optimizer: The optimizer that updates the pieces.
        parameter: The parameter.
        group: The number of the parameter's group in the optimizer.

    Returns:
        The number of elements at whose multiples cuts are allowed, and the reason as text.
    """
    size, bytes_each = max(1, parameter.numel()), parameter.element_size()
    if type(optimizer) not in ELEMENTWISE:
        return size, "has an optimizer for whole tensors"
    if not parameter.is_contiguous():
        return size, "is not contiguous"
    if parameter.device.type == "cpu":
        # Torch's vector loops and its loops over remaining elements do not always round alike,
        # so bits depend on an element's position in its tensor. 16-bit types differ in
        # `a + alpha * b`. Large tensors also have such loop ends inside, between the parts of
        # threads. 32 and 64 bits differ only in the fused kernels of Adam, AdamW and SGD, whose
        # vectors use fused multiply-add. There, the parts of threads end at multiples of 64
        # bytes, and a vector is at most that long.
        if bytes_each < 4:
            return size, f"is {parameter.dtype} on a CPU"
        if optimizer.param_groups[group].get("fused"):
            return 64 // bytes_each, "is updated with fused=True on a CPU"
    return 1, "can be cut anywhere"
