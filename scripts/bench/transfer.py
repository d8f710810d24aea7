"""cloudrun against s5cmd, rclone, plain boto3, bare obstore and, if asked for, `aws s3`: one server, one run.

    python -m scripts.bench.transfer [--server nginx|seaweedfs] [--rounds 3] [--quick] [--with-aws] [--json]

Tasks: many small objects down, the same again when all is there, one large object down, one up, many small files up.
Rounds are interleaved: each client once, then all again. Wall seconds are medians; CPU seconds and the peak of memory
are those of the client and its children (of the largest of them). A ratio above 1 means faster than that reference.

cloudrun downloads by `cloudrun sync`, with all that a sync does: If-Match on each object, its length, MD5 where the
ETag is one, a checksum for the record, names that appear only when the file is whole. It uploads by the store that the
supervisor uses, with a BLAKE3 of each file. The others check what they check by themselves.

This process stays small, since Linux counts the memory of the parent that a client was forked from as the client's.
Needs an idle machine, room in --scratch (a tmpfs) for about three times the data, and nginx or SeaweedFS.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from scripts.bench.nulls3 import nginx_program, write_listing

BUCKET = "bench"
ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
LIMIT = 600.0
"""Seconds after which a client is stopped."""

TASKS = ("down-small", "no-op", "down-large", "up-large", "up-small")
CLIENTS = ("cloudrun", "s5cmd", "rclone", "boto3", "obstore", "aws")
REFERENCES = ("s5cmd", "boto3")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of files, and bytes."""

    down_files: int = 20_000
    down_bytes: int = 10 << 10
    up_files: int = 5_000
    up_bytes: int = 100 << 10
    large: int = 2 << 30

    def of(self, task: str) -> str:
        small = f"{self.down_files:,} x {self.down_bytes >> 10} KiB"
        return {
            "down-small": f"{small} down",
            "no-op": f"{small}, all there",
            "down-large": f"{self.large >> 20:,} MiB down",
            "up-large": f"{self.large >> 20:,} MiB up",
            "up-small": f"{self.up_files:,} x {self.up_bytes >> 10} KiB up",
        }[task]


QUICK = Sizes(down_files=1200, up_files=60, large=40 * MIB)


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of one client: seconds, seconds, bytes."""

    wall: float
    cpu: float
    rss: int


@dataclass(slots=True)
class Row:
    """All runs of one client at one task. ``failed`` says why there are no more."""

    task: str
    client: str
    samples: list[Sample] = field(default_factory=list)
    failed: str = ""

    @property
    def wall(self) -> float:
        return statistics.median(sample.wall for sample in self.samples)

    @property
    def cpu(self) -> float:
        return statistics.median(sample.cpu for sample in self.samples)

    @property
    def rss(self) -> float:
        return statistics.median(sample.rss for sample in self.samples)


class FailedError(Exception):
    """A client did not do its task."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where the objects are, and what a client needs to get at them."""

    kind: str
    endpoint: str
    environ: Mapping[str, str]
    base: Path

    @contextmanager
    def upload_place(self, large: int) -> Iterator[tuple[str, str]]:
        """A bucket and a prefix to upload to; emptied afterwards."""
        if self.kind != "nginx":
            bucket = f"up-{os.urandom(4).hex()}"
            library("bucket", "make", self, bucket, "", self.base)
            yield bucket, ""
            library("bucket", "drop", self, bucket, "", self.base)
            return
        folder = self.base / "data" / BUCKET / "up"
        folder.mkdir()
        # Parts are not put together; clients that look at what they have sent find something of its size.
        with (folder / "large.bin").open("wb") as file:
            file.truncate(large)
        yield BUCKET, "up/"
        shutil.rmtree(folder)
        shutil.rmtree(self.base / "_parts" / BUCKET, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Job:
    """One task for one client: the objects below ``prefix`` and the files in ``folder``."""

    task: str
    server: Server
    bucket: str
    prefix: str
    folder: Path

    @property
    def objects(self) -> str:
        return f"{self.bucket}/{self.prefix}"


def main() -> None:
    options = parse()
    # A benchmark that is told to end takes its servers and its data with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sizes = QUICK if options.quick else Sizes()
    clients = [client for client in options.clients if client != "aws" or options.with_aws]
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-", dir=options.scratch)))
        if options.with_aws:
            install_aws()
            stack.callback(shutil.rmtree, aws_folder(), ignore_errors=True)
        aside(lambda: make_sources(scratch / "source", sizes))
        server = stack.enter_context(serving(options.server, scratch, options.latency))
        rows = Bench(server, scratch, sizes, options.rounds).run(clients, options.tasks)
    if options.json:
        print(json.dumps([as_json(row, options.server) for row in rows]))
    else:
        print_tables(rows, sizes, options)
    if any(row.failed for row in rows if row.client == "cloudrun"):
        sys.exit(1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", choices=("nginx", "seaweedfs"), default="nginx", help="default: nginx")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds before each first byte (nginx only)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each client; default: 3")
    parser.add_argument("--clients", nargs="+", choices=CLIENTS, default=CLIENTS, metavar="CLIENT")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS, metavar="TASK")
    parser.add_argument("--quick", action="store_true", help="small sizes: does everything work?")
    parser.add_argument("--with-aws", action="store_true", help="also aws s3, from PyPI into a folder that goes again")
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm"), help="where data lies; default: /dev/shm")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser.parse_args()


