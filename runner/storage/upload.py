"""Up: one file into one object; large ones in parts, several at once, from one reading of the file.

The file is read once, in order, by one thread; every byte goes past the caller's sink and then to the store. What has
arrived is written down, so that another process sends only the rest: it reads all of the file again, but a part whose
checksum is the one that was sent needs not to be sent again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from crc32c import crc32c

from runner.errors import AccessDenied, CloudrunError, CredentialsExpired, NotOffered, ObjectMissing, SourceChanged
from runner.storage.api import ObjectInfo, OnBytes, Sink
from runner.storage.bucket import PART_LIMIT, Part
from runner.storage.local import OpenSource, reading, translating
from runner.storage.requests import Requests, raise_first
from runner.storage.transfer_note import TransferNote

PART = 16 << 20
"""Bytes of a part, and of the largest object that goes in one request."""

PARTS_AT_ONCE = 6


def part_size_for(size: int) -> int:
    """Bytes of a part: whole MiB, such that ``size`` needs no more parts than providers take, with room to spare."""
    mebibytes = -(-size // (PART_LIMIT * 9 // 10 << 20))
    return max(PART, mebibytes << 20)


@dataclass(frozen=True, slots=True)
class Upload:
    """One file on its way to ``key``, which is the bucket's. The rest is as in ``ObjectStore.upload``."""

    requests: Requests
    key: str
    on_bytes: OnBytes
    sink: Callable[[], Sink] | None
    note: Path | None

    def run(self, source: Path) -> ObjectInfo:
        """Raises SourceChanged, and the bucket's errors."""
        with reading(source) as file:
            if file.size <= PART:
                return self._small(file)
            try:
                return _InParts(self, file).run()
            except ObjectMissing:
                # Somebody has aborted it under way: a rule of the bucket, another tool.
                if self.note is not None:
                    self.note.unlink(missing_ok=True)
                os.lseek(file.fd, 0, os.SEEK_SET)
                return _InParts(self, file).run()

    def _small(self, file: OpenSource) -> ObjectInfo:
        buffer = memoryview(whole(file))
        if self.sink is not None:
            self.sink()(buffer)
        # The listener may want to end it all: before anything has happened.
        self.on_bytes(0)
        file.check()
        info = self.requests.send("upload", lambda: self.requests.bucket.put(self.key, buffer))
        self.on_bytes(file.size)
        return info


