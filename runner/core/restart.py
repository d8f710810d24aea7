"""Restart, fail or succeed: what an exit of the trainer means, with the reason."""

from __future__ import annotations

from dataclasses import dataclass

from runner.core.events import TrainerExited
from runner.core.policy import ExitRule, Policy

SIGNAL_NAMES = {
    1: "SIGHUP",
    2: "SIGINT",
    3: "SIGQUIT",
    4: "SIGILL",
    6: "SIGABRT",
    7: "SIGBUS",
    8: "SIGFPE",
    9: "SIGKILL",
    10: "SIGUSR1",
    11: "SIGSEGV",
    12: "SIGUSR2",
    13: "SIGPIPE",
    15: "SIGTERM",
}

NO_SPACE = "No space left on device"

# Killed by these, the trainer did not choose to die: a person, the kernel's memory killer, a machine going down.
FOREIGN_KILLS = (-9, -15)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do after an exit."""

    rule: ExitRule
    reason: str


def ran_out_of_disk(event: TrainerExited) -> bool:
    """The trainer's last words blame the disk: no other part of its story is at fault."""
    return any(NO_SPACE in line for line in event.tail)


def describe(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    name = SIGNAL_NAMES.get(-code, f"signal {-code}")
    return f"killed by {name} (out of memory?)" if code == -9 else f"killed by {name}"


COMPLETE = ("is finished, nothing to resume",)
"""What Ultralytics says of a training that has had all its epochs."""


def judge(policy: Policy, event: TrainerExited) -> Verdict:
    """The owner's words first: fatal patterns, retry patterns, exit codes; then the default."""
    how = describe(event.code)
    if event.not_started is not None:
        return Verdict("fail", f"the command could not be started: {event.not_started}")
    if event.code != 0 and event.fatal is not None:
        return Verdict("fail", f"{how}; a fatal pattern matched: {event.fatal}")
    if event.code != 0 and event.retry is not None:
        return Verdict("restart", f"{how}; a retry pattern matched: {event.retry}")
    rule = dict(policy.on_exit).get(event.code if event.code >= 0 else 128 - event.code)
    if rule is not None:
        return Verdict(rule, f"{how}; restart.on_exit says {rule}")
    if event.code != 0 and (said := says_complete(event.tail)):
        return Verdict("succeed", f"{how}; it says that the training is complete: {said}")
    return Verdict("succeed" if event.code == 0 else "restart", how)


def says_complete(tail: tuple[str, ...]) -> str:
    """The last line in which a trainer refuses to go on since all is done: it calls that an error. "" without one."""
    return next((line for line in reversed(tail) if any(words in line for words in COMPLETE)), "")


def backoff(policy: Policy, fruitless: int) -> float:
    """Seconds before the next attempt: none after an attempt that added a checkpoint, then doubling."""
    if fruitless == 0:
        return 0.0
    return min(policy.backoff_first * 2.0 ** min(fruitless - 1, 30), policy.backoff_limit)
