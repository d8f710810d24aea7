"""Equal states have equal digests; a difference shows."""

from __future__ import annotations

import torch

from runner.training import state_digest
from runner.training.environment import differences, doubts, record


def _state(count: int = 100_000) -> dict[str, object]:
    return {"weights": torch.arange(count, dtype=torch.float32), "step": 3, "groups": [{"lr": 0.1}]}


def test_equal_states_have_equal_digests() -> None:
    for full in (False, True):
        assert state_digest(_state(), full=full) == state_digest(_state(), full=full)
    reordered = dict(reversed(_state().items()))
    assert state_digest(reordered) == state_digest(_state())


def test_one_bit_shows_in_a_full_digest() -> None:
    changed = _state()
    weights = changed["weights"]
    assert isinstance(weights, torch.Tensor)
    weights.view(torch.int32)[77_777] ^= 1
    assert state_digest(changed, full=True) != state_digest(_state(), full=True)


def test_what_differs_everywhere_shows_in_a_sampled_digest() -> None:
    changed = _state()
    weights = changed["weights"]
    assert isinstance(weights, torch.Tensor)
    weights += 1
    assert state_digest(changed) != state_digest(_state())


def test_numbers_names_dtypes_and_shapes_count() -> None:
    base = state_digest({"a": torch.zeros(4), "n": 1})
    others = [
        {"a": torch.zeros(4), "n": 2},
        {"a": torch.zeros(4), "n": 1.0},
        {"b": torch.zeros(4), "n": 1},
        {"a": torch.zeros(2, 2), "n": 1},
        {"a": torch.zeros(4, dtype=torch.int32), "n": 1},
    ]
    assert base not in {state_digest(other) for other in others}


def test_an_unchanged_environment_has_no_differences() -> None:
    assert differences(record(1), record(1)) == []
    assert differences(record(1), record(2)) == ["the number of ranks was 1, is 2"]


def test_a_gpu_is_doubted_unless_it_is_told_to_be_deterministic() -> None:
    gpu = {**record(1), "device": "H100", "deterministic": "False", "cudnn_benchmark": "True"}
    assert len(doubts(gpu)) == 2
    assert doubts({**gpu, "deterministic": "True", "cudnn_benchmark": "False"}) == []
    assert doubts(record(1)) == [] or torch.cuda.is_available()
