"""What a store's refusal means: HTTP status and error code in, one of our errors out. S3 and OBS share the words."""

from __future__ import annotations

from typing import Literal, NamedTuple

from runner.errors import (
    AccessDenied,
    BadKey,
    BeyondEnd,
    ClockSkewed,
    CloudrunError,
    CredentialsExpired,
    NotOffered,
    ObjectChanged,
    ObjectMissing,
    StoreBusy,
    StoreError,
    StoreUnreachable,
)

Operation = Literal["list", "read", "write", "delete"]

EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"})
SKEWED = frozenset({"RequestTimeTooSkewed", "AccessDeniedRequestTimeTooSkewed"})
BUSY = frozenset({"SlowDown", "Throttling", "ThrottlingException", "TooManyRequests", "RequestLimitExceeded",
                  "ServiceUnavailable", "ServerBusy", "BandwidthLimitExceeded", "QosLimited"})  # fmt: skip
PASSING = frozenset({"InternalError", "RequestTimeout", "OperationAborted", "ConditionalRequestConflict",
                     "IncompleteBody", "MalformedXML", "BadDigest", "InvalidDigest", "XAmzContentSHA256Mismatch",
                     "XAmzContentChecksumMismatch", "PriorRequestNotComplete"})  # fmt: skip
"""Codes below 500 that another try can cure: the network mangled the request, or another writer was quicker."""

NO_BUCKET = frozenset({"NoSuchBucket", "NoSuchBucketException"})
NO_KEY = frozenset({"NoSuchKey", "NoSuchVersion", "NoSuchUpload", "NotFound", "404"})
COLD = frozenset({"InvalidObjectState", "ObjectNotRestored"})
UNKNOWN_WHO = frozenset({"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "InvalidSecurity",
                         "AuthorizationHeaderMalformed", "UnrecognizedClientException"})  # fmt: skip


class Asked(NamedTuple):
    """What was asked of a store. ``bucket`` is ``scheme://name``; the key, or prefix, may be empty."""

    operation: Operation
    bucket: str
    key: str = ""

    @property
    def what(self) -> str:
        return f"{self.bucket}/{self.key}" if self.key else self.bucket


RIGHTS: dict[tuple[str, Operation], str] = {
    ("s3", "list"): "s3:ListBucket on the bucket",
    ("s3", "read"): "s3:GetObject on the object (and kms:Decrypt where a KMS key encrypts it)",
    ("s3", "write"): "s3:PutObject on the object (and kms:GenerateDataKey where a KMS key encrypts it)",
    ("s3", "delete"): "s3:DeleteObject on the object",
    ("obs", "list"): "obs:bucket:ListBucket on the bucket",
    ("obs", "read"): "obs:object:GetObject on the object",
    ("obs", "write"): "obs:object:PutObject on the object",
    ("obs", "delete"): "obs:object:DeleteObject on the object",
}


def error_of(asked: Asked, status: int, code: str, message: str = "") -> CloudrunError:
    """The error for an answer that is not success. ``message`` is the store's own text; it never holds credentials."""
    message = " ".join(message.split())
    said = f"{asked.what}: {code or status}" + (f" ({message})" if message and message != code else "")
    if code in EXPIRED:
        return CredentialsExpired(said, "the credentials have run out: renew them, or use ones that renew themselves")
    if code in SKEWED:
        return ClockSkewed(
            said, "this machine's clock is wrong: set it (chronyc makestep, or timedatectl set-ntp true)"
        )
    if code in BUSY or status in (429, 503):
        return StoreBusy(said, "the store asks for fewer requests: `storage.concurrency` limits them")
    if code in ("NotImplemented", "NotSupported") or status == 501:
        return NotOffered(said, "is this the endpoint of an object store? It does not know such requests")
    if code in PASSING or status >= 500 or status == 408:
        return StoreUnreachable(said, "the store has trouble; try again later")
    return _final(asked, status, code, said)


def _final(asked: Asked, status: int, code: str, said: str) -> CloudrunError:
    """Errors that the same request would meet again."""
    if code in NO_BUCKET:
        return StoreError(f"{asked.bucket} does not exist", "check the bucket's name, region and endpoint")
    if code in NO_KEY or (status == 404 and asked.key):
        return ObjectMissing(f"{asked.what} does not exist")
    if status == 412 or code == "PreconditionFailed":
        return ObjectChanged(f"{asked.what} is not the version that was asked for")
    if code == "InvalidRange" or status == 416:
        return BeyondEnd(f"{asked.what}: the range begins behind the last byte")
    if code in UNKNOWN_WHO or status == 401:
        return AccessDenied(
            said, f"the store does not accept these credentials for {asked.bucket}: check key, secret and session token"
        )
    if code == "KeyTooLongError":
        return BadKey(f"{asked.what[:200]}...: the store cannot hold so long a key")
    if code in COLD:
        return StoreError(f"{asked.what} lies in an archive storage class", "restore the object first, or leave it out")
    if status == 403:
        right = RIGHTS.get((asked.bucket.partition("://")[0], asked.operation), f"the right to {asked.operation}")
        return AccessDenied(said, f"these credentials need {right}: {asked.what}")
    if status in (301, 307, 308) or code in ("PermanentRedirect", "IllegalLocationConstraintException"):
        return StoreError(said, "the bucket is in another region: set `storage.region`")
    hint = "is this the endpoint of an object store, and the bucket's name right?" if status == 404 else ""
    return StoreError(said, hint)
