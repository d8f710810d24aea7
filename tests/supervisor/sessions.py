"""A real session on a folder of the test's: a spec, a store, a clock, and a list of what was posted."""

from __future__ import annotations

import io
import os
import threading
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from runner.checkpoint.layout import LocalLayout, StoreLayout
from runner.clock import SystemClock
from runner.core.events import Event
from runner.dataset.cache import DataCache
from runner.dataset.source import Source
from runner.spec import load_spec
from runner.storage.api import ObjectStore
from runner.storage.folder import FolderStore
from runner.storage.retrying import Retry
from runner.supervisor.lease import LeaseKeeper, LeasePlace
from runner.supervisor.lease_body import PERIOD, Waiter
from runner.supervisor.output import Secrets
from runner.supervisor.session import Session

E = TypeVar("E", bound=Event)


class Posted(list[Event]):
    """What was posted, oldest first."""

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self if isinstance(event, kind)]

    def wait(self, kind: type[E], seconds: float = 20.0) -> E:
        """The first event of a kind, as soon as there is one."""
        give_up = time.monotonic() + seconds
        while time.monotonic() < give_up:
            if found := self.of(kind):
                return found[0]
            time.sleep(0.01)
        raise AssertionError(f"no {kind.__name__} among {self}")


def make_session(
    root: Path,
    *lines: str,
    store: ObjectStore | None = None,
    fresh: bool = False,
    sources: tuple[tuple[str, Source], ...] = (),
    command: str = "command: [python, -c, pass]",
    environ: Mapping[str, str] | None = None,
    id: str = "abcdef",  # noqa: A002 - the field's name
) -> tuple[Session, Posted]:
    """A session of the job "job", whose spec has these further lines."""
    project = root / "project"
    project.mkdir(parents=True, exist_ok=True)
    spec_path = project / "job.yaml"
    spec_path.write_text("\n".join(["name: job", command, f"store: file://{root / 'store'}", *lines]) + "\n")
    environ = {**os.environ, "XDG_CACHE_HOME": str(root / "cache"), **(environ or {})}
    spec = load_spec(spec_path, environ=environ)
    posted = Posted()
    clock, leaving = SystemClock(), threading.Event()
    local = LocalLayout(root / "state", root / "cache", "job", f"file://{root / 'store'}")
    store = store or FolderStore(root / "store")
    place = LeasePlace(store, StoreLayout("job").lease(), Waiter(id, "here"), PERIOD)
    lease = LeaseKeeper(place, local.lease_note, post=posted.append, clock=clock, first=Retry(1.0, stop=leaving))
    session = Session(
        id=id,
        spec=spec,
        store=store,
        lease=lease,
        keys=StoreLayout("job"),
        local=local,
        cache=DataCache(root / "cache"),
        sources=sources,
        environ=environ,
        host="here",
        fresh=fresh,
        post=posted.append,
        terminal=None,
        progress=lambda _: None,
        secrets=Secrets(spec.secret_values(environ)),
        clock=clock,
        leaving=leaving,
    )
    return session, posted


def save(folder: Path, step: int, *, name: str = "") -> Path:
    """A checkpoint as torch.save writes it, renamed into place."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}q\x00.")
        archive.writestr("archive/data/0", b"weights" * 100 + str(step).encode())
        archive.writestr("archive/version", b"3\n")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / (name or f"step-{step}.pt")
    part = folder / f".{path.name}.part"
    part.write_bytes(buffer.getvalue())
    part.replace(path)
    return path


def save_here(session: Session, step: int, *, name: str = "") -> Path:
    """A checkpoint of run 1 on this disk; the store knows of the run."""
    session.store.write(session.keys.job_yaml(1), b"")
    return save(session.local.checkpoints(1), step, name=name)


def wait_for(condition: Callable[[], object], seconds: float = 20.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, f"{condition} did not become true"
        time.sleep(0.01)
