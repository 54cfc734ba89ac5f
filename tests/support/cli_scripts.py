"""Training scripts, small ones, as files."""

from pathlib import Path

TRAINS = """
import sys
import paceline, torch

hidden = int(sys.argv[1]) if len(sys.argv) > 1 else 8
paceline.init()
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(6, hidden), torch.nn.Linear(hidden, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = paceline.distribute(model, optimizer)
if paceline.rank() == 0:
    with open("runs.txt", "a") as runs:
        print("began", file=runs)
    print("the script speaks")
for _ in range(12):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 6)).square().mean()
    loss.backward()
    optimizer.step(loss=loss)
"""

PACES = TRAINS.replace(
    "    loss.backward()", "    paceline.pace(0.5)\n    loss.backward()"
)

READS_SIZES = (
    TRAINS.replace(
        "import paceline",
        "from pathlib import Path\nimport paceline",
    )
    .replace("else 8", 'else int(Path("hidden.txt").read_text())')
    .replace(
        "torch.randn(4, 6)", 'torch.randn(4, int(Path("height.txt").read_text()), 6)'
    )
)
"""What it computes depends on its arguments, and on files."""

STANDS_IN = """
import paceline, torch

paceline.init()
model = paceline.stand_in(
    paceline.Workload(names=("a",), sizes=(4000,), forward=(1,), backward=(2,), update=3)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = paceline.distribute(model, optimizer)
for _ in range(4):
    model(torch.ones(1)).backward()
    optimizer.step()
"""

CALLS_A_PART = TRAINS.replace("model(torch", "torch.nn.Sequential.forward(model, torch")

ANOTHER_MODEL = (
    TRAINS
    + """
optimizer.finish()
other = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
optimizer = paceline.distribute(other, optimizer)
for _ in range(3):
    other(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""
)

TWO_MODELS = """
import paceline, torch

paceline.init()
models = [torch.nn.Linear(2, 1), torch.nn.Linear(3, 1)]
optimizers = [
    paceline.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for model in models
]
for _ in range(12):
    for model, optimizer in zip(models, optimizers):
        model(torch.ones(4, model.in_features)).sum().backward()
        optimizer.step()
for optimizer in optimizers:
    optimizer.finish()
"""

SLEEPS = """
import time
import paceline, torch


class Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


class Layer(torch.nn.Linear):
    def __init__(self, forward, backward):
        super().__init__(4, 4)
        self.seconds = forward, backward

    def forward(self, x):
        time.sleep(self.seconds[0])
        return Work.apply(super().forward(x), self.seconds[1])


class SGD(torch.optim.SGD):
    def step(self):
        time.sleep(0.02)
        return super().step()


paceline.init()
model = torch.nn.Sequential(Layer(0.01, 0.03), Layer(0.03, 0.01))
optimizer = paceline.distribute(model, SGD(model.parameters(), lr=0.1))
while True:
    optimizer.zero_grad()
    with optimizer.no_sync():
        model(torch.ones(8, 4)).square().mean().backward()
    model(torch.ones(8, 4)).square().mean().backward()
    optimizer.step()
"""

TRAINS_NOTHING = "import paceline\npaceline.init()\n"

FAILS = TRAINS + "raise RuntimeError('boom')\n"


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path
