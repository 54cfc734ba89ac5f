"""Models that are sharded before a trainer gets them: what it says. ``sharded.py TRAINER FOLDER``"""

import json
import sys
from functools import partial

import torch
import torch.distributed as dist
from common import net
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_module

from paceline.errors import UsageError

TRAINER, FOLDER = sys.argv[1:]


def sharded(tool, model):
    if tool == "FSDP":
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    mesh = init_device_mesh("cpu", (2,))
    if tool == "fully_shard":
        return fully_shard(model, mesh=mesh)
    return distribute_module(model, mesh)


def to_lightning(tool):
    import lightning

    from paceline.integrations.lightning import PacelineStrategy

    class Sharded(lightning.LightningModule):
        def configure_model(self):
            self.net = sharded(tool, net())

        def training_step(self, batch, number):
            return self.net(batch).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy=PacelineStrategy(),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Sharded(), torch.utils.data.DataLoader(torch.ones(8, 20), 4))


def to_fabric(tool):
    import lightning

    from paceline.integrations.fabric import FabricStrategy

    fabric = lightning.Fabric(accelerator="cpu", strategy=FabricStrategy())
    fabric.launch()
    model = sharded(tool, net())
    fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))


def to_accelerate(tool):
    from paceline.integrations.accelerate import prepare  # isort: skip
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = sharded(tool, net())
    prepare(accelerator, model, torch.optim.SGD(model.parameters(), 0.1))


def to_trainer(tool):
    from paceline.integrations.transformers import attach  # isort: skip
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(FOLDER, use_cpu=True, report_to=[])
    assert arguments.device.type == "cpu"  # it meets the other worker
    attach(Trainer(sharded(tool, net()), arguments))


def by_arguments():
    """As trainers themselves shard models."""
    if TRAINER == "accelerate":
        from paceline.integrations.accelerate import prepare  # isort: skip
        from accelerate import Accelerator, FullyShardedDataParallelPlugin

        accelerator = Accelerator(
            cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin()
        )
        model = net()
        prepare(accelerator, model, torch.optim.SGD(model.parameters(), 0.1))
    else:
        from paceline.integrations.transformers import attach  # isort: skip
        from transformers import Trainer, TrainingArguments

        arguments = TrainingArguments(
            FOLDER, use_cpu=True, report_to=[], fsdp="full_shard"
        )
        attach(Trainer(net(), arguments))


GIVE = {
    "lightning": to_lightning,
    "fabric": to_fabric,
    "accelerate": to_accelerate,
    "trainer": to_trainer,
}
tries = {
    tool: partial(GIVE[TRAINER], tool) for tool in ("FSDP", "fully_shard", "DTensor")
}
if TRAINER in ("accelerate", "trainer"):
    tries["arguments"] = by_arguments
said = {}
for name, attempt in tries.items():
    try:
        attempt()
    except UsageError as error:
        said[name] = str(error)
sys.stdout.write("\n=== " + json.dumps(said) + "\n")
sys.stdout.flush()
dist.barrier()
