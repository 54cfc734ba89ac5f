"""Which optimizers may be applied piece by piece, and in which pieces.

The tables below decide it by class. Law of every piece that `check_pieces` lets pass: its
update has the bits that it would have as a part of its whole tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from paceline.errors import UsageError
from paceline.interfaces import Piece
from paceline.interfaces.buckets import stands_in, wire_bytes

_t = torch.optim
ELEMENTWISE = {
    *(_t.SGD, _t.Adam, _t.AdamW, _t.NAdam, _t.RAdam, _t.Adamax),
    *(_t.Adagrad, _t.Adadelta, _t.RMSprop, _t.Rprop, _t.ASGD),
}
"""Every element is updated from its own gradient and state: may be split and sharded."""

WHOLE_TENSOR = {
    _t.Muon: "orthogonalizes the update of a whole matrix",
    _t.Adafactor: "keeps a mean per row and per column",
}
"""An element's update depends on the rest of its tensor: whole tensors only."""

REFUSED = {
    _t.LBFGS: "searches along a line, with several passes over all parameters",
    _t.SparseAdam: "takes sparse gradients, and only dense ones travel",
}

KEPT_AT_HOME = {
    _t.Adafactor: "has a state that is neither per element nor a number",
}
"""A server could apply them, but not hand out their state, for a checkpoint or at the end."""

_ADVICE = "use a method whose worker updates, such as bsp"


def check_applicable(optimizer: torch.optim.Optimizer) -> None:
    """Raise `UsageError` unless *optimizer* may be applied to some tensors at a time.

    Only torch's own classes may: a subclass can read more than its piece.
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
    """Raise `UsageError` unless *optimizer* may live on servers, state and all."""
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
    """One piece for each trainable parameter that has elements."""
    return [
        Piece(number, 0, parameter.numel())
        for number, (parameter, _) in enumerate(parameters_of(optimizer))
        if parameter.requires_grad and parameter.numel()
    ]


def split_pieces(optimizer: torch.optim.Optimizer, most_bytes: int) -> list[Piece]:
    """Pieces of at most *most_bytes* bytes, as equal as a parameter's elements allow.

    A parameter stays whole where the optimizer is not elementwise, where it is not
    contiguous, and where it has a 16-bit type on a CPU; ``fused=True`` on a CPU needs
    cuts at multiples of 64 bytes. Raises `UsageError` where *most_bytes* is below that,
    or below one element.
    """
    parameters, pieces = parameters_of(optimizer), []
    for whole in whole_pieces(optimizer):
        (parameter, group), size = parameters[whole.parameter], whole.stop
        unit, _ = cut_every(optimizer, parameter, group)
        unit_bytes = unit * max(1, wire_bytes(parameter) // size)
        few = stands_in(parameter)  # few elements to cut, but not few bytes
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
    """Raise `UsageError` unless each piece can be updated alone, and all together hold
    every element of every trainable parameter once."""
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
    """Raise `UsageError` unless *piece* is a part of *parameter*, which is in the
    optimizer's group number *group*, that can be updated alone."""
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
    """Every parameter, trainable or not, and the number of its group."""
    groups = enumerate(optimizer.param_groups)
    return [(parameter, number) for number, g in groups for parameter in g["params"]]


def cut_every(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, group: int
) -> tuple[int, str]:
    """A parameter may be cut at multiples of so many elements; and why."""
    size, bytes_each = max(1, parameter.numel()), parameter.element_size()
    if type(optimizer) not in ELEMENTWISE:
        return size, "has an optimizer for whole tensors"
    if not parameter.is_contiguous():
        return size, "is not contiguous"
    if parameter.device.type == "cpu":
        # Torch's vector loops and its loops over the few elements that are left over do
        # not always round alike, so that bits depend on where in its tensor an element
        # stands. For 16-bit types this is so in `a + alpha * b`, and large tensors have
        # such ends within, where threads meet. For 32 and 64 bits only the fused kernels
        # of Adam, AdamW and SGD differ (vectors use fused multiply-add); their threads
        # meet at multiples of 64 bytes, and one vector is at most that long.
        if bytes_each < 4:
            return size, f"is {parameter.dtype} on a CPU"
        if optimizer.param_groups[group].get("fused"):
            return 64 // bytes_each, "is updated with fused=True on a CPU"
    return 1, "can be cut anywhere"
