"""Lightning, each case under its own DDP or under paceline; see `common`."""

import logging
from pathlib import Path

import lightning
import torch
import torch.nn.functional as F
from common import data, die_once, each, net
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def training_step(self, batch, number):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, number):
        self.log(
            "validation", F.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True
        )

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class Dies(Classifier):
    """As it does in a job that survives; see `common.die_once`."""

    def training_step(self, batch, number):
        die_once(number)
        return super().training_step(batch, number)


class Evaluates(Classifier):
    """Several evaluations a step."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Two(lightning.LightningModule):
    """Two optimizers, each with a submodule of its own, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = net(), net()

    def training_step(self, batch, number):
        for net_, optimizer in zip(
            (self.first, self.second), self.optimizers(), strict=True
        ):
            loss = F.cross_entropy(net_(batch[0]), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def validation_step(self, batch, number):
        self.log(
            "validation",
            F.cross_entropy(self.first(batch[0]), batch[1]),
            sync_dist=True,
        )

    def configure_optimizers(self):
        return [
            torch.optim.SGD(self.first.parameters(), 0.05),
            torch.optim.Adam(self.second.parameters(), 0.01),
        ]


CASES = {
    "plain": {},
    "accumulation": {"accumulate_grad_batches": 3},
    "clipping": {"gradient_clip_val": 0.5},
    "bf16": {"precision": "bf16-mixed"},
    "two": {"module": Two},
    "resumed": {"resumes": True},
    "early": {"max_epochs": 12, "early": True},
    "lbfgs": {"module": Evaluates},
    "dies": {"module": Dies},
}


def trainer(side, method, *, early=False, max_epochs=2, folder=None, **options):
    strategy = "ddp_find_unused_parameters_true"  # DDP's backward passes of one of two
    if side != "ddp":
        from paceline.integrations.lightning import PacelineStrategy

        strategy = PacelineStrategy(method)
    callbacks = []
    if early:  # stops at the first epoch in which it is not better by a third
        callbacks.append(EarlyStopping("validation", min_delta=0.33, patience=1))
    if folder is not None:
        callbacks.append(ModelCheckpoint(folder, filename="last", monitor=None))
    return lightning.Trainer(
        max_epochs=max_epochs,
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        logger=False,
        callbacks=callbacks,
        enable_checkpointing=folder is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def train(side, method, folder, module=Classifier, resumes=False, **options):
    lightning.seed_everything(3, verbose=False)
    training = DataLoader(data(384), 16, shuffle=True)
    validation = DataLoader(data(128), 32)
    model, path = module(), None
    if resumes:
        first = trainer(side, method, max_epochs=1, folder=folder, **options)
        first.fit(model, training, validation)
        path = str(Path(folder, "last.ckpt"))
        model = module()
    last = trainer(side, method, **options)
    last.fit(model, training, validation, ckpt_path=path)
    return {
        "rank": last.global_rank,
        "model": model,
        "steps": last.global_step,
        **(
            {"first_step": last.optimizers[0].first_step}
            if module is Dies
            else {"validation": float(last.callback_metrics["validation"])}
        ),
    }


each(train, CASES)
