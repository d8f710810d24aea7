"""A save straight to the disk: complete and synced under its final name when it returns.

Everything is written into a hidden folder first. Rank 0 writes the list of files last, syncs, and renames: nobody ever
sees half a checkpoint, neither after a kill nor after a power cut.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from runner.training import sharded
from runner.training.channel import Channel
from runner.training.folder import META, folder_name, meta_name, saved_in, step_of, tensors_name
from runner.training.image import Image
from runner.training.ranks import Ranks


class NotSaved(OSError):
    """No rank's part of this checkpoint counts, since one of them could not be written."""


class Direct:
    """Saves into one folder. The ranks call it together, with the same step."""

    def __init__(self, parent: Path, ranks: Ranks, keep: int, channel: Channel | None = None) -> None:
        self._parent = parent
        self._ranks = ranks
        self._keep = keep
        self._channel = channel

    def save(
        self,
        image: Image,
        meta: bytes,
        step: int,
        asked: bool,  # noqa: ARG002 (a disk skips nothing)
        shards: Mapping[str, Tensor] | None = None,
    ) -> bool:
        """Write this rank's part and wait for the others; always True.

        Raises OSError when this rank cannot write, NotSaved when another one cannot; nothing is left behind then.
        """
        began = time.perf_counter()
        part = self._parent / f".{folder_name(step)}.part"
        try:
            self._together(lambda: self._begin(part))
            self._together(lambda: self._write(part, image, meta))
            if shards:
                sharded.save(shards, part, self._ranks)
            self._together(lambda: self._publish(part, meta, step))
        except OSError:
            shutil.rmtree(part, ignore_errors=True)
            raise
        if self._channel is not None and self._ranks.rank == 0:
            path, metrics = self._parent / folder_name(step), json.loads(meta)["metrics"]
            self._channel.saved(str(path), step, time.perf_counter() - began, metrics)
        return True

    def _together(self, act: Callable[[], None]) -> None:
        """Every rank acts; when one of them fails, all of them raise. A rank that went on alone would wait for ever."""
        failure: OSError | None = None
        try:
            act()
        except OSError as error:
            failure = error
        if self._ranks.highest(failure is not None)[0]:
            raise failure or NotSaved("another rank could not write its part of the checkpoint")

    def _begin(self, part: Path) -> None:
        if self._ranks.rank == 0:
            self._parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()

    def _write(self, part: Path, image: Image, meta: bytes) -> None:
        rank = self._ranks.rank
        with open(part / tensors_name(rank), "wb") as file:
            image.write_to(file)
            file.flush()
            os.fsync(file.fileno())
        if rank:
            _write_synced(part / meta_name(rank), meta)

    def _publish(self, part: Path, meta: bytes, step: int) -> None:
        if self._ranks.rank:
            return
        files = {path.relative_to(part).as_posix(): path.stat().st_size for path in sorted(part.rglob("*"))}
        _write_synced(part / META, json.dumps({**json.loads(meta), "files": files}).encode())
        _sync(part)
        final = self._parent / folder_name(step)
        aside = part.with_suffix(".old")
        with suppress(FileNotFoundError):
            final.rename(aside)  # of an earlier life; a folder cannot be renamed onto another
        part.rename(final)
        _sync(self._parent)
        shutil.rmtree(aside, ignore_errors=True)
        self._prune(step)

    def _prune(self, step: int) -> None:
        """Keep the newest ones. What an earlier life saved further on stays: it is not ours to judge."""
        older = [path for path in saved_in(self._parent) if step_of(path) <= step]
        for path in older[: -self._keep]:
            shutil.rmtree(path)


def _write_synced(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
