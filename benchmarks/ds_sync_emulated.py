"""`ds_sync.py` between real processes: one cell, 8 hosts of an emulated network.

Each method trains for as many steps as it needed in virtual time (with one seed); how
long that takes, and the accuracy at the end, are held against what is predicted: a run in
virtual time of the same model on the same network. The model has its own 134 KB here, on links
that are slower by as much.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import ds_sync_runs as runs
import torch
import torch.distributed as dist
import torch.nn.functional as F

import paceline
from paceline.run_options import ScriptJob

WORKERS = 8
SEED = 1
"""With which bsp needs few steps: all methods together take five minutes."""


def rows(bench, ways, cell):
    """A row per way whose workers form means."""
    jobs = []
    for way in map(bench.tuned, ways):
        steps = None if way.on_servers else bench.steps(way, cell, WORKERS)[SEED]
        if steps is not None:
            jobs.append((way, steps))
    print(
        "| method | steps | predicted s | measured s | off by | predicted % | measured % |\n"
        f"|{'---|' * 7}"
    )
    measured = measure(cell, jobs)
    found = []
    for (way, steps), (seconds, accuracy) in zip(jobs, measured, strict=True):
        link = runs.light_link()
        predicted = runs.train(
            way, cell, WORKERS, SEED, steps, make=runs.light_model, link=link
        )
        row = {
            "method": way.name,
            "steps": steps,
            "predicted_seconds": max(e[-1] for e in predicted.ends) - predicted.began,
            "measured_seconds": seconds,
            "predicted_accuracy": predicted.accuracies[steps],
            "measured_accuracy": accuracy,
        }
        off = row["predicted_seconds"] / seconds - 1
        print(
            f"| {way.name} | {steps} | {row['predicted_seconds']:.1f} | {seconds:.1f} | "
            f"{off:+.0%} | {row['predicted_accuracy']:.1f} | {accuracy:.1f} |",
            flush=True,
        )
        found.append(row)
    return found


def measure(cell, jobs):
    """Seconds and accuracy of each job, one after the other in one set of processes."""
    from paceline.runtimes.emulated.launch import EmulatedJob
    from paceline.runtimes.emulated.network import EmulatedNetwork

    wanted = [
        {
            "spec": way.spec,
            "buckets": way.buckets,
            "optimizer": way.optimizer,
            "rate": way.rate,
            "steps": steps,
        }
        for way, steps in jobs
    ]
    cluster = cell.cluster(WORKERS, runs.light_link())
    with tempfile.TemporaryDirectory() as scratch, EmulatedNetwork(cluster) as network:
        jobs_file, output = Path(scratch) / "jobs.json", Path(scratch) / "found.json"
        jobs_file.write_text(json.dumps(wanted))
        words = [str(jobs_file), str(output)]
        if EmulatedJob(ScriptJob(__file__, words), network).run():
            sys.exit("the job failed")
        return json.loads(output.read_text())


def train(job):
    """Seconds from the first step's start to the last worker's last end; the accuracy then."""
    torch.manual_seed(SEED)
    model = runs.light_model()
    own = runs.make_optimizer(model.parameters(), job["optimizer"], job["rate"])
    optimizer = paceline.distribute(
        model, own, method=job["spec"], buckets=job["buckets"]
    )
    batches = runs.batches(SEED, paceline.rank(), paceline.world_size())
    dist.barrier()
    start = time.perf_counter()
    for _ in range(job["steps"]):
        x, y = next(batches)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    dist.barrier()
    seconds = time.perf_counter() - start
    optimizer.finish()
    return seconds, runs.accuracy(model.parameters())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("jobs", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    paceline.init()
    found = []
    for job in json.loads(arguments.jobs.read_text()):
        found.append(train(job))
        if paceline.rank() == 0:
            words = f"{job['spec']}: {found[-1][0]:.1f} s, {found[-1][1]:.1f} %"
            print(words, file=sys.stderr, flush=True)
    if paceline.rank() == 0:
        arguments.output.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
