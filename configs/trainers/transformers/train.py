"""A tiny language model on made-up text, with the Transformers Trainer: a script that knows nothing of cloudrun."""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", default="out")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--save_steps", type=int, default=10)
parser.add_argument("--delay", type=float, default=0.0, help="seconds that reading one sample takes")
parser.add_argument("--resume_from_checkpoint")


class Sequences(Dataset[dict[str, torch.Tensor]]):
    """Sample ``index`` counts upwards from a random token."""

    def __init__(self, delay: float) -> None:
        self.delay = delay

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(self.delay)
        start = torch.randint(64, (1,), generator=torch.Generator().manual_seed(index))
        tokens = (start + torch.arange(16)) % 64
        return {"input_ids": tokens, "labels": tokens}


class Steps(TrainerCallback):
    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        print(f"step {state.global_step}/{state.max_steps}", flush=True)


def main() -> None:
    options = parser.parse_args()
    set_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    arguments = TrainingArguments(
        output_dir=options.output_dir,
        max_steps=options.steps,
        save_steps=options.save_steps,
        save_total_limit=3,
        per_device_train_batch_size=2,
        logging_steps=10,
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(
        model=LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape)),
        args=arguments,
        train_dataset=Sequences(options.delay),
        callbacks=[Steps()],
    )
    trainer.train(resume_from_checkpoint=options.resume_from_checkpoint)
    trainer.save_model()


if __name__ == "__main__":
    main()
