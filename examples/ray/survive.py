"""A training that outlives its workers, its server and their nodes: Ray starts them again.

python examples/ray/survive.py --workers 2 --snapshot /tmp/digits.snapshot

Meanwhile kill what you like: `kill -9` of a process called ray::Worker.run or ray::Server, or `ray stop` on a node.
"""

import argparse

from paceline.integrations.ray import run


def train(config):
    import torch
    import torch.nn.functional as F
    from sklearn.datasets import load_digits
    from torch import nn

    import paceline

    paceline.init()
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(digits.target)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = paceline.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(
        optimizer.first_step, config["steps"]
    ):  # of the job, not of this life
        seed = step * paceline.world_size() + paceline.rank()
        batch = torch.randint(
            0, len(images), (64,), generator=torch.Generator().manual_seed(seed)
        )
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    optimizer.finish()
    return (model(images).argmax(1) == labels).float().mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--method", default="ssp")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--snapshot")
    chosen = parser.parse_args()
    accuracies = run(
        train,
        workers=chosen.workers,
        method=chosen.method,
        config={"steps": chosen.steps},
        snapshot=chosen.snapshot,
    )
    for rank, accuracy in enumerate(accuracies):
        print(f"worker {rank}: accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
