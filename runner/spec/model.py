"""JobSpec: every key of a job spec, its type, its default and what it means.

The descriptions here are the reference: ``cloudrun schema`` prints them, editors show them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping as ReadOnly
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from runner.spec.document import Mapping
from runner.spec.kinds import (
    BestOf,
    Cadence,
    Currency,
    Duration,
    Endpoint,
    EnvValue,
    ExitStatus,
    Folders,
    KeptLast,
    KeptLogs,
    Limit,
    Listen,
    Milestones,
    Money,
    Name,
    Patterns,
    Period,
    Processes,
    ProgressPattern,
    Resume,
    Share,
    Signal,
    SizeOrShare,
    Sources,
    SourceUrl,
    StoreUrl,
    Target,
    Text,
    Texts,
    VariableKey,
    Variables,
    Webhook,
    Words,
    is_glob,
)
from runner.spec.problems import Wrong
from runner.units import parse_duration

ExitAction = Literal["restart", "fail", "succeed"]
Format = Literal[
    "auto", "torch", "dcp", "transformers", "lightning", "accelerate", "deepspeed", "ultralytics", "composer", "any"
]
Happening = Literal["preempted", "restarted", "failed", "succeeded", "stalled"]
EVERY_HAPPENING: tuple[Happening, ...] = ("preempted", "restarted", "failed", "succeeded", "stalled")


def _key(default: Any, description: str, *, written: object = None, examples: tuple[object, ...] = ()) -> Any:
    """One key. ``written`` is the default as people write it, where the model holds something else."""
    extra: dict[str, Any] = {} if written is None else {"default": written}
    return Field(default, description=description, examples=list(examples) or None, json_schema_extra=extra or None)


def _time(default: str, description: str) -> Any:
    """One key that holds a duration."""
    return _key(parse_duration(default), description, written=default)


class Section(BaseModel):
    """A mapping of known keys. A key without a value (``stop:``) has its default."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", validate_default=False, use_attribute_docstrings=False
    )
    null_counts: ClassVar[bool] = False

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, raw: Any) -> Any:
        if not isinstance(raw, dict) or cls.null_counts:
            return raw
        return {key: value for key, value in raw.items() if value is not None}


class StorageOptions(Section):
    """How to talk to a store."""

    endpoint: Endpoint | None = _key(None, "URL of the service, where it is not the provider's own.")
    region: Text | None = _key(None, "Region of the bucket.", examples=("eu-west-1",))
    addressing: Literal["auto", "path", "virtual"] | None = _key(None, "How the bucket stands in the URL.")
    profile: Text | None = _key(None, "Profile in the provider's own configuration files.")
    sse: Literal["AES256", "aws:kms"] | None = _key(None, "Server-side encryption of what is written.")
    kms_key: Text | None = _key(None, "Key for `aws:kms`.")
    requester_pays: bool = _key(default=False, description="Agree to pay for requests to someone else's bucket.")
    concurrency: int | None = Field(
        default=None, ge=1, le=1024, description="Transfers at the same time. Empty: chosen by size."
    )


class Storage(StorageOptions):
    """Options for every store, and more for the stores of one URL scheme."""

    give_up: Duration = _time(
        "1h", "How long a finished job keeps trying to store its last checkpoint before it leaves with code 73."
    )
    s3: StorageOptions | None = _key(None, "Options for s3:// only; they go over those beside it.")
    obs: StorageOptions | None = _key(None, "Options for obs:// only; they go over those beside it.")

    @model_validator(mode="after")
    def _encrypted(self) -> Storage:
        for scheme, own in (("s3", self.s3), ("obs", self.obs)):
            options = self.for_scheme(scheme)
            if options.kms_key and options.sse != "aws:kms":
                at = (scheme, "kms_key") if own is not None and own.kms_key else ("kms_key",)
                raise Wrong("does nothing without sse: aws:kms beside it", at=at)
        return self

    @model_validator(mode="after")
    def _without_profiles(self) -> Storage:
        if self.obs is not None and self.obs.profile:
            hint = "set OBS_ACCESS_KEY_ID and OBS_SECRET_ACCESS_KEY, or give the machine an agency"
            raise Wrong("does nothing: OBS knows no profiles", hint, at=("obs", "profile"), echo=False)
        return self

    def for_scheme(self, scheme: str) -> Storage:
        """The options that hold for one URL scheme: the general ones, overlaid by the scheme's own."""
        own: StorageOptions | None = {"s3": self.s3, "obs": self.obs}.get(scheme)
        return self.model_copy(update={name: getattr(own, name) for name in own.model_fields_set} if own else {})


