"""Snapshots of a run: from shared memory to the disk, whoever dies meanwhile."""

from __future__ import annotations

import json
import math
import queue
import re
import secrets
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.checkpoint.local import delete
from runner.core.events import Noticed
from runner.supervisor import saver
from runner.supervisor.session import Session
from runner.supervisor.shelf_watch import Begun, ShelfWatch
from runner.supervisor.slots import (
    SHARED_MEMORY,
    SharedFolder,
    Slot,
    clear_slot,
    is_whole,
    newest_whole,
    read_slot,
    remove_leftovers,
    room_in,
)

PART_PREFIX = ".snapshot-"
# So many stay on this disk; older ones are in the store, or will never be needed.
KEPT_HERE = 3
SUPERSEDED = "a newer one was saved"
SKIPPED = "not all ranks saved this step"

_FOLDER = re.compile(r"step-(\d{12,})")


def folder_name(step: int) -> str:
    """The checkpoint that a snapshot of this step becomes."""
    return f"step-{step:012d}"


class Snapshots:
    """The shared memory of one run, for the whole session. A job whose trainers never ask for it has none."""

    def __init__(
        self, session: Session, run: int, uploading: Callable[[], str | None], root: Path = SHARED_MEMORY
    ) -> None:
        """``uploading`` tells the name of the checkpoint whose files are being read, if there is one."""
        self._session = session
        self._target = session.folders(run).checkpoints
        self._uploading = uploading
        self._root = root
        identity = f"{session.local.store_url}\n{session.spec.name}\n{run}\n{self._target}"
        self._folder = SharedFolder(root, identity)
        self._room: int | None = None
        self._told = ""

    @property
    def folder(self) -> Path:
        return self._folder.path

    def rescue(self) -> None:
        """Bring to the disk what an earlier supervisor of this boot left in shared memory, and clean up after it."""
        if not self._root.is_dir():
            return
        remove_leftovers(self._root, self.folder, self._session.clock.now())
        try:
            if self.folder.is_dir():
                # Its saver may still be writing: it keeps the lock until it is done.
                self._folder.open()
            for part in self._target.glob(f"{PART_PREFIX}*"):
                delete(part)
            self.settle()
        except OSError as error:
            self._session.post(Noticed(f"what an earlier supervisor left in {self.folder} cannot be saved: {error}"))

    def begin(self) -> None:
        """A trainer is about to start: what is left of the one before it gives way."""
        self.settle()
        self._folder.empty()
        self._room = None

    def welcome(self) -> dict[str, Any]:
        """What a trainer is told of its shared memory. ``room`` is for all its ranks together."""
        try:
            self._folder.open(within=0.0)
            if self._room is None:
                self._room = room_in(self._root)
        except OSError as error:
            return {"shared_memory": None, "room": 0, "why_not": str(error)}
        return {"shared_memory": str(self.folder), "room": self._room, "why_not": None}

    def settle(self) -> str:
        """Nobody writes slots now: save the newest step that every rank has; then the memory is free again.

        When it cannot be saved, it stays where it is, and the answer says why.
        """
        whole = newest_whole(self._folder.slots()) if self._folder.is_open else []
        why = self.persist(whole, hurried=True) if whole else ""
        if not why:
            self._folder.empty()
        return why and f"the newest step, {whole[0].step}, is not saved: {why}"

    def persist(self, slots: list[Slot], *, hurried: bool) -> str:
        """Save one step, of which ``slots`` are the ranks' parts in order. Answers why that failed; empty: it is saved.

        With ``hurried`` as fast as it goes, else with what the trainer leaves of processors and disk.
        """
        try:
            order = make_order(slots, self._target)
            self._folder.touch()
        except (OSError, ValueError, TypeError, RecursionError) as error:
            why = f"the snapshot cannot be read: {error}"
        else:
            why = run_saver(order | {"hurried": hurried}, self._folder.lock)
            shutil.rmtree(order["part"], ignore_errors=True)  # is still there when the saver was killed
        if why:
            self._complain(f"step {slots[0].step} could not be saved in {self._target}: {why}")
            return why
        for slot in slots:
            clear_slot(slot)
        self._told = ""
        self.rotate()
        return ""

    def rotate(self) -> None:
        """Keep the newest few of our folders. In a folder of the owner's nothing is deleted."""
        if self._session.spec.checkpoint_dir is not None:
            return
        ours = sorted(path for path in self._target.glob("step-*") if is_ours(path))
        for path in ours[:-KEPT_HERE]:
            if path.name != self._uploading():
                delete(path)

    def close(self) -> None:
        """The session leaves. What could not be saved stays for the next supervisor."""
        self._folder.close(remove=not self._folder.slots())

    def _complain(self, text: str) -> None:
        """Once for each new reason: every further save would fail in the same way."""
        what = text.partition(": ")[2]
        if what != self._told:
            self._session.post(Noticed(text))
        self._told = what


def is_ours(path: Path) -> bool:
    """True for a folder that a snapshot, or a direct save of our library, became."""
    return _FOLDER.fullmatch(path.name) is not None and (path / "state.json").is_file()


def metrics_in(slot: Slot) -> tuple[tuple[str, float], ...]:
    """What the trainer measured at this step, as far as the slot's description tells numbers."""
    try:
        told = json.loads(slot.read_meta())["metrics"]
        return tuple((str(name), float(value)) for name, value in sorted(told.items()) if math.isfinite(value))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return ()


