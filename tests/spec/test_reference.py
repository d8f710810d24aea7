"""The page that explains every key says what the model says."""

from __future__ import annotations

from runner.spec.known import known_paths
from scripts.pages import with_part
from scripts.spec_reference import NAME, PAGE, reference


def test_the_page_is_in_step_with_the_model() -> None:
    """When it is not: python -m scripts.spec_reference --write."""
    page = PAGE.read_text()
    assert with_part(page, NAME, reference()) == page


def test_every_key_has_a_line() -> None:
    text = reference()
    for path in known_paths():
        key = ".".join(path).replace(".*", "[]")
        inside = f"`{key}." in text or f"`{key}[]." in text
        repeated = path[0] == "storage" and len(path) > 2
        assert inside or repeated or f"| `{key}` |" in text, key
