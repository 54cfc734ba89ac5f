"""Runs another script, a line of arguments each, on a local Ray cluster of two nodes.

Arguments: a file of such lines, or ``refusals``, which tries what cannot be.
"""

import os
import runpy
import shlex
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


def bsp():
    import torch

    import paceline

    model = torch.nn.Linear(2, 1)
    paceline.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))


REFUSALS = {
    "many": (idle, {"workers": 3, "method": "asp"}),
    "GPU": (
        idle,
        {"workers": 1, "method": "asp", "resources_per_worker": {"GPU": 1}},
    ),
    "large": (
        idle,
        {"workers": 1, "method": "asp", "resources_per_worker": {"CPU": 2}},
    ),
    "busy": (
        idle,
        {"workers": 1, "method": "asp", "grows": True, "room_seconds": 2}
        | {"resources_per_worker": {"CPU": 2}},
    ),
    "loop": (breaks, {"workers": 1, "method": "asp", "config": 7}),
    "script's": (bsp, {"workers": 1}),
    "folder": (idle, {"workers": 1, "method": "asp", "snapshot": "/nowhere/file"}),
    "there": (idle, {"workers": 1, "method": "asp", "snapshot": __file__}),
    "always dies": (dies, {"workers": 1, "method": "asp", "config": 7}),
}


def refusals():
    for name, (loop, options) in REFUSALS.items():
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
        if sys.argv[1:] == ["refusals"]:
            refusals()
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
