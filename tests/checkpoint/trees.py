"""The files that each trainer writes, in the order in which it writes them: small, and made with the real torch."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

Files = dict[str, bytes]
"""Path below the checkpoint folder -> content; the order is that of writing."""


@dataclass(frozen=True)
class Tree:
    """A checkpoint of one trainer.

    name      of its folder
    format    what it is recognised as
    step      what its own files or its name tell
    proof     of the complete one: the name of a Proof
    optional  what may be missing without a fault: what comes after the proof, or says nothing of completeness
    """

    name: str
    format: str
    step: int
    files: Files = field(repr=False)
    proof: str = "WHOLE"
    optional: frozenset[str] = field(default_factory=frozenset)


@cache
def torch_file(**values: object) -> bytes:
    """What torch.save writes of a tensor and these values."""
    import torch

    buffer = io.BytesIO()
    torch.save({**values, "w": torch.arange(20.0)}, buffer)
    return buffer.getvalue()


def safetensors(length: int = 64) -> bytes:
    header = json.dumps({"a": {"dtype": "U8", "shape": [length], "data_offsets": [0, length]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(range(length))


def dcp(shards: Sequence[str] = ("__0_0.distcp", "__1_0.distcp"), size: int = 50) -> Files:
    """Shards of ``size`` bytes with two records each, then ``.metadata``, as torch's own classes pickle it."""
    storage = {
        MetadataIndex(f"{shard}.{number}"): _StorageInfo(shard, number * size // 2, size // 2)
        for shard in shards
        for number in range(2)
    }
    return {**dict.fromkeys(shards, b"s" * size), ".metadata": pickle.dumps(Metadata({}, storage_data=storage))}


def below(folder: str, files: Files) -> Files:
    return {f"{folder}/{name}": data for name, data in files.items()}


def transformers(step: int = 20, ranks: int = 1) -> Tree:
    rng = {"rng_state.pth": torch_file()} if ranks == 1 else {f"rng_state_{r}.pth": torch_file() for r in range(ranks)}
    return Tree(
        f"checkpoint-{step}",
        "transformers",
        step,
        {
            "config.json": b"{}",
            "model.safetensors": safetensors(),
            "training_args.bin": torch_file(save_only_model=False),
            "optimizer.pt": torch_file(),
            "scheduler.pt": torch_file(),
            **rng,
            "trainer_state.json": state_json(step),
        },
        proof="WHOLE" if ranks == 1 else "LAST",
        optional=frozenset(
            {"config.json", "model.safetensors", "training_args.bin", "scheduler.pt"}
            | {f"rng_state_{ranks - 1}.pth" if ranks > 2 else ""}
        ),
    )


def transformers_fsdp(step: int = 20) -> Tree:
    return Tree(
        f"checkpoint-{step}",
        "transformers",
        step,
        {
            **below("pytorch_model_fsdp_0", dcp()),
            "training_args.bin": torch_file(save_only_model=False),
            **below("optimizer_0", dcp()),
            "scheduler.pt": torch_file(),
            "rng_state_0.pth": torch_file(),
            "rng_state_1.pth": torch_file(),
            "trainer_state.json": state_json(step),
        },
        optional=frozenset({"training_args.bin", "scheduler.pt"}),
    )


def transformers_deepspeed(step: int = 20) -> Tree:
    return Tree(
        f"checkpoint-{step}",
        "transformers",
        step,
        {
            "training_args.bin": torch_file(save_only_model=False),
            **below(f"global_step{step}", zero(step)),
            "latest": f"global_step{step}".encode(),
            "zero_to_fp32.py": b"",
            "scheduler.pt": torch_file(),
            "rng_state_0.pth": torch_file(),
            "rng_state_1.pth": torch_file(),
            "trainer_state.json": state_json(step),
        },
        optional=frozenset({"training_args.bin", "latest", "zero_to_fp32.py", "scheduler.pt"}),
    )


def sharded_weights(step: int = 20) -> Tree:
    index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    whole = transformers(step)
    files = {
        "model-1-of-2.safetensors": safetensors(),
        "model-2-of-2.safetensors": safetensors(),
        "model.safetensors.index.json": json.dumps(index).encode(),
        **{name: data for name, data in whole.files.items() if name != "model.safetensors"},
    }
    return Tree(whole.name, "transformers", step, files, optional=whole.optional | frozenset(list(files)[:3]))


def state_json(step: int) -> bytes:
    return json.dumps({"global_step": step, "epoch": 1.0, "log_history": [{"loss": 0.5}]}).encode()


def zero(step: int, stage: int = 2, ranks: int = 2) -> Files:
    """The states of one tag."""
    model = torch_file(global_steps=step, dp_world_size=ranks, mp_world_size=1, ds_config=_Config(stage))
    models = (
        {f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt": model for rank in range(ranks)}
        if stage == 3
        else {"mp_rank_00_model_states.pt": model}
    )
    optim = {f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt": torch_file() for rank in range(ranks)}
    return models | (optim if stage else {})


class _Config(dict[str, object]):
    """DeepSpeed's own configuration, hashable so that it can be an argument of a cached function."""

    def __init__(self, stage: int) -> None:
        super().__init__(train_batch_size=8, zero_optimization={"stage": stage})

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(str(self))

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return dict, (dict(self),)


def deepspeed(stage: int, step: int = 30) -> Tree:
    return Tree(f"global_step{step}", "deepspeed", step, zero(step, stage))


def accelerate(ranks: int = 2) -> Tree:
    return Tree(
        "checkpoint_3",
        "accelerate",
        3,
        {
            "model.safetensors": safetensors(),
            "optimizer.bin": torch_file(),
            "scheduler.bin": torch_file(),
            "sampler.bin": torch_file(),
            **{f"random_states_{rank}.pkl": torch_file(step=5) for rank in range(ranks)},
            "custom_checkpoint_0.pkl": torch_file(),
        },
        proof="LAST",
        optional=frozenset(
            {"model.safetensors", "optimizer.bin", "scheduler.bin", "sampler.bin", "custom_checkpoint_0.pkl"}
            | {f"random_states_{ranks - 1}.pkl" if ranks > 1 else ""}
        ),
    )


def torchtitan(step: int = 40) -> Tree:
    return Tree(f"step-{step}", "dcp", step, dcp())


def lightning_folder(step: int = 50) -> Tree:
    return Tree(
        f"epoch=1-step={step}.ckpt",
        "lightning",
        step,
        {**dcp(), "meta.pt": torch_file(**{"global_step": step, "pytorch-lightning_version": "2.6"})},
    )


def composer_folder() -> Tree:
    return Tree("ep1-ba60", "composer", 60, dcp())


def megatron() -> Tree:
    files = {"common.pt": torch_file(), **dcp(), "metadata.json": b"{}"}
    return Tree("iter_0000070", "megatron", 70, files, optional=frozenset({"common.pt", "metadata.json"}))


def training(step: int = 80) -> Tree:
    files = {
        "state.safetensors": safetensors(),
        "rank-00001.safetensors": safetensors(32),
        "rank-00001.json": b"{}",
    }
    state = {
        "format": "cloudrun-training", "version": 1, "step": step, "files": {n: len(d) for n, d in files.items()},
    }  # fmt: skip
    return Tree(f"step-{step:012d}", "cloudrun-training", step, {**files, "state.json": json.dumps(state).encode()})


FOLDERS = {
    "transformers": transformers(),
    "transformers, 2 ranks": transformers(ranks=2),
    "transformers, 4 ranks": transformers(ranks=4),
    "transformers, FSDP": transformers_fsdp(),
    "transformers, DeepSpeed": transformers_deepspeed(),
    "transformers, sharded weights": sharded_weights(),
    "deepspeed, no ZeRO": deepspeed(0),
    "deepspeed, ZeRO 2": deepspeed(2),
    "deepspeed, ZeRO 3": deepspeed(3),
    "accelerate": accelerate(1),
    "accelerate, 2 ranks": accelerate(2),
    "torchtitan": torchtitan(),
    "lightning, FSDP": lightning_folder(),
    "composer, FSDP": composer_folder(),
    "megatron": megatron(),
    "runner.training": training(),
}

FILES = {
    "lightning": ("last.ckpt", torch_file(**{"global_step": 50, "pytorch-lightning_version": "2.6"}), "lightning", 50),
    "composer": ("ep1-ba60-rank0.pt", torch_file(), "composer", 60),
    "mmengine": ("epoch_4.pth", torch_file(), "mmengine", 4),
    "timm": ("last.pth.tar", torch_file(epoch=9), "torch", None),
    "plain": ("ckpt.pt", torch_file(iter_num=2000), "torch", 2000),
}
"""Kind -> (name, content, format, step told by the content or the name)."""


def ultralytics(epoch: int) -> bytes:
    """What ``last.pt`` holds, as far as it can be told without the library: its module is named in the pickle."""
    return torch_file(epoch=epoch, best_fitness=0.5, train_args="", model="ultralytics.nn.tasks")
