"""What can go wrong, as values a person can act on.

Every error carries the exit code that the command leaves with, whether trying again can help,
and a hint. The command line prints two lines: ``error: ...`` and ``hint: ...``.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """How ``cloudrun`` leaves; the numbers follow sysexits.h where one fits."""

    SUCCEEDED = 0
    USAGE = 64
    STORE_UNREACHABLE = 69
    TRAINER_FAILED = 70
    NO_PROGRESS = 71
    NOT_STORED = 73
    PREEMPTED = 75
    ACCESS_DENIED = 77
    BAD_SPEC = 78
    INTERRUPTED = 130
    STOPPED = 143


class CloudrunError(Exception):
    """Base of all errors that are meant for a person."""

    exit_code: ExitCode = ExitCode.TRAINER_FAILED
    retryable: bool = False

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(CloudrunError):
    """The command was called in a way that makes no sense."""

    exit_code = ExitCode.USAGE


class NotYetError(CloudrunError):
    """The spec asks for a feature that this version does not have."""

    exit_code = ExitCode.BAD_SPEC


class StoreError(CloudrunError):
    """The object store answered with something that is not success."""

    exit_code = ExitCode.STORE_UNREACHABLE


class StoreUnreachable(StoreError):
    """No useful answer: the network, a server error, a stale mount. Trying again can help."""

    retryable = True


class StoreBusy(StoreUnreachable):
    """The store asks for fewer requests (``SlowDown``, 429, 503): trying again helps, after a while and less hard."""


class ClockSkewed(StoreUnreachable):
    """Machine and store differ too much about the time for signatures. A clock that is being set comes right."""


class AccessDenied(StoreError):
    """The store knows us and says no. Trying again is senseless."""

    exit_code = ExitCode.ACCESS_DENIED


class CredentialsExpired(AccessDenied):
    """The credentials have run out; a fresh look at where they come from can help."""

    retryable = True


class ObjectMissing(StoreError):
    """No object has this key."""


class ObjectExists(StoreError):
    """A conditional write found that the key is taken."""


class ObjectChanged(StoreError):
    """The object is not the version that was asked for."""

    retryable = True


class NotOffered(StoreError):
    """The store does not know this kind of request."""


class BeyondEnd(StoreError):
    """A range was asked for that begins behind the last byte; of an empty object, every range does."""


class BadKey(StoreError):
    """A key that cannot be stored or must not be followed (empty, absolute, ``..``, control characters)."""


class DiskFull(CloudrunError):
    """The local disk, or the cache's limit, has no room for what must be written."""


class CorruptData(CloudrunError):
    """Bytes that do not match their digest, or a file that its format calls incomplete."""


class SourceChanged(CloudrunError):
    """A local file changed while it was read; what was read of it must not be used."""

    retryable = True


class DataError(CloudrunError):
    """A dataset cannot be brought to this machine as the spec asks."""

    exit_code = ExitCode.BAD_SPEC
