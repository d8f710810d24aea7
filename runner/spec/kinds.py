"""The kinds of values a spec holds: how each is written, read and described to an editor.

Every reader takes what YAML gave, returns the value in its final type and raises Wrong for the rest.
"""

from __future__ import annotations

import re
import shlex
import signal
import warnings
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, WithJsonSchema

from runner.spec.problems import Wrong
from runner.units import DURATION_FORMS, SIZE_FORMS, parse_duration, parse_size

SCHEMES = ("s3", "obs", "file")
PLACEHOLDERS = ("{path}", "{step}")

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.ASCII | re.DOTALL)
_PERCENT = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?) ?%", re.ASCII)
_FOUR_NUMBERS = re.compile(r"[0-9]+(\.[0-9]+){3}", re.ASCII)
_HOST_PORT = re.compile(r"([A-Za-z0-9.-]*|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})", re.ASCII)

Read = Callable[[object], Any]


def read_name(raw: object) -> str:
    if not isinstance(raw, str):
        raise Wrong("must be text", 'put it in quotes, such as name: "2024"')
    if not _NAME.fullmatch(raw):
        hint = "1 to 63 of a-z, 0-9, '.', '_' and '-', of which the first is a letter or a digit"
        raise Wrong("must be a job name", hint)
    return raw


def read_variable(raw: object) -> str:
    if not isinstance(raw, str) or not _VARIABLE.fullmatch(raw):
        raise Wrong("must be the name of an environment variable", "letters, digits and '_', no digit first")
    return raw


def read_text(raw: object) -> str:
    if not isinstance(raw, str):
        raise Wrong("must be text", "put it in quotes" if isinstance(raw, (int, float)) else "")
    if not raw.strip():
        raise Wrong("must not be empty", echo=False)
    return raw


def read_env_value(raw: object) -> str:
    if raw is None:
        raise Wrong(
            "has no value", 'write "" for an empty value, or ${NAME} to pass on one of this machine', echo=False
        )
    if not isinstance(raw, str):
        raise Wrong("must be text")
    return raw


def read_duration(raw: object) -> float:
    if isinstance(raw, (int, float)) and not isinstance(raw, bool):
        if raw == 0:
            return 0.0
        raise Wrong(f"must be {DURATION_FORMS}", "a bare number has no unit: write 600s or 10m")
    try:
        return parse_duration(raw if isinstance(raw, str) else "")
    except ValueError:
        raise Wrong(f"must be {DURATION_FORMS}") from None


def read_period(raw: object) -> float:
    seconds = read_duration(raw)
    if seconds <= 0:
        raise Wrong("must be longer than 0")
    return seconds


def read_limit(raw: object) -> float | None:
    return None if raw is None or raw == "none" else read_period(raw)


def read_cadence(raw: object) -> float | str:
    if raw == "auto":
        return "auto"
    try:
        return read_period(raw)
    except Wrong as wrong:
        raise Wrong(f"{wrong.message}, or auto", wrong.hint) from None


def read_milestones(raw: object) -> int | float:
    """A whole number is steps, a text is a duration."""
    if isinstance(raw, int) and not isinstance(raw, bool):
        if raw < 1:
            raise Wrong("must be at least 1 step")
        return raw
    try:
        return read_period(raw)
    except Wrong as wrong:
        raise Wrong(f"{wrong.message}, or a number of steps") from None


def read_share(raw: object) -> float:
    """``30 %`` or 0.3: a part of a whole, above 0 and at most 1."""
    percent = _PERCENT.fullmatch(raw.strip()) if isinstance(raw, str) else None
    is_number = isinstance(raw, (int, float)) and not isinstance(raw, bool)
    share = float(percent[1]) / 100 if percent else float(raw) if is_number else 0.0  # type: ignore[arg-type]
    if not 0 < share <= 1:
        raise Wrong("must be a share such as 30 % or 0.3, above 0 and at most 100 %")
    return share


