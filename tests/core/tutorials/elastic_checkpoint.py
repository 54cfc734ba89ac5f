"""A regression trained by a Trainer class with snapshots, as multi-GPU tutorials do it."""

import json
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self, model, optimizer, loader, snapshot_path):
        self.model, self.optimizer, self.loader = model, optimizer, loader
        self.snapshot_path = snapshot_path
        self.losses = []

    def run_batch(self, x, y):
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        self.losses.append(total.item() / dist.get_world_size())

    def run_epoch(self, epoch):
        self.loader.sampler.set_epoch(epoch)
        for x, y in self.loader:
            self.run_batch(x, y)

    def save_snapshot(self, epoch):
        model = getattr(self.model, "module", self.model)
        torch.save({"model": model.state_dict(), "epoch": epoch}, self.snapshot_path)

    def train(self, epochs):
        for epoch in range(epochs):
            self.run_epoch(epoch)
            if dist.get_rank() == 0 and epoch % 2 == 0:
                self.save_snapshot(epoch)
            dist.barrier()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(512, 20)
    y = torch.tanh(x @ torch.randn(20, 1)) + 0.01 * torch.randn(512, 1)
    dataset = TensorDataset(x, y)
    loader = DataLoader(
        dataset, batch_size=32, sampler=DistributedSampler(dataset), shuffle=False
    )
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 64),
        torch.nn.BatchNorm1d(64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 1),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model = DistributedDataParallel(model)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(model, optimizer, loader, os.path.join(folder, "snapshot.pt"))
        trainer.train(epochs=4)
        dist.barrier()
    if dist.get_rank() == 0:
        print("losses", json.dumps(trainer.losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
