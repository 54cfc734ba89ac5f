"""transformers' Trainer, each case under its own DDP or under paceline; see `common`."""

import torch
from common import each

from paceline.integrations.transformers import attach  # isort: skip
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)

SIZES = {"vocab_size": 32, "n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 2}
DROPS = {
    "resid_pdrop": 0,
    "embd_pdrop": 0,
    "attn_pdrop": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


class Counting(torch.utils.data.Dataset):
    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(1)
        first = torch.randint(0, 16, (samples, 1), generator=generator)
        self.words = (first + torch.arange(24) % 16) % 32

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index):
        return {"input_ids": self.words[index], "labels": self.words[index]}


CASES = {
    "plain": {"max_grad_norm": 0.0},
    "clipping": {},
    "accumulation": {"gradient_accumulation_steps": 2, "bf16": True},
    "resumed": {"save_strategy": "epoch", "resumes": True},
    "early": {
        "early": True,
        "num_train_epochs": 12,
        "lr_scheduler_type": "constant",
        "save_strategy": "epoch",
        "metric_for_best_model": "eval_loss",
        "load_best_model_at_end": True,
    },
}
STOPS_BELOW = 0.1
"""Improvement of the loss in an epoch."""


def train(side, method, folder, resumes=False, early=False, **options):
    def trainer(epochs):
        arguments = TrainingArguments(
            output_dir=str(folder),
            use_cpu=True,
            per_device_train_batch_size=8,
            learning_rate=3e-3,
            report_to=[],
            disable_tqdm=True,
            logging_steps=1000,
            eval_strategy="epoch",
            **{"num_train_epochs": 2, "seed": 0, "save_strategy": "no", **options},
            max_steps=epochs * 8 if resumes else -1,
        )
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(**SIZES, **DROPS))
        made = Trainer(
            model, arguments, train_dataset=Counting(128), eval_dataset=Counting(64)
        )
        if early:
            made.add_callback(EarlyStoppingCallback(1, STOPS_BELOW))
        if side != "ddp":
            attach(made, method=method)
        return made

    if resumes:
        trainer(1).train()
    last = trainer(2)
    last.train(resume_from_checkpoint=True if resumes else None)
    return {
        "rank": last.args.process_index,
        "model": last.model,
        "steps": last.state.global_step,
        "loss": last.evaluate()["eval_loss"],
    }


each(train, CASES)
