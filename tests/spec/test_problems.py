"""What is refused, where it is pointed at, and in which words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from runner.errors import ExitCode, UsageError
from runner.spec import Problem, SpecInvalid, load_spec

OK = "name: a\ncommand: b\n"


def problems(
    folder: Path, text: str | bytes, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> tuple[Problem, ...]:
    path = folder / "job.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(SpecInvalid) as caught:
        load_spec(path, overrides=overrides, environ=environ or {})
    assert caught.value.exit_code == ExitCode.BAD_SPEC
    assert caught.value.message == "\n".join(map(str, caught.value.problems))
    return caught.value.problems


def lines(
    folder: Path, text: str | bytes, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> list[str]:
    found = problems(folder, text, overrides, environ)
    return [str(problem).replace(str(folder / "job.yaml"), "job.yaml") for problem in found]


SIZE = "must be a size such as 200GiB, 5GB, 500MB or a number of bytes"
DURATION = "must be a duration such as 90s, 10m, 2h, 1d, 500ms or 1h30m"

TABLE = [
    # unknown keys, at every level, with the nearest known key
    (
        "restart:\n  max_without_progress: 3\n  backof: {}\n",
        "5:3: restart.backof: unknown key, did you mean restart.backoff?",
    ),
    (
        "restart: {backoff: {frist: 1s}}",
        "3:21: restart.backoff.frist: unknown key, did you mean restart.backoff.first?",
    ),
    ("comand: x", "3:1: comand: unknown key, did you mean command?"),
    ("grace: 3s", "3:1: grace: unknown key, did you mean stop.grace?"),
    ("data: [{source: file:///x, traget: y}]", "3:28: data.0.traget: unknown key, did you mean data.0.target?"),
    ("storage: {s3: {regoin: y}}", "3:16: storage.s3.regoin: unknown key, did you mean storage.s3.region?"),
    ("zzz: 1", "3:1: zzz: unknown key"),
    ("on_finish: {then: exit}", "3:13: on_finish.then: unknown key"),
    # types
    ("stop: 3", "3:7: stop: must be a mapping of keys to values, not '3'"),
    ("stop: [a]", "3:7: stop: must be a mapping of keys to values"),
    ("data: {source: x}", "3:7: data: must be a list"),
    ("data: [x]", "3:8: data.0: must be a mapping of keys to values, not 'x'"),
    ("data: [{target: x}]", "3:8: data.0.source: is required"),
    ("nodes: {port: x}", "3:15: nodes.port: must be a whole number, not 'x'"),
    ('nodes: {port: "80"}', "3:15: nodes.port: must be a whole number, not '80'"),
    ("nodes: {port: 0}", "3:15: nodes.port: must be at least 1, not '0'"),
    ("nodes: {port: 65536}", "3:15: nodes.port: must be at most 65535, not '65536'"),
    ("nodes: {min: 3, max: 2}", "3:22: nodes.max: must not be less than nodes.min, not '2'"),
    ("checkpoints: {dir: []}", "3:20: checkpoints.dir: must not be empty"),
    (
        "checkpoints:\n  dir:\n  - a/*.pt\n  - ../x/*.pt",
        "6:5: checkpoints.dir.1: must lie inside the workdir, not '../x/*.pt'",
    ),
    ("checkpoints: {dir: /abs/*.pt}", "3:20: checkpoints.dir: must lie inside the workdir, not '/abs/*.pt'"),
    ("checkpoints: {dir: a/**/*.pt}", "3:20: checkpoints.dir: must name each folder on the way, not 'a/**/*.pt'"),
    (
        "checkpoints: {dir: .o/*.pt}",
        "3:20: checkpoints.dir: must match names that can be checkpoints, not '.o/*.pt'",
    ),
    ("checkpoints: {dir: tmp_a/*}", "3:20: checkpoints.dir: must match names that can be checkpoints, not 'tmp_a/*'"),
    ("checkpoints: {dir: a/*.part}", "3:20: checkpoints.dir: must match names that can be checkpoints, not 'a/*.part'"),
    ("checkpoints: {keep: {best: max}}", "3:28: checkpoints.keep.best: must be the name of a metric, not 'max'"),
    (
        "checkpoints: {keep: {best: up a}}",
        "3:28: checkpoints.keep.best: must be the name of a metric, not 'up a'",
    ),
    ("checkpoints: {inject: 1}", "3:23: checkpoints.inject: must be true or false, not '1'"),
    ("price: {per_hour: -1}", "3:19: price.per_hour: must be at least 0, not '-1'"),
    ("price: {per_hour: .inf}", "3:19: price.per_hour: must be a finite number, not '.inf'"),
    ("price: {currency: dollar}", "3:19: price.currency: must be three capital letters, such as USD, not 'dollar'"),
    ("version: 2", "3:10: version: must be 1, not '2'"),
    ("workdir: 3", "3:10: workdir: must be text, not '3'"),
    ("workdir: ' '", "3:10: workdir: must not be empty"),
    ("env: {A: [1]}", "3:10: env.A: must be text"),
    ("env: {A: }", "3:7: env.A: has no value"),
    ("env: {1A: x}", "3:7: env.1A: must be the name of an environment variable"),
    (
        "checkpoints: {format: torhc}",
        (
            "3:23: checkpoints.format: must be one of "
            "auto, torch, dcp, transformers, lightning, accelerate, deepspeed, ultralytics, composer, any, not 'torhc'"
        ),
    ),
    # durations, sizes, shares
    ("stop: {grace: 10}", f"3:15: stop.grace: {DURATION}, not '10'"),
    ("stop: {grace: 10 minutes}", f"3:15: stop.grace: {DURATION}, not '10 minutes'"),
    ("checkpoints: {every: 0s}", "3:22: checkpoints.every: must be longer than 0, or auto, not '0s'"),
    ("checkpoints: {keep: {every: 0}}", "3:29: checkpoints.keep.every: must be at least 1 step, not '0'"),
    ("checkpoints: {keep: {last: 0}}", "3:28: checkpoints.keep.last: must be at least 1, not '0'"),
    (
        "cache: {limit: 5G}",
        f"3:16: cache.limit: {SIZE}, or a share such as 90 %, not '5G'",
    ),
    (
        "slowdown: {threshold: 130 %}",
        "3:23: slowdown.threshold: must be a share such as 30 % or 0.3, above 0 and at most 100 %, not '130 %'",
    ),
    (
        "restart: {backoff: {first: 10m}}",
        "3:28: restart.backoff.first: must not be longer than backoff.limit, not '10m'",
    ),
    # commands and arguments
    ("script: echo", "3:9: script: cannot stand beside command"),
    ("checkpoints: {resume: 'x {pth}'}", "3:23: checkpoints.resume: has an unknown placeholder ({pth}), not 'x {pth}'"),
    ("checkpoints: {resume: [a, '{p}']}", "3:27: checkpoints.resume.1: has an unknown placeholder ({p}), not '{p}'"),
    ("checkpoints: {dir: []}", "3:20: checkpoints.dir: must not be empty"),
    # stores and data
    (
        "store: /mnt/x",
        "3:8: store: must be a URL: s3://bucket/prefix, obs://bucket/prefix or file:///folder, not '/mnt/x'",
    ),
    ("store: file://rel", "3:8: store: must be an absolute path after file://, not 'file://rel'"),
    ("store: file:///", "3:8: store: must name a folder, not the whole disk, not 'file:///'"),
    (
        "store: file:///a/../b",
        "3:8: store: must be a plain path, without . and .. parts or control characters, not 'file:///a/../b'",
    ),
    ("store: gs://bucket", "3:8: store: must begin with s3://, obs:// or file://, not 'gs://bucket'"),
    ("store: s3:///x", "3:8: store: must name a bucket after ://, not 's3:///x'"),
    ("store: s3://ab/x", "3:8: store: must name a bucket of 3 to 63 characters, not 's3://ab/x'"),
    ("store: s3://My-Jobs/x", "3:8: store: must name a bucket without capital letters, not 's3://My-Jobs/x'"),
    ("store: obs://my_jobs", "3:8: store: must name a bucket of a-z, 0-9, '.' and '-' only, not 'obs://my_jobs'"),
    ("store: s3://jöbs", "3:8: store: must name a bucket of a-z, 0-9, '.' and '-' only, not 's3://jöbs'"),
    (
        "store: s3://-jobs",
        "3:8: store: must name a bucket that begins and ends with a letter or a digit, not 's3://-jobs'",
    ),
    (
        "store: obs://jobs.",
        "3:8: store: must name a bucket that begins and ends with a letter or a digit, not 'obs://jobs.'",
    ),
    ("store: s3://my..jobs/", "3:8: store: must name a bucket without two dots in a row, not 's3://my..jobs/'"),
    (
        "store: s3://10.0.0.1/x",
        "3:8: store: must name a bucket that does not look like an IP address, not 's3://10.0.0.1/x'",
    ),
    ("store: obs://my-.jobs", "3:8: store: must name a bucket without '.' and '-' side by side, not 'obs://my-.jobs'"),
    ("store: s3://host:9000/x", "3:8: store: must name a bucket after ://, without ':', not 's3://host:9000/x'"),
    (
        "data: [{source: 's3://UP/x', target: a}]",
        "3:17: data.0.source: must name a bucket of 3 to 63 characters, not 's3://UP/x'",
    ),
    # keys that would do nothing
    (
        "storage: {s3: {give_up: 1h}}",
        "3:16: storage.s3.give_up: unknown key: it is about the job, so it stands once, for all stores",
    ),
    (
        "storage: {obs: {give_up: 1h}}",
        "3:17: storage.obs.give_up: unknown key: it is about the job, so it stands once, for all stores",
    ),
    ("storage: {file: {region: x}}", "3:11: storage.file: unknown key: a folder takes no options"),
    ("storage: {obs: {profile: p}}", "3:26: storage.obs.profile: does nothing: OBS knows no profiles"),
    ("store: s3://key:password@bucket", "3:8: store: must not hold credentials"),
    (
        "storage: {endpoint: minio.local}",
        "3:21: storage.endpoint: must be a URL that begins with https:// or http://, not 'minio.local'",
    ),
    ("storage: {kms_key: k}", "3:20: storage.kms_key: does nothing without sse: aws:kms beside it, not 'k'"),
    (
        "storage: {sse: AES256, s3: {kms_key: k}}",
        "3:38: storage.s3.kms_key: does nothing without sse: aws:kms beside it, not 'k'",
    ),
    ("storage: {s3: {endpoint: 'https://a:b@c'}}", "3:26: storage.s3.endpoint: must not hold credentials"),
    (
        "storage: {endpoint: 'http://a/?b'}",
        "3:21: storage.endpoint: must be a plain address, without a query, not 'http://a/?b'",
    ),
    ("data: [{source: file:///x, target: ../y}]", "3:36: data.0.target: must stay inside the data folder, not '../y'"),
    ("data: [{source: file:///x, target: /y}]", "3:36: data.0.target: must stay inside the data folder, not '/y'"),
    ("data: [{source: file:///x}, {source: file:///y}]", "3:29: data.1.target: lies in the same folder as data.0"),
    (
        "data: [{source: file:///x, target: a/b}, {source: file:///y, target: a}]",
        "3:70: data.1.target: lies in the same folder as data.0",
    ),
    # rules of the other sections
    ("stop: {signal: KILL}", "3:16: stop.signal: must be a signal that a program can catch, not 'KILL'"),
    ("stop: {signal: 19}", "3:16: stop.signal: must be a signal that a program can catch, not '19'"),
    (
        "stop: {signal: SIGFOO}",
        "3:16: stop.signal: must be the name of a signal, such as SIGTERM or SIGUSR1, not 'SIGFOO'",
    ),
    ("restart: {on_exit: {256: fail}}", "3:21: restart.on_exit.256: must be an exit code from 0 to 255"),
    ("restart: {on_exit: {x: fail}}", "3:21: restart.on_exit.x: must be an exit code from 0 to 255"),
    ("restart: {on_exit: {3: fial}}", "3:24: restart.on_exit.3: must be one of restart, fail, succeed, not 'fial'"),
    (
        "restart: {fatal_patterns: [a, '(']}",
        (
            "3:31: restart.fatal_patterns.1: must be a Python regular expression "
            "(missing ), unterminated subpattern at position 0), not '('"
        ),
    ),
    ("progress: {pattern: 'a(b)'}", "3:21: progress.pattern: must have a group named step, not 'a(b)'"),
    ("notify: [{on: [failed]}]", "3:10: notify.0: needs exactly one of url and command"),
    ("notify: [{url: 'https://x', command: y}]", "3:10: notify.0: needs exactly one of url and command"),
    (
        "notify: [{url: ftp://x}]",
        "3:16: notify.0.url: must be a URL that begins with https:// or http://, not 'ftp://x'",
    ),
    (
        "metrics: {listen: 99999}",
        "3:19: metrics.listen: must be an address such as 127.0.0.1:9090, or a port, not '99999'",
    ),
    ("on_finish: reboot", "3:12: on_finish.do: must be one of exit, poweroff, terminate"),
    ("secrets: [NOPE]", "3:11: secrets.0: is not set in the environment (NOPE)"),
    ("secrets: [1x]", "3:11: secrets.0: must be the name of an environment variable, not '1x'"),
    ("env_file: none.env", "3:11: env_file: names a file that does not exist, not 'none.env'"),
    # YAML itself
    ("name: c", "3:1: name: given twice, first on line 1, column 1"),
    ("stop: {grace: 1s, grace: 2s}", "3:19: stop.grace: given twice, first on line 3, column 8"),
    ("? [a]\n: b", "3:3: a key must be plain text"),
    ("workdir: !!python/object:os.system x", "3:10: workdir: the tag !!python/object:os.system is not allowed"),
    ("env: !x {A: b}", "3:6: env: the tag !x is not allowed"),
    ('workdir: "a\\0b"', "3:10: workdir: must not hold a NUL character"),
]


@pytest.mark.parametrize(("text", "expected"), TABLE, ids=[text.splitlines()[0] for text, _ in TABLE])
def test_one_fault_is_one_line_at_its_place(tmp_path: Path, text: str, expected: str) -> None:
    assert lines(tmp_path, OK + text) == [f"job.yaml:{expected}"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# note\ncommand: b", "1:1: name: is required"),
        ("# note\nname: a", "1:1: command: is required, or script"),
        ("name:\ncommand: b", "1:1: name: is required"),
        ("name: 2024\ncommand: b", "1:7: name: must be text, not '2024'"),
        ("name: yes\ncommand: b", "1:7: name: must be text, not 'yes'"),
        ("name: Digits\ncommand: b", "1:7: name: must be a job name, not 'Digits'"),
        ("name: -a\ncommand: b", "1:7: name: must be a job name, not '-a'"),
        (f"name: {'a' * 64}\ncommand: b", f"1:7: name: must be a job name, not '{'a' * 60}...'"),
        ('name: "a\\n"\ncommand: b', "1:7: name: must be a job name, not 'a\\n'"),
        ("name: a\ncommand: b 'c", "2:10: command: has an unbalanced quote or a backslash at its end, not 'b 'c'"),
        ("name: a\ncommand: ''", "2:10: command: must not be empty"),
        ("name: a\ncommand: []", "2:10: command: must not be empty"),
        ("name: a\ncommand: [b, [c]]", "2:14: command.1: must be text"),
        ("name: a\ncommand: 3", "2:10: command: must be text or a list of texts, not '3'"),
        ("", "1:1: is empty"),
        ("# only a note\n", "1:1: is empty"),
        ("- a", "1:1: must be a mapping of keys to values"),
        ("just text", "1:1: must be a mapping of keys to values"),
        ("name: a\n\tcommand: b", "2:1: a tab cannot indent in YAML"),
        ("name: a: b", "1:8: not valid YAML: mapping values are not allowed here"),
        ("name: a\n--- \nname: b", "2:1: not valid YAML: but found another document"),
        ("name: [a", "1:9: not valid YAML: expected ',' or ']', but got '<stream end>'"),
        ("name: *nope", "1:7: not valid YAML: found undefined alias 'nope'"),
    ],
)
def test_faults_of_the_whole_file(tmp_path: Path, text: str, expected: str) -> None:
    assert lines(tmp_path, text) == [f"job.yaml:{expected}"]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"name: a\n# \xff\n", "2:3: is not UTF-8 text"),
        (b"name: a\nx: \x01", "2:4: holds a control character that YAML does not allow"),
        (b"# " + b"x" * 1024 * 1024, "1:1: is larger than 1 MiB"),
    ],
)
def test_files_that_are_no_text(tmp_path: Path, data: bytes, expected: str) -> None:
    assert lines(tmp_path, data) == [f"job.yaml:{expected}"]


def test_all_faults_at_once_sorted_by_line(tmp_path: Path) -> None:
    text = "stop: {grace: x}\nnam: a\nstore: ${NOPE}\ndata: [{target: ..}]\nrestart:\n  backof: 1\n"
    assert lines(tmp_path, text) == [
        "job.yaml:1:1: command: is required, or script",
        "job.yaml:1:1: name: is required",
        f"job.yaml:1:15: stop.grace: {DURATION}, not 'x'",
        "job.yaml:2:1: nam: unknown key, did you mean name?",
        "job.yaml:3:8: store: ${NOPE} is not set in the environment",
        "job.yaml:4:8: data.0.source: is required",
        "job.yaml:4:17: data.0.target: must stay inside the data folder, not '..'",
        "job.yaml:6:3: restart.backof: unknown key, did you mean restart.backoff?",
    ]


def test_hints_say_what_to_do(tmp_path: Path) -> None:
    hints = {
        problem.key: problem.hint
        for problem in problems(tmp_path, "name: 2024\ncommand: b\nstore: /x\nzzz: 1\nstop: {signal: KILL}")
    }
    assert hints["name"] == 'put it in quotes, such as name: "2024"'
    assert hints["store"] == "for a folder, put file:// before the path"
    assert hints["zzz"].startswith("known here: version, name, store, ")
    assert hints["stop.signal"] == "SIGKILL cannot be caught, so nothing could be saved"


def test_a_bucket_is_refused_with_the_rules(tmp_path: Path) -> None:
    (found,) = problems(tmp_path, f"{OK}store: s3://My_Jobs/x")
    assert found.hint.startswith("a bucket has 3 to 63 of a-z, 0-9, '.' and '-'")
    (found,) = problems(tmp_path, f"{OK}store: s3://host:9000/x")
    assert found.hint.startswith("the address of a service goes into storage.endpoint")
    (found,) = problems(tmp_path, f"{OK}storage: {{s3: {{give_up: 1h}}}}")
    assert found.hint == "write storage.give_up"


@pytest.mark.parametrize("name", ["abc", "a.b-c.1", "1-2", "a" * 63, "1.2.3", "10.0.0.1.x", "s3.amazonaws.com"])
@pytest.mark.parametrize("scheme", ["s3", "obs"])
def test_good_names_of_buckets(tmp_path: Path, scheme: str, name: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"{OK}store: {scheme}://{name}/p\n")
    assert load_spec(path, environ={}).store == f"{scheme}://{name}/p"


def test_only_obs_minds_a_dot_beside_a_hyphen(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"{OK}store: s3://my-.jobs\n")
    assert load_spec(path, environ={}).store == "s3://my-.jobs"


def test_a_bad_name_of_a_bucket_from_the_environment_is_not_shown(tmp_path: Path) -> None:
    (line,) = lines(tmp_path, f"{OK}store: s3://${{WHERE}}/x", environ={"WHERE": "Hunter22"})
    assert line == "job.yaml:3:8: store: must name a bucket without capital letters, not the value from the environment"


def test_a_file_that_is_not_there_is_bad_usage(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path, tmp_path / ("x" * 300)):
        with pytest.raises(UsageError) as caught:
            load_spec(path, environ={})
        assert str(path) in caught.value.message


def test_bad_lines_of_an_env_file_are_pointed_at_without_their_text(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("A=1\n  hunter22\nB='open\n=x\n", encoding="utf-8")
    found = problems(tmp_path, f"{OK}env_file: .env\nzzz: 1")
    assert [(Path(problem.file).name, problem.line, problem.column) for problem in found] == [
        ("job.yaml", 4, 1),
        (".env", 2, 3),
        (".env", 3, 1),
        (".env", 4, 1),
    ]
    assert "hunter22" not in "".join(map(repr, found))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["restart.backof=3"], ["--set:1:1: restart.backof: unknown key, did you mean restart.backoff?"]),
        (["env.A=1", "stop.grace=x"], [f"--set:2:12: stop.grace: {DURATION}, not 'x'"]),
        (["stop={grace: 1s, garce: 2s}"], ["--set:1:18: stop.garce: unknown key, did you mean stop.grace?"]),
        (["name=2024"], ["--set:1:6: name: must be text, not '2024'"]),
        (["name"], ["--set:1:1: an override needs a key and a value"]),
        (
            ["=x", ".a=x"],
            ["--set:1:1: an override needs a key and a value", "--set:2:1: an override needs a key and a value"],
        ),
        (["data.0.mode=copy"], ["--set:1:1: data: must be a list"]),
        (["name.x=1"], ["--set:1:1: name: holds one value, so nothing can be set below it"]),
        (
            ["command=[a", "zzz=1"],
            ["--set:1:11: not valid YAML: expected ',' or ']', but got '<stream end>'", "--set:2:1: zzz: unknown key"],
        ),
    ],
)
def test_faults_of_overrides(tmp_path: Path, overrides: list[str], expected: list[str]) -> None:
    assert lines(tmp_path, OK, overrides) == expected


def test_an_item_that_is_not_there_cannot_be_set(tmp_path: Path) -> None:
    found = problems(tmp_path, f"{OK}data: [{{source: file:///x}}]", ["data.1.mode=copy"])
    assert str(found[0]) == "--set:1:1: data.1: there is no such item"
