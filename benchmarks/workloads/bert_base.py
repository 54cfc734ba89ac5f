"""The built-in workload bert-base: BERT-base's encoder and pooler, counted.

python benchmarks/workloads/bert_base.py [--output FILE]
"""

import torch
from common import ASSUMED_RATE, write
from models import BertBase

from paceline.cluster.workload import Workload


def workload():
    with torch.device("meta"):
        model, tokens = BertBase(), torch.empty(32, 128, dtype=torch.long)
    return Workload.from_module(
        model,
        tokens,
        ASSUMED_RATE,
        source="BERT-base uncased, encoder and pooler, 32 sequences of 128 tokens: FLOPs "
        f"counted by torch, not measured, at an assumed {ASSUMED_RATE:g} FLOP/s",
    )


if __name__ == "__main__":
    write(workload(), "bert-base")
