"""A folder as an object store: local disks, NFS, any mounted file system (``file://``)."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from runner.clock import Clock, SystemClock
from runner.errors import BadKey, ObjectChanged, ObjectExists, ObjectMissing, StoreError, StoreUnreachable
from runner.files import (
    STORE_LOCK,
    is_hidden,
    is_part,
    locked,
    make_directory,
    part_path,
    replace_durably,
    sync_directory,
)
from runner.storage.api import (
    ObjectInfo,
    OnBytes,
    Sink,
    check_folder,
    check_key,
    check_prefix,
    check_size,
    ignore_bytes,
)
from runner.storage.local import as_ours, copy_bytes, copy_seen, current, fingerprint, reading, translating, write_all

NAME_LIMIT = 255
"""Bytes of one segment of a key: what common file systems can hold."""

STALE_PART = 86400.0
"""Seconds after which a part file belongs to a writer that is dead."""

_VANISHED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EROFS)
_RENAME_NOREPLACE = 1
_AT_FDCWD = -100

Publish = Callable[[Path, Path], None]


def version_of(info: os.stat_result) -> str:
    size, mtime_ns, inode = fingerprint(info)
    return f"{mtime_ns}-{size}-{inode}"


def info_of(key: str, info: os.stat_result) -> ObjectInfo:
    return ObjectInfo(key, info.st_size, version_of(info), info.st_mtime)


class FolderStore:
    """An :class:`ObjectStore` whose keys are the paths of the regular files below ``root``.

    Symbolic links are followed for reading. Nothing is written or deleted through a linked folder that leads out of
    the root. Sockets, pipes, devices and dangling links are no objects: a bucket could not hold them.
    """

    def __init__(self, root: Path, *, clock: Clock | None = None) -> None:
        self._root = Path(os.path.abspath(root))
        self._clock = clock or SystemClock()
        self._swept: set[Path] = set()
        self._was_there = False
        self._was_mounted = False

    @property
    def url(self) -> str:
        return f"file://{self._root}"

    @property
    def exclusive(self) -> bool:
        """New names are so on every file system; for replacing it takes locks, which some network mounts have not."""
        try:
            with self._locked():
                return True
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return False
            raise as_ours(error, self.url) from error

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        with translating(self._what(prefix)):
            if self._has_root():
                yield from _walk(self._root, prefix)
                # When a disk is taken away in the middle, the rest looks deleted.
                self._has_root()

    def folders(self, prefix: str = "") -> Iterator[str]:
        check_folder(prefix)
        with translating(self._what(prefix)):
            if self._has_root():
                for entry in _entries(os.path.join(self._root, prefix)):
                    # One without a single object in it is no folder of a store.
                    if _is_folder(entry) and next(_walk(self._root, f"{prefix}{_text(entry)}/"), None):
                        yield entry.name
                self._has_root()

    def read(self, key: str) -> bytes:
        return self.look(key)[0]

    def look(self, key: str, *, at_most: int | None = None) -> tuple[bytes, str]:
        with translating(self._what(key)), self._opened(key) as fd, os.fdopen(fd, "rb", closefd=False) as file:
            check_size(self._what(key), os.fstat(fd).st_size, at_most)
            return file.read(), version_of(os.fstat(fd))

    def write(self, key: str, data: bytes, *, only_new: bool = False, replacing: str | None = None) -> ObjectInfo:
        target = self._place(key)
        with self._writing(target, len(data)) as (part, fd):
            write_all(fd, data)
            if replacing is None:
                return self._publish(key, fd, part, target, publish_new if only_new else replace_durably)
            with self._locked():
                self._check_version(key, replacing)
                return self._publish(key, fd, part, target, replace_durably)

    def download(
        self,
        key: str,
        target: Path,
        *,
        version: str | None = None,
        on_bytes: OnBytes = ignore_bytes,
        note: Path | None = None,
    ) -> int | None:
        with translating(self._what(key)), self._opened(key) as source:
            before = os.fstat(source)
            if version not in (None, version_of(before)):
                raise ObjectChanged(f"{self._what(key)} is not the version that was asked for")
            with translating(str(target), room=(target.parent, before.st_size)), open(target, "wb", 0) as file:
                copy_bytes(source, file.fileno(), before.st_size, on_bytes)
            if fingerprint(os.fstat(source)) != fingerprint(before) or (
                version is not None and current(self._path(key)) != fingerprint(before)
            ):
                raise ObjectChanged(f"{self._what(key)} changed while it was read")
        return None

    def upload(
        self,
        source: Path,
        key: str,
        *,
        on_bytes: OnBytes = ignore_bytes,
        sink: Callable[[], Sink] | None = None,
        note: Path | None = None,
    ) -> ObjectInfo:
        target = self._place(key)
        with reading(source) as file, self._writing(target, file.size) as (part, fd):
            if sink is None:
                copy_bytes(file.fd, fd, file.size, on_bytes)
            else:
                copy_seen(file.fd, fd, sink(), on_bytes)
            file.check()
            return self._publish(key, fd, part, target, replace_durably)

    def copy(self, source: str, key: str, *, version: str | None = None) -> ObjectInfo:
        target = self._place(key)
        with translating(self._what(source)), self._opened(source) as fd:
            before = os.fstat(fd)
            if version not in (None, version_of(before)):
                raise ObjectChanged(f"{self._what(source)} is not the version that was asked for")
            with self._writing(target, before.st_size) as (part, part_fd):
                copy_bytes(fd, part_fd, before.st_size)
                if fingerprint(os.fstat(fd)) != fingerprint(before):
                    raise ObjectChanged(f"{self._what(source)} changed while it was copied")
                return self._publish(key, part_fd, part, target, replace_durably)

    def delete(self, keys: Iterable[str]) -> None:
        touched = set[Path]()
        for key in keys:
            path = self._place(key)
            with translating(self._what(key)):
                if _unlink_object(path):
                    touched.add(path.parent)
        for folder in touched:
            with translating(f"file://{folder}"):
                self._tidy(folder)

    def sweep(self, prefix: str, before: float) -> None:
        check_folder(prefix)
        with translating(self._what(prefix)):
            if self._has_root():
                for folder, _, names in os.walk(os.path.join(self._root, prefix)):
                    _remove_parts([Path(folder, name) for name in names if is_part(name)], before)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Alone among all processes, of all machines where the file system carries locks, that replace something."""
        self._has_root()
        with locked(self._root / STORE_LOCK):
            yield

    def _check_version(self, key: str, version: str) -> None:
        with self._opened(key) as fd:
            if version_of(os.fstat(fd)) != version:
                raise ObjectChanged(f"{self._what(key)} is not the version that was asked for")

    def _what(self, key: str) -> str:
        return f"{self.url}/{key}"

    def _path(self, key: str) -> Path:
        return self._root / key

    def _has_root(self) -> bool:
        """Whether the root exists. Raises StoreUnreachable when it did once, or was a mount point, and is not so now:
        an empty mount point must not pass for an empty store, nor be filled in its place.
        """
        # Remembered before looking: another thread may be making the root right now.
        was_there, was_mounted = self._was_there, self._was_mounted
        with translating(self.url):
            there = _identity(str(self._root)) is not None
            if there and not os.path.isdir(self._root):
                raise StoreError(f"{self.url} is a file, not a folder", "a store is a folder; give another path")
            mounted = there and os.path.ismount(self._root)
            dangling = not there and any(map(os.path.islink, self._missing()))
        if dangling or (was_there and not there) or (was_mounted and not mounted):
            raise StoreUnreachable(f"{self.url} is not there", "is the disk mounted?")
        if there:
            self._was_there, self._was_mounted = True, mounted
        return there

    def _missing(self) -> Iterator[Path]:
        """The root and the folders above it, as far as they do not exist."""
        return (path for path in (self._root, *self._root.parents) if not os.path.exists(path))

    @contextmanager
    def _opened(self, key: str) -> Iterator[int]:
        """A descriptor of the object's file; of exactly one version of it, also when it is replaced meanwhile."""
        check_key(key)
        self._has_root()
        fd = None if is_hidden(os.path.basename(key)) else _open_object(self._path(key))
        if fd is None:
            raise ObjectMissing(f"{self._what(key)} does not exist")
        try:
            yield fd
        finally:
            os.close(fd)

    def _place(self, key: str) -> Path:
        """The path that may be written or deleted for ``key``."""
        check_key(key)
        if any(len(os.fsencode(segment)) > NAME_LIMIT for segment in key.split("/")):
            raise BadKey(f"bad key {key[:60]!r}...: a segment is longer than {NAME_LIMIT} bytes")
        self._has_root()
        path = self._path(key)
        if is_hidden(path.name):
            raise BadKey(f"bad key {key!r}: this name is kept for unfinished writes")
        root = os.path.realpath(self._root)
        if not Path(os.path.realpath(path.parent)).is_relative_to(root):
            raise BadKey(f"bad key {key!r}: a symbolic link leads out of {self.url}")
        return path

    @contextmanager
    def _writing(self, target: Path, size: int) -> Iterator[tuple[Path, int]]:
        """A part file beside ``target`` and its descriptor; whatever is left of it at the end goes."""
        with translating(f"file://{target}"):
            part, fd = self._new_part(target)
        try:
            with translating(f"file://{target}", room=(target.parent, size)):
                yield part, fd
        finally:
            os.close(fd)
            with suppress(FileNotFoundError):
                part.unlink()

    def _new_part(self, target: Path) -> tuple[Path, int]:
        for _ in range(20):
            # A delete that tidies up may take the folder away before our part stands in it.
            with suppress(FileNotFoundError), _object_in_the_way(target):
                make_directory(target.parent)
                self._sweep_once(target.parent)
                part = part_path(target)
                return part, os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        raise StoreUnreachable(f"{target.parent} vanishes as soon as it is made")

    def _publish(self, key: str, fd: int, part: Path, target: Path, publish: Publish) -> ObjectInfo:
        os.fsync(fd)
        info = info_of(key, os.fstat(fd))
        _make_way(target)
        publish(part, target)
        return info

    def _sweep_once(self, folder: Path) -> None:
        """Remove what dead writers left, the first time that this process touches ``folder``."""
        if folder in self._swept:
            return
        self._swept.add(folder)
        with os.scandir(folder) as entries:
            parts = [Path(entry.path) for entry in entries if is_part(entry.name)]
        _remove_parts(parts, self._clock.now() - STALE_PART)

    def _tidy(self, folder: Path) -> None:
        """Remove folders that a delete left empty (a bucket has none) and make the delete durable."""
        while folder != self._root and self._remove_empty(folder):
            folder = folder.parent
        with suppress(FileNotFoundError, NotADirectoryError):
            sync_directory(folder)

    def _remove_empty(self, folder: Path) -> bool:
        """True when ``folder`` has gone, by us or by another."""
        try:
            self._sweep_once(folder)
            os.rmdir(folder)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True


