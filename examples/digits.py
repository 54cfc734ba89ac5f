"""A small CNN on scikit-learn's digits: 1,797 real images of 8x8 pixels, 10 classes.

torchrun --nproc-per-node 2 examples/digits.py
paceline simulate examples/digits.py --workers 8 --link 100mbit
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import paceline


def load_data():
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return (images[train], labels[train]), (images[test], labels[test])


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1024, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=64, help="over all workers")
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()

    paceline.init()
    torch.manual_seed(0)
    (images, labels), (test_images, test_labels) = load_data()
    dataset = TensorDataset(images, labels)
    sampler = DistributedSampler(
        dataset, paceline.world_size(), paceline.rank(), seed=0
    )
    batch = max(1, args.batch // paceline.world_size())
    loader = DataLoader(dataset, batch_size=batch, sampler=sampler)

    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    optimizer = paceline.distribute(model, optimizer)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            paceline.log(loss=loss)
        with optimizer.consolidated(), torch.no_grad():
            model.eval()
            correct = (model(test_images).argmax(1) == test_labels).float().mean()
        paceline.log(accuracy=correct)
        if paceline.rank() == 0:
            print(f"epoch {epoch + 1}: test accuracy {correct.item():.3f}")
    optimizer.finish()


if __name__ == "__main__":
    main()
