"""File systems that take two names for one: upper and lower case, composed and decomposed letters."""

from __future__ import annotations

import secrets
import unicodedata
from collections.abc import Callable
from pathlib import Path


def folding_of(folder: Path) -> Callable[[str], str] | None:
    """How the file system of ``folder`` makes paths alike; None when it tells all of them apart."""
    name = f".probe-{secrets.token_hex(4)}-"
    probe = folder / f"{name}A\N{LATIN SMALL LETTER E WITH ACUTE}"
    probe.touch()
    try:
        case = (folder / f"{name}a\N{LATIN SMALL LETTER E WITH ACUTE}").exists()
        form = (folder / f"{name}Ae\N{COMBINING ACUTE ACCENT}").exists()
    finally:
        probe.unlink()
    return folding(case=case, form=form)


def folding(*, case: bool, form: bool) -> Callable[[str], str] | None:
    """Gives paths that a file system takes for one the same name."""
    if case:
        # Those that fold case fold forms as well, or may: one warning too many is better than a lost file.
        return lambda path: unicodedata.normalize("NFC", path.casefold())
    if form:
        return lambda path: unicodedata.normalize("NFC", path)
    return None
