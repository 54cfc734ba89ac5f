"""The built-in workload gpt-10m: a GPT of 10.7 million parameters, counted, 30 + 60 ms a step.

python benchmarks/workloads/gpt_10m.py [--output FILE]
"""

import torch
from common import write
from models import Gpt

from paceline.cluster.workload import Workload

# FLOP/s with which a forward pass of 32 sequences takes 30 ms: a small GPU's, or a large
# processor's.
RATE = 6.456e12


def workload():
    with torch.device("meta"):
        model, tokens = Gpt(), torch.empty(32, 256, dtype=torch.long)
    return Workload.from_module(
        model,
        tokens,
        RATE,
        source="GPT, 6 layers of width 384, 32 sequences of 256 tokens: FLOPs counted by torch, "
        f"not measured, at an assumed {RATE:g} FLOP/s",
    )


if __name__ == "__main__":
    write(workload(), "gpt-10m")
