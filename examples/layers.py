"""Equal layers for timing: compute is paced, gradients are real, nothing is learned.

paceline simulate examples/layers.py --workers 8 --link 200mbit -- --layers 16
"""

import argparse
import math

import torch

import paceline


class PacedLayer(torch.autograd.Function):
    """Adds the mean of its weight; takes a given time forward and backward."""

    @staticmethod
    def forward(ctx, x, weight, forward_seconds, backward_seconds):
        paceline.pace(forward_seconds)
        ctx.weight, ctx.backward_seconds = weight, backward_seconds
        return x + weight.flatten()[0]

    @staticmethod
    def backward(ctx, gradient):
        paceline.pace(ctx.backward_seconds)
        return gradient, torch.full_like(ctx.weight, gradient.item()), None, None


class Layers(torch.nn.Module):
    def __init__(
        self, layers, megabytes, forward_seconds, backward_seconds, square=False
    ):
        super().__init__()
        share, extra = divmod(round(megabytes * 1e6 / 4), layers)
        side = math.isqrt(share)
        shapes = [
            (side, side) if square else share + (i < extra) for i in range(layers)
        ]
        self.weights = torch.nn.ParameterList(torch.zeros(shape) for shape in shapes)
        self.seconds = forward_seconds / layers, backward_seconds / layers

    def forward(self, x):
        for weight in self.weights:
            x = PacedLayer.apply(x, weight, *self.seconds)
        return x


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--megabytes", type=float, default=8.0, help="of gradients")
    parser.add_argument("--forward", type=float, default=0.1, help="seconds a step")
    parser.add_argument("--backward", type=float, default=0.2, help="seconds a step")
    parser.add_argument("--square", action="store_true", help="matrices, not vectors")
    parser.add_argument("--train-steps", type=int, default=24)
    args = parser.parse_args()

    paceline.init()
    times = args.forward, args.backward
    model = Layers(args.layers, args.megabytes, *times, args.square)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = paceline.distribute(model, optimizer)
    for _ in range(args.train_steps):
        optimizer.zero_grad()
        loss = (model(torch.zeros(())) - 1.0) ** 2
        loss.backward()
        optimizer.step()
        paceline.log(loss=loss)
    optimizer.finish()


if __name__ == "__main__":
    main()
