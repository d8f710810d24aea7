"""Every key and name, and back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.checkpoint.layout import (
    CheckpointKey,
    CheckpointName,
    LocalLayout,
    Segment,
    StoreLayout,
    attempt_name,
    checkpoint_id,
    parse_checkpoint_id,
    state_dir,
)

LAYOUT = StoreLayout("digits")
ID = "step-000000001200.a7-3f9c2d"


def test_the_keys_of_the_contract() -> None:
    attempt = attempt_name(7, "3f9c2d")
    assert checkpoint_id(1200, 7, "3f9c2d") == ID
    assert [
        LAYOUT.run_prefix(1),
        LAYOUT.job_yaml(1),
        LAYOUT.checkpoint_prefix(1, ID),
        LAYOUT.manifest(1, ID),
        LAYOUT.journal_segment(1, attempt, 1),
        LAYOUT.log_segment(1, attempt, 12),
        LAYOUT.done(2),
        LAYOUT.status(),
    ] == [
        "digits/run-1/",
        "digits/run-1/job.yaml",
        f"digits/run-1/checkpoints/{ID}/",
        f"digits/run-1/checkpoints/{ID}/cloudrun-manifest.json",
        "digits/run-1/journal/a7-3f9c2d.jsonl.d/000001",
        "digits/run-1/logs/a7-3f9c2d/000012.log",
        "digits/run-2/DONE",
        "digits/status.json",
    ]


def test_keys_come_back() -> None:
    assert LAYOUT.parse_checkpoint_key(1, f"digits/run-1/checkpoints/{ID}/a/b.pt") == CheckpointKey(ID, "a/b.pt")
    assert LAYOUT.parse_segment("digits/run-3/journal/a7-3f9c2d.jsonl.d/000002") == Segment(
        3, "journal", 7, "3f9c2d", 2
    )
    assert LAYOUT.parse_segment("digits/run-3/logs/a7-3f9c2d/000002.log") == Segment(3, "logs", 7, "3f9c2d", 2)
    assert LAYOUT.run_of("digits/run-12/job.yaml") == 12
    assert [LAYOUT.attempt_in(folder) for folder in (ID, "a8-3f9c2d.jsonl.d", "a9-3f9c2d")] == [7, 8, 9]


@given(st.integers(0, 10**18 - 1), st.integers(1, 10**9 - 1), st.integers(0, 16**6 - 1))
def test_checkpoint_ids_come_back_and_sort_by_step(step: int, attempt: int, number: int) -> None:
    text = checkpoint_id(step, attempt, f"{number:06x}")
    assert parse_checkpoint_id(text) == CheckpointName(step, attempt, f"{number:06x}")
    if step < 10**12 - 1:
        assert text < checkpoint_id(step + 1, attempt, f"{number:06x}")


@pytest.mark.parametrize(
    "text",
    [
        "", "step-1200.a7-3f9c2d", ID + "\n", ID + "/", "step-000000001200.a07-3f9c2d", "step-000000001200.a0-3f9c2d",
        "step-0000000001200.a7-3f9c2d", "step-000000001200.a7-3F9C2D", "step-00000000120٣.a7-3f9c2d",
        "step--00000001200.a7-3f9c2d", "step-000000001200.a7-3f9c2d.tmp", "../step-000000001200.a7-3f9c2d",
    ],
)  # fmt: skip
def test_foreign_checkpoint_ids_are_nothing(text: str) -> None:
    assert parse_checkpoint_id(text) is None


@pytest.mark.parametrize(
    "key",
    [
        "", "digits", "digits/run-1", "digits/run-0/x", "digits/run-01/x", "digits/run-x/x", "other/run-1/x",
        "digits/run-1x/x", "digits//run-1/x", "digits/run-9999999999/x", "/digits/run-1/x",
    ],
)  # fmt: skip
def test_foreign_keys_have_no_run(key: str) -> None:
    assert LAYOUT.run_of(key) is None


@pytest.mark.parametrize("folder", ["", "a0-3f9c2d", "a7", "b7-3f9c2d", "a7-3f9c2d.jsonl", "a7-3F9C2D", "a7-3f9c2d\n"])
def test_foreign_folders_are_of_no_attempt(folder: str) -> None:
    assert LAYOUT.attempt_in(folder) is None


@given(st.text())
def test_no_text_breaks_a_parser(text: str) -> None:
    LAYOUT.run_of(f"digits/{text}")
    LAYOUT.attempt_in(text)
    LAYOUT.parse_segment(f"digits/run-1/logs/{text}")
    LAYOUT.parse_checkpoint_key(1, f"digits/run-1/checkpoints/{text}")


@pytest.mark.parametrize("job", ["", "..", "a/b", "Digits", "-x", "x" * 64, "a\n"])
def test_a_hostile_job_name_is_refused(job: str) -> None:
    with pytest.raises(ValueError, match="no job"):
        StoreLayout(job)


@pytest.mark.parametrize(
    "call",
    [
        partial(attempt_name, 0, "3f9c2d"),
        partial(attempt_name, 1, "../../"),
        partial(checkpoint_id, -1, 1, "3f9c2d"),
        partial(LAYOUT.run_prefix, 0),
        partial(LAYOUT.manifest, 1, "../x"),
        partial(LAYOUT.log_segment, 1, "a1-3f9c2d", 0),
    ],
)
def test_senseless_numbers_and_ids_are_refused(call: Callable[[], str]) -> None:
    with pytest.raises(ValueError):
        call()


def test_the_local_names() -> None:
    local = LocalLayout(Path("/state"), Path("/cache"), "digits", "s3://bucket/prefix")
    folder = local.state.name
    assert folder.startswith("digits@")
    assert len(folder) == len("digits@") + 8
    assert local.state == Path("/state/jobs") / folder
    assert local.lock == local.state / "lock"
    assert local.setup_done("0af3") == local.state / "setup-0af3.done"
    assert local.journal_segment(1, "a7-3f9c2d", 1) == local.state / "run-1/journal/a7-3f9c2d.jsonl.d/000001"
    assert local.log_segment(1, "a7-3f9c2d", 1) == local.state / "run-1/logs/a7-3f9c2d/000001.log"
    run = Path("/cache/jobs") / folder / "run-2"
    assert [local.checkpoints(2), local.set_aside(2), local.tmp(2), local.stop_file(2)] == [
        run / "checkpoints", run / "set-aside", run / "tmp", run / "stop",
    ]  # fmt: skip


def test_one_name_in_two_stores_is_two_jobs() -> None:
    one, two = (LocalLayout(Path("/s"), Path("/c"), "digits", url) for url in ("s3://a/x", "s3://b/x"))
    assert one.state != two.state


def test_the_state_directory_follows_xdg() -> None:
    assert state_dir({"XDG_STATE_HOME": "/x", "HOME": "/home/u"}) == Path("/x/cloudrun")
    assert state_dir({"HOME": "/home/u"}) == Path("/home/u/.local/state/cloudrun")
    assert state_dir({"XDG_STATE_HOME": "relative", "HOME": "/home/u"}) == Path("/home/u/.local/state/cloudrun")
