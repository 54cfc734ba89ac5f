"""What each of four workers does, on two nodes or more racks as the environment says: refused
places, sums over two levels, and a sum whose first aggregator is killed. One line for each."""

import sys

import torch
import torch.distributed as dist

from paceline.errors import PacelineError
from paceline.interfaces import Service, ServiceJob
from paceline.interfaces.server_messages import Say
from paceline.runtimes.join import join_world
from tests.support.two_levels import DIE, KIND, add, job_of

HOSTS = sys.argv[1:3]
"""Where aggregators are in one of the sums."""
world = join_world()
world.connect()
half = world.size // 2
racks = [range(half), range(half, world.size)]
mine = world.rank // half


def say(*words):
    print(f"rank {world.rank}:", *words, flush=True)


def refused(service):
    try:
        world.services(ServiceJob((service,)))
    except PacelineError as error:
        say(f"{type(error).__name__}: {error}")


def start(*places):
    endpoints = world.services(job_of(racks, places[:2], places[2]))
    if world.rank == 0:
        say("ports", *(endpoint.name.rpartition(":")[2] for endpoint in endpoints))
    return endpoints


def sums(rounds, *places):
    endpoints = start(*places)
    for number in range(rounds):
        # More than one chunk, so that an answer is put together from several.
        part = torch.full((700_000,), float(world.rank + number))
        add(endpoints[mine], number, part)
        expected = sum(rank + number for rank in range(world.size))
        assert torch.equal(part, torch.full_like(part, expected)), part
    for endpoint in endpoints:
        endpoint.close()
    say("has sums of", *places)


def killed(*places):
    endpoints = start(*places)
    dist.barrier()  # all have met the services that are about to go
    try:
        if (
            world.rank == 1
        ):  # which its rack and, through the root, the other one wait for
            endpoints[0].request(Say(words=DIE)).wait()
        add(endpoints[mine], 0, torch.ones(1000))
    except PacelineError as error:
        say(f"{type(error).__name__}: {error}")
    for endpoint in endpoints:
        endpoint.close()
    dist.barrier()  # the root's process ends with rank 0, which is no cause here


refused(Service("root", KIND, "rack:7"))
refused(Service("root", KIND, "host:nowhere"))
refused(Service("root", "no.such.module:Level", "beside:2"))
refused(Service("root", KIND, "beside:2", "0", peers=("root",)))
sums(3, "beside:1", "beside:3", "beside:0")
sums(2, *HOSTS, "rack:0")
killed("beside:1", "beside:3", "beside:0")