def read_size_or_share(raw: object) -> int | float:
    """Bytes as an int, or a share of the disk as a float above 0 and at most 1."""
    if isinstance(raw, str) and "%" in raw:
        return read_share(raw)
    if isinstance(raw, int) and not isinstance(raw, bool) and raw > 0:
        return raw
    if isinstance(raw, float):
        return read_share(raw)
    try:
        size = parse_size(raw if isinstance(raw, str) else "")
    except ValueError:
        size = 0
    if size <= 0:
        raise Wrong(f"must be {SIZE_FORMS}, or a share such as 90 %")
    return size


def read_words(raw: object) -> tuple[str, ...]:
    """A command line: a list as it is, a text split as a shell splits words."""
    if isinstance(raw, str):
        try:
            words = tuple(shlex.split(raw))
        except ValueError:
            raise Wrong("has an unbalanced quote or a backslash at its end", "close it, or write a list") from None
    elif isinstance(raw, tuple):
        words = tuple(_word(word, index) for index, word in enumerate(raw))
    else:
        raise Wrong("must be text or a list of texts")
    if not words or not words[0]:
        raise Wrong("must not be empty", echo=False)
    return words


def _word(raw: object, index: int) -> str:
    if not isinstance(raw, str):
        raise Wrong("must be text", at=(index,))
    return raw


def read_resume(raw: object) -> tuple[str, ...]:
    words = read_words(raw)
    for index, word in enumerate(words):
        for found in re.findall(r"\{[A-Za-z_][A-Za-z0-9_]*\}", word):
            if found not in PLACEHOLDERS:
                at = (index,) if isinstance(raw, tuple) else ()
                raise Wrong("has an unknown placeholder", "there are {path} and {step}", detail=found, at=at)
    return words


def read_pattern(raw: object) -> str:
    text = read_text(raw)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise Wrong("must be a Python regular expression", 'such as "loss is nan"', detail=str(error)) from None
    return text


def read_progress_pattern(raw: object) -> str:
    text = read_pattern(raw)
    if "step" not in re.compile(text).groupindex:
        raise Wrong("must have a group named step", r"such as 'step (?P<step>\d+)'")
    return text


def read_signal(raw: object) -> str:
    """``TERM``, ``SIGTERM`` and 15 are all ``SIGTERM``."""
    name = _signal_name(raw)
    if name in ("SIGKILL", "SIGSTOP"):
        raise Wrong("must be a signal that a program can catch", f"{name} cannot be caught, so nothing could be saved")
    return name


def _signal_name(raw: object) -> str:
    text = str(raw).upper()
    try:
        if text.isdecimal() and len(text) < 4:
            return signal.Signals(int(text)).name
        return signal.Signals[text if text.startswith("SIG") else f"SIG{text}"].name
    except (KeyError, ValueError):
        raise Wrong("must be the name of a signal, such as SIGTERM or SIGUSR1") from None


def read_listen(raw: object) -> str:
    """``host:port``, ``:port`` or a port, as ``host:port``; without a host, this machine only."""
    text = f":{raw}" if isinstance(raw, int) and not isinstance(raw, bool) else raw
    match = _HOST_PORT.fullmatch(text if isinstance(text, str) else "")
    if not match or not 0 < int(match[2]) < 65536:
        raise Wrong("must be an address such as 127.0.0.1:9090, or a port")
    return f"{match[1] or '127.0.0.1'}:{match[2]}"


def read_webhook(raw: object) -> str:
    match = _URL.fullmatch(raw) if isinstance(raw, str) else None
    if not match or match[1] not in ("http", "https") or not match[2]:
        raise Wrong("must be a URL that begins with https:// or http://")
    return match[0]


def read_endpoint(raw: object) -> str:
    url = read_webhook(raw).rstrip("/")
    if "@" in url.partition("://")[2].partition("/")[0]:
        raise Wrong("must not hold credentials", "give them in the environment, or in a profile", echo=False)
    if any(sign in url for sign in "?#") or not url.isprintable():
        raise Wrong("must be a plain address, without a query", "such as https://s3.example.com")
    return url


