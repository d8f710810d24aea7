"""Files beside the checkpoints in which some trainers look up their newest one."""

from __future__ import annotations

import os
from pathlib import Path

from runner.checkpoint.formats import Pointer, pointer_to
from runner.files import part_path, sync_directory, write_atomically

_TEXTS = ("latest", "last_checkpoint", "latest_checkpointed_iteration.txt")
_MAX_TEXT = 4096


def lead_to(path: Path) -> None:
    """Make the trainer's own pointer, where it has one, lead to the complete checkpoint ``path``; in one step."""
    pointer = pointer_to(path)
    if pointer is None or _says(path.with_name(pointer.name), pointer):
        return
    place = path.with_name(pointer.name)
    if not pointer.is_link:
        write_atomically(place, pointer.text.encode())
        return
    part = part_path(place)
    part.symlink_to(pointer.text)
    os.replace(part, place)
    sync_directory(place.parent)


def _says(place: Path, pointer: Pointer) -> bool:
    """True where nothing is to be done, which a folder of the owner's with this name is too."""
    if place.is_symlink():
        return pointer.is_link and os.readlink(place) == pointer.text
    return place.is_dir() or (not pointer.is_link and _text(place) == pointer.text)


def dangling(folder: Path) -> list[str]:
    """Names of the pointers in ``folder`` that lead nowhere: a trainer that follows one fails, at every start."""
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    links = [name for name in names if name.startswith("latest-rank") and (folder / name).is_symlink()]
    texts = {name: _text(folder / name) for name in names if name in _TEXTS}
    return [name for name in links if not (folder / name).exists()] + [
        name for name, text in texts.items() if text is not None and not _target_exists(folder, text)
    ]


def _target_exists(folder: Path, text: str) -> bool:
    """A name, a path, or the number of an iteration. An empty one leads nowhere."""
    targets = [folder / text] if text else []
    if text.isascii() and text.isdigit():
        targets.append(folder / f"iter_{int(text):07d}")
    return any(os.path.lexists(target) for target in targets)


def _text(place: Path) -> str | None:
    """What a pointer says; None where there is none, or a file of the owner's that only has its name."""
    if not place.is_file():
        return None
    with open(place, "rb") as file:
        text = file.read(_MAX_TEXT).decode(errors="replace").strip()
    return text if text.isprintable() and "\ufffd" not in text else None
