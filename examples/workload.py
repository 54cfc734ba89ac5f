"""A stand-in for another model: its tensors and their times, without its arithmetic.

paceline simulate examples/workload.py --workers 64 --link 10gbit -- googlenet-k80
paceline compare examples/workload.py --method bsp --method bsp:buckets=ddp -- my.json
"""

import argparse

import torch

import paceline


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", nargs="?", default="resnet50")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()

    paceline.init()
    torch.manual_seed(paceline.rank())
    workload = paceline.Workload.load(args.workload)
    model = paceline.stand_in(workload)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = paceline.distribute(model, optimizer)
    for _ in range(args.steps):
        batch = torch.randn(int(workload.batch or 1))
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()
    optimizer.finish()


if __name__ == "__main__":
    main()
