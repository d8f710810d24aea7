"""How a job's datasets are opened."""

from __future__ import annotations

from pathlib import Path

from runner.spec import load_spec
from runner.storage.retrying import Retry
from runner.wiring.places import open_source


def test_a_folder_is_listed_while_it_is_read(tmp_path: Path) -> None:
    """It may hold millions of files: what is handed out is not held."""
    (tmp_path / "data" / "below").mkdir(parents=True)
    (tmp_path / "data" / "first").touch()
    spec = tmp_path / "job.yaml"
    spec.write_text(f"name: a\ncommand: b\ndata: [{{source: 'file://{tmp_path}/data'}}]\n")
    loaded = load_spec(spec, environ={})
    listing = open_source(loaded, loaded.data[0], {}, Retry(1)).store.list()
    assert next(listing).key == "first"
    (tmp_path / "data" / "below" / "later").touch()
    assert [info.key for info in listing] == ["below/later"]
