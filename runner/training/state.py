"""Nested state <-> flat tensors and a JSON tree. Types come back exactly as they went; nothing is ever pickled.

What JSON has stays as it is: None, bool, int, str, finite floats, lists. Everything else is an object with one key that
tells what it is::

    {"map": {...}}            dict whose keys are strings        {"tuple": [...]}, {"set": [...]}, {"frozenset": [...]}
    {"dict": [[k, v], ...]}   dict with other keys               {"float": "nan"}, {"complex": [re, im]}
    {"ordered": [...]}        OrderedDict, with "metadata"       {"bytes": "<base64>"}, {"bytearray": "<base64>"}
    {"counter": [...]}, {"default": [...], "of": "list"}         {"deque": [...], "maxlen": n}
    {"tensor": name}          with "complex": true for a view as reals, or "bytes_of": dtype and "shape" for a dtype
                              that safetensors does not know; a tensor met twice has the same name twice
    {"array": name, "dtype": "<f8", "shape": [...]}              {"scalar": "<f8", "bytes": "<base64>"}     (numpy)
    {"dtype": "float32"}, {"device": "cuda:0"}, {"size": [...]}  {"sharded": name, ...}  (DTensor, see sharded.py)
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from runner.training.image import has_code
from runner.training.optional import is_dtensor, np

_PLAIN_TENSORS = (Tensor, nn.Parameter, nn.Buffer) if hasattr(nn, "Buffer") else (Tensor, nn.Parameter)
_FACTORIES: dict[str, Callable[[], Any]] = {kind.__name__: kind for kind in (list, dict, set, int, float, str, bool)}
_TOO_DEEP = 200


class NotStorable(TypeError):
    """A value in the state that a checkpoint cannot hold; the message names its path and what to do."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(
            f"{path} cannot be stored: it is {what}. "
            "Give plain values, tensors and containers of them, or leave it out of the state."
        )


@dataclass(slots=True)
class Packed:
    """Flat tensors by name, DTensors by name, and the JSON tree that refers to both."""

    plan: Any = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    sharded: dict[str, Tensor] = field(default_factory=dict)


def pack(value: object, prefix: str) -> Packed:
    """Flatten ``value``. Tensors are referred to, not copied; their names are their paths below ``prefix``.

    Raises NotStorable for what no checkpoint can hold.
    """
    packer = _Packer()
    packer.packed.plan = packer.pack(value, prefix, 0)
    return packer.packed


