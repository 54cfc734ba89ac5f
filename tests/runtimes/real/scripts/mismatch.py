"""Models and options that differ between ranks; what each rank is told goes to a file.

The first argument is a folder; the second names a case that is not caught, at the end.
"""

import sys
from pathlib import Path

import torch
from torch import nn

import paceline


class Model(nn.Module):
    def __init__(self, name="weight", shape=(3, 2), dtype=torch.float32, count=2):
        super().__init__()
        self.first = nn.Parameter(torch.zeros(4))
        for number in range(count - 1):
            suffix = str(number) if number else ""
            self.register_parameter(
                name + suffix, nn.Parameter(torch.zeros(shape, dtype=dtype))
            )


paceline.init()
ODD = paceline.world_size() - 1
odd_one = paceline.rank() == ODD
sgd = {"lr": 0.1}
CASES = {
    "name": lambda: (Model(name="kernel") if odd_one else Model(), {}),
    "shape": lambda: (Model(shape=(2, 3)) if odd_one else Model(), {}),
    "dtype": lambda: (Model(dtype=torch.float64) if odd_one else Model(), {}),
    "count": lambda: (Model(count=4) if odd_one else Model(), {}),
    "fewer": lambda: (Model(count=1) if odd_one else Model(), {}),
    "frozen": lambda: (Model().requires_grad_(False) if odd_one else Model(), {}),
    "buckets": lambda: (Model(), {"buckets": "wfbp" if odd_one else "ddp"}),
    "optimizer": lambda: (Model(), {}),
}


def distribute(case):
    model, options = CASES[case]()
    if case == "frozen" and odd_one:
        model.first.requires_grad_(True)
    kind = torch.optim.SGD
    if case == "optimizer" and odd_one:
        kind = torch.optim.Adam
    optimizer = kind(model.parameters(), lr=0.1)
    return paceline.distribute(model, optimizer, **options)


folder, last = sys.argv[1:]
for case in CASES:
    path = Path(folder) / f"{case}-{paceline.rank()}.txt"
    try:
        distribute(case)
    except paceline.PacelineError as error:
        path.write_text(f"{type(error).__name__}: {error}")
distribute(last)
