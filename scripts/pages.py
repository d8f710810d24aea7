"""Pages of the docs of which a part is generated: the part stands between two marks and is never edited by hand."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GUIDES = ROOT / "docs" / "guides"


def with_part(page: str, name: str, part: str) -> str:
    """The page with the part called ``name`` replaced. Raises ValueError when its marks are not there."""
    begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->\n"
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"the page has no marks for {name}")
    return f"{before}{begin}{part}{end}{after}"


def print_or_write(page: Path, name: str, part: str) -> None:
    """Print the part; with ``--write`` on the command line, put it into its page."""
    if "--write" in sys.argv[1:]:
        page.write_text(with_part(page.read_text(), name, part))
    else:
        print(part, end="")
