"""Faults at random instants: ``python -m tests.chaos --seeds 40 [--from 100] [--virtual | --ray]``.

``--ports [--messages 100000] [--from SEED]`` sends random and mutated messages to each port instead.

A seed is one job and its faults, the same on every machine. Instants vary with the machine's speed.
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import tests.conftest  # noqa: F401 - the environment of the processes that tests start
from tests.chaos import campaign, port_attacks, virtual
from tests.chaos.ports import PORTS


def attack_ports(
    messages: int, seed: int, processes: int, log: Callable[[object], None]
) -> int:
    """Attack each port, *processes* at a time; the exit status."""
    print(f"replay: python -m tests.chaos --ports --messages {messages} --from {seed}")
    bad = 0
    attacks = []
    with _pool(processes) as pool:
        for kind in PORTS.values():
            if kind.needs and find_spec(kind.needs) is None:
                print(f"--  {kind.name}: not attacked, {kind.needs} is not installed")
                continue
            attacks.append(pool.submit(port_attacks.attack_port, kind, messages, seed))
        for done in as_completed(attacks):
            outcome = done.result()
            log(outcome)
            bad += bool(outcome.violations)
            sent = ", ".join(f"{n} {name}" for name, n in outcome.messages.items())
            print(
                f"{'BAD' if outcome.violations else 'ok '} {outcome.port}: {sent}; memory grew by "
                f"{outcome.memory >> 10} KiB, {outcome.connections} connections, "
                f"{outcome.printed} characters were logged, {outcome.seconds:.0f} s",
                flush=True,
            )
            for violation in outcome.violations:
                print(f"    {violation}")
    return 1 if bad else 0


def _pool(processes: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="how many")
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first")
    parser.add_argument("--virtual", action="store_true", help="without processes")
    parser.add_argument("--ray", action="store_true", help="jobs on Ray instead")
    parser.add_argument(
        "--processes", type=int, default=4, help="seeds or ports at a time"
    )
    parser.add_argument(
        "--log", type=Path, help="append a line of JSON for each seed or port"
    )
    parser.add_argument("--show", action="store_true", help="print each job's output")
    parser.add_argument("--ports", action="store_true", help="attack each port")
    parser.add_argument("--messages", type=int, default=2000, help="of each kind")
    options = parser.parse_args()
    began = time.monotonic()

    def log(outcome: object) -> None:
        if options.log:
            with options.log.open("a") as file:
                what = vars(outcome) | {"output": "", "landed": []}
                what["elapsed"] = time.monotonic() - began
                print(json.dumps(what), file=file)

    if options.ports:
        return attack_ports(options.messages, options.first, options.processes, log)
    run_seed = partial(campaign.run_seed, on_ray=options.ray)
    if options.virtual:
        run_seed = virtual.run_seed
    seeds = range(options.first, options.first + options.seeds)
    print(
        f"replay a seed: python -m tests.chaos{' --virtual' * options.virtual}{' --ray' * options.ray} "
        "--seeds 1 --from SEED"
    )
    tally: collections.Counter[str] = collections.Counter()
    bad = 0
    with _pool(options.processes) as pool:
        for done in as_completed([pool.submit(run_seed, seed) for seed in seeds]):
            outcome = done.result()
            tally.update(outcome.tally)
            bad += bool(outcome.violations)
            if outcome.violations or not options.virtual:
                print("BAD" if outcome.violations else "ok ", outcome.title)
            for violation in outcome.violations:
                print(f"    {violation}")
            if outcome.violations or options.show:
                print(outcome.output)
            sys.stdout.flush()
            log(outcome)
    for name, count in sorted(tally.items()):
        print(f"{count:6} {name}")
    seconds = time.monotonic() - began
    print(
        f"{len(seeds)} seeds from {options.first}: {bad} with violations, {seconds:.0f} s"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
