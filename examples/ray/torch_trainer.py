"""Ray Train starts the workers, paceline synchronizes them: the one line that changes is marked.

python examples/ray/torch_trainer.py                          # two workers, bsp
python examples/ray/torch_trainer.py --workers 8 --method osp
python examples/ray/torch_trainer.py --method ddp             # Ray's own prepare_model, to compare
"""

import argparse
import tempfile

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train(config):
    import torch
    import torch.nn.functional as F
    from ray.train.torch import prepare_model
    from sklearn.datasets import load_digits
    from torch import nn

    import paceline

    rank = ray.train.get_context().get_world_rank()
    size = ray.train.get_context().get_world_size()
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(digits.target)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    if config["method"] == "ddp":
        model = prepare_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if config["method"] != "ddp":
        optimizer = paceline.distribute(model, optimizer, method=config["method"])  # <-
    for epoch in range(config["epochs"]):
        order = torch.randperm(
            len(images), generator=torch.Generator().manual_seed(epoch)
        )
        own = order[: len(order) // size * size][rank::size]
        for batch in own.split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    if config["method"] != "ddp":
        optimizer.finish()  # Ray's process goes on, so nothing else says that this is over
    accuracy = (model(images).argmax(1) == labels).float().mean().item()
    digest = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    return {"accuracy": accuracy, "digest": digest}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--method", default="bsp")
    parser.add_argument("--epochs", type=int, default=3)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = TorchTrainer(
            train,
            train_loop_config={"method": chosen.method, "epochs": chosen.epochs},
            scaling_config=ScalingConfig(
                num_workers=chosen.workers,
                resources_per_worker={"CPU": 1},
                placement_strategy="SPREAD",
            ),
            run_config=RunConfig(storage_path=folder),
        ).fit()
        told = result.return_value  # of worker 0
    print(
        f"{chosen.method}: accuracy {told['accuracy']:.3f}, sum of |parameters| {told['digest']:.12f}"
    )


if __name__ == "__main__":
    main()