class Bench:
    """Runs tasks against one server and keeps what was seen."""

    def __init__(self, server: Server, scratch: Path, sizes: Sizes, rounds: int) -> None:
        self._server = server
        self._scratch = scratch
        self._sizes = sizes
        self._rounds = rounds
        self._rows: dict[tuple[str, str], Row] = {}

    def run(self, clients: Sequence[str], tasks: Sequence[str]) -> list[Row]:
        todo: dict[str, Callable[[str], None]] = {}
        if {"down-small", "no-op"} & set(tasks):
            todo["down-small"] = self._down_small
        todo |= {"down-large": self._down_large, "up-large": self._up_large, "up-small": self._up_small}
        for task in [task for task in todo if task in tasks or task == "down-small"]:
            for number in range(self._rounds):
                for client in clients:
                    tell(f"{task}, round {number + 1}, {client}")
                    todo[task](client)
        return [row for row in self._rows.values() if row.task in tasks]

    def _down_small(self, client: str) -> None:
        with self._folder() as folder:
            job = Job("down-small", self._server, BUCKET, "small/", folder)
            if self._measure(client, job, lambda: check_down(client, job, self._scratch / "source/small")):
                self._measure(client, Job("no-op", self._server, BUCKET, "small/", folder), lambda: None)

    def _down_large(self, client: str) -> None:
        with self._folder() as folder:
            job = Job("down-large", self._server, BUCKET, "large/", folder)
            self._measure(client, job, lambda: check_down(client, job, self._scratch / "source/large"))

    def _up_large(self, client: str) -> None:
        with self._server.upload_place(self._sizes.large) as (bucket, prefix):
            job = Job("up-large", self._server, bucket, prefix, self._scratch / "source/large")
            self._measure(client, job, lambda: None)

    def _up_small(self, client: str) -> None:
        with self._server.upload_place(0) as (bucket, prefix):
            job = Job("up-small", self._server, bucket, prefix, self._scratch / "source/many")
            self._measure(client, job, lambda: None)

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="target-", dir=self._scratch) as folder:
            yield Path(folder)

    def _measure(self, client: str, job: Job, check: Callable[[], None]) -> bool:
        row = self._rows.setdefault((job.task, client), Row(job.task, client))
        try:
            command, environ = COMMANDS[client](job)
            row.samples.append(run(command, {**job.server.environ, **environ}))
            aside(check)
        except FailedError as error:
            row.failed = str(error)
            tell(f"    failed: {error}")
            return False
        tell(f"    {row.samples[-1].wall:.2f} s, CPU {row.samples[-1].cpu:.2f} s, {row.samples[-1].rss / MIB:.0f} MiB")
        return True


# How each client is called


