"""Runs another script, a line of arguments each, on a local Ray cluster of two nodes.

Arguments: such lines, or ``tried``: jobs in which something is wrong.
"""

import os
import runpy
import shlex
import signal
import sys
import traceback

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["PACELINE_SECRET"] = (
    "0123456789abcdef"  # what nodes inherit: osp has a server
)
import ray
from ray.cluster_utils import Cluster

from paceline.errors import PacelineError
from paceline.integrations.ray import run

NODES = 2


def breaks(config):
    raise ValueError(f"so it goes: {config}")


def dies(config):
    os._exit(3)


def idle():
    return "done"


def trained(steps=3):
    import torch

    import paceline

    model = torch.nn.Linear(2, 1)
    optimizer = paceline.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2)).backward()
        optimizer.step()
    optimizer.finish()


def apart():
    """One of the two does not train: the other waits for it, until it is known to be done."""
    if os.environ["RANK"] == "1":
        return "idle"
    trained()
    return "trained"


def server_goes():
    """The server has nothing to do any more, and cannot be started again."""
    trained()
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["name"].endswith("Server"):
            ray.kill(ray.get_actor(**actor))
    return "trained"


def coordinator_goes():
    """Nothing else knows the results."""
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["name"].endswith("Coordinator"):
            ray.kill(ray.get_actor(**actor))
    trained()


def dies_after():
    """A process whose training is over, and whose loop has not returned."""
    trained()
    if os.environ["PACELINE_INCARNATION"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return "trained"


def terminated():
    """What a loop does is not what ends it."""
    if os.environ["PACELINE_INCARNATION"] == "0":
        os.kill(os.getpid(), signal.SIGTERM)
    trained()
    return "trained"


@ray.remote(num_cpus=1, name="other", lifetime="detached")
class Other:
    """Of another job: waits for room, too."""


def room_goes():
    """When this process dies somebody else has waited for its room."""
    Other.remote()
    os._exit(3)


def bsp():
    import torch

    import paceline

    model = torch.nn.Linear(2, 1)
    paceline.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))


ONE = {"workers": 1, "method": "asp"}
TRIED = {
    "many": (idle, {"workers": 3, "method": "asp"}),
    "GPU": (
        idle,
        ONE | {"resources_per_worker": {"GPU": 1}},
    ),
    "large": (
        idle,
        ONE | {"resources_per_worker": {"CPU": 2}},
    ),
    "busy": (
        idle,
        ONE | {"grows": True, "room_seconds": 2, "resources_per_worker": {"CPU": 2}},
    ),
    "loop": (breaks, ONE | {"config": 7}),
    "script's": (bsp, {"workers": 1}),
    "folder": (idle, ONE | {"snapshot": "/nowhere/file"}),
    "there": (idle, ONE | {"snapshot": __file__}),
    "always dies": (dies, ONE | {"config": 7}),
    "apart": (
        apart,
        {"workers": 2, "method": "ssp", "server_resources": {"CPU": 0}},
    ),
    "server goes": (server_goes, ONE),
    "coordinator goes": (coordinator_goes, ONE),
    "late": (dies_after, ONE),
    "terminated": (terminated, ONE),
    "room goes": (room_goes, ONE | {"room_seconds": 20}),
}


def tried():
    for name, (loop, options) in TRIED.items():
        try:
            said = run(loop, **options)
        except PacelineError as error:
            said = f"{type(error).__name__}: {error}"
        print(f"=== {name}: {said}", flush=True)


def main():
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0,
            "object_store_memory": 80 << 20,
            "include_dashboard": False,
        },
    )
    try:
        for _ in range(NODES):
            cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address)
        if sys.argv[1:] == ["tried"]:
            tried()
        else:
            for line in sys.argv[1:]:
                sys.argv = shlex.split(line)
                runpy.run_path(sys.argv[0], run_name="__main__")
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