def read_exit_code(raw: object) -> int:
    text = str(raw)
    if not text.isascii() or not text.isdecimal() or len(text) > 3 or int(text) > 255 or text != str(int(text)):
        raise Wrong("must be an exit code from 0 to 255", echo=False)
    return int(text)


def read_processes(raw: object) -> int | str:
    if raw == "auto" or (isinstance(raw, int) and not isinstance(raw, bool) and 0 < raw < 65536):
        return raw
    raise Wrong("must be auto or a whole number from 1")


def read_kept_logs(raw: object) -> int | str:
    if raw == "all" or (isinstance(raw, int) and not isinstance(raw, bool) and raw > 0):
        return raw
    raise Wrong("must be all or a number of attempts from 1")


def read_kept_last(raw: object) -> int:
    if not isinstance(raw, int) or isinstance(raw, bool):
        raise Wrong("must be a whole number")
    if raw < 1:
        raise Wrong("must be at least 1", "with no checkpoint kept, nothing could be resumed")
    return raw


def read_sources(raw: object) -> str | tuple[str, ...]:
    if raw == "auto":
        return "auto"
    if not isinstance(raw, tuple) or not raw:
        raise Wrong("must be auto or a list of monitors")
    return tuple(read_text(_word(item, index)) for index, item in enumerate(raw))


def read_best(raw: object) -> str:
    """``loss`` as ``min loss``."""
    words = read_text(raw).split()
    if len(words) == 1 and words[0] not in ("min", "max"):
        return f"min {words[0]}"
    if len(words) != 2 or words[0] not in ("min", "max"):
        raise Wrong("must be the name of a metric", "write it like val_loss, or max val_accuracy")
    return " ".join(words)


def read_folders(raw: object) -> str | tuple[str, ...]:
    if isinstance(raw, tuple):
        if not raw:
            raise Wrong("must not be empty", echo=False)
        return tuple(_read_glob(_word(item, index), (index,)) for index, item in enumerate(raw))
    text = read_text(raw)
    return _read_glob(text) if is_glob(text) else text


def is_glob(text: str) -> bool:
    """Whether it stands for many names, and not for a folder."""
    return any(sign in text for sign in "*?[")


_NEVER = re.compile(r"\.|tmp|.*\.(?:tmp|part|partial)$")


def _read_glob(raw: object, at: tuple[int, ...] = ()) -> str:
    text = read_text(raw)
    if text.startswith(("/", "~")) or ".." in text.split("/"):
        raise Wrong("must lie inside the workdir", "write it like runs/*/weights/*.pt", at=at)
    if "**" in text:
        raise Wrong("must name each folder on the way", "** is not known: write */ for each, like runs/*/*.pt", at=at)
    parts = [part for part in text.split("/") if part not in ("", ".")]
    if not parts or any(map(_NEVER.match, parts)):
        hint = "nothing counts that begins with . or tmp, or ends in .tmp, .part or .partial"
        raise Wrong("must match names that can be checkpoints", hint, at=at)
    return "/".join(parts)


def read_store(raw: object) -> str:
    return _read_url(raw).rstrip("/")


def read_source(raw: object) -> str:
    return _read_url(raw)


def _read_url(raw: object) -> str:
    match = _URL.fullmatch(raw) if isinstance(raw, str) else None
    if match is None:
        raise Wrong("must be a URL: s3://bucket/prefix, obs://bucket/prefix or file:///folder", _path_hint(raw))
    scheme, rest = match.groups()
    if scheme not in SCHEMES:
        raise Wrong("must begin with s3://, obs:// or file://")
    _check_folder(rest) if scheme == "file" else _check_bucket(scheme, rest)
    if any(part in (".", "..") for part in rest.split("/")) or not rest.isprintable():
        raise Wrong("must be a plain path, without . and .. parts or control characters")
    return match[0]


