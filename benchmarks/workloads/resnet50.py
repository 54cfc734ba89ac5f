"""The built-in workload resnet50: ResNet-50, counted.

python benchmarks/workloads/resnet50.py [--output FILE]
"""

import torch
from common import ASSUMED_RATE, write
from models import ResNet50

from paceline.cluster.workload import Workload


def workload():
    with torch.device("meta"):
        model, images = ResNet50(), torch.empty(32, 3, 224, 224)
    return Workload.from_module(
        model,
        images,
        ASSUMED_RATE,
        source="ResNet-50, 32 images of 224 x 224: FLOPs counted by torch, not measured, "
        f"at an assumed {ASSUMED_RATE:g} FLOP/s",
    )


if __name__ == "__main__":
    write(workload(), "resnet50")