def program(name: str) -> str:
    """A program of the environment that runs this script, whether its folder is in PATH or not."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else name


Command = tuple[list[str], dict[str, str]]


def cloudrun(job: Job) -> Command:
    if job.task.startswith("up-"):
        return library_command("cloudrun", job.task, job.server, job.bucket, job.prefix, job.folder), {}
    spec = job.folder / "job.yaml"
    spec.write_text(
        f"name: bench\ncommand: 'true'\nstore: file://{job.folder}/store\ncache: {{dir: {job.folder}/cache}}\n"
        f"storage: {{endpoint: {job.server.endpoint!r}, region: us-east-1}}\n"
        f"data: [{{source: 's3://{job.objects}', target: data, extract: never}}]\n"
    )
    homes = {f"XDG_{kind}_HOME": str(job.folder / kind) for kind in ("STATE", "DATA", "CACHE")}
    return [program("cloudrun"), "sync", str(spec)], homes


def s5cmd(job: Job) -> Command:
    one = {
        "down-small": ["cp", f"s3://{job.objects}*", f"{job.folder}/"],
        "no-op": ["sync", "--size-only", f"s3://{job.objects}*", f"{job.folder}/"],
        "down-large": ["cp", f"s3://{job.objects}large.bin", f"{job.folder}/large.bin"],
        "up-large": ["cp", f"{job.folder}/large.bin", f"s3://{job.objects}large.bin"],
        "up-small": ["cp", f"{job.folder}/", f"s3://{job.objects}"],
    }[job.task]
    return [program("s5cmd"), "--log", "error", "--endpoint-url", job.server.endpoint, *one], {}


def rclone(job: Job) -> Command:
    remote, many = f"bench:{job.objects}", ["--transfers", "32", "--checkers", "32"]
    one = {
        "down-small": ["copy", *many, remote, str(job.folder)],
        "no-op": ["copy", *many, "--size-only", remote, str(job.folder)],
        "down-large": ["copyto", f"{remote}large.bin", f"{job.folder}/large.bin"],
        "up-large": ["copyto", "--ignore-times", f"{job.folder}/large.bin", f"{remote}large.bin"],
        "up-small": ["copy", *many, str(job.folder), remote],
    }[job.task]
    settings = {
        "TYPE": "s3",
        "PROVIDER": "Other",
        "ENDPOINT": job.server.endpoint,
        "REGION": "us-east-1",
        "ENV_AUTH": "true",
        "FORCE_PATH_STYLE": "true",
        "NO_CHECK_BUCKET": "true",
        "LIST_VERSION": "2",
    }
    environ = {f"RCLONE_CONFIG_BENCH_{name}": value for name, value in settings.items()}
    return [program("rclone"), "--config", "", *one], environ


def aws(job: Job) -> Command:
    one = {
        "down-small": ["sync", f"s3://{job.objects}", str(job.folder)],
        "no-op": ["sync", "--size-only", f"s3://{job.objects}", str(job.folder)],
        "down-large": ["cp", f"s3://{job.objects}large.bin", f"{job.folder}/large.bin"],
        "up-large": ["cp", f"{job.folder}/large.bin", f"s3://{job.objects}large.bin"],
        "up-small": ["sync", str(job.folder), f"s3://{job.objects}"],
    }[job.task]
    return [str(aws_folder() / "bin/aws"), "--endpoint-url", job.server.endpoint, "s3", *one, "--only-show-errors"], {}


def of_library(client: str) -> Callable[[Job], Command]:
    return lambda job: (library_command(client, job.task, job.server, job.bucket, job.prefix, job.folder), {})


COMMANDS: Mapping[str, Callable[[Job], Command]] = {
    "cloudrun": cloudrun,
    "s5cmd": s5cmd,
    "rclone": rclone,
    "aws": aws,
    "boto3": of_library("boto3"),
    "obstore": of_library("obstore"),
}


def library_command(client: str, task: str, server: Server, bucket: str, prefix: str, folder: Path) -> list[str]:
    where = [server.endpoint, bucket, prefix, str(folder)]
    return [sys.executable, "-m", "scripts.bench.clients", client, task, *where]


def library(client: str, task: str, server: Server, bucket: str, prefix: str, folder: Path) -> None:
    """Run something that is not measured."""
    run(library_command(client, task, server, bucket, prefix, folder), server.environ)


def aws_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"bench-aws-{os.getpid()}"


def install_aws() -> None:
    subprocess.run([sys.executable, "-m", "venv", str(aws_folder())], check=True)
    subprocess.run([str(aws_folder() / "bin/pip"), "install", "-q", "awscli"], check=True)


# Measuring


def run(command: Sequence[str], environ: Mapping[str, str]) -> Sample:
    """Run a client to its end. Raises FailedError with the last line that it said."""
    with tempfile.TemporaryFile() as said:
        began = time.monotonic()
        child = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **environ}, stdout=said, stderr=said, start_new_session=True
        )
        timer = threading.Timer(LIMIT, os.killpg, (child.pid, signal.SIGKILL))
        timer.start()
        try:
            _, status, usage = os.wait4(child.pid, 0)
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)
            raise
        finally:
            timer.cancel()
        wall = time.monotonic() - began
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            said.seek(0)
            words = said.read().decode(errors="replace").strip().splitlines()
            raise FailedError(f"exit {child.returncode}: {words[-1][:200] if words else 'no word'}")
    return Sample(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def aside(work: Callable[[], None]) -> None:
    """Run ``work`` in a process of its own, which keeps this one small. Raises FailedError."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            work()
        except FailedError as error:
            os.write(writer, str(error).encode())
        else:
            os.write(writer, b"good")
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as told:
        words = told.read().decode() or "the check itself failed"
    os.waitpid(child, 0)
    if words != "good":
        raise FailedError(words)


