"""Nested state comes back exactly as it went, types and bits, and what cannot is named."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from runner.training import NotStorable
from runner.training.image import image_of, load_image
from runner.training.state import pack, unpack


def _there_and_back(value: Any, tmp_path: Path) -> Any:
    """Through a real file and real JSON."""
    packed = pack(value, "state")
    path = tmp_path / "state.safetensors"
    with open(path, "wb") as file:
        image_of(packed.tensors).write_to(file)
    return unpack(json.loads(json.dumps(packed.plan, allow_nan=False)), load_image(path))


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return bool(one.dtype == other.dtype and one.shape == other.shape and _bytes(one) == _bytes(other))
    if isinstance(one, np.ndarray):
        return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=True)
        return len(one) == len(other) and all(_same(a, c) and _same(b, d) for (a, b), (c, d) in pairs)
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, complex):
        return _same([one.real, one.imag], [other.real, other.imag])
    if isinstance(one, float):
        return one.hex() == str(other.hex())
    if isinstance(one, np.generic):
        return bool(one.dtype == other.dtype and one.tobytes() == other.tobytes())
    return bool(one == other)


def _bytes(tensor: Tensor) -> Any:
    return tensor.contiguous().resolve_conj().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers()
KEYS = st.integers() | st.text() | st.booleans() | st.none() | st.tuples(st.integers(), st.text())
NESTED = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.lists(inner).map(deque)
        | st.dictionaries(st.text(), inner)
        | st.dictionaries(KEYS, inner)
        | st.dictionaries(KEYS, inner).map(OrderedDict)
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(NESTED)
def test_plain_values_round_trip(value: Any) -> None:
    packed = pack(value, "state")
    assert not packed.tensors
    assert _same(unpack(json.loads(json.dumps(packed.plan, allow_nan=False)), {}), value)


_DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex32, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e8m0fnu, torch.bool),
]


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (2, 3)], ids=str)
def test_tensors_of_every_dtype_round_trip(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    count = math.prod(shape) * dtype.itemsize
    raw = torch.arange(1, count + 1, dtype=torch.uint8)
    tensor = raw.clone().clamp(max=1) if dtype == torch.bool else raw
    tensor = (tensor.view(dtype) if count else torch.empty(0, dtype=dtype)).reshape(shape)
    assert _same(_there_and_back({"t": tensor, 1: [tensor]}, tmp_path), {"t": tensor, 1: [tensor]})


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(12.0)[::3],
        torch.tensor(3.0).expand(4, 2),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(3, dtype=torch.complex64).conj().imag,
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.tensor([math.nan, -0.0, math.inf, 1e-45]),
        np.float64(0.1),
        np.int8(-3),
        np.bool_(True),
        np.datetime64("2024-01-01"),
        np.arange(6, dtype=">i2").reshape(2, 3),
        np.array(["a", "bcd"]),
        np.zeros((0, 3), np.float32),
        np.array(1.5),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        Counter({3: 2, "x": 1}),
        deque([1, 2], maxlen=2),
        {1, 2, "three"},
        frozenset({(1, 2)}),
        torch.Size([2, 3]),
        torch.device("cuda:1"),
        torch.bfloat16,
        bytearray(b"abc"),
        {1: "int", "1": "str", None: "none", 0.5: "float"},
        {"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}},
        {1: torch.ones(1), "1": torch.zeros(1)},
    ],
)
def test_what_states_hold_round_trips(tmp_path: Path, value: Any) -> None:
    assert _same(_there_and_back(value, tmp_path), value)


def test_a_default_dict_makes_what_it_made(tmp_path: Path) -> None:
    back = _there_and_back(defaultdict(list, {2: [1]}), tmp_path)
    assert back[2] == [1]
    assert back["new"] == []


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    weight = torch.randn(100)
    packed = pack({"embed": weight, "head": weight, "part": weight[:50], "copy": weight.clone()}, "state")
    assert sorted(packed.tensors) == ["state/copy", "state/embed", "state/part"]
    back = unpack(packed.plan, packed.tensors)
    assert back["embed"] is back["head"]
    assert back["embed"] is not back["copy"]


def test_a_tensor_and_its_conjugate_are_two(tmp_path: Path) -> None:
    one = torch.randn(3, dtype=torch.complex64)
    back = _there_and_back([one, one.conj()], tmp_path)
    assert torch.equal(back[0], one)
    assert torch.equal(back[1], one.conj())


def test_a_module_keeps_the_versions_of_its_parts(tmp_path: Path) -> None:
    state = nn.Sequential(nn.BatchNorm1d(2)).state_dict()
    back = _there_and_back(state, tmp_path)
    assert back._metadata == state._metadata  # type: ignore[attr-defined]
    assert type(back) is OrderedDict


_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, 0.1, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
    "tensor lr": lambda p: torch.optim.AdamW(p, torch.tensor(0.1), foreach=False),
    "adafactor": torch.optim.Adafactor,
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=3),
    "rprop": torch.optim.Rprop,
    "groups": lambda p: torch.optim.AdamW([{"params": p[:1], "lr": 0.1}, {"params": p[1:], "betas": (0.5, 0.6)}]),
}


@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_optimizers_round_trip(tmp_path: Path, name: str) -> None:
    model = nn.Linear(3, 2)
    optimizer = _OPTIMIZERS[name](list(model.parameters()))

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(torch.ones(4, 3)).pow(2).mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    state = optimizer.state_dict()
    assert _same(_there_and_back(state, tmp_path), state)


def test_schedulers_round_trip(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    kinds = torch.optim.lr_scheduler
    for scheduler in (
        kinds.OneCycleLR(optimizer, 0.1, total_steps=10),
        kinds.MultiStepLR(optimizer, [2, 4, 4]),
        kinds.ReduceLROnPlateau(optimizer),
        kinds.LambdaLR(optimizer, lambda step: 0.9**step),
        kinds.SequentialLR(optimizer, [kinds.ConstantLR(optimizer), kinds.CosineAnnealingLR(optimizer, 5)], [3]),
        kinds.CyclicLR(optimizer, 0.01, 0.1),
    ):
        state = scheduler.state_dict()
        assert _same(_there_and_back(state, tmp_path), state)


class Thing:
    pass


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [1, {"b": Thing()}]}, "state/a/1/b"),
        ({"a": {Thing: 1}}, "state/a/key"),
        ({"f": (len,)}, "state/f/0"),
        ({"p": Path("x")}, "state/p"),
        ({"t": torch.eye(2).to_sparse()}, "state/t"),
        ({"t": torch.empty(2, device="meta")}, "state/t"),
        ({"q": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)}, "state/q"),
        ({"n": np.array([Thing()])}, "state/n"),
        ({"d": defaultdict(lambda: 1)}, "state/d"),
    ],
)
def test_what_cannot_be_stored_is_named_by_its_path(value: Any, path: str) -> None:
    with pytest.raises(NotStorable, match=path):
        pack(value, "state")


def test_a_state_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(NotStorable, match="holds itself"):
        pack(loop, "state")
