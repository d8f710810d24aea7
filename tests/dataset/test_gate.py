"""The gate that every file passes on its way into its place."""

from __future__ import annotations

import threading
import time

import pytest

from runner.dataset.fetch import Gate, SyncStopped


def test_nothing_passes_a_gate_that_is_shut() -> None:
    gate, passed = Gate(), []
    gate.shut()
    with pytest.raises(SyncStopped), gate:
        passed.append(1)
    assert passed == []
    gate.shut()  # nobody is inside: who was refused does not count


def test_who_shuts_a_gate_waits_for_who_is_inside() -> None:
    gate, inside, left = Gate(), threading.Event(), threading.Event()

    def pass_slowly() -> None:
        with gate:
            inside.set()
            time.sleep(0.2)
            left.set()

    thread = threading.Thread(target=pass_slowly)
    thread.start()
    inside.wait()
    gate.shut()
    assert left.is_set()
    thread.join()
