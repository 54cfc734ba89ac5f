"""SimGrid's times for messages that share links, which `tests/cluster/test_links.py` holds.

    /usr/bin/python3 benchmarks/measure/simgrid_figures.py tests/cluster/simgrid.json

SimGrid 3.32 (Debian's ``python3-simgrid``) with its model CM02, without latency and TCP factors:
rates are max-min fair. It needs nothing of paceline. Each case has racks of hosts, and messages that
begin at random instants; hosts are numbered rack by rack.
"""

import json
import random
import sys

import simgrid

CASES, MESSAGES, SEED = 12, 24, 38
CONFIGURATION = (
    "network/model:CM02",
    "network/bandwidth-factor:1",
    "network/latency-factor:1",
    "network/weight-S:0",
    "network/crosstraffic:0",
    "network/TCP-gamma:0",
)


def made(number):
    """A case: links in bytes a second, and messages as [start, source, target, bytes]."""
    draw = random.Random(f"{SEED}/{number}")
    count = draw.choice([1, 2, 3])
    racks = []
    for _ in range(count):
        hosts = draw.randint(2, 4)
        links = [draw.choice([25e6, 50e6, 125e6, 1.25e9]) for _ in range(hosts)]
        uplink = draw.uniform(0.3, 1.2) * sum(links) if count > 1 else None
        racks.append({"links": links, "uplink": uplink})
    total = sum(len(rack["links"]) for rack in racks)
    messages = []
    for _ in range(MESSAGES):
        source, target = draw.sample(range(total), 2)
        size = float(draw.randint(1, 40) * 100_000)
        messages.append([round(draw.uniform(0, 0.2), 6), source, target, size])
    return {"racks": racks, "messages": messages}


def send(start, size, target):
    simgrid.this_actor.sleep_until(start)
    simgrid.Mailbox.by_name(target).put(0, int(size))


def receive(target, ends, number):
    simgrid.Mailbox.by_name(target).get()
    ends[number] = simgrid.Engine.clock


def main(path):
    words = [f"--cfg={one}" for one in CONFIGURATION]
    engine = simgrid.Engine([sys.argv[0], *words])
    zone = simgrid.NetZone.create_full_zone("all")
    cases = [made(number) for number in range(CASES)]
    all_ends = []
    for number, case in enumerate(cases):
        hosts, links, rack_of = [], [], []
        for rack, described in enumerate(case["racks"]):
            uplink = described["uplink"]
            up, down = (
                zone.create_link(f"{number}-rack-{rack}-{way}", uplink or 1e18).seal()
                for way in ("up", "down")
            )
            for rate in described["links"]:
                name = f"{number}-host-{len(hosts)}"
                hosts.append(zone.create_host(name, 1e9))
                pair = [
                    zone.create_link(f"{name}-{w}", rate).seal() for w in ("out", "in")
                ]
                links.append((*pair, up, down))
                rack_of.append(rack)
        for a, from_links in enumerate(links):
            for b, to_links in enumerate(links):
                if a == b:
                    continue
                way = [from_links[0]]
                if rack_of[a] != rack_of[b]:
                    way += [from_links[2], to_links[3]]
                way.append(to_links[1])
                route = [simgrid.LinkInRoute(link) for link in way]
                zone.add_route(
                    *(hosts[a].netpoint, hosts[b].netpoint, None, None, route, False)
                )
        ends = [None] * MESSAGES
        all_ends.append(ends)
        for place, (start, source, target, size) in enumerate(case["messages"]):
            box = f"{number}-{place}"
            simgrid.Actor.create(f"s{box}", hosts[source], send, start, size, box)
            simgrid.Actor.create(f"r{box}", hosts[target], receive, box, ends, place)
    zone.seal()
    engine.run()
    for case, ends in zip(cases, all_ends, strict=True):
        case["ends"] = ends
    with open(path, "w") as file:
        lines = ",\n".join(json.dumps(case) for case in cases)
        file.write(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main(sys.argv[1])
