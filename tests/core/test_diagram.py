"""The diagram in the docs shows what ``decide`` does."""

from __future__ import annotations

from scripts.pages import with_part
from scripts.state_diagram import NAME, PAGE, TIME, diagram, edges


def test_the_page_is_in_step_with_the_rules() -> None:
    """When it is not: python -m scripts.state_diagram --write."""
    page = PAGE.read_text()
    assert with_part(page, NAME, diagram()) == page


def test_it_shows_how_a_job_goes() -> None:
    found = edges()
    assert "Restored" in found["preparing", "running"]
    assert "TrainerExited, 1" in found["running", "backing_off"]
    assert TIME in found["backing_off", "preparing"]
    assert "DoneMarked" in found["flushing", "finished"]
    assert not any(before == "finished" for before, _ in found), "finished is the end"