def _remove_parts(parts: list[Path], before: float) -> None:
    for part in parts:
        with suppress(FileNotFoundError):
            if part.lstat().st_mtime < before:
                part.unlink()


def publish_new(part: Path, target: Path, link: Callable[[Path, Path], None] = os.link) -> None:
    """Give ``part`` the name ``target`` unless it is taken (ObjectExists). Atomic, on NFS as well."""
    try:
        link(part, target)
    except FileExistsError:
        # A server whose answer was lost sees our own second try: then the name is taken by our very file.
        if not _same_file(part, target):
            raise ObjectExists(f"file://{target} exists") from None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        rename_new(part, target)
    sync_directory(target.parent)


def rename_new(part: Path, target: Path) -> None:
    """Rename without replacing, for file systems that have no hard links (FAT, some network mounts)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not libc.renameat2(_AT_FDCWD, os.fsencode(part), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE):
        return
    code = ctypes.get_errno()
    if code == errno.EEXIST:
        raise ObjectExists(f"file://{target} exists")
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        raise StoreError(
            f"file://{target.parent}: this file system has neither hard links nor renames that do not replace",
            "only one of several machines may write there, and cloudrun cannot make sure of it: use another folder",
        )
    raise OSError(code, os.strerror(code), str(target))


def _same_file(one: Path, other: Path) -> bool:
    try:
        return os.path.samestat(os.lstat(one), os.lstat(other))
    except FileNotFoundError:
        return False


@contextmanager
def _object_in_the_way(target: Path) -> Iterator[None]:
    try:
        yield
    except NotADirectoryError as error:
        raise BadKey(f"file://{target}: a folder of its path is an object; a disk cannot hold both") from error


def _make_way(target: Path) -> None:
    """Objects cannot have the name of a folder; one that is empty is nothing and goes."""
    if not os.path.isdir(target):
        return
    try:
        os.rmdir(target)
    except OSError as error:
        raise BadKey(f"file://{target} is a folder with objects; a disk cannot hold both") from error


def _open_object(path: Path) -> int | None:
    """A descriptor of the regular file ``path``; None when there is none."""
    try:
        # Without O_NONBLOCK a named pipe would hold us until somebody writes into it.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (*_VANISHED, errno.ENXIO):
            return None
        raise
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    return None


def _unlink_object(path: Path) -> bool:
    """Remove a file (or a link, never what it points to); False when there is none."""
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            return False
        os.unlink(path)
    except OSError as error:
        if error.errno in _VANISHED:
            return False
        raise
    return True


@dataclass(frozen=True, slots=True)
class _Branch:
    """A folder still to be listed, and the identities of the folders above it: a link to one of those is a loop."""

    path: str
    key: str
    start: str = ""
    above: frozenset[tuple[int, int]] = frozenset()


def _walk(root: Path, prefix: str) -> Iterator[ObjectInfo]:
    folder, slash, start = prefix.rpartition("/")
    waiting = [_Branch(os.path.join(root, folder), folder + slash, start)]
    while waiting:
        branch = waiting.pop()
        identity = _identity(branch.path)
        if identity is None or identity in branch.above:
            continue
        above = branch.above | {identity}
        for entry in _entries(branch.path):
            if not entry.name.startswith(branch.start):
                continue
            key = branch.key + _text(entry)
            if _is_folder(entry):
                waiting.append(_Branch(entry.path, key + "/", "", above))
            elif not is_hidden(entry.name) and (info := _object_stat(entry)):
                yield info_of(key, info)


def _identity(folder: str) -> tuple[int, int] | None:
    try:
        info = os.stat(folder)
    except OSError as error:
        if error.errno in _VANISHED:
            return None
        raise
    return info.st_dev, info.st_ino


def _entries(path: str) -> Iterator[os.DirEntry[str]]:
    """The names in a folder; none when it vanished. Any other trouble is raised: a listing never just ends early."""
    try:
        entries = os.scandir(path)
    except OSError as error:
        if error.errno in _VANISHED:
            return
        raise
    with entries:
        yield from entries


def _text(entry: os.DirEntry[str]) -> str:
    try:
        entry.name.encode()
    except UnicodeEncodeError:
        raise StoreError(
            f"{os.fsencode(entry.path)!r}: a file name that is not UTF-8", "rename the file: a key must be text"
        ) from None
    return entry.name


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno in _VANISHED:
            return False
        raise


def _object_stat(entry: os.DirEntry[str]) -> os.stat_result | None:
    """None for what is no object: special files, dangling links, files that vanished meanwhile."""
    try:
        info = entry.stat()
    except OSError as error:
        if error.errno in _VANISHED:
            return None
        raise
    return info if stat.S_ISREG(info.st_mode) else None
