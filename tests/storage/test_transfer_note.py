"""Notes of long transfers: every piece is there, and none without what it belongs to."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from runner.storage.transfer_note import TransferNote


def test_pieces_that_are_added_at_once_are_all_there(tmp_path: Path) -> None:
    note = TransferNote(tmp_path / "note", {"object": "k"})
    note.begin({"upload": "u"})
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda number: note.add({"part": number, "tag": "x" * (number % 50)}), range(2000)))
    told = TransferNote(tmp_path / "note", {"object": "k"}).read()
    assert told is not None
    assert told[0]["upload"] == "u"
    assert sorted(piece["part"] for piece in told[1]) == list(range(2000))


def test_a_piece_does_not_make_a_note(tmp_path: Path) -> None:
    note = TransferNote(tmp_path / "note", {"object": "k"})
    note.add({"part": 1})
    assert not (tmp_path / "note").exists()


def test_a_note_about_something_else_says_nothing(tmp_path: Path) -> None:
    TransferNote(tmp_path / "note", {"object": "k"}).begin({})
    assert TransferNote(tmp_path / "note", {"object": "other"}).read() is None
