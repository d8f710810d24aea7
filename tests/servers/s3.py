"""Servers that speak S3."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from runner.storage.access import Access
from tests.servers.process import free_ports, program, scratch, serving

ACCESS_KEY = "cloudrun-test"
SECRET_KEY = "cloudrun-test-secret"  # opens nothing but the servers below


@dataclass(frozen=True)
class Server:
    """One running server, and what opens it."""

    endpoint: str
    access_key: str = ACCESS_KEY
    secret_key: str = SECRET_KEY
    region: str = "us-east-1"
    certificate: Path | None = None

    def environ(self) -> dict[str, str]:
        """The environment of a process that may use the server; it asks no machine's metadata for credentials."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": self.region,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def access(self, **options: Any) -> Access:
        """Access to the server; ``options`` are fields of :class:`Access`."""
        return replace(Access(endpoint=self.endpoint, region=self.region, environ=self.environ()), **options)

    def client(self, service: str = "s3") -> Any:
        """A plain boto3 client, for what a test prepares or looks up behind the product's back."""
        return boto3.session.Session().client(
            service,
            endpoint_url=self.endpoint,
            region_name=self.region,
            verify=str(self.certificate) if self.certificate else None,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(
                s3={"addressing_style": "path"},
                retries={"total_max_attempts": 1},
                connect_timeout=5,
                read_timeout=30,
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                proxies={},
            ),
        )

    def make_bucket(self, name: str, *, versioning: bool = False) -> None:
        """One that is there already is left as it is: two tests of a module may ask for theirs, one after the other."""
        client = self.client()
        with suppress(client.exceptions.BucketAlreadyOwnedByYou, client.exceptions.BucketAlreadyExists):
            client.create_bucket(Bucket=name)
        if versioning:
            client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})

    def answers(self) -> bool:
        """True once buckets can be made: some servers listen long before they can."""
        try:
            self.client().create_bucket(Bucket="are-you-there")
        except ClientError as error:
            return error.response["Error"]["Code"] in ("BucketAlreadyExists", "BucketAlreadyOwnedByYou")
        except BotoCoreError:
            return False
        return True


@contextmanager
def seaweedfs() -> Iterator[Server]:
    """SeaweedFS: a real store, small. Signatures, checksums and conditions are taken seriously."""
    names = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc",
             "s3.port", "s3.port.grpc")  # fmt: skip
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    server = Server(f"http://127.0.0.1:{ports['s3.port']}")
    with scratch() as folder:
        # One volume for a new bucket, not seven: its first write waits for them.
        (folder / "master.toml").write_text("[master.volume_growth]\ncopy_1 = 1\n")
        (folder / "s3.json").write_text(json.dumps(_seaweedfs_identities(server)))
        command = [program("weed"), "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder}", "-s3"]
        command += [f"-{name}={port}" for name, port in ports.items()]
        command += [
            f"-s3.config={folder}/s3.json",
            "-s3.autoCreateBucket=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
        ]
        command += [f"-filer.localSocket={folder}/filer", f"-s3.localSocket={folder}/s3"]
        # Each bucket is a collection and takes volumes of its own.
        command += ["-volume.max=1000", "-master.volumeSizeLimitMB=64", "-volume.minFreeSpace=100MiB"]
        try:
            with serving(command, folder, server.answers):
                yield server
        finally:
            _sweep_sockets(ports.values())


def _sweep_sockets(ports: Iterable[int]) -> None:
    """SeaweedFS puts these beside everybody's files, whatever it is told."""
    for port in ports:
        for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
            path.unlink(missing_ok=True)


def _seaweedfs_identities(server: Server) -> dict[str, Any]:
    keys = [{"accessKey": server.access_key, "secretKey": server.secret_key}]
    return {"identities": [{"name": "test", "credentials": keys, "actions": ["Admin", "Read", "Write", "List"]}]}


@contextmanager
def ministack() -> Iterator[Server]:
    """ministack: takes every key that S3 takes, whoever asks."""
    (port,) = free_ports(1)
    server = Server(f"http://127.0.0.1:{port}")
    with scratch() as folder:
        environ = {"BIND_HOST": "127.0.0.1", "GATEWAY_PORT": str(port), "SERVICES": "s3,sts", "TMPDIR": str(folder)}
        environ |= {"LOG_LEVEL": "WARNING", "S3_DATA_DIR": f"{folder}/s3", "IOT_MTLS_ENABLED": "0"}
        with serving([program("ministack")], folder, server.answers, environ):
            yield server


@contextmanager
def moto() -> Iterator[Server]:
    """moto, in this process: forgiving, and full of other services."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # it logs each request, in the name of the tests
    threaded = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    threaded.start()
    try:
        _, port = threaded.get_host_and_port()
        yield Server(f"http://127.0.0.1:{port}")
    finally:
        threaded.stop()


@contextmanager
def rclone(certificate: Path | None = None) -> Iterator[Server]:
    """``rclone serve s3`` over a folder: verifies signatures, ignores conditions and overwrites. With a ``certificate``
    (a file that holds its key as well) it speaks TLS.
    """
    (port,) = free_ports(1)
    server = Server(f"{'https' if certificate else 'http'}://127.0.0.1:{port}", certificate=certificate)
    with scratch() as folder:
        (folder / "data").mkdir()
        (folder / "rclone.conf").touch()
        command = [program("rclone"), "serve", "s3", f"{folder}/data", "--config", f"{folder}/rclone.conf"]
        command += ["--addr", f"127.0.0.1:{port}", "--auth-key", f"{server.access_key},{server.secret_key}"]
        command += ["--cert", str(certificate), "--key", str(certificate)] if certificate else []
        with serving(command, folder, server.answers):
            yield server