class Data(Section):
    """One dataset that must lie on the machine before training starts."""

    source: SourceUrl = Field(
        description="Where it lies: a prefix (every object below it) or one object.",
        examples=["s3://bucket/imagenet/", "file:///mnt/nas/digits.tar"],
    )
    target: Target = _key("", "Folder inside the data folder, `$CLOUDRUN_DATA_DIR`. Empty: the data folder itself.")
    mode: Literal["copy", "stream"] = _key("copy", "Copy everything before training, or fetch while training.")
    extract: Literal["auto", "never"] = _key("auto", "Unpack archives (tar, zip and their kin) after copying.")
    include: Texts = _key((), "Only objects whose name matches one of these globs.", examples=(["*.jpg"],))
    exclude: Texts = _key((), "No objects whose name matches one of these globs.", examples=(["*.tmp"],))
    verify: bool = _key(default=False, description="Read cached files again at each start and compare their digests.")


class Cache(Section):
    """Where datasets are kept on this machine."""

    dir: Text | None = _key(
        None, "Folder. Empty: `/cache` where it exists and is writable, else the user's cache directory."
    )
    limit: SizeOrShare = _key(
        0.9, "Most it may hold: a size, or a share of its disk.", written="90 %", examples=("90 %", "200GiB")
    )


class Keep(Section):
    """Which stored checkpoints stay."""

    last: KeptLast = _key(3, "How many of the newest stay; at least 1.")
    every: Milestones | None = _key(
        None, "Milestones that stay for good: one each so many steps, or each so long.", examples=(10000, "1d")
    )
    best: BestOf | None = _key(
        None,
        "The metric whose best checkpoint stays; `max` before it where more is better. The trainer reports it.",
        examples=("val_loss", "max val_accuracy"),
    )


class Checkpoints(Section):
    """Where the trainer writes checkpoints, how they are known, and how it starts from one."""

    dir: Folders | None = _key(
        None,
        "Folder the trainer writes to, relative to the workdir; or globs of the checkpoints themselves, inside the "
        "workdir. Empty: `$CLOUDRUN_CHECKPOINT_DIR`.",
        examples=("out", ["runs/*/weights/*.pt"]),
    )
    format: Format = _key("auto", "Whose files they are. `auto` looks; `any` takes every file or folder that is still.")
    every: Cadence = _key("auto", "How often to upload. `auto` weighs what a save costs against what is at risk.")
    keep: Keep = Field(default_factory=Keep, description="Which stored checkpoints stay.")
    resume: Resume = _key(
        (),
        "Arguments appended to the command when there is something to resume; `{path}` and `{step}` are filled in.",
        examples=("--resume {path}",),
    )
    ask: Signal | None = _key(None, "Signal that makes the trainer save. Empty: it is never asked.")
    inject: bool = _key(
        default=False,
        description="Hand the chosen path to Transformers and Lightning trainers whose scripts take no such argument.",
    )


class Stop(Section):
    """How the trainer is asked to leave."""

    signal: Signal = _key("SIGTERM", "Signal that asks it to save and leave.", examples=("SIGTERM", "SIGUSR1"))
    grace: Duration = _time("30s", "Time it has for that. A notice with a deadline shortens or lengthens it.")


class Interruption(Section):
    """How the machine's end is foreseen."""

    sources: Sources = _key("auto", "Who is asked for notices: `auto`, or a list of monitors.")
    lead: dict[Text, Duration] = _key({}, "How long before the end each source tells.", examples=({"aws": "2m"},))
    rebalance: Literal["save", "leave", "ignore"] = _key("save", "What a mere hint of an end makes us do.")


class Backoff(Section):
    """How long to wait before the trainer is started again."""

    first: Duration = _time("5s", "Wait after the first failure. It doubles each time.")
    limit: Duration = _time("5m", "Longest wait.")

    @model_validator(mode="after")
    def _ordered(self) -> Backoff:
        if self.first > self.limit:
            raise Wrong("must not be longer than backoff.limit", at=("first",))
        return self


