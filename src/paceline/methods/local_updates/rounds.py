"""One mean of the workers' models: what is sent, and what becomes of it."""

from __future__ import annotations

import torch

from paceline.interfaces import Comm, Run
from paceline.methods.flat_tensors import Flat
from paceline.methods.local_updates.fragments import (
    Flight,
    LocalState,
    Part,
    Since,
    beginning,
)
from paceline.methods.local_updates.optimizer_state import flats_of_moments
from paceline.methods.local_updates.options import Options
from paceline.methods.local_updates.outer_optimizer import outer_step, rescaled_step

LATE = "outer"
"""The queue of means that are used later: what the script sends meanwhile never waits for
them."""


def send(
    options: Options,
    state: LocalState,
    run: Run,
    number: int,
    *,
    since: Since,
    among: Comm | None = None,
) -> Flight:
    """The mean of part *number* goes on its way, among all or in a group. Collective.

    Each worker's weight travels beside it: what arrives is the mean of w*D, and of w. Where
    there is an anchor (and all workers meet) D is what has been moved since; else the
    parameters themselves, which are assigned as they are: x - (x - x_i) would be rounded.
    """
    part = state.parts[number]
    share = since.share(run.step)
    device = part.parameters[0].buffer.device
    flight = Flight(
        number,
        run.step + options.delay,
        torch.tensor([share, run.active], dtype=torch.float64, device=device),
        share=share,
    )
    channel = LATE if options.delay else ""

    def average(
        tensor: torch.Tensor, parts: dict[str, torch.Tensor] | None = None
    ) -> None:
        pending = run.average(tensor, among=among, channel=channel, parts=parts)
        flight.pending.append(pending)

    average(flight.weights)
    differences = options.keeps_anchor and among is None
    names = names_of(run) if differences else {}
    for index, flat in enumerate(part.parameters):
        flat.take()
        if differences:
            _subtract(flat, part.anchors[index])
        _weigh(flat, share)
        rows = zip(flat.of, flat.views, strict=True)
        average(flat.buffer, {names[id(p)]: v for p, v in rows} if names else None)
    if among is None:
        if options.state == "average":
            flight.moments = flats_of_moments(part, run)
        part.rounds += 1
    for flat in (*part.statistics, *flight.moments):
        flat.take()
        _weigh(flat, share)
        average(flat.buffer)
    comm = run.comm if among is None else among
    comm = comm.channel(channel) if channel else comm
    for flat in part.counters:
        flat.take()
        flight.pending.append(comm.all_reduce(flat.buffer, "max"))
    since.begin(run.step + 1)
    return flight


def _subtract(flat: Flat, anchor: torch.Tensor) -> None:
    """The buffer, where workers are, becomes what they have moved: D_i = x - x_i."""
    flat.buffer.neg_().add_(beginning(flat, anchor))


def names_of(run: Run) -> dict[int, str]:
    """Each parameter's, by its identity."""
    return {
        id(parameter): name
        for bucket in run.buckets
        for parameter, name in zip(bucket.parameters, bucket.names, strict=True)
    }


def _weigh(flat: Flat, share: float) -> None:
    if share != 1:
        flat.buffer.mul_(share)


def land(
    options: Options,
    state: LocalState,
    run: Run,
    flight: Flight,
    *,
    in_group: bool = False,
) -> None:
    """Wait for a mean, and go on from it. Where nobody has trained nothing moves."""
    flight.wait()
    part = state.parts[flight.part]
    total, active = flight.weights.tolist()
    part.put_counters()
    if not total:
        return
    # The last round, of what is left when all are out of data, is a plain mean.
    plain = not active
    if plain and options.differences and not in_group:
        _send_without_code(part, run, flight.share)
    for flat in (*part.parameters, *part.statistics, *flight.moments):
        if total != 1:
            flat.buffer.div_(total)
    for flat in (*part.statistics, *flight.moments):
        flat.put()
    if in_group or not options.keeps_anchor:
        for flat in part.parameters:
            flat.put()
        return
    for flat, last in zip(part.statistics, part.averaged, strict=True):
        last.copy_(flat.buffer)
    for index in range(len(part.parameters)):
        if plain:
            plain_step(part, index)
        else:
            _outer(options, state, run, part, index)
        flat = part.parameters[index]
        flat.buffer.copy_(part.anchors[index])
        _put(flat, 0.0 if plain else options.keep_local)


def _send_without_code(part: Part, run: Run, share: float) -> None:
    """The last round once more: what a code has left out of it no other round would bring.
    Nobody has trained since it was sent. Collective."""
    pending = []
    for flat, anchor in zip(part.parameters, part.anchors, strict=True):
        flat.take()
        _subtract(flat, anchor)
        _weigh(flat, share)
        pending.append(run.average(flat.buffer))
    for one in pending:
        one.wait()


def plain_step(part: Part, index: int) -> None:
    """x <- x - D, and u is dropped: a round of few steps must not be followed by a step of
    the momentum of many."""
    part.anchors[index].sub_(part.parameters[index].buffer)
    if part.momenta:
        part.momenta[index].zero_()


def _outer(
    options: Options, state: LocalState, run: Run, part: Part, index: int
) -> None:
    flat, anchor = part.parameters[index], part.anchors[index]
    momentum = part.momenta[index] if part.momenta else None
    if not options.rescale:
        outer_step(
            anchor,
            momentum,
            flat.buffer,
            learning_rate=options.outer_learning_rate,
            factor=options.outer_momentum,
            nesterov=options.nesterov,
        )
        return
    assert momentum is not None, "checked where options are made"
    rates = rates_of(run, flat)
    if 0 in rates and "rate 0" not in state.said:
        state.said.add("rate 0")
        run.say(
            f"{options.name}: a learning rate is 0, in whose units the outer momentum is "
            "kept: until it is above 0 these parameters are averaged plainly"
        )
    rescaled_step(
        anchor,
        momentum,
        flat.buffer,
        [tensor.numel() for tensor in flat.of],
        rates,
        learning_rate=options.outer_learning_rate,
        factor=options.outer_momentum,
        nesterov=options.nesterov,
    )


def rates_of(run: Run, flat: Flat) -> list[float]:
    """The inner learning rate of each tensor, as of now; 1 where the optimizer does not have
    it, and it does not move."""
    assert run.optimizer is not None, "workers update"
    rates = {
        id(tensor): float(group["lr"])
        for group in run.optimizer.param_groups
        for tensor in group["params"]
    }
    return [rates.get(id(tensor), 1.0) for tensor in flat.of]


def _put(flat: Flat, mixing: float) -> None:
    """x_i <- alpha*x_i + (1 - alpha)*x, where x is in the buffer."""
    if not mixing:
        flat.put()
        return
    for tensor, mean in zip(flat.tensors, flat.views, strict=True):
        tensor.copy_(torch.lerp(mean, tensor.to(mean.dtype), mixing))