def _path_hint(raw: object) -> str:
    if isinstance(raw, str) and raw.startswith("/"):
        return "for a folder, put file:// before the path"
    return "for a folder, write its whole path after file://, such as file:///mnt/store"


def _check_folder(rest: str) -> None:
    if not rest.startswith("/"):
        raise Wrong("must be an absolute path after file://", "write three slashes, such as file:///mnt/store")
    if not rest.strip("/"):
        raise Wrong("must name a folder, not the whole disk")


def _check_bucket(scheme: str, rest: str) -> None:
    bucket, _, prefix = rest.partition("/")
    if "@" in bucket:
        raise Wrong("must not hold credentials", "give them in the environment or in a profile", echo=False)
    if ":" in bucket:
        hint = "the address of a service goes into storage.endpoint; ARNs are not understood"
        raise Wrong("must name a bucket after ://, without ':'", hint)
    for demand, holds in _DEMANDS_ON_BUCKETS:
        if not holds(bucket):
            raise Wrong(f"must name a bucket {demand}", _BUCKET_HINT)
    if scheme == "obs" and any(pair in bucket for pair in (".-", "-.")):
        raise Wrong("must name a bucket without '.' and '-' side by side", "OBS has no such bucket")
    if any(mark in prefix for mark in "?#"):
        raise Wrong("must be a plain prefix, without ? and #")


_BUCKET_HINT = "a bucket has 3 to 63 of a-z, 0-9, '.' and '-', of which the first and the last are letters or digits"

_DEMANDS_ON_BUCKETS: tuple[tuple[str, Callable[[str], object]], ...] = (
    ("after ://", bool),
    ("of 3 to 63 characters", lambda name: 3 <= len(name) <= 63),
    ("without capital letters", lambda name: name == name.lower()),
    ("of a-z, 0-9, '.' and '-' only", re.compile(r"[a-z0-9.-]*", re.ASCII).fullmatch),
    ("that begins and ends with a letter or a digit", re.compile(r"[a-z0-9].*[a-z0-9]", re.ASCII).fullmatch),
    ("without two dots in a row", lambda name: ".." not in name),
    ("that does not look like an IP address", lambda name: not _FOUR_NUMBERS.fullmatch(name)),
)


def read_target(raw: object) -> str:
    """A folder below the data folder, without ``..``; empty means the data folder itself."""
    text = raw if isinstance(raw, str) else None
    if text is None:
        raise Wrong("must be text", "put it in quotes" if isinstance(raw, (int, float)) else "")
    path = PurePosixPath(text)
    if path.is_absolute() or ".." in path.parts:
        raise Wrong("must stay inside the data folder", "write a relative path without .., such as images/train")
    if not text.isprintable():
        raise Wrong("must not hold control characters")
    return "" if str(path) == "." else str(path)


def one_or_many(raw: object) -> object:
    """A single text stands for a list of one."""
    return (raw,) if isinstance(raw, str) else raw


def _written(read: Read, **schema: object) -> tuple[PlainValidator, WithJsonSchema]:
    return PlainValidator(read), WithJsonSchema(dict(schema))


_TEXT: dict[str, object] = {"type": "string", "minLength": 1}
_DURATION: dict[str, object] = {
    "type": "string",
    "pattern": r"^([0-9.]+ ?(ms|s|m|h|d) ?)+$|\$\{",
    "examples": ["90s", "10m", "2h"],
}
_URL_SCHEMA = {"type": "string", "pattern": r"^(s3|obs|file)://|\$\{"}
_WORDS = {"anyOf": [_TEXT, {"type": "array", "minItems": 1, "items": {"type": ["string", "number", "boolean"]}}]}
_SIGNAL = {"type": ["string", "integer"], "examples": ["SIGTERM", "SIGUSR1", "SIGINT"]}


def _or_word(word: str, schema: dict[str, object]) -> dict[str, object]:
    return {"anyOf": [{"const": word}, schema]}


