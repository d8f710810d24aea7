"""When it saves, what it restores, and what it refuses."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections import OrderedDict
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from runner.training import Checkpointer, DamagedCheckpoint, Mismatch, NotStorable, state_digest
from runner.training.folder import saved_in, step_of


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("CLOUDRUN_")]:
        monkeypatch.delenv(name)


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def _steps(folder: Path) -> list[int]:
    return [step_of(path) for path in saved_in(folder)]


def _saved(state: dict[str, Any], folder: Path, **options: Any) -> None:
    checkpointer = Checkpointer(state, folder=folder, **options)
    checkpointer.step()
    assert checkpointer.save()


# ---- when


def test_every_so_many_steps_and_at_the_end(tmp_path: Path) -> None:
    checkpointer = Checkpointer({"model": _model()}, folder=tmp_path, every=3, total=8, keep=10)
    assert checkpointer.restore() == 0
    for _ in range(8):
        checkpointer.step()
    assert _steps(tmp_path) == [3, 6, 8]


def test_by_time(tmp_path: Path) -> None:
    checkpointer = Checkpointer({"model": _model()}, folder=tmp_path, every=timedelta(microseconds=1))
    checkpointer.step()
    seldom = Checkpointer({"model": _model()}, folder=tmp_path / "seldom", every=timedelta(days=1))
    seldom.step()
    assert (_steps(tmp_path), _steps(tmp_path / "seldom")) == ([1], [])


@pytest.mark.parametrize("every", [0, -3, timedelta(0), timedelta(seconds=-1)])
def test_a_cadence_that_makes_no_sense(tmp_path: Path, every: int | timedelta) -> None:
    with pytest.raises(ValueError, match="above zero"):
        Checkpointer({}, folder=tmp_path, every=every)


def test_a_loss_that_is_no_number_does_not_spoil_the_json(tmp_path: Path) -> None:
    checkpointer = Checkpointer({"model": _model()}, folder=tmp_path, every=1)
    checkpointer.step(loss=float("nan"), accuracy=torch.tensor(0.5))
    text = (tmp_path / "step-000000000001/state.json").read_text()
    assert "NaN" not in text
    assert json.loads(text)["metrics"] == {"accuracy": 0.5}


def test_a_loop_may_save_by_itself(tmp_path: Path) -> None:
    checkpointer = Checkpointer({"model": _model()}, folder=tmp_path, every=2)
    wanted = []
    for _ in range(4):
        checkpointer.advance()
        wanted.append(checkpointer.should_save)
        if checkpointer.should_save:
            checkpointer.save()
            assert not checkpointer.should_save
    assert wanted == [False, True, False, True]
    assert _steps(tmp_path) == [2, 4]


def test_the_stop_file_saves_and_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = tmp_path / "stop"
    monkeypatch.setenv("CLOUDRUN_STOP_FILE", str(stop))
    checkpointer = Checkpointer({"model": _model()}, folder=tmp_path)
    stop.write_text("1764500000.0")
    checkpointer.step()
    assert checkpointer.stopping
    checkpointer.step()
    assert _steps(tmp_path) == [1]
    assert json.loads((tmp_path / "step-000000000001/state.json").read_bytes())["reason"] == "stop"


@pytest.fixture
def _default_signals() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = [signal.signal(number, signal.SIG_DFL) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("_default_signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_stops(tmp_path: Path, number: signal.Signals) -> None:
    checkpointer = Checkpointer({"model": _model()}, folder=tmp_path, stop_signals=[signal.SIGTERM, number])
    checkpointer.step()
    before_it = checkpointer.stopping
    signal.raise_signal(number)
    until_the_step = checkpointer.stopping
    checkpointer.step()
    assert (before_it, until_the_step, checkpointer.stopping) == (False, False, True)
    assert _steps(tmp_path) == [2]


@pytest.mark.usefixtures("_default_signals")
def test_a_signal_that_the_script_handles_is_left_to_it(tmp_path: Path) -> None:
    heard = []
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    checkpointer = Checkpointer({"model": _model()}, folder=tmp_path)
    signal.raise_signal(signal.SIGTERM)
    checkpointer.step()
    assert heard == [signal.SIGTERM]
    assert not checkpointer.stopping


@pytest.mark.usefixtures("_default_signals")
def test_a_fork_of_the_training_ends_by_the_signal(tmp_path: Path) -> None:
    Checkpointer({"model": _model()}, folder=tmp_path)
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def wait() -> None:
        there.send("begun")
        time.sleep(60)

    child = context.Process(target=wait)
    child.start()
    assert here.recv() == "begun"
    child.terminate()
    child.join(30)
    assert child.exitcode == -signal.SIGTERM


# ---- what is restored


def test_nothing_is_there_at_first(tmp_path: Path) -> None:
    assert Checkpointer({"model": _model()}, folder=tmp_path / "none").restore() == 0


def test_the_variable_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOUDRUN_CHECKPOINT_DIR", str(tmp_path))
    checkpointer = Checkpointer({"model": _model()}, every=1)
    checkpointer.step()
    assert _steps(tmp_path) == [1]


def test_the_supervisors_choice_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = Checkpointer({"model": _model()}, folder=tmp_path, every=1)
    for _ in range(3):
        checkpointer.step()
    monkeypatch.setenv("CLOUDRUN_RESUME_FROM", str(tmp_path / "step-000000000002"))
    assert Checkpointer({"model": _model()}, folder=tmp_path).restore() == 2
    monkeypatch.setenv("CLOUDRUN_RESUME_FROM", "")
    assert Checkpointer({"model": _model()}, folder=tmp_path).restore() == 0


def test_weights_go_between_compiled_and_plain_models(tmp_path: Path) -> None:
    plain = _model()
    compiled: Any = torch.compile(_model(), backend="eager")
    parts = _model()
    parts[0] = torch.compile(parts[0], backend="eager")  # type: ignore[assignment]
    previous: Any = plain
    for number, model in enumerate((compiled, parts, nn.DataParallel(_model()), _model())):
        _saved({"model": previous}, tmp_path / str(number))
        Checkpointer({"model": model}, folder=tmp_path / str(number)).restore()
        pairs = zip(model.state_dict().values(), plain.state_dict().values(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
        previous = model


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    def tied() -> nn.ModuleDict:
        model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
        model["head"].weight = model["embed"].weight
        return model

    model: Any = tied()
    _saved({"model": model}, tmp_path)
    other: Any = tied()
    Checkpointer({"model": other}, folder=tmp_path).restore()
    assert torch.equal(other["head"].weight, model["embed"].weight)
    assert other["head"].weight is other["embed"].weight


class Keeps:
    """Keeps what it is given, as many averages do."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        self.value = state