class _InParts:
    """A multipart upload of one file."""

    def __init__(self, upload: Upload, file: OpenSource) -> None:
        self._upload = upload
        self._requests = upload.requests
        self._file = file
        self._part_size = part_size_for(file.size)
        self._failed = threading.Event()
        self._note = self._make_note()
        self._id, self._arrived = self._begin()

    def run(self) -> ObjectInfo:
        try:
            with self._requests.buffers.in_use():
                parts = self._send_all()
            self._file.check()
            info = self._finish(parts)
        except SourceChanged:
            self._abort()
            raise
        except BaseException:
            if self._note is None:
                self._abort()
            raise
        if self._note is not None:
            self._note.remove()
        return info

    def _make_note(self) -> TransferNote | None:
        if self._upload.note is None:
            return None
        about = {
            "object": self._requests.what(self._upload.key),
            "source": str(self._file.path),
            "seen": list(self._file.seen),
            "part_size": self._part_size,
        }
        return TransferNote(self._upload.note, about)

    def _begin(self) -> tuple[str, dict[int, tuple[int, Part]]]:
        """The upload's id, and for each part that has arrived its crc32c and what the store calls it."""
        told = self._note.read() if self._note is not None else None
        if told is not None:
            upload = str(told[0]["upload"])
            try:
                return upload, self._still_there(upload, told[1])
            except CredentialsExpired:
                raise
            except (ObjectMissing, AccessDenied, NotOffered):
                pass  # to ask for parts takes a right that sending has no need of
        upload = self._requests.send("upload", lambda: self._requests.bucket.begin(self._upload.key))
        if self._note is not None:
            self._note.begin({"upload": upload})
        return upload, {}

    def _still_there(self, upload: str, pieces: list[dict[str, Any]]) -> dict[int, tuple[int, Part]]:
        there = self._requests.send("upload", lambda: self._requests.bucket.parts(self._upload.key, upload))
        parts = {part.number: part for part in there}
        sent = {piece["part"]: piece for piece in pieces}
        return {
            number: (sent[number]["crc32c"], part)
            for number, part in parts.items()
            if number in sent and sent[number]["tag"] == part.tag
        }

    def _send_all(self) -> list[Part]:
        sink = self._upload.sink() if self._upload.sink is not None else None
        sending: list[Future[Part]] = []
        with ThreadPoolExecutor(PARTS_AT_ONCE, thread_name_prefix="part") as pool:
            try:
                for number, start in enumerate(range(0, self._file.size, self._part_size), 1):
                    if self._failed.is_set():
                        break
                    block = self._requests.buffers.take(self._part_size)
                    sending.append(pool.submit(self._send_and_give_back, number, block, self._read(block, start, sink)))
                raise_first(sending)
                return [part.result() for part in sending]
            except BaseException:
                self._failed.set()
                raise

    def _read(self, block: bytearray, start: int, sink: Sink | None) -> memoryview:
        """The part that begins at ``start``, in ``block``, which goes back when it cannot be had."""
        try:
            data = memoryview(block)[: min(self._part_size, self._file.size - start)]
            fill(self._file, data)
            if sink is not None:
                sink(data)
        except BaseException:
            self._requests.buffers.give_back(block)
            raise
        return data

    def _send_and_give_back(self, number: int, block: bytearray, data: memoryview) -> Part:
        try:
            part = self._send(number, data)
            self._upload.on_bytes(len(data))
            return part
        except BaseException:
            self._failed.set()
            raise
        finally:
            data.release()
            self._requests.buffers.give_back(block)

    def _send(self, number: int, data: memoryview) -> Part:
        checksum = crc32c(data)
        known, there = self._arrived.get(number, (None, None))
        if there is not None and known == checksum and there.size == len(data):
            return replace(there, crc32c=checksum)
        part = self._requests.retry("upload", lambda: self._put(number, data))
        if self._note is not None:
            self._note.add({"part": number, "crc32c": checksum, "tag": part.tag})
        return part

    def _put(self, number: int, data: memoryview) -> Part:
        if self._failed.is_set():
            raise CancelledError
        # The listener may want to end it all: asked before each try.
        self._upload.on_bytes(0)
        with self._requests.throttle.turn():
            return self._requests.bucket.put_part(self._upload.key, self._id, number, data)

    def _finish(self, parts: list[Part]) -> ObjectInfo:
        requests, key, tries = self._requests, self._upload.key, 0
        before = self._version_there()

        def finish() -> ObjectInfo:
            nonlocal tries
            tries += 1
            try:
                return requests.bucket.finish(key, self._id, parts)
            except ObjectMissing:
                # After a lost answer the store knows the object, and the upload no more.
                there = requests.bucket.head(key) if tries > 1 else None
                if there is None or there.size != self._file.size or there.version == before:
                    raise
                return there

        return requests.send("upload", finish)

    def _version_there(self) -> str | None:
        """Of the object that has our key already."""
        try:
            return self._requests.send("upload", lambda: self._requests.bucket.head(self._upload.key)).version
        except ObjectMissing:
            return None

    def _abort(self) -> None:
        """Best effort: what stays behind is swept later, and must not hide the error that brought us here."""
        with suppress(CloudrunError):
            self._requests.bucket.abort(self._upload.key, self._id)
        if self._note is not None:
            self._note.remove()


def whole(file: OpenSource) -> bytes:
    """All of a small file. Raises SourceChanged when it has fewer bytes than it had."""
    with translating(str(file.path)):
        data = os.read(file.fd, file.size)
        while len(data) < file.size:
            more = os.read(file.fd, file.size - len(data))
            if not more:
                raise SourceChanged(f"{file.path} became shorter while it was read")
            data += more
    return data


def fill(file: OpenSource, buffer: memoryview) -> None:
    """Read as many bytes as the buffer has room for. Raises SourceChanged when there are fewer."""
    with translating(str(file.path)):
        while buffer:
            count = os.readv(file.fd, [buffer])
            if not count:
                raise SourceChanged(f"{file.path} became shorter while it was read")
            buffer = buffer[count:]