def unpack(plan: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value that :func:`pack` was given. Tensors met twice are one object again."""
    return _Unpacker(tensors).unpack(plan)


class Copies(Mapping[str, Tensor]):
    """Tensors that are copied when they are asked for: for those who keep what they are given."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name].clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class _Packer:
    """One walk through a state."""

    def __init__(self) -> None:
        self.packed = Packed()
        self._names: dict[tuple[Any, ...], str] = {}

    def pack(self, value: Any, path: str, depth: int) -> Any:
        if depth > _TOO_DEEP:
            raise NotStorable(path, "nested too deeply, or holds itself")
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if kind in _CONTAINERS:
            return _CONTAINERS[kind](self, value, path, depth + 1)
        if kind in _LEAVES:
            return _LEAVES[kind](value)
        if np is not None and isinstance(value, (np.generic, np.ndarray)):
            return self._numpy(value, path)
        raise NotStorable(path, f"a {kind.__module__}.{kind.__qualname__}")

    def items(self, values: Iterable[Any], path: str, depth: int) -> list[Any]:
        return [self.pack(value, f"{path}/{place}", depth) for place, value in enumerate(values)]

    def pairs(self, value: Mapping[Any, Any], path: str, depth: int) -> list[list[Any]]:
        return [
            [self.pack(key, f"{path}/key {key!r}", depth), self.pack(item, f"{path}/{key}", depth)]
            for key, item in value.items()
        ]

    def _tensor(self, tensor: Tensor, path: str) -> dict[str, Any]:
        if is_dtensor(tensor):
            return self._sharded(tensor, path)
        if type(tensor) not in _PLAIN_TENSORS:
            raise NotStorable(path, f"a {type(tensor).__qualname__}, a kind of tensor of its own")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            raise NotStorable(path, f"a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}")
        return self._plain(tensor.detach(), path)

    def _plain(self, tensor: Tensor, path: str) -> dict[str, Any]:
        if tensor.is_complex():
            return {"tensor": self._named(torch.view_as_real(tensor.resolve_conj()), path, tensor), "complex": True}
        if has_code(tensor.dtype):
            return {"tensor": self._named(tensor, path, tensor)}
        raw = tensor.contiguous().view(-1).view(torch.uint8)
        dtype = str(tensor.dtype).removeprefix("torch.")
        return {"tensor": self._named(raw, path, tensor), "bytes_of": dtype, "shape": list(tensor.shape)}

    def _named(self, stored: Tensor, path: str, original: Tensor) -> str:
        """The same memory seen the same way (tied weights) is stored once."""
        bits = (original.dtype, original.is_conj(), original.is_neg())
        identity = (original.device, original.data_ptr(), original.shape, original.stride(), bits)
        if original.numel() and identity in self._names:
            return self._names[identity]
        name = self._free(path)
        self.packed.tensors[name] = stored
        self._names[identity] = name
        return name

    def _sharded(self, tensor: Any, path: str) -> dict[str, Any]:
        name = self._free(path)
        self.packed.sharded[name] = tensor.detach()
        return {"sharded": name}

    def _numpy(self, value: Any, path: str) -> dict[str, Any]:
        if (
            value.dtype.hasobject
            or value.dtype.names
            or (type(value) is not np.ndarray and not isinstance(value, np.generic))
        ):
            raise NotStorable(path, f"a numpy value of {value.dtype}")
        if isinstance(value, np.generic):
            return {"scalar": value.dtype.str, "bytes": _text(value.tobytes())}
        raw = torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8) if value.size else torch.empty(0).byte()
        name = self._free(path)
        self.packed.tensors[name] = raw
        return {"array": name, "dtype": value.dtype.str, "shape": list(value.shape)}

    def _free(self, path: str) -> str:
        """Two paths can read the same (keys 1 and "1"): the later one gets a number."""
        name, number = path, 2
        while name in self.packed.tensors or name in self.packed.sharded:
            name, number = f"{path}#{number}", number + 1
        return name


def _pack_dict(packer: _Packer, value: dict[Any, Any], path: str, depth: int) -> dict[str, Any]:
    if all(type(key) is str for key in value):
        return {"map": {key: packer.pack(item, f"{path}/{key}", depth) for key, item in value.items()}}
    return {"dict": packer.pairs(value, path, depth)}


def _pack_ordered(packer: _Packer, value: OrderedDict[Any, Any], path: str, depth: int) -> dict[str, Any]:
    """A module's state carries the versions of its parts as an attribute: loading old layouts depends on them."""
    packed: dict[str, Any] = {"ordered": packer.pairs(value, path, depth)}
    if hasattr(value, "_metadata"):
        packed["metadata"] = packer.pack(value._metadata, f"{path}/_metadata", depth)  # noqa: SLF001
    return packed


def _pack_default(packer: _Packer, value: defaultdict[Any, Any], path: str, depth: int) -> dict[str, Any]:
    factory = getattr(value.default_factory, "__name__", None)
    if value.default_factory is not None and _FACTORIES.get(str(factory)) is not value.default_factory:
        raise NotStorable(path, "a defaultdict that makes its values by a function")
    return {"default": packer.pairs(value, path, depth), "of": factory}


def _pack_deque(packer: _Packer, value: deque[Any], path: str, depth: int) -> dict[str, Any]:
    return {"deque": packer.items(value, path, depth), "maxlen": value.maxlen}


def _pack_items(name: str) -> Callable[[_Packer, Any, str, int], dict[str, Any]]:
    return lambda packer, value, path, depth: {name: packer.items(value, path, depth)}


def _pack_set(name: str) -> Callable[[_Packer, Any, str, int], dict[str, Any]]:
    """Sorted by what is written, so that equal sets are equal bytes."""
    return lambda packer, value, path, depth: {name: sorted(packer.items(value, path, depth), key=repr)}


_CONTAINERS: dict[type, Callable[[_Packer, Any, str, int], Any]] = {
    list: lambda packer, value, path, depth: packer.items(value, path, depth),
    tuple: _pack_items("tuple"),
    torch.Size: _pack_items("size"),
    set: _pack_set("set"),
    frozenset: _pack_set("frozenset"),
    dict: _pack_dict,
    OrderedDict: _pack_ordered,
    Counter: lambda packer, value, path, depth: {"counter": packer.pairs(value, path, depth)},
    defaultdict: _pack_default,
    deque: _pack_deque,
}

