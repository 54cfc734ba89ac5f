"""A worker that says which cluster it knows, what a mean over its racks gives, and what becomes
of each way in which ranks are told of clusters.

Arguments: a JSON file with the ways, a list of [NAME, FILE of each rank]."""

import json
import sys

import torch.distributed as dist

import paceline
from paceline.cluster import cluster_toml
from paceline.collectives.process_groups import default_store
from paceline.errors import ClusterError
from paceline.runtimes.join import join_runtime
from paceline.runtimes.real.cluster_check import agree_on_cluster
from paceline.runtimes.real.job_store import JobStore
from paceline.testing import Case
from paceline.testing.method_checks import final_parameters

paceline.init()
runtime = join_runtime()
found = {
    "cluster": runtime.cluster and cluster_toml(runtime.cluster, exact=True),
    "racks": runtime.cluster and runtime.cluster.racks_of_workers,
    "speeds": runtime.cluster and runtime.cluster.speeds,
    "end": final_parameters(Case(method="bsp:collective=hierarchical"), "ddp"),
}
if len(sys.argv) > 1:
    with open(sys.argv[1]) as file:
        ways = json.load(file)
    whole = default_store()
    for name, files in ways:
        store = dist.PrefixStore(name, whole)
        try:
            job_store = JobStore(store, runtime.size)
            agree_on_cluster(runtime.rank, runtime.size, files[runtime.rank], job_store)
            found[name] = ""
        except ClusterError as error:
            found[name] = str(error)
print(json.dumps(found), flush=True)
