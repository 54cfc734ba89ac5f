"""The built-in workload vgg16: VGG-16, counted.

python benchmarks/workloads/vgg16.py [--output FILE]
"""

import torch
from common import ASSUMED_RATE, write
from models import VGG16

from paceline.cluster.workload import Workload


def workload():
    with torch.device("meta"):
        model, images = VGG16(), torch.empty(32, 3, 224, 224)
    return Workload.from_module(
        model,
        images,
        ASSUMED_RATE,
        source="VGG-16, 32 images of 224 x 224: FLOPs counted by torch, not measured, "
        f"at an assumed {ASSUMED_RATE:g} FLOP/s",
    )


if __name__ == "__main__":
    write(workload(), "vgg16")