_LEAVES: dict[type, Callable[[Any], dict[str, Any]]] = {
    complex: lambda value: {"complex": [repr(value.real), repr(value.imag)]},
    bytes: lambda value: {"bytes": _text(value)},
    bytearray: lambda value: {"bytearray": _text(value)},
    torch.dtype: lambda value: {"dtype": str(value).removeprefix("torch.")},
    torch.device: lambda value: {"device": str(value)},
}


class _Unpacker:
    """One walk through a plan."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._made: dict[str, Tensor] = {}

    def unpack(self, plan: Any) -> Any:
        if isinstance(plan, list):
            return [self.unpack(item) for item in plan]
        if not isinstance(plan, dict):
            return plan
        kind = next(iter(plan))
        return _MAKERS[kind](self, plan)

    def items(self, plans: Sequence[Any]) -> list[Any]:
        return [self.unpack(plan) for plan in plans]

    def pairs(self, plans: Sequence[Any]) -> list[tuple[Any, Any]]:
        return [(self.unpack(key), self.unpack(item)) for key, item in plans]

    def tensor(self, plan: Mapping[str, Any]) -> Tensor:
        name = plan["tensor"]
        if name not in self._made:
            self._made[name] = _seen_as(self._tensors[name], plan)
        return self._made[name]

    def ordered(self, plan: Mapping[str, Any]) -> OrderedDict[Any, Any]:
        made = OrderedDict(self.pairs(plan["ordered"]))
        if "metadata" in plan:
            made._metadata = self.unpack(plan["metadata"])  # type: ignore[attr-defined]  # noqa: SLF001
        return made

    def default(self, plan: Mapping[str, Any]) -> defaultdict[Any, Any]:
        factory = None if plan["of"] is None else _FACTORIES[plan["of"]]
        return defaultdict(factory, self.pairs(plan["default"]))

    def array(self, plan: Mapping[str, Any]) -> Any:
        raw = self._tensors[plan["array"]].numpy().tobytes()
        return np.frombuffer(raw, dtype=np.dtype(plan["dtype"])).reshape(plan["shape"]).copy()


def _seen_as(stored: Tensor, plan: Mapping[str, Any]) -> Tensor:
    if plan.get("complex"):
        return torch.view_as_complex(stored)
    if "bytes_of" in plan:
        return stored.view(getattr(torch, plan["bytes_of"])).view(plan["shape"])
    return stored


def _scalar(plan: Mapping[str, Any]) -> Any:
    return np.frombuffer(_raw(plan["bytes"]), dtype=np.dtype(plan["scalar"]))[0]


_MAKERS: dict[str, Callable[[_Unpacker, Any], Any]] = {
    "map": lambda walk, plan: {key: walk.unpack(item) for key, item in plan["map"].items()},
    "dict": lambda walk, plan: dict(walk.pairs(plan["dict"])),
    "ordered": _Unpacker.ordered,
    "counter": lambda walk, plan: Counter(dict(walk.pairs(plan["counter"]))),
    "default": _Unpacker.default,
    "deque": lambda walk, plan: deque(walk.items(plan["deque"]), plan["maxlen"]),
    "tuple": lambda walk, plan: tuple(walk.items(plan["tuple"])),
    "size": lambda walk, plan: torch.Size(walk.items(plan["size"])),
    "set": lambda walk, plan: set(walk.items(plan["set"])),
    "frozenset": lambda walk, plan: frozenset(walk.items(plan["frozenset"])),
    "float": lambda _, plan: float(plan["float"]),
    "complex": lambda _, plan: complex(*map(float, plan["complex"])),
    "bytes": lambda _, plan: _raw(plan["bytes"]),
    "bytearray": lambda _, plan: bytearray(_raw(plan["bytearray"])),
    "dtype": lambda _, plan: getattr(torch, plan["dtype"]),
    "device": lambda _, plan: torch.device(plan["device"]),
    "tensor": _Unpacker.tensor,
    "sharded": lambda walk, plan: walk._tensors[plan["sharded"]],  # noqa: SLF001
    "array": _Unpacker.array,
    "scalar": lambda _, plan: _scalar(plan),
}


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _raw(text: str) -> bytes:
    return base64.b64decode(text)