def make_order(slots: list[Slot], target: Path) -> dict[str, Any]:
    """What the saver is to do. Raises OSError, ValueError or TypeError when a description cannot be read."""
    copies, texts = [], {}
    for slot in slots:
        stem = f"rank-{slot.rank:05d}" if slot.rank else "state"
        copies.append(
            {
                "name": f"{stem}.safetensors",
                "source": str(slot.path),
                "offset": slot.image_at,
                "bytes": slot.image,
            }
        )
        texts[f"{stem}.json"] = slot.read_meta().decode()
    state = json.loads(texts.pop("state.json"))
    if not isinstance(state, dict):
        raise TypeError("its description is no object")
    sizes = {copy["name"]: copy["bytes"] for copy in copies} | {
        name: len(text.encode()) for name, text in texts.items()
    }
    # Last, since it says of all the others that they are whole.
    texts["state.json"] = json.dumps(state | {"files": sizes}, separators=(",", ":"))
    name = folder_name(slots[0].step)
    part = f"{PART_PREFIX}{name}-{secrets.token_hex(4)}"
    return {"target": str(target / name), "part": str(target / part), "copies": copies, "texts": texts}


def run_saver(order: dict[str, Any], lock: int) -> str:
    """Have it done by a process of its own; why it failed, or nothing. It keeps ``lock`` until it is done."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", saver.__file__],
        input=json.dumps(order).encode(),
        capture_output=True,
        cwd="/",
        start_new_session=True,
        pass_fds=(lock,),
        check=False,
    )
    try:
        told = json.loads(done.stdout)
    except ValueError:
        said = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        return f"the process that saves ended with {done.returncode}: {said}".removesuffix(": ")
    return str(told.get("failed", ""))


# -- one attempt -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Announced:
    """A rank says that its slot is READY. ``at`` is when we heard (epoch seconds), ``stall`` what it cost it.

    ``hurried`` when time is short: then the save need not stand back behind the training.
    """

    rank: int
    slot: str
    sequence: int
    step: int
    at: float
    stall: float | None = None
    metrics: tuple[tuple[str, float], ...] = ()
    hurried: bool = False


@dataclass(frozen=True, slots=True)
class Passed:
    """A rank has reached this step: what it has not announced by now, it has not saved."""

    rank: int
    step: int


@dataclass(frozen=True, slots=True)
class Answer:
    """The slot may be written again. ``refused`` is why it is not on the disk, empty when it is."""

    rank: int
    slot: str
    sequence: int
    refused: str = ""


class SnapshotWriter:
    """Saves the snapshots of one attempt, one at a time and the newest first, in a thread of its own."""

    def __init__(
        self,
        snapshots: Snapshots,
        watch: ShelfWatch,
        answer: Callable[[Answer], None],
        complain: Callable[[str], None],
    ) -> None:
        self._complain = complain
        self._snapshots = snapshots
        self._watch = watch
        self._answer = answer
        self._heard: queue.SimpleQueue[Announced | Passed | None] = queue.SimpleQueue()
        self._waiting: list[Slot] = []
        self._reached: dict[int, int] = {}
        self._hurried: set[int] = set()
        self._thread = threading.Thread(target=self._work, name="snapshots", daemon=True)

    def start(self) -> None:
        self._snapshots.begin()
        self._thread.start()

    def hear(self, news: Announced | Passed) -> None:
        """Returns at once."""
        self._heard.put(news)

    def finish(self) -> str:
        """The trainer has gone: bring the newest step that it finished to the disk. Answers why that failed."""
        self._heard.put(None)
        self._thread.join()
        return self._snapshots.settle()

    def _work(self) -> None:
        try:
            while self._listen():
                self._release(SKIPPED, [slot for slot in self._waiting if self._is_hopeless(slot)])
                if whole := newest_whole(self._waiting):
                    self._write(whole)
        except Exception as error:  # noqa: BLE001 - a thread's edge: the error becomes a notice
            self._complain(f"snapshots are not saved any more in this attempt: {error!r}")

    def _listen(self) -> bool:
        """Wait for news and take all there is; False when there will be no more."""
        news = self._heard.get()
        while news is not None:
            self._reached[news.rank] = max(news.step, self._reached.get(news.rank, 0))
            if isinstance(news, Announced):
                self._take(news)
            try:
                news = self._heard.get_nowait()
            except queue.Empty:
                return True
        return False

    def _take(self, news: Announced) -> None:
        slot = read_slot(self._snapshots.folder / news.slot)
        if slot is None or (slot.rank, slot.sequence, slot.step) != (news.rank, news.sequence, news.step):
            self._answer(Answer(news.rank, news.slot, news.sequence, "the slot does not hold what was announced"))
            return
        self._waiting = [*(other for other in self._waiting if other.path != slot.path), slot]
        if news.hurried:
            self._hurried.add(slot.step)
        if slot.rank == 0:
            self._watch.expect(folder_name(slot.step), Begun(news.at, news.stall, news.metrics or metrics_in(slot)))

    def _is_hopeless(self, slot: Slot) -> bool:
        of_step = {other.rank: other for other in self._waiting if other.step == slot.step}
        if is_whole(of_step):
            return False
        missing = self._reached.keys() - of_step.keys()
        return any(self._reached[rank] > slot.step for rank in missing)

    def _write(self, whole: list[Slot]) -> None:
        step = whole[0].step
        why = self._snapshots.persist(whole, hurried=step in self._hurried)
        if not why:
            self._watch.look_now()
        for slot in whole:
            self._waiting.remove(slot)
            self._answer(Answer(slot.rank, slot.path.name, slot.sequence, why))
        if not why:
            self._release(SUPERSEDED, [slot for slot in self._waiting if slot.step < step])

    def _release(self, why: str, slots: Collection[Slot]) -> None:
        for slot in slots:
            self._waiting.remove(slot)
            clear_slot(slot)
            self._answer(Answer(slot.rank, slot.path.name, slot.sequence, why))