def test_anything_with_state_dict_and_plain_values(tmp_path: Path) -> None:
    best = {"loss": 0.25, "history": [1, (2, None)]}
    average = Keeps(OrderedDict(a=torch.ones(3), b={1: torch.zeros(2, dtype=torch.bfloat16)}))
    _saved({"average": average, "best": best}, tmp_path)
    fresh, again = Keeps(None), {"loss": 9.0, "gone": 1}
    Checkpointer({"average": fresh, "best": again}, folder=tmp_path).restore()
    assert again == {"loss": 0.25, "history": [1, (2, None)]}
    assert type(fresh.value) is OrderedDict
    assert fresh.value["b"][1].dtype == torch.bfloat16
    fresh.value["a"].add_(1)
    assert Checkpointer({"average": Keeps(None), "best": {}}, folder=tmp_path).restore() == 1


def test_generators_are_each_ranks_own_and_restored(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(4)
    torch.rand(3, generator=generator)
    _saved({"noise": generator}, tmp_path)
    expected = torch.rand(3, generator=generator)
    other = torch.Generator()
    Checkpointer({"noise": other}, folder=tmp_path).restore()
    assert torch.equal(torch.rand(3, generator=other), expected)


def test_a_digest_is_recorded_and_compared(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = _model()
    _saved({"model": model}, tmp_path, digest="full")
    meta = json.loads((tmp_path / "step-000000000001/state.json").read_bytes())
    assert meta["digest"] == {"kind": "full", "value": state_digest({"model": model.state_dict()}, full=True)}
    assert Checkpointer({"model": _model()}, folder=tmp_path).restore() == 1
    assert capfd.readouterr().err == ""
    weights = tmp_path / "step-000000000001/state.safetensors"
    data = bytearray(weights.read_bytes())
    length = int.from_bytes(data[:8], "little")
    span = json.loads(data[8 : 8 + length])["state/model/0.weight"]["data_offsets"]
    data[8 + length + span[0]] ^= 1
    weights.write_bytes(data)
    Checkpointer({"model": _model()}, folder=tmp_path).restore()
    assert f"the saved one had {meta['digest']['value']}" in capfd.readouterr().err


def test_another_environment_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _saved({"model": _model()}, tmp_path)
    path = tmp_path / "step-000000000001/state.json"
    meta = json.loads(path.read_bytes())
    meta["environment"] |= {"threads": "64", "cpu": "AVX2"}
    path.write_text(json.dumps(meta))
    Checkpointer({"model": _model()}, folder=tmp_path).restore()
    said = capfd.readouterr().err
    assert "may not be exact" in said
    assert f"the number of threads was 64, is {torch.get_num_threads()}" in said
    assert "the instruction set of the CPU was AVX2, is" in said


# ---- what is refused


def test_state_that_cannot_be_stored_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(NotStorable, match=r"state/average/a/0 cannot be stored: it is a .*Keeps"):
        Checkpointer({"average": Keeps({"a": [Keeps(1)]})}, folder=tmp_path)


def test_a_thing_without_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"state\['number'\] is a int"):
        Checkpointer({"number": 3}, folder=tmp_path)


def test_a_checkpoint_that_lacks_a_part_is_refused(tmp_path: Path) -> None:
    _saved({"model": _model()}, tmp_path)
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(Mismatch, match="holds model, but not optimizer"):
        Checkpointer({"model": model, "optimizer": optimizer}, folder=tmp_path).restore()


def test_a_part_that_is_not_wanted_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _saved({"model": _model(), "best": {}}, tmp_path)
    assert Checkpointer({"model": _model()}, folder=tmp_path).restore() == 1
    assert "also holds best, which is not restored" in capfd.readouterr().err


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    checkpointer = Checkpointer({"model": _model()}, folder=tmp_path, every=1)
    for _ in range(3):
        checkpointer.step()
    (tmp_path / "step-000000000003/state.json").write_text("{")
    os.truncate(tmp_path / "step-000000000002/state.safetensors", 100)
    assert Checkpointer({"model": _model()}, folder=tmp_path).restore() == 1
    assert capfd.readouterr().err.count("passed over") == 2


def test_never_a_silent_fresh_start(tmp_path: Path) -> None:
    _saved({"model": _model()}, tmp_path)
    (tmp_path / "step-000000000001/state.safetensors").unlink()
    with pytest.raises(DamagedCheckpoint, match="Move them away to start anew"):
        Checkpointer({"model": _model()}, folder=tmp_path).restore()


def test_a_foreign_checkpoint_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({}, tmp_path / "step-5.pt")
    monkeypatch.setenv("CLOUDRUN_RESUME_FROM", str(tmp_path / "step-5.pt"))
    with pytest.raises(DamagedCheckpoint, match=r"not saved by runner\.training"):
        Checkpointer({"model": _model()}, folder=tmp_path).restore()


@pytest.mark.parametrize(("key", "value"), [("format", "other"), ("version", 2), ("files", None)])
def test_another_format_or_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: object
) -> None:
    _saved({"model": _model()}, tmp_path)
    folder = tmp_path / "step-000000000001"
    meta = json.loads((folder / "state.json").read_bytes())
    (folder / "state.json").write_text(json.dumps({**meta, key: value}))
    monkeypatch.setenv("CLOUDRUN_RESUME_FROM", str(folder))
    with pytest.raises(DamagedCheckpoint, match=r"state\.json"):
        Checkpointer({"model": _model()}, folder=tmp_path).restore()


def test_ranks_that_have_not_joined_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="init_process_group"):
        Checkpointer({"model": _model()}, folder=tmp_path)