class Restart(Section):
    """What happens when the trainer fails."""

    max_without_progress: int = Field(
        default=3, ge=1, description="Give up after so many attempts in a row that added no newer checkpoint."
    )
    backoff: Backoff = Field(default_factory=Backoff, description="How long to wait before the next attempt.")
    on_exit: dict[ExitStatus, ExitAction] = _key(
        {}, "What an exit code of the trainer means, where it is not the usual.", examples=({"3": "fail"},)
    )
    fatal_patterns: Patterns = _key(
        (), "Regular expressions; output that matches one means that starting again is senseless."
    )
    retry_patterns: Patterns = _key(
        (), "Regular expressions; output that matches one means that starting again may help."
    )


class Limits(Section):
    """When enough is enough. `none` switches a limit off."""

    null_counts = True

    startup: Limit = _key(3600.0, "Longest time to the first step.", written="60m")
    idle: Limit = _key(900.0, "Longest time without progress after that.", written="15m")
    runtime: Limit = _key(None, "Longest life of one attempt.", written="none")
    lifetime: Limit = _key(None, "Longest life of the whole job, all attempts together.", written="none")
    cost: Money | None = _key(None, "Most the job may cost, in the currency of `price`.")


class Slowdown(Section):
    """When this machine is slower than the job's own history."""

    threshold: Share = _key(0.3, "How much slower counts.", written="30 %")
    window: Period = _time("10m", "Over how long.")
    action: Literal["report", "leave"] = _key("report", "Say so, or save and leave with code 75.")


class Progress(Section):
    """How the step is read."""

    pattern: ProgressPattern | None = _key(
        None,
        "Regular expression over the trainer's output whose group `step` is the step. Empty: the usual ones are known.",
        examples=(r"step (?P<step>\d+)",),
    )


class Nodes(Section):
    """How many machines train together."""

    min: int = Field(default=1, ge=1, le=10_000, description="Fewest machines to start with.")
    max: int = Field(default=1, ge=1, le=10_000, description="Most machines. Empty: as many as `min`.")
    processes_per_node: Processes = _key("auto", "Processes on each machine. `auto`: one for each GPU.")
    port: int = Field(default=29400, ge=1, le=65535, description="Where they meet.")

    @model_validator(mode="before")
    @classmethod
    def _max_follows_min(cls, raw: Any) -> Any:
        fewest = raw.get("min") if isinstance(raw, dict) else None
        return {**raw, "max": fewest} if isinstance(fewest, int) and raw.get("max") is None else raw

    @model_validator(mode="after")
    def _ordered(self) -> Nodes:
        if self.min > self.max:
            raise Wrong("must not be less than nodes.min", at=("max",))
        return self


class Price(Section):
    """What this machine costs."""

    per_hour: Money | None = _key(None, "Price of this machine for an hour. Empty: unknown, never 0.")
    on_demand_per_hour: Money | None = _key(None, "What it would cost if it could not vanish; savings are against it.")
    currency: Currency = _key("USD", "Currency of all prices.")


def _or_word(schema: dict[str, Any]) -> None:
    """Let an editor know the short form, which is `do` alone."""
    section = dict(schema)
    schema.clear()
    schema["anyOf"] = [section["properties"]["do"], section]


class Ending(Section):
    """What becomes of the machine: one word, or a word and a delay."""

    model_config = ConfigDict(json_schema_extra=_or_word)

    do: Literal["exit", "poweroff", "terminate"] = _key("exit", "Only leave, switch it off, or give it back.")
    after: Duration = _key(0.0, "Wait so long first, for someone who wants to look.", written="0s")

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, raw: Any) -> Any:
        return {"do": raw} if isinstance(raw, str) else raw


class Notify(Section):
    """Someone who wants to know. Exactly one of `url` and `command`."""

    url: Webhook | None = _key(None, "Webhook: gets a JSON body by POST.")
    command: Words | None = _key(None, "Command: gets the JSON on its standard input.")
    on: tuple[Happening, ...] = _key(EVERY_HAPPENING, "What to tell.", written=list(EVERY_HAPPENING))


