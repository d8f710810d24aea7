"""``cloudrun submit`` with a lease period that a test can wait for: python -m tests.e2e.short_lease SPEC SECONDS."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from runner.cli.submission import Submission
from runner.core.record import Entry
from runner.report.console import narrate
from runner.supervisor.inbox import Inbox
from runner.supervisor.signals import signals_posted
from runner.wiring.supervision import run_job


def main(spec: str, seconds: str) -> int:
    inbox = Inbox()
    with signals_posted(inbox.post):
        job = Submission.load(Path(spec), (), dict(os.environ)).job
        ending = run_job(
            job, inbox, fresh=False, terminal=None, progress=lambda _: None, tell=tell, lease_period=float(seconds)
        )
    return ending.exit_code


def tell(entry: Entry) -> None:
    for line in narrate(entry):
        print(f"{entry.at:.2f} {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
