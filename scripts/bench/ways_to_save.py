"""A training that saves in one of several ways, and measures what that costs it. Run by checkpoint.py, as a job.

    ways_to_save.py WAY LAYERS WIDTH SAVES

Prints one JSON object a save (see :class:`Seen`), and at the end the memory that saving has taken.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_saver as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter

MOST_WAIT_S = 300.0
WAIT_FOR_STORE_S = 30.0
STEPS_ALONE = 8
FOLDER = Path(os.environ.get("CLOUDRUN_CHECKPOINT_DIR") or "checkpoints")


@dataclass(frozen=True, slots=True)
class Seen:
    """One save: seconds, and the time (epoch) at which it began.

    copy       of one plain copy of the state into memory that is there, right before
    slowdown   what the steps lost while the save was on its way
    durable    from the beginning until it was complete on the disk
    stored     from the beginning until it was in the store: of the first save only; None where it never came there
    """

    at: float
    copy: float
    stall: float
    slowdown: float
    durable: float
    stored: float | None
    step: float


class Way(Protocol):
    """A way to save. ``save`` returns when the training may go on, ``is_done`` when all is on the disk."""

    def save(self, step: int) -> None: ...

    def is_done(self) -> bool: ...


class Training:
    """Layers without bias, and Adam with state: parameters and state are what is saved."""

    def __init__(self, layers: int, width: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), fused=True)
        self.batch = torch.randn(64, width)

    def step(self) -> float:
        """Seconds."""
        began = time.perf_counter()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - began

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def tensors(self) -> list[Tensor]:
        state = self.optimizer.state
        return [tensor for p in self.model.parameters() for tensor in (p.detach(), *state[p].values())]


# -- the ways ----------------------------------------------------------------------------------------------------------


class Ours:
    """runner.training under its supervisor."""

    def __init__(self, training: Training) -> None:
        from runner.training import Checkpointer  # noqa: PLC0415 - the rivals' interpreters need not have it

        self._checkpointer = Checkpointer({"model": training.model, "optimizer": training.optimizer}, every=1 << 40)
        self._checkpointer.restore()
        self._checkpointer.step()
        self._step = 1
        # As in a real training, the first save comes a good while after the first step.
        memory: Any = self._checkpointer._memory  # noqa: SLF001 - a benchmark may look inside
        until(lambda: memory is None or all(slot.is_ready for slot in memory._slots))  # noqa: SLF001

    def save(self, step: int) -> None:
        while self._step < step:
            self._checkpointer.advance()
            self._step += 1
        self._checkpointer.save()

    def is_done(self) -> bool:
        return (FOLDER / f"step-{self._step:012d}").exists()


class TorchSave:
    """torch.save, renamed into place; with or without waiting for the disk."""

    def __init__(self, training: Training, *, sync: bool) -> None:
        self._training = training
        self._sync = sync

    def save(self, step: int) -> None:
        write(self._training.state(), step, sync=self._sync)

    def is_done(self) -> bool:
        return True


class CloneAndThread:
    """All tensors cloned, then torch.save in a thread."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._thread = threading.Thread()

    def save(self, step: int) -> None:
        copy = clone(self._training.state())
        self._thread = threading.Thread(target=write, args=(copy, step), kwargs={"sync": True})
        self._thread.start()

    def is_done(self) -> bool:
        return not self._thread.is_alive()


class Distributed:
    """torch.distributed.checkpoint: at once, or asynchronously in a thread or a process."""

    def __init__(self, training: Training, kind: str) -> None:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        torch.distributed.init_process_group("gloo", rank=0, world_size=1)
        self._training = training
        self._kind = kind
        self._under_way: Future[Any] | None = None
        self._names = (Path(), Path())

    def save(self, step: int) -> None:
        part, final = FOLDER / f".part-{step}", FOLDER / f"step-{step}"
        self._names = part, final
        writer = FileSystemWriter(part, sync_files=True)
        state = self._training.state()
        if self._kind == "wait":
            dcp.save(state, storage_writer=writer)
            part.rename(final)
            return
        kind = dcp.AsyncCheckpointerType.PROCESS if self._kind == "process" else dcp.AsyncCheckpointerType.THREAD
        self._under_way = dcp.async_save(  # type: ignore[assignment]
            state, storage_writer=writer, async_checkpointer_type=kind
        )

    def is_done(self) -> bool:
        if self._under_way is not None:
            if not self._under_way.done():
                return False
            self._under_way.result()
            self._under_way = None
            self._names[0].rename(self._names[1])
        return True