class Metrics(Section):
    """Figures for a monitoring system."""

    listen: Listen | None = _key(None, "Address on which Prometheus may read them.")
    textfile: Text | None = _key(None, "File for the node exporter's textfile collector.")


class Logs(Section):
    """What becomes of the trainer's output."""

    keep: KeptLogs = _key("all", "Keep the logs of all attempts, or of so many of the newest.")
    upload_every: Period = _time("10s", "How often new output goes to the store.")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a spec came from; what must not show in its repr."""

    source: Path
    raw_text: str
    digest: str
    home: Path
    env_file: ReadOnly[str, str]
    secrets: frozenset[str]
    tree: Mapping
    overrides: tuple[str, ...]

    def says(self, text: str) -> bool:
        """True where the owner wrote this very text, so that showing it tells nothing of the environment."""
        return any(text in written for written in (self.raw_text, *self.overrides))


class JobSpec(Section):
    """A job: what to run, with which data, where its checkpoints go, and what to do when things go wrong."""

    version: Literal[1] = _key(1, "Version of this format.")
    name: Name = Field(
        description="Identity of the job inside its store: a-z, 0-9, '.', '_' and '-', at most 63.", examples=["digits"]
    )
    store: StoreUrl | None = _key(
        None,
        "Where checkpoints, logs and status live: `s3://bucket/prefix`, `obs://bucket/prefix` or `file:///folder`. "
        "Empty: a folder in the user's data directory.",
        examples=("s3://bucket/jobs", "file:///mnt/nas/jobs"),
    )
    storage: Storage = Field(default_factory=Storage, description="How to talk to stores; may be given per URL scheme.")
    command: Words | None = _key(
        None,
        "The training command. Text is split as a shell splits words, but no shell runs; a list is taken as it is. "
        "Variables are filled in before a text is split.",
        examples=("python train.py", ["python", "train.py", "--epochs", 3]),
    )
    script: Text | None = _key(
        None, "A bash script instead of `command`. `${...}` in it belongs to bash: cloudrun fills in nothing."
    )
    setup: Text | None = _key(
        None,
        "A bash script that runs once per machine before the first attempt, and again when its text changes. "
        "`${...}` in it belongs to bash: cloudrun fills in nothing.",
        examples=("pip install -r requirements.txt",),
    )
    workdir: Text = _key(".", "Where the command runs, relative to the spec's folder.")
    env: dict[VariableKey, EnvValue] = Field(
        default={}, description="Environment for the trainer.", examples=[{"NCCL_DEBUG": "WARN"}], repr=False
    )
    env_file: Text | None = _key(None, "File of NAME=VALUE lines, relative to the spec's folder; `env` goes over it.")
    secrets: Variables = _key(
        (),
        "Names that must be in the environment; passed on, and masked in every log, journal, report and error.",
        examples=(["HF_TOKEN"],),
    )
    data: tuple[Data, ...] = _key((), "Datasets that must lie on the machine before training starts.")
    cache: Cache = Field(default_factory=Cache, description="Where datasets are kept on this machine.")
    checkpoints: Checkpoints = Field(
        default_factory=Checkpoints, description="Where checkpoints are and how to resume from one."
    )
    stop: Stop = Field(default_factory=Stop, description="How the trainer is asked to leave.")
    interruption: Interruption = Field(default_factory=Interruption, description="How the machine's end is foreseen.")
    restart: Restart = Field(default_factory=Restart, description="What happens when the trainer fails.")
    limits: Limits = Field(default_factory=Limits, description="When enough is enough.")
    slowdown: Slowdown = Field(
        default_factory=Slowdown, description="When this machine is slower than the job's own history."
    )
    progress: Progress = Field(default_factory=Progress, description="How the step is read.")
    nodes: Nodes = Field(default_factory=Nodes, description="How many machines train together.")
    price: Price = Field(default_factory=Price, description="What this machine costs.")
    on_finish: Ending = Field(
        default_factory=Ending, description="What becomes of the machine when the job has succeeded."
    )
    on_failure: Ending = Field(
        default_factory=Ending, description="What becomes of the machine when the job has failed."
    )
    notify: tuple[Notify, ...] = _key((), "Who wants to know.")
    metrics: Metrics = Field(default_factory=Metrics, description="Figures for a monitoring system.")
    logs: Logs = Field(default_factory=Logs, description="What becomes of the trainer's output.")

    _origin: Origin = PrivateAttr()

    @classmethod
    def of(cls, values: object, origin: Origin) -> JobSpec:
        """The spec that ``values`` describe. Raises pydantic's ValidationError with all that is wrong."""
        return cls.model_validate(values, context=origin)

    def model_post_init(self, context: Any, /) -> None:
        assert isinstance(context, Origin)
        self._origin = context

    def __repr__(self) -> str:
        """Short: the values may hold secrets."""
        return f"JobSpec({self.name!r})"

    __str__ = __repr__

    @property
    def origin(self) -> Origin:
        return self._origin

    @property
    def source(self) -> Path:
        """The spec's file, absolute."""
        return self._origin.source

    @property
    def raw_text(self) -> str:
        """The file's text as it was, with no variable filled in."""
        return self._origin.raw_text

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of what file and overrides say, before variables are filled in: no secret is in it."""
        return self._origin.digest

    @property
    def argv(self) -> tuple[str, ...] | None:
        """The command's words; None when the job is a script."""
        return self.command

    @property
    def working_directory(self) -> Path:
        """Where the command runs, absolute."""
        return self._path(self.workdir, self.source.parent)

    @property
    def checkpoint_dir(self) -> Path | None:
        """The folder the trainer writes to, absolute; None when it is ours to choose, or globs are given."""
        chosen = self.checkpoints.dir
        if not isinstance(chosen, str) or is_glob(chosen):
            return None
        return self._path(chosen, self.working_directory)

    @property
    def checkpoint_globs(self) -> tuple[str, ...]:
        """Patterns of the checkpoints' own names, relative to the workdir; empty where there is one folder for all."""
        chosen = self.checkpoints.dir
        globs = (chosen,) if isinstance(chosen, str) else chosen or ()
        return globs if self.checkpoint_dir is None else ()

    def store_url(self, environ: ReadOnly[str, str]) -> str:
        """The store; by default a folder in the user's data directory."""
        if self.store is not None:
            return self.store
        return f"file://{user_folder(environ, 'XDG_DATA_HOME', '.local/share') / 'cloudrun' / 'store'}"

    def cache_dir(self, environ: ReadOnly[str, str], *, shared: Path = Path("/cache")) -> Path:
        """The dataset cache; by default ``shared`` where it exists and is writable, else the user's cache directory."""
        if self.cache.dir is not None:
            return self._path(self.cache.dir, self.source.parent)
        return usual_cache_dir(environ, shared=shared)

    def environment(self, environ: ReadOnly[str, str]) -> dict[str, str]:
        """What the spec adds to the trainer's environment: ``env_file``, over it ``env``, over both the secrets."""
        return {**self._origin.env_file, **self.env, **dict(self._named_secrets(environ))}

    def secret_values(self, environ: ReadOnly[str, str]) -> tuple[str, ...]:
        """Every text that must be masked wherever we write, longest first."""
        return tuple(sorted({value for _, value in self._named_secrets(environ)}, key=lambda it: (-len(it), it)))

    def _named_secrets(self, environ: ReadOnly[str, str]) -> list[tuple[str, str]]:
        return [(name, environ[name]) for name in self.secrets if environ.get(name)]

    def _path(self, text: str, folder: Path) -> Path:
        if text == "~" or text.startswith("~/"):
            return self._origin.home / text[2:]
        return Path(os.path.normpath(folder / text))


def usual_cache_dir(environ: ReadOnly[str, str], *, shared: Path = Path("/cache")) -> Path:
    """The cache of jobs that name none: ``shared`` where it exists and is writable, else the user's cache directory."""
    if os.path.isdir(shared) and os.access(shared, os.W_OK | os.X_OK):
        return shared
    return user_folder(environ, "XDG_CACHE_HOME", ".cache") / "cloudrun"


def user_folder(environ: ReadOnly[str, str], variable: str, usual: str) -> Path:
    """One of the user's own directories; the XDG rules say that a relative path there must be ignored."""
    named = environ.get(variable, "")
    return Path(named) if named.startswith("/") else home_of(environ) / usual


def home_of(environ: ReadOnly[str, str]) -> Path:
    """The user's home directory, by the environment given."""
    named = environ.get("HOME", "")
    return Path(named) if named.startswith("/") else Path.home()
