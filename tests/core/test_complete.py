"""A trainer that refuses to go on since all is done."""

from __future__ import annotations

import pytest

from runner.core.events import TrainerExited
from runner.core.policy import Policy
from runner.core.restart import judge

SAID = "AssertionError: last.pt training to 3 epochs is finished, nothing to resume."


@pytest.mark.parametrize(
    ("policy", "event", "verdict"),
    [
        (Policy(), TrainerExited(1, 1, ("Traceback", SAID, "")), "succeed"),
        (Policy(), TrainerExited(1, 1, ("Traceback", "nothing to resume")), "restart"),
        (Policy(on_exit=((1, "fail"),)), TrainerExited(1, 1, (SAID,)), "fail"),
        (Policy(), TrainerExited(1, 1, (SAID,), fatal="Error"), "fail"),
        (Policy(), TrainerExited(1, 0, (SAID,)), "succeed"),
    ],
)
def test_it_has_succeeded_unless_the_owner_says_otherwise(policy: Policy, event: TrainerExited, verdict: str) -> None:
    assert judge(policy, event).rule == verdict