class TorchSnapshot:
    """torchsnapshot's asynchronous take."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._pending: Any = None
        self._names = (Path(), Path())

    def save(self, step: int) -> None:
        torchsnapshot: Any = importlib.import_module("torchsnapshot")

        self._names = FOLDER / f".part-{step}", FOLDER / f"step-{step}"
        state = {"model": self._training.model, "optimizer": self._training.optimizer}
        self._pending = torchsnapshot.Snapshot.async_take(str(self._names[0]), state)

    def is_done(self) -> bool:
        if self._pending is not None and self._pending.done():
            self._pending.wait()
            self._pending = None
            self._names[0].rename(self._names[1])
        return self._pending is None


WAYS: dict[str, Callable[[Training], Way]] = {
    "runner.training": Ours,
    "torch.save": lambda training: TorchSave(training, sync=False),
    "torch.save, fsync": lambda training: TorchSave(training, sync=True),
    "clones, a thread": CloneAndThread,
    "DCP save": lambda training: Distributed(training, "wait"),
    "DCP async_save, thread": lambda training: Distributed(training, "thread"),
    "DCP async_save, process": lambda training: Distributed(training, "process"),
    "torchsnapshot async_take": TorchSnapshot,
}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def write(state: Any, step: int, *, sync: bool) -> None:
    part, final = FOLDER / f".part-{step}", FOLDER / f"step-{step}.pt"
    with part.open("wb") as file:
        torch.save(state, file)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    part.rename(final)


def clone(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: clone(one) for key, one in value.items()}
    return [clone(one) for one in value] if isinstance(value, list) else value


# -- measuring ---------------------------------------------------------------------------------------------------------


def measure(training: Training, way: Way, step: int, targets: list[Tensor], store: Path | None) -> Seen:
    alone = median([training.step() for _ in range(STEPS_ALONE)])
    copied = copy_once(training.tensors(), targets)
    at, began = time.time(), time.perf_counter()
    way.save(step)
    stall = time.perf_counter() - began
    done: list[float] = []
    watcher = threading.Thread(target=lambda: done.append(watch(way)))
    watcher.start()
    slowdown = 0.0
    while watcher.is_alive():
        slowdown += training.step() - alone
    stored = None if store is None else wait_for_store(store, began)
    return Seen(at, copied, stall, slowdown, done[0] - began, stored, alone)


def wait_for_store(store: Path, began: float) -> float | None:
    """Seconds until a checkpoint is committed there; None where that does not happen for a while."""
    give_up = time.monotonic() + WAIT_FOR_STORE_S
    while not list(store.rglob("cloudrun-manifest.json")):
        if time.monotonic() > give_up:
            return None
        time.sleep(0.01)
    return time.perf_counter() - began


def watch(way: Way) -> float:
    until(way.is_done, 0.005)
    return time.perf_counter()


def until(happens: Callable[[], bool], pause: float = 0.02) -> None:
    give_up = time.monotonic() + MOST_WAIT_S
    while not happens():
        if time.monotonic() > give_up:
            raise TimeoutError(f"still not so after {MOST_WAIT_S:g} s")
        time.sleep(pause)


def copy_once(sources: list[Tensor], targets: list[Tensor]) -> float:
    began = time.perf_counter()
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
    return time.perf_counter() - began


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def memory_of(pid: int, field: str) -> Iterator[int]:
    """Bytes of a process and of all below it; those that have gone meanwhile do not count."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    yield next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith(field))
    for child in children:
        yield from memory_of(int(child), field)


def main() -> None:
    way_name, layers, width, saves = sys.argv[1], *map(int, sys.argv[2:5])
    FOLDER.mkdir(parents=True, exist_ok=True)
    training = Training(layers, width)
    for _ in range(3):
        training.step()
    targets = [torch.zeros_like(tensor) for tensor in training.tensors()]
    before = sum(memory_of(os.getpid(), "VmRSS:"))
    way = WAYS[way_name](training)
    size = sum(tensor.numel() * tensor.element_size() for tensor in training.tensors())
    for number in range(1, saves + 1):
        store = Path(os.environ["BENCH_STORE"]) if number == 1 else None
        print("seen", json.dumps(asdict(measure(training, way, 10 * number, targets, store))), flush=True)
        if number > 2:
            remove(number - 2)
    peak = sum(memory_of(os.getpid(), "VmHWM:"))
    print("memory", json.dumps({"extra": peak - before, "state": size}), flush=True)


def remove(number: int) -> None:
    """Old ones, which a training would not keep either."""
    for path in FOLDER.glob(f"step-*{10 * number}*"):
        if path.name.removesuffix(".pt").rpartition("-")[2].lstrip("0") == str(10 * number):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


if __name__ == "__main__":
    main()
