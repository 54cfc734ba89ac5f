"""Faults without processes: the state machines of servers, group servers and aggregators.

The trials are those of their own tests; here each seed draws one of them, and its faults. Servers run in virtual
time. Aggregators sum over loopback, in threads of one process.
"""

from __future__ import annotations

import contextlib
import io
import random
import traceback
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

from paceline import methods
from paceline.methods.osp import OSP
from paceline.spec import parse
from paceline.testing.server_checks import CHECKS
from tests.chaos.campaign import Outcome
from tests.collectives.in_network import sums, test_sums
from tests.conformance import test_servers
from tests.methods.gssp import test_discipline
from tests.parameter_server.groups import test_group_server
from tests.support.group_server_trial import GroupServerTrial


def server(choose: random.Random) -> str:
    """Connections break; workers die and come back; the server restarts from a snapshot."""
    spec = choose.choice(sorted(test_servers.LAWS))
    workers = choose.randint(3 if "wait_for" in spec else 1, 4)
    check = choose.choice(CHECKS)
    members = f"0-{workers - 1}" if workers > 1 else "0"
    method, _ = methods.make(parse(spec.format(members=members)), set())
    # osp decides in every step what it defers.
    with patch.object(OSP, "interval", 1):
        check(
            lambda: method.server(workers),
            workers,
            test_servers.LAWS[spec],
            choose.randrange(1 << 30),
        )
    return parse(spec).name


def group_servers(choose: random.Random) -> str:
    """Links are cut and heal; workers and servers die and come back; workers change groups and meet at barriers."""
    name = choose.choice(sorted(test_group_server.CASES))
    case = test_group_server.CASES[name]
    first = max(case.meets | case.loads, default=0) + 1
    case = replace(
        case,
        agree=bool(case.loads) or choose.random() < 0.5,
        steps=tuple(choose.randint(first, 7) for _ in case.of),
        cuts=case.cuts and choose.randint(1, 8),
        deaths=case.deaths and choose.randint(1, 4),
        kills=case.kills and choose.randint(1, 3),
        peril=10 ** choose.uniform(-3, -1.5),
    )
    trial = GroupServerTrial(case, choose)
    trial.run()
    trial.check_end()
    assert case.deaths or case.kills or not trial.refusals, trial.refusals
    return name


def gssp(choose: random.Random) -> str:
    """As `group_servers`, with the discipline of ``gssp`` and a schedule of learning rates."""
    faults = {
        "agree": choose.random() < 0.5,
        "cuts": choose.randint(0, 4),
        "kills": choose.choice((0, 0, 1, 2)),
        "deaths": choose.choice((0, 0, 1, 3)),
        "peril": 10 ** choose.uniform(-3, -1.5),
    }
    test_discipline.play_servers(choose.randrange(1 << 30), **faults).check_end()
    return "gssp"


def sums_in_aggregators(choose: random.Random) -> str:
    """Sums over any layout with little memory are exact."""
    racks = sorted(choose.choices(range(3), k=choose.randint(2, 6)))
    shared = [rack for rack in set(racks) if racks.count(rack) > 1] or [racks[0]]
    racks[1] = racks[1] if len(shared) and racks.count(shared[0]) > 1 else racks[0]
    sums.check_sums(
        choose.choice([sums.ring, sums.tree]),
        racks,
        choose.choices([1, 2, 1000, 4097, 30_000], k=choose.randint(1, 3)),
        memory=choose.randint(2 << 10, 60 << 10),
        aggregating=sorted({choose.choice(shared), *choose.sample(racks, k=1)}),
    )
    return "sums"


def deaths_beside_aggregators(choose: random.Random) -> str:
    """A worker or an aggregator dies: all others know at once, and none has a wrong sum."""
    victim = choose.choice(["worker", "aggregator"])
    test_sums.test_who_dies_at_any_moment_is_known_to_all_at_once(
        choose.choice(sorted(test_sums.WAYS)), victim, choose.randrange(1 << 30)
    )
    return f"death of a {victim}"


KINDS: dict[str, tuple[Callable[[random.Random], str], int]] = {
    "server": (server, 10),
    "group servers": (group_servers, 4),
    "gssp": (gssp, 3),
    "aggregators: sums": (sums_in_aggregators, 1),
    "aggregators: deaths": (deaths_beside_aggregators, 1),
}
"""By name: a trial, and how often it is drawn."""


def run_seed(seed: int) -> Outcome:
    """Run the trial of a seed."""
    choose = random.Random(seed)
    names = list(KINDS)
    name = choose.choices(names, [weight for _, weight in KINDS.values()])[0]
    outcome = Outcome(f"seed {seed}: {name}", tally=[name])
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
            outcome.tally.append(f"{name}: {KINDS[name][0](choose)}")
    except Exception as error:
        outcome.violations.append(f"{type(error).__name__}: {error}")
        outcome.output = traceback.format_exc() + printed.getvalue()
    return outcome
