"""What a restart needs of a program of local updates.

Anchors and momenta are saved by parameter, in the model's order: a restart may send them in
other buckets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from paceline.errors import UsageError
from paceline.interfaces import Run
from paceline.methods.flat_tensors import Flat
from paceline.methods.local_updates.fragments import (
    Flight,
    LocalState,
    Part,
    Since,
    pairs,
)
from paceline.methods.local_updates.options import Options


def saved(state: LocalState, run: Run) -> dict[str, Any]:
    """All of it. Means under way are waited for: all workers have sent their part."""
    for flight in state.flights:
        flight.wait()
    return {
        "parts": [
            {
                "anchors": _by_parameter(run, part.parameters, part.anchors),
                "momenta": _by_parameter(run, part.parameters, part.momenta),
                "averaged": part.averaged,
                "since": part.since.saved(run.step),
                "rounds": part.rounds,
            }
            for part in state.parts
        ],
        "flights": [
            {
                "part": flight.part,
                "due": flight.due - run.step,
                "weights": flight.weights,
                "means": means(run, state.parts[flight.part]),
            }
            for flight in state.flights
        ],
        "since_group": state.since_group.saved(run.step),
    }


def load(options: Options, state: LocalState, run: Run, there: dict[str, Any]) -> None:
    """Go on from what was saved, before the same step. Raises `UsageError` where it is another
    program's."""
    if not _fits(state, run, there["parts"]):
        raise UsageError(
            f"{options.name}: the checkpoint was saved with another number of fragments, or "
            "with an outer optimizer where there is none now, or the other way round: "
            "load it with the options with which it was saved"
        )
    state.drop_flights()  # their buffers are written to until they are in
    for part, kept in zip(state.parts, there["parts"], strict=True):
        for own, saved_one in (
            (_by_parameter(run, part.parameters, part.anchors), kept["anchors"]),
            (_by_parameter(run, part.parameters, part.momenta), kept["momenta"]),
            (part.averaged, kept["averaged"]),
        ):
            put(own, saved_one)
        part.since = Since.loaded(run.step, kept["since"])
        part.rounds = kept["rounds"]
    for kept in there["flights"]:
        part = state.parts[kept["part"]]
        put(means(run, part), kept["means"])
        weights = kept["weights"].to(part.parameters[0].buffer.device)
        state.flights.append(Flight(kept["part"], run.step + kept["due"], weights))
    state.since_group = Since.loaded(run.step, there["since_group"])


def redistributed(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """For another number of workers. Anchors, momenta and means under way are equal on all.
    What each one has trained by itself since is gone where there is an anchor, else it is in
    the model: a round begins."""
    first = next(iter(parts))
    for part in first["parts"]:
        part["since"] = [0, 0.0]
    first["since_group"] = [0, 0.0]
    return first


def _by_parameter(
    run: Run, flats: Sequence[Flat], values: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Each parameter's part of *values*, which are of the shape of the flats' buffers, or
    none."""
    number = {id(parameter): i for i, parameter in enumerate(run.parameters)}
    found = [
        (number[id(parameter)], own)
        for flat, value in zip(flats, values, strict=bool(values))
        for parameter, (_, own) in zip(flat.of, pairs(flat, value), strict=True)
    ]
    return [own for _, own in sorted(found, key=lambda entry: entry[0])]


def means(run: Run, part: Part) -> list[torch.Tensor]:
    """What the flat buffers of a part hold: for the parameters, in the model's order, and then
    for all else."""
    buffers = [flat.buffer for flat in part.parameters]
    rest = [flat.buffer for flat in (*part.statistics, *part.counters)]
    return _by_parameter(run, part.parameters, buffers) + rest


def _fits(state: LocalState, run: Run, parts: Sequence[dict[str, Any]]) -> bool:
    if len(parts) != len(state.parts):
        return False
    return all(
        len(_by_parameter(run, part.parameters, own)) == len(kept[name])
        for part, kept in zip(state.parts, parts, strict=True)
        for name, own in (("anchors", part.anchors), ("momenta", part.momenta))
    )


def put(own: Sequence[torch.Tensor], there: Sequence[torch.Tensor]) -> None:
    """What was saved, into its place."""
    for tensor, value in zip(own, there, strict=True):
        tensor.copy_(value)
