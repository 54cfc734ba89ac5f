"""Loops within loops, a method of its own, prints on the way, and a log at the end."""

import sys

import torch

import paceline

cleaned = []


def train():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    optimizer = paceline.distribute(
        model, torch.optim.SGD(model.parameters(), lr=0.1), method="bsp:buckets=single"
    )
    try:
        for _ in range(5):
            for _ in range(4):
                optimizer.zero_grad()
                loss = model(torch.ones(3, 8)).square().mean()
                loss.backward()
                paceline.log(loss=loss)
                optimizer.step()
            print("an epoch has ended")
    finally:
        cleaned.append("yes")


if __name__ == "__main__":
    print("noise on standard output")
    print("arguments", sys.argv[1:])
    train()
    print("the script came to its end")
