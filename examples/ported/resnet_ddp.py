"""Train a ResNet on CIFAR-shaped random data, in the shape of the trainers that go with these models."""

import argparse
import os
import time

import resnet_model
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser(description="ResNets for CIFAR-10, in PyTorch")
parser.add_argument("--arch", default="resnet20", choices=["resnet8", "resnet20"])
parser.add_argument("--epochs", default=2, type=int)
parser.add_argument("-b", "--batch-size", default=32, type=int, help="of each process")
parser.add_argument("--lr", "--learning-rate", default=0.1, type=float)
parser.add_argument("--momentum", default=0.9, type=float)
parser.add_argument("--weight-decay", "--wd", default=1e-4, type=float)
parser.add_argument("--print-freq", "-p", default=4, type=int)
parser.add_argument("--images", default=512, type=int, help="to train on")
parser.add_argument("--save-dir", default="save_temp")
best_prec1 = 0


def random_cifar(count, seed):
    """Noise with a faint picture of its class: 10 classes, 3 x 32 x 32."""
    pictures = torch.randn(10, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    noise = torch.randn(count, 3, 32, 32, generator=generator)
    return TensorDataset(noise + 0.5 * pictures[labels], labels)


def main():
    global args, best_prec1
    args = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"
    os.makedirs(args.save_dir, exist_ok=True)
    torch.manual_seed(0)

    model = getattr(resnet_model, args.arch)().to(device)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(
        model.parameters(),
        args.lr,
        momentum=args.momentum,
        weight_decay=args.weight_decay,
    )
    model = DistributedDataParallel(model)
    lr_scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1])

    train_set = random_cifar(args.images, seed=1)
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler)
    val_loader = DataLoader(random_cifar(128, seed=2), batch_size=64)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, epoch, device)
        lr_scheduler.step()
        prec1 = validate(val_loader, model, criterion, device)
        if dist.get_rank() == 0 and prec1 >= best_prec1:
            best_prec1 = prec1
            save_checkpoint(
                {"state_dict": model.module.state_dict(), "best_prec1": best_prec1},
                filename=os.path.join(args.save_dir, "model.th"),
            )
    dist.destroy_process_group()


def train(train_loader, model, criterion, optimizer, epoch, device):
    batch_time, losses, top1 = AverageMeter(), AverageMeter(), AverageMeter()
    model.train()
    end = time.time()
    for i, (images, target) in enumerate(train_loader):
        images, target = images.to(device), target.to(device)
        output = model(images)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        losses.update(loss.item(), len(images))
        top1.update(accuracy(output, target), len(images))
        batch_time.update(time.time() - end)
        end = time.time()
        if i % args.print_freq == 0:
            print(
                f"[{dist.get_rank()}] Epoch: [{epoch}][{i}/{len(train_loader)}]\t"
                f"Time {batch_time.val:.3f} ({batch_time.avg:.3f})\t"
                f"Loss {losses.val:.6f} ({losses.avg:.6f})\t"
                f"Prec@1 {top1.val:.3f} ({top1.avg:.3f})"
            )


@torch.no_grad()
def validate(val_loader, model, criterion, device):
    losses, top1 = AverageMeter(), AverageMeter()
    model.eval()
    for images, target in val_loader:
        images, target = images.to(device), target.to(device)
        output = model(images)
        losses.update(criterion(output, target).item(), len(images))
        top1.update(accuracy(output, target), len(images))
    print(
        f"[{dist.get_rank()}] Test: Loss {losses.avg:.6f} * Prec@1 {top1.avg:.3f}",
        flush=True,
    )
    return top1.avg


def save_checkpoint(state, filename):
    torch.save(state, filename)


class AverageMeter:
    """The latest value, and the mean of all so far."""

    def __init__(self):
        self.val = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n

    @property
    def avg(self):
        return self.sum / self.count


def accuracy(output, target):
    """Per cent whose greatest output is their class."""
    return (output.argmax(1) == target).float().mean().item() * 100


if __name__ == "__main__":
    main()
