"""What a good spec becomes."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from runner.spec import JobSpec, load_spec

FULL = """\
version: 1
name: digits
store: file:///mnt/nas/jobs/
storage: {give_up: 2h, region: eu, s3: {region: us, concurrency: 8}}
command: python train.py --name "two words"
setup: |
  echo ${i} $${x}
workdir: code
env: {DEBUG: 1, SHOW: yes, RATE: 0.10, PORT: 0x10, EMPTY: ""}
data:
  - {source: "file:///data/train", target: ./a/b/, include: "*.jpg", verify: true}
  - {source: "s3://bucket/x", target: c, mode: stream, extract: never, exclude: ["*.tmp", "x"]}
cache: {dir: big, limit: 50 %}
checkpoints:
  dir: out
  format: torch
  every: 10m
  keep: {last: 2, every: 1000, best: loss}
  resume: --resume {path} --step {step}
  ask: usr1
  inject: true
stop: {signal: 12, grace: 1m}
interruption: {sources: [aws, files], lead: {aws: 2m}, rebalance: leave}
restart:
  max_without_progress: 5
  backoff: {first: 1s, limit: 1m}
  on_exit: {3: fail, 0: restart}
  fatal_patterns: [nan]
  retry_patterns: NCCL
limits: {startup: none, idle: , runtime: 1d, cost: 5}
slowdown: {threshold: 0.25, window: 5m, action: leave}
progress: {pattern: 'step (?P<step>\\d+)'}
nodes: {min: 2, processes_per_node: 4}
price: {per_hour: 1, currency: CNY}
on_finish: poweroff
on_failure: {do: terminate, after: 10m}
notify: [{url: "https://x.org/hook", on: [failed]}, {command: [notify-send, 3]}]
metrics: {listen: 9090}
logs: {keep: 5, upload_every: 1m}
"""


def load(folder: Path, text: str, *overrides: str, **environ: str) -> JobSpec:
    path = folder / "job.yaml"
    path.write_text(text, encoding="utf-8")
    return load_spec(path, overrides=overrides, environ=environ)


def test_a_minimal_job_has_the_defaults_of_the_reference(tmp_path: Path) -> None:
    spec = load(tmp_path, "name: digits\ncommand: python train.py\n")
    assert spec.model_dump() == {
        "version": 1,
        "name": "digits",
        "store": None,
        "storage": {
            **dict.fromkeys(["endpoint", "region", "addressing", "profile", "sse", "kms_key", "concurrency"]),
            **dict.fromkeys(["s3", "obs"]),
            "requester_pays": False,
            "give_up": 3600.0,
        },
        "command": ("python", "train.py"),
        "script": None,
        "setup": None,
        "workdir": ".",
        "env": {},
        "env_file": None,
        "secrets": (),
        "data": (),
        "cache": {"dir": None, "limit": 0.9},
        "checkpoints": {
            "dir": None,
            "format": "auto",
            "every": "auto",
            "keep": {"last": 3, "every": None, "best": None},
            "resume": (),
            "ask": None,
            "inject": False,
        },
        "stop": {"signal": "SIGTERM", "grace": 30.0},
        "interruption": {"sources": "auto", "lead": {}, "rebalance": "save"},
        "restart": {
            "max_without_progress": 3,
            "backoff": {"first": 5.0, "limit": 300.0},
            "on_exit": {},
            "fatal_patterns": (),
            "retry_patterns": (),
        },
        "limits": {"startup": 3600.0, "idle": 900.0, "runtime": None, "lifetime": None, "cost": None},
        "slowdown": {"threshold": 0.3, "window": 600.0, "action": "report"},
        "progress": {"pattern": None},
        "nodes": {"min": 1, "max": 1, "processes_per_node": "auto", "port": 29400},
        "price": {"per_hour": None, "on_demand_per_hour": None, "currency": "USD"},
        "on_finish": {"do": "exit", "after": 0.0},
        "on_failure": {"do": "exit", "after": 0.0},
        "notify": (),
        "metrics": {"listen": None, "textfile": None},
        "logs": {"keep": "all", "upload_every": 10.0},
    }


def test_every_key_of_a_full_job_arrives_in_its_final_type(tmp_path: Path) -> None:
    spec = load(tmp_path, FULL)
    assert spec.store == "file:///mnt/nas/jobs"
    assert spec.storage.give_up == 7200.0
    assert spec.argv == ("python", "train.py", "--name", "two words")
    assert spec.env == {"DEBUG": "1", "SHOW": "yes", "RATE": "0.10", "PORT": "0x10", "EMPTY": ""}
    assert [entry.target for entry in spec.data] == ["a/b", "c"]
    assert spec.data[0].include == ("*.jpg",)
    assert spec.data[1].exclude == ("*.tmp", "x")
    assert (spec.data[0].verify, spec.data[1].verify) == (True, False)
    assert spec.cache.limit == 0.5
    assert spec.checkpoints.every == 600.0
    assert (spec.checkpoints.keep.every, spec.checkpoints.keep.best) == (1000, "min loss")
    assert spec.checkpoints.resume == ("--resume", "{path}", "--step", "{step}")
    assert (spec.checkpoints.ask, spec.stop.signal, spec.stop.grace) == ("SIGUSR1", "SIGUSR2", 60.0)
    assert spec.interruption.sources == ("aws", "files")
    assert spec.interruption.lead == {"aws": 120.0}
    assert spec.restart.on_exit == {3: "fail", 0: "restart"}
    assert spec.restart.retry_patterns == ("NCCL",)
    assert (spec.limits.startup, spec.limits.idle, spec.limits.runtime, spec.limits.cost) == (None, None, 86400.0, 5.0)
    assert spec.slowdown.threshold == 0.25
    assert (spec.nodes.min, spec.nodes.max, spec.nodes.processes_per_node) == (2, 2, 4)
    assert spec.on_finish.do == "poweroff"
    assert (spec.on_failure.do, spec.on_failure.after) == ("terminate", 600.0)
    assert spec.notify[0].on == ("failed",)
    assert spec.notify[1].command == ("notify-send", "3")
    assert spec.metrics.listen == "127.0.0.1:9090"
    assert (spec.logs.keep, spec.logs.upload_every) == (5, 60.0)


def test_bash_texts_keep_their_dollars(tmp_path: Path) -> None:
    assert load(tmp_path, FULL).setup == "echo ${i} $${x}\n"


def test_storage_of_a_scheme_goes_over_the_general_one(tmp_path: Path) -> None:
    storage = load(tmp_path, FULL).storage
    assert (storage.for_scheme("s3").region, storage.for_scheme("s3").concurrency) == ("us", 8)
    assert (storage.for_scheme("obs").region, storage.for_scheme("obs").concurrency) == ("eu", None)
    assert storage.for_scheme("s3").give_up == 7200.0


def test_the_model_cannot_be_changed(tmp_path: Path) -> None:
    spec = load(tmp_path, FULL)
    with pytest.raises(ValidationError):
        spec.name = "other"
    with pytest.raises(ValidationError):
        spec.stop.grace = 1.0


def test_paths_are_relative_to_the_folder_of_the_spec(tmp_path: Path) -> None:
    spec = load(tmp_path, FULL, "env_file=", HOME="/home/me")
    assert spec.source == tmp_path / "job.yaml"
    assert spec.working_directory == tmp_path / "code"
    assert spec.checkpoint_dir == tmp_path / "code" / "out"
    assert spec.cache_dir({}) == tmp_path / "big"
    spec = load(tmp_path, FULL, "cache.dir=~/c", "workdir=../x", "checkpoints.dir=[a*, b*]", HOME="/home/me")
    assert spec.cache_dir({}) == Path("/home/me/c")
    assert spec.working_directory == tmp_path.parent / "x"
    assert spec.checkpoint_dir is None
    assert spec.checkpoints.dir == ("a*", "b*")


def test_the_default_store_and_cache_follow_the_xdg_rules(tmp_path: Path) -> None:
    spec = load(tmp_path, "name: a\ncommand: b\n")
    nowhere = tmp_path / "none"
    assert spec.store_url({"HOME": "/h"}) == "file:///h/.local/share/cloudrun/store"
    assert spec.store_url({"HOME": "/h", "XDG_DATA_HOME": "/d"}) == "file:///d/cloudrun/store"
    assert spec.store_url({"HOME": "/h", "XDG_DATA_HOME": "rel"}) == "file:///h/.local/share/cloudrun/store"
    assert spec.cache_dir({"HOME": "/h"}, shared=nowhere) == Path("/h/.cache/cloudrun")
    assert spec.cache_dir({"XDG_CACHE_HOME": "/c"}, shared=nowhere) == Path("/c/cloudrun")
    assert spec.cache_dir({"HOME": "/h"}, shared=tmp_path) == tmp_path


def test_an_empty_section_has_its_defaults(tmp_path: Path) -> None:
    spec = load(tmp_path, "name: a\ncommand: b\nstop:\ncheckpoints:\n  keep:\n  every: null\n")
    assert (spec.stop.grace, spec.checkpoints.keep.last, spec.checkpoints.every) == (30.0, 3, "auto")


def test_a_command_list_is_taken_as_it_is_and_may_hold_numbers(tmp_path: Path) -> None:
    spec = load(tmp_path, "name: a\ncommand: [python, 'a b.py', --lr, 1e-3, --amp, true]\n")
    assert spec.argv == ("python", "a b.py", "--lr", "1e-3", "--amp", "true")


def test_anchors_and_merges_within_reason(tmp_path: Path) -> None:
    text = "name: &n a\ncommand: [run, *n]\nstorage: {s3: &s {region: x}, obs: {<<: *s, concurrency: 2}}\n"
    spec = load(tmp_path, text)
    assert spec.argv == ("run", "a")
    assert spec.storage.obs is not None
    assert (spec.storage.obs.region, spec.storage.obs.concurrency) == ("x", 2)


def test_the_environment_of_the_trainer(tmp_path: Path) -> None:
    lines = "# notes\n\nexport A=1 # one\nB='x # y' # note\nC=\"two\\nlines\"\nD=\nE = a=b\nB2=x#y\n"
    (tmp_path / ".env").write_text(lines, encoding="utf-8")
    spec = load(
        tmp_path, "name: a\ncommand: b\nenv_file: .env\nenv: {A: over}\nsecrets: TOKEN\n", TOKEN="s3cr3t", OTHER="no"
    )
    assert spec.environment({"TOKEN": "s3cr3t", "OTHER": "no"}) == {
        "A": "over",
        "B": "x # y",
        "C": "two\nlines",
        "D": "",
        "E": "a=b",
        "B2": "x#y",
        "TOKEN": "s3cr3t",
    }
    assert spec.secret_values({"TOKEN": "s3cr3t"}) == ("s3cr3t",)


def test_the_digest_follows_the_meaning_and_no_secret_enters_it(tmp_path: Path) -> None:
    text = "name: a\ncommand: b ${X}\n"
    digest = load(tmp_path, text, X="1").digest
    assert digest == load(tmp_path, f"# note\n{text}", X="2").digest
    assert digest == load(tmp_path, "command: other\nname: a\n", "command=b ${X}", X="2").digest
    assert digest != load(tmp_path, text, "env.A=1", X="1").digest
    assert len(digest) == 64
    assert load(tmp_path, text, X="1").raw_text == text


def test_a_repr_shows_no_values(tmp_path: Path) -> None:
    assert repr(load(tmp_path, "name: a\ncommand: b hidden")) == "JobSpec('a')"


def test_an_env_file_from_another_system(tmp_path: Path) -> None:
    text = "\ufeffA=1\r\n# note\r\nexport B='two words'\r\n\r\nC=x\u2028y\x0cz\r\nD=last"
    (tmp_path / ".env").write_bytes(text.encode())
    spec = load(tmp_path, "name: a\ncommand: b\nenv_file: .env\n")
    assert spec.environment({}) == {"A": "1", "B": "two words", "C": "x\u2028y\x0cz", "D": "last"}


@pytest.mark.parametrize(
    ("text", "globs"),
    [
        ("{dir: ./out//*.pt}", ("out/*.pt",)),
        ("{dir: [out, a/b-*/]}", ("out", "a/b-*")),
        ("{dir: out}", ()),
        ("{}", ()),
    ],
)
def test_checkpoints_may_lie_in_several_folders(tmp_path: Path, text: str, globs: tuple[str, ...]) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"name: a\ncommand: b\ncheckpoints: {text}\n")
    spec = load_spec(path, environ={})
    assert spec.checkpoint_globs == globs
    assert spec.checkpoint_dir == (tmp_path / "out" if text == "{dir: out}" else None)
