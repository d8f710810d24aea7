"""The supervisor's loop. It has no opinions."""

from __future__ import annotations

from collections.abc import Callable

from runner.clock import Clock
from runner.core.actions import Action
from runner.core.decide import decide, wake_at
from runner.core.policy import Policy
from runner.core.record import Entry
from runner.core.state import Ending, Finished, State
from runner.supervisor.inbox import Inbox


def supervise(
    policy: Policy,
    inbox: Inbox,
    perform: Callable[[Action], None],
    record: Callable[[Entry], None],
    clock: Clock,
) -> Ending:
    """Run one session to its end. Somebody has posted Started before."""
    state = State()
    while not isinstance(state.phase, Finished):
        event = inbox.wait(wake_at(policy, state), clock)
        now = clock.now()
        before = state
        state, actions = decide(policy, before, event, now)
        record(Entry(now, before, event, state, actions))
        for action in actions:
            perform(action)
    return state.phase.ending
