"""Images are valid safetensors files, whichever way they are written; damage is seen; reading changes no file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runner.checkpoint.formats import judge
from runner.training import DamagedCheckpoint
from runner.training.image import image_of, load_image

TENSORS = {
    "byte": torch.tensor([1, 2, 3], dtype=torch.uint8),
    "double": torch.randn(3, dtype=torch.float64),
    "empty": torch.empty(0, 4),
    "flag": torch.tensor(True),
    "half": torch.randn(5).to(torch.bfloat16),
    "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
    "turned": torch.arange(6.0).reshape(2, 3).t(),
    "large": torch.randn(3_000_000),
}


def _written(path: Path, tensors: dict[str, Tensor]) -> Path:
    with open(path, "wb") as file:
        image_of(tensors).write_to(file)
    return path


def test_written_or_copied_the_bytes_are_the_same(tmp_path: Path) -> None:
    image = image_of(TENSORS)
    buffer = torch.full((image.size,), 255, dtype=torch.uint8)
    image.copy_into(buffer)
    assert _written(tmp_path / "a.safetensors", TENSORS).read_bytes() == buffer.numpy().tobytes()


def test_the_file_is_what_safetensors_asks_for(tmp_path: Path) -> None:
    path = _written(tmp_path / "a.safetensors", TENSORS)
    assert judge(path).complete
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + length])
    entries.pop("__metadata__")
    spans = sorted(entry["data_offsets"] for entry in entries.values())
    assert [start for start, _ in spans] == [0, *(stop for _, stop in spans)][: len(spans)]
    assert (8 + length) % 64 == 0
    assert all((8 + length + e["data_offsets"][0]) % {"F64": 8, "F32": 4, "BF16": 2}.get(e["dtype"], 1) == 0
               for e in entries.values())  # fmt: skip


def test_reading_gives_the_tensors(tmp_path: Path) -> None:
    back = load_image(_written(tmp_path / "a.safetensors", TENSORS))
    assert back.keys() == TENSORS.keys()
    assert all(torch.equal(back[name], tensor) and back[name].dtype == tensor.dtype for name, tensor in TENSORS.items())


def test_no_tensors_at_all(tmp_path: Path) -> None:
    assert load_image(_written(tmp_path / "a.safetensors", {})) == {}


def test_writing_to_what_was_read_leaves_the_file_alone(tmp_path: Path) -> None:
    path = _written(tmp_path / "a.safetensors", TENSORS)
    before = path.read_bytes()
    for tensor in load_image(path).values():
        tensor.zero_()
    assert path.read_bytes() == before


def test_a_file_of_another_writer_may_lie_unaligned(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    header = b'{"t":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + torch.tensor([1.0, 2.0]).numpy().tobytes())
    assert load_image(path)["t"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1])
def test_a_shorter_file_is_refused(tmp_path: Path, keep: int) -> None:
    path = _written(tmp_path / "a.safetensors", {"t": torch.ones(50)})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DamagedCheckpoint, match=r"a\.safetensors"):
        load_image(path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, -8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
        {"dtype": "X", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]},
        {"dtype": "F32"},
        7,
    ],
)
def test_a_header_that_makes_no_sense_is_refused(tmp_path: Path, entry: object) -> None:
    path = tmp_path / "a.safetensors"
    header = json.dumps({"t": entry}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(DamagedCheckpoint, match=r"a\.safetensors"):
        load_image(path)
