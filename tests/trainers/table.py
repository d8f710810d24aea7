"""The examples of configs/trainers, as the tests run them."""

from __future__ import annotations

from tests.trainers.harness import Trainer

TRAINERS = {
    trainer.name: trainer
    for trainer in (
        Trainer(
            name="accelerate",
            folder="out",
            command="python train.py --output_dir out --steps {steps} --save_steps 20 --delay 0.025",
            modules=("accelerate",),
        ),
        Trainer(
            name="composer",
            folder="out",
            command="python train.py --save_folder out --steps {steps} --save_steps 20 --delay 0.025",
            modules=("composer",),
        ),
        Trainer(
            name="deepspeed",
            folder="out",
            command="python -m torch.distributed.run --standalone --nproc-per-node 1"
            " train.py --save_dir out --steps {steps} --save_steps 20 --delay 0.05",
            modules=("deepspeed",),
        ),
        Trainer(
            name="lightning",
            folder="out",
            command="python train.py --dirpath out --steps {steps} --save_steps 20 --delay 0.025",
            modules=("lightning",),
        ),
        Trainer(
            name="torch_save",
            folder="out",
            command="python train.py --out out --steps {steps} --save_steps 20 --delay 0.05",
            modules=("torch",),
        ),
        Trainer(
            name="torchtitan",
            folder="outputs/checkpoint",
            command="python train.py --folder outputs/checkpoint --steps {steps} --save_steps 20 --delay 0.05",
            modules=("torchtitan",),
        ),
        Trainer(
            name="transformers",
            folder="out",
            command="python train.py --output_dir out --steps {steps} --save_steps 20 --delay 0.025",
            modules=("transformers", "accelerate"),
        ),
        Trainer(
            name="ultralytics",
            folder="runs/squares/weights",
            command="python train.py --project runs --epochs {steps}",
            modules=("ultralytics", "torchvision", "cv2"),
            steps=12,
            steps_per_kill=4,
            # Its checkpoints count epochs from 0, its output from 1.
            ahead=2,
        ),
    )
}