Name = Annotated[str, *_written(read_name, type="string", pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$|\$\{")]
Text = Annotated[str, *_written(read_text, **_TEXT)]
Variable = Annotated[str, *_written(read_variable, type="string", pattern=r"^[A-Za-z_][A-Za-z0-9_]*$|\$\{")]
VariableKey = Annotated[str, *_written(read_variable, type="string")]
EnvValue = Annotated[str, *_written(read_env_value, type=["string", "number", "boolean"])]
Duration = Annotated[float, *_written(read_duration, **_DURATION)]
Period = Annotated[float, *_written(read_period, **_DURATION)]
Limit = Annotated[float | None, *_written(read_limit, **_or_word("none", _DURATION))]
Cadence = Annotated[float | str, *_written(read_cadence, **_or_word("auto", _DURATION))]
Milestones = Annotated[int | float, *_written(read_milestones, anyOf=[{"type": "integer", "minimum": 1}, _DURATION])]
Share = Annotated[float, *_written(read_share, type=["string", "number"], examples=["30 %", 0.3])]
SizeOrShare = Annotated[int | float, *_written(read_size_or_share, type=["string", "integer"], examples=["200GiB"])]
Words = Annotated[tuple[str, ...], *_written(read_words, **_WORDS)]
Resume = Annotated[tuple[str, ...], *_written(read_resume, **_WORDS)]
Pattern = Annotated[str, *_written(read_pattern, type="string")]
ProgressPattern = Annotated[str, *_written(read_progress_pattern, type="string")]
Signal = Annotated[str, *_written(read_signal, **_SIGNAL)]
Listen = Annotated[str, *_written(read_listen, type=["string", "integer"], examples=["127.0.0.1:9090", 9090])]
Webhook = Annotated[str, *_written(read_webhook, type="string", pattern=r"^https?://|\$\{")]
Endpoint = Annotated[str, *_written(read_endpoint, type="string", pattern=r"^https?://|\$\{")]
ExitStatus = Annotated[int, *_written(read_exit_code, type="integer", minimum=0, maximum=255)]
Processes = Annotated[int | str, *_written(read_processes, **_or_word("auto", {"type": "integer", "minimum": 1}))]
KeptLast = Annotated[int, *_written(read_kept_last, type="integer", minimum=1)]
Sources = Annotated[
    str | tuple[str, ...],
    *_written(read_sources, **_or_word("auto", {"type": "array", "minItems": 1, "items": _TEXT})),
]
KeptLogs = Annotated[int | str, *_written(read_kept_logs, **_or_word("all", {"type": "integer", "minimum": 1}))]
Folders = Annotated[
    str | tuple[str, ...], *_written(read_folders, anyOf=[_TEXT, {"type": "array", "minItems": 1, "items": _TEXT}])
]
BestOf = Annotated[str, *_written(read_best, type="string", examples=["val_loss", "max val_accuracy"])]
StoreUrl = Annotated[str, *_written(read_store, **_URL_SCHEMA)]
SourceUrl = Annotated[str, *_written(read_source, **_URL_SCHEMA)]
Target = Annotated[str, *_written(read_target, type="string", examples=["images/train"])]

_ONE_OR_MANY = BeforeValidator(one_or_many, json_schema_input_type=str | tuple[str, ...])
Texts = Annotated[tuple[Text, ...], _ONE_OR_MANY]
Patterns = Annotated[tuple[Pattern, ...], _ONE_OR_MANY]
Variables = Annotated[tuple[Variable, ...], _ONE_OR_MANY]

Money = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Currency = Annotated[
    str,
    *_written(read_text, type="string", pattern=r"^[A-Z]{3}$|\$\{", examples=["USD", "EUR", "CNY"]),
    AfterValidator(lambda text: text if re.fullmatch(r"[A-Z]{3}", text) else _refuse_currency()),
]


def _refuse_currency() -> str:
    raise Wrong("must be three capital letters, such as USD")