def check_down(client: str, job: Job, source: Path) -> None:
    """Whether what a client brought is what there is: every name and size, and the content of some."""
    folder = next((job.folder / "cache/data").glob("*/files")) if client == "cloudrun" else job.folder
    wanted = {path.name: path.stat().st_size for path in source.iterdir()}
    found = {path.name: path.stat().st_size for path in folder.iterdir()}
    if wanted != found:
        raise FailedError(f"{len(wanted)} files wanted, {len(found)} found, or of other sizes")
    for name in sorted(wanted)[:: max(1, len(wanted) // 10)]:
        if not same_content(source / name, folder / name):
            raise FailedError(f"{name} has other content")


def same_content(one: Path, other: Path) -> bool:
    with one.open("rb") as left, other.open("rb") as right:
        while block := left.read(MIB):
            if block != right.read(MIB):
                return False
        return not right.read(1)


# Data and servers


def make_sources(folder: Path, sizes: Sizes) -> None:
    make_files(folder / "small", sizes.down_files, sizes.down_bytes)
    make_files(folder / "many", sizes.up_files, sizes.up_bytes)
    (folder / "large").mkdir()
    block = os.urandom(MIB)
    with (folder / "large/large.bin").open("wb") as file:
        for number in range(sizes.large // MIB):
            file.write(number.to_bytes(8) + block[8:])


def make_files(folder: Path, count: int, size: int) -> None:
    folder.mkdir(parents=True)
    for number in range(count):
        (folder / f"{number:06d}.bin").write_bytes(os.urandom(size))


@contextmanager
def serving(kind: str, scratch: Path, latency: float) -> Iterator[Server]:
    base, source = scratch / "server", scratch / "source"
    base.mkdir()
    more = [str(latency)] if kind == "nginx" else []
    if kind == "nginx":
        nginx_program()
        (base / "data" / BUCKET).mkdir(parents=True)
        for name in ("small", "large"):
            (base / "data" / BUCKET / name).symlink_to(source / name)
            aside(lambda name=name: write_listing(base, BUCKET, f"{name}/"))  # type: ignore[misc]
    command = [sys.executable, "-m", "scripts.bench.serve", kind, str(base), BUCKET, *more]
    child = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    try:
        told = json.loads(child.stdout.readline() or sys.exit("error: the server did not start"))
        server = Server(kind, told["endpoint"], environ_for(told, scratch), base)
        if kind != "nginx":
            for name in ("small", "large"):
                run(s5cmd_fill(server, source / name, name), server.environ)
        yield server
    finally:
        child.communicate()


def s5cmd_fill(server: Server, folder: Path, name: str) -> list[str]:
    return [program("s5cmd"), "--endpoint-url", server.endpoint, "cp", f"{folder}/", f"s3://{BUCKET}/{name}/"]


def environ_for(told: Mapping[str, str], scratch: Path) -> dict[str, str]:
    nothing = str(scratch / "no-such-file")
    return {
        "AWS_ACCESS_KEY_ID": told["access_key"],
        "AWS_SECRET_ACCESS_KEY": told["secret_key"],
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": nothing,
        "AWS_SHARED_CREDENTIALS_FILE": nothing,
        "NO_COLOR": "1",
    }


# Telling


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def as_json(row: Row, server: str) -> dict[str, object]:
    medians = {"wall": row.wall, "cpu": row.cpu, "rss": row.rss} if row.samples else {}
    samples = [asdict(sample) for sample in row.samples]
    return {
        "server": server,
        "task": row.task,
        "client": row.client,
        "failed": row.failed,
        "samples": samples,
        **medians,
    }


def print_tables(rows: Sequence[Row], sizes: Sizes, options: argparse.Namespace) -> None:
    late = f", {options.latency * 1000:.0f} ms before each first byte" if options.latency else ""
    print(f"{options.server}{late}, {os.cpu_count()} cores, median of {options.rounds}")
    for task in options.tasks:
        print(f"\n{sizes.of(task)}\n")
        print_table([row for row in rows if row.task == task])


def print_table(rows: Sequence[Row]) -> None:
    ratios = "".join(f" | x {name}" for name in REFERENCES)
    print(f"| client | wall s | CPU s | peak MiB{ratios} |\n|---|---|---|---{'|---' * len(REFERENCES)}|")
    walls = {row.client: row.wall for row in rows if not row.failed}
    for row in sorted(rows, key=lambda row: walls.get(row.client, float("inf"))):
        if row.failed:
            print(f"| {row.client} | failed: {row.failed} | | {'| ' * len(REFERENCES)}|")
            continue
        shares = [f"{walls[name] / row.wall:.2f}" if name in walls else "" for name in REFERENCES]
        spread = f"{row.wall:.2f} ({min(s.wall for s in row.samples):.2f}-{max(s.wall for s in row.samples):.2f})"
        print(f"| {row.client} | {spread} | {row.cpu:.2f} | {row.rss / MIB:.0f} | {' | '.join(shares)} |")


if __name__ == "__main__":
    main()
