"""Messages that share links take the times that SimGrid finds (``benchmarks/measure/simgrid_figures.py``)."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paceline.cluster import Cluster, Rack
from paceline.cluster.links import EventQueue, Links

CASES = json.loads((Path(__file__).parent / "simgrid.json").read_text())


def ends_of(case: dict[str, Any]) -> list[float]:
    racks = tuple(
        Rack(
            workers=len(rack["links"]),
            link=tuple(rack["links"]),
            latency=0.0,
            uplink=rack["uplink"],
        )
        for rack in case["racks"]
    )
    agenda = EventQueue()
    links = Links(agenda, Cluster(racks))
    ends = [-1.0] * len(case["messages"])

    def arrived(number: int) -> None:
        ends[number] = agenda.now

    for number, (start, source, target, size) in enumerate(case["messages"]):
        words = number, source, target, size, lambda: None, partial(arrived, number)
        agenda.at(start, partial(links.send, *words))
    agenda.run()
    return ends


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_messages_arrive_when_simgrid_says(case: dict[str, Any]) -> None:
    assert ends_of(case) == pytest.approx(case["ends"], rel=1e-4)


def test_the_figures_know_of_sharing() -> None:
    """Alone the messages of a case would be there earlier: what is compared is the sharing."""
    for case in CASES:
        alone = [
            ends_of(case | {"messages": [message]})[0] for message in case["messages"]
        ]
        later = sum(
            end > 1.1 * one for end, one in zip(case["ends"], alone, strict=True)
        )
        assert later > len(alone) / 4
