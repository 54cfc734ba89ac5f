"""ResNet-20 and its like, as section 4.2 of He et al. (2015) has them for CIFAR-10."""

import torch
import torch.nn.functional as F
from torch import nn


class BasicBlock(nn.Module):
    def __init__(self, planes_in, planes, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(planes_in, planes, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.stride, self.missing = stride, planes - planes_in

    def shortcut(self, x):
        """Option A: every other pixel, and zeros for the planes that are new."""
        return F.pad(
            x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.missing)
        )

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, blocks, classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        planes, layers = 16, []
        for wanted, stride in ((16, 1), (32, 2), (64, 2)):
            for number in range(blocks):
                layers.append(BasicBlock(planes, wanted, stride if number == 0 else 1))
                planes = wanted
        self.layers = nn.Sequential(*layers)
        self.linear = nn.Linear(64, classes)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.kaiming_normal_(parameter)

    def forward(self, x):
        y = self.layers(F.relu(self.bn1(self.conv1(x))))
        return self.linear(torch.flatten(F.adaptive_avg_pool2d(y, 1), 1))


def resnet8():
    return ResNet(1)


def resnet20():
    return ResNet(3)
