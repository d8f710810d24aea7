"""A tiny detector on made-up pictures, with Ultralytics: a script that knows nothing of cloudrun."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from ultralytics import YOLO

parser = argparse.ArgumentParser()
parser.add_argument("--project", type=Path, default=Path("runs"))
parser.add_argument("--data", type=Path, default=Path("pictures"))
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--resume", type=Path)


def make_pictures(folder: Path) -> Path:
    """Four pictures of one white square each, and the file that describes them."""
    for name in ("images", "labels"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for number in range(4):
        picture = np.zeros((32, 32, 3), np.uint8)
        picture[8 : 20 + number, 8:24] = 255
        cv2.imwrite(str(folder / f"images/{number}.png"), picture)
        (folder / f"labels/{number}.txt").write_text("0 0.5 0.5 0.5 0.5\n")
    described = folder / "pictures.yaml"
    described.write_text(f"path: {folder.absolute()}\ntrain: images\nval: images\nnames: [square]\n")
    return described


def tell(trainer: Any) -> None:
    print(f"epoch {trainer.epoch + 1}/{trainer.epochs}", flush=True)


def main() -> None:
    options = parser.parse_args()
    data = make_pictures(options.data)
    model = YOLO(options.resume or "yolo11n.yaml")
    model.add_callback("on_train_epoch_end", tell)
    if options.resume:
        model.train(resume=True)
        return
    model.train(
        data=str(data),
        epochs=options.epochs,
        imgsz=32,
        batch=2,
        workers=0,
        device="cpu",
        project=str(options.project.absolute()),
        name="squares",
        exist_ok=True,
        plots=False,
        amp=False,
    )


if __name__ == "__main__":
    main()
