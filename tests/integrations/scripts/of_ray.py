"""Trainings on a local Ray cluster of several nodes, one after the other, of which something is killed
meanwhile.

Arguments: a folder, and for each training METHOD:KILLS:WHAT, where WHAT is ``worker``, ``server``, ``node`` (a
worker's), ``server's node`` or ``both nodes`` (these two, at once). Prints a line of JSON for each.

Every gradient is made of ones, so the parameter tells how many were applied: under backup each
step moves it by the learning rate, however many workers' gradients are in it; under asp each gradient moves
it by the learning rate over the number of workers. These are powers of two: sums are exact.
"""

import json
import os
import random
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["PACELINE_SILENT_SECONDS"] = "600"  # workers wait for kills
import ray
from ray.cluster_utils import Cluster

from paceline.integrations.ray import run

WORKERS = 2
RATE = 2.0**-10
APART = 20
"""Steps from one kill to the next."""
PAUSE = 0.02
"""What a larger model computes: kills meet workers in the middle of steps."""
PATIENCE = 240.0


def loop(config):
    """Notes each incarnation, and each of its steps, in a folder. Some steps begin after their kill."""
    import torch

    import paceline

    folder, steps = Path(config["folder"]), config["steps"]
    paceline.init()
    rank, incarnation = paceline.rank(), os.environ["PACELINE_INCARNATION"]
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = paceline.distribute(model, torch.optim.SGD(model.parameters(), lr=RATE))
    part = folder / f"part-{rank}"
    node = ray.get_runtime_context().get_node_id()
    part.write_text(f"{os.getpid()} {incarnation} {node}")
    part.replace(folder / f"process-{rank}")
    with open(folder / f"steps-{rank}-{incarnation}", "a", buffering=1) as record:
        for step in range(optimizer.first_step, steps):
            kill, after = divmod(step, APART)
            while kill < config["kills"] and after == 15:
                if (folder / f"killed-{kill}").exists():
                    break
                time.sleep(0.005)
            optimizer.zero_grad()
            model(torch.ones(4)).backward()
            time.sleep(PAUSE)
            optimizer.step()
            print(step, file=record)
    optimizer.finish()
    return {
        "rank": rank,
        "incarnation": int(incarnation),
        "weight": model.weight.flatten().tolist(),
    }


class Killer:
    """Kills what it is told to, each time that the *job*, which runs on a thread, has come so far.
    (New nodes are started on the main thread, or not at all.)"""

    def __init__(self, cluster, nodes, job, folder, snapshot):
        self.cluster, self.nodes, self.job = cluster, nodes, job
        self.folder, self.snapshot = folder, snapshot

    def kill_all(self, what, kills):
        choose = random.Random(what)
        killed = {}
        for kill in range(kills):
            rank = choose.randrange(WORKERS)
            after = APART * kill + choose.randrange(2, 12)
            self.wait_until(lambda a=after: self.reached() >= a)
            self.wait_until(
                lambda r=rank: self.life_of(r)[1] not in (-1, killed.get(r))
            )
            if self.snapshot is not None:
                self.wait_until(self.snapshot.exists)
            killed[rank] = self.life_of(rank)[1]
            self.kill(what, rank)
            (self.folder / f"killed-{kill}").touch()

    def wait_until(self, condition):
        def holds():
            if self.job.done():
                raise AssertionError(f"the job has ended: {self.job.result()}")
            return condition()

        wait_until(holds, "progress")

    def reached(self):
        """The job's step that somebody has done."""
        noted = [path.read_text().split() for path in self.folder.glob("steps-*")]
        return max((int(lines[-1]) for lines in noted if lines), default=-1)

    def life_of(self, rank):
        path = self.folder / f"process-{rank}"
        return path.read_text().split() if path.exists() else (0, -1, "")

    def kill(self, what, rank):
        if what == "worker":
            os.kill(int(self.life_of(rank)[0]), signal.SIGKILL)
        elif what == "server":
            os.kill(server_of(self.cluster)[0], signal.SIGKILL)
        else:
            wanted = {
                "node": [self.life_of(rank)[2]],
                "server's node": [server_of(self.cluster)[1]],
                "both nodes": [self.life_of(rank)[2], server_of(self.cluster)[1]],
            }[what]
            gone = [node for node in self.nodes if node.node_id in wanted]
            for node in gone:
                self.nodes.remove(node)
                self.cluster.remove_node(node, allow_graceful=False)
            self.nodes += [one_more(self.cluster) for _ in gone]


def wait_until(condition, what):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {PATIENCE} s"
        time.sleep(0.01)


def raylets(cluster):
    """Which node each raylet's process is of."""
    return {
        info.process.pid: node.node_id
        for node in cluster.list_all_nodes()
        for info in node.all_processes.get("raylet", ())
    }


def actors(cluster, kind):
    """The processes of this cluster's actors of a kind, and their nodes."""
    of, found = raylets(cluster), {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes()
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if words.startswith(f"ray::{kind}".encode()) and parent in of:
            found[int(path.name)] = of[parent]
    return found


def server_of(cluster):
    """The process of the server's actor, and its node."""
    wait_until(lambda: actors(cluster, "Server"), "server")
    return next(iter(actors(cluster, "Server").items()))


def one_more(cluster):
    return cluster.add_node(num_cpus=1, object_store_memory=80 << 20)


def trained(cluster, nodes, folder, what, kills, method):
    """One training, and what is said of it."""
    snapshot = None if what == "worker" else folder / "snapshot"
    steps = APART * kills + 30
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(
            run,
            loop,
            workers=WORKERS,
            method=method,
            config={"folder": str(folder), "steps": steps, "kills": kills},
            snapshot=snapshot,
            snapshot_seconds=0.01,
        )
        try:
            Killer(cluster, nodes, job, folder, snapshot).kill_all(what, kills)
        except BaseException:
            ray.shutdown()  # else the job waits for its next kill
            raise
        results = job.result()
    seconds = time.monotonic() - began
    for kind in ("Server", "Worker", "Coordinator"):
        wait_until(lambda k=kind: not actors(cluster, k), f"end of each {kind}")
    noted = [
        [int(step) for step in path.read_text().split()]
        for path in sorted(folder.glob("steps-*"))
    ]
    return {
        "what": what,
        "kills": kills,
        "steps": steps,
        "method": method,
        "results": results,
        "moved": -results[0]["weight"][0] / RATE,
        "noted": sum(map(len, noted)),
        "last": max(max(steps, default=-1) for steps in noted),
        "seconds": round(seconds, 1),
        "left": sorted(path.name for path in folder.glob("snapshot*")),
    }


def main():
    folder = Path(sys.argv[1])
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0,
            "object_store_memory": 80 << 20,
            "include_dashboard": False,
        },
    )
    try:
        nodes = [one_more(cluster) for _ in range(WORKERS + 2)]
        ray.init(address=cluster.address)
        for number, row in enumerate(sys.argv[2:]):
            method, kills, what = row.rsplit(":", 2)
            own = folder / str(number)
            own.mkdir()
            told = trained(cluster, nodes, own, what, int(kills), method)
            print("=== " + json.dumps(told), flush=True)
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
