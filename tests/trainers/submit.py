"""``cloudrun submit --set ...`` with a lease period that a test can wait for.

python -m tests.trainers.submit SPEC SECONDS [KEY=VALUE]...
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from runner.cli.submission import Submission
from runner.supervisor.inbox import Inbox
from runner.supervisor.signals import signals_posted
from runner.wiring.supervision import run_job
from tests.e2e.short_lease import tell


def main(spec: str, seconds: str, *overrides: str) -> int:
    inbox = Inbox()
    with signals_posted(inbox.post):
        job = Submission.load(Path(spec), overrides, dict(os.environ)).job
        ending = run_job(
            job, inbox, fresh=False, terminal=None, progress=lambda _: None, tell=tell, lease_period=float(seconds)
        )
    return ending.exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
