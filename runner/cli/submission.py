"""What submit does once the command line is understood. Imported late: it brings everything along."""

from __future__ import annotations

import os
import shlex
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from runner.checkpoint.stored import list_stored
from runner.cli.main import complain
from runner.cli.progress import SyncReport
from runner.core.record import Entry
from runner.core.state import Checkpoint, Ending, age
from runner.errors import ExitCode
from runner.files import is_locked
from runner.report.console import Story
from runner.spec import SpecInvalid, load_spec, not_yet, unmet_needs
from runner.storage.api import find
from runner.supervisor.history import stored_runs
from runner.supervisor.inbox import Inbox
from runner.supervisor.lease_body import read_body
from runner.supervisor.output import Console, Secrets
from runner.supervisor.recovery import choose_run
from runner.wiring.places import Job, open_job
from runner.wiring.supervision import read_supervisor, run_job


@dataclass(frozen=True, slots=True)
class Submission:
    """A job that may run here: its spec is right, this version can do all of it, and what it needs is there."""

    job: Job

    @classmethod
    def load(cls, spec: Path, overrides: tuple[str, ...], environ: Mapping[str, str]) -> Submission:
        """Raises SpecInvalid with everything that is wrong."""
        loaded = load_spec(spec, overrides=overrides, environ=environ)
        problems = (*not_yet(loaded), *unmet_needs(loaded, environ))
        if problems:
            raise SpecInvalid(problems)
        return cls(open_job(loaded, environ))

    def is_running(self) -> bool:
        return is_locked(self.job.local.lock)

    def supervisor_pid(self) -> int | None:
        """The process that holds the job here, as soon as it says so."""
        pid = read_supervisor(self.job.local).get("pid")
        return pid if isinstance(pid, int) and self.is_running() else None

    def plan(self, *, fresh: bool) -> list[str]:
        """What submit would do, in words; asks the store, changes nothing."""
        job, spec = self.job, self.job.spec
        there = stored_runs(job.store, job.keys)
        run = choose_run(job.local, there, fresh=fresh)
        told = list_stored(job.store, job.keys, run)
        stored = [one for one in told if isinstance(one, Checkpoint)]
        command = shlex.join(spec.argv) if spec.argv else "the script of the spec, by bash"
        lines = [
            f"job         {spec.name}, run {run}" + ("" if run in there else " (new)"),
            f"store       {job.local.store_url}",
            f"command     {Secrets(spec.secret_values(job.environ)).redact_text(command)}",
            f"workdir     {spec.working_directory}",
            f"checkpoints {', '.join(spec.checkpoint_globs) or spec.checkpoint_dir or job.local.checkpoints(run)}",
        ]
        lines += [f"data        {data.source} -> {data.target or '.'}" for data in spec.data]
        newest = max(stored, key=age, default=None)
        begin = f"step {newest.step} ({newest.id})" if newest else "the first step"
        done = find(job.store, job.keys.done(run)) is not None
        lines.append(f"begins at   {'nothing: this run is finished' if done else begin}")
        lease = read_body(job.store, job.keys.lease())
        return [*lines, *([f"stands by   {lease.host} runs this job now"] if lease and not lease.released else [])]

    def run(self, inbox: Inbox, *, fresh: bool, standby: bool, quiet: bool) -> int:
        """Run the job in the foreground; the exit code."""
        errors = Console(sys.stderr.fileno())
        terminal = None if quiet else Console(sys.stdout.fileno())
        redact = Secrets(self.job.spec.secret_values(self.job.environ)).redact_text

        def say(text: str) -> None:
            errors.feed(f"[cloudrun] {redact(text)}\n".encode("utf-8", "replace"))

        story = Story()

        def tell(entry: Entry) -> None:
            for line in story(entry):
                say(line)

        try:
            with SyncReport(say) as report:
                ending = run_job(
                    self.job, inbox, fresh=fresh, standby=standby, terminal=terminal, progress=report, tell=tell
                )
        finally:
            errors.close()
            if terminal is not None:
                terminal.close()
        say_goodbye(ending, redact, fresh=fresh)
        return leave(ending.exit_code)


def say_goodbye(ending: Ending, redact: Callable[[str], str], *, fresh: bool) -> None:
    """A bad end is told as every error is."""
    if ending.exit_code == ExitCode.SUCCEEDED:
        return
    hint = ending.hint
    if ending.exit_code in (ExitCode.PREEMPTED, ExitCode.INTERRUPTED, ExitCode.STOPPED):
        command = "the same command without --fresh" if fresh else "the same command again"
        hint = f"run {command}, here or on another machine: it goes on from there"
    complain(redact(ending.reason), redact(hint))


def leave(code: int) -> int:
    """A thread that hangs in the kernel (a dead network disk) must not keep the process: what matters is written."""
    stuck = [thread for thread in threading.enumerate() if not thread.daemon and thread is not threading.main_thread()]
    if stuck:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
