"""Exceptions of botocore and obstore in, our errors out."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from html import unescape
from types import TracebackType
from typing import Any
from xml.etree.ElementTree import Element, ParseError, fromstring

from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, ParamValidationError, ProfileNotFound
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from runner.errors import AccessDenied, CloudrunError, CredentialsExpired, StoreError, StoreUnreachable
from runner.storage.refusals import Asked, error_of

# After its own words object_store hands on the answer, then Rust's view of the whole.
_STATUS = re.compile(r"Server returned (?:non-2xx|error) status(?: code)?: (\d{3})")
_REST = "\n\nDebug source:"
_CODE = re.compile(r"<Code>([^<]*)</Code>")
_MESSAGE = re.compile(r"<Message>([^<]*)</Message>")

_STATUS_OF: tuple[tuple[type[Exception], int], ...] = (
    (FileNotFoundError, 404),
    (PermissionDeniedError, 403),
    (UnauthenticatedError, 401),
    (PreconditionError, 412),
    (AlreadyExistsError, 412),
)

_CAUSES = re.compile(r'(?:message|error): "([^"]+)"')
_KIND = re.compile(r"(InvalidCertificate)|kind: (Timeout|Interrupted|Decode)")


class Asking:
    """Lets only our own errors out of its block. No generator: it stands round every request for a small object."""

    __slots__ = ("_asked", "_endpoint", "_on_expiry", "_source")

    def __init__(self, asked: Asked, endpoint: str, on_expiry: Callable[[], None], source: Callable[[], str]) -> None:
        """``on_expiry`` is for credentials that the store calls expired; ``source`` says where they came from."""
        self._source = source
        self._asked = asked
        self._endpoint = endpoint
        self._on_expiry = on_expiry

    def __enter__(self) -> Asked:
        return self._asked

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        if isinstance(error, ProfileNotFound):
            raise AccessDenied(str(error), "`aws configure list-profiles` shows those that there are") from None
        told = self._told(error)
        if isinstance(told, CredentialsExpired):
            self._on_expiry()
        if isinstance(told, AccessDenied) and (source := self._source()):
            # Blocks stand in one another, and many requests share one failed look for credentials.
            told.hint = f"{told.hint.removesuffix(came := f' (they came from {source})')}{came}"
        if told is not error:
            raise told from error

    def _told(self, error: BaseException) -> BaseException:
        theirs = isinstance(error, ClientError | BotoCoreError | BaseError | FileNotFoundError)
        return error_from(self._asked, self._endpoint, error) if theirs and not _is_fault_of_ours(error) else error


def error_from(asked: Asked, endpoint: str, error: BaseException) -> CloudrunError:
    """Our error for one of theirs."""
    if isinstance(error, ClientError):
        return _from_client(asked, error)
    if isinstance(error, ParamValidationError):
        return StoreError(f"{asked.what}: {error}")
    if isinstance(error, BotoCoreError):
        # The innermost words say why; those around them only repeat the URL.
        return unreachable(asked, endpoint, str(_inner(error) or error).rpartition(": ")[2])
    return _from_obstore(asked, endpoint, error)


def error_in(asked: Asked, status: int, body: bytes) -> CloudrunError:
    """Our error for an answer that holds S3's XML, or nothing, or some proxy's page."""
    return _from_text(asked, status, body.decode(errors="replace"))


def document(asked: Asked, body: bytes) -> Element:
    """The XML of an answer. StoreUnreachable when it is cut off."""
    try:
        return fromstring(body)  # noqa: S314  # expat limits by itself what entities can grow to
    except ParseError as error:
        raise StoreUnreachable(f"{asked.what}: the answer is cut off or mangled: {error}") from error


def needed(asked: Asked, answer: Mapping[str, Any], name: str) -> Any:
    """What every answer of a store has. StoreUnreachable where it lacks: it was cut off, or somebody else answered (the
    page of a captive portal says 200 as well).
    """
    if answer.get(name) is None:
        raise StoreUnreachable(
            f"{asked.what}: the answer lacks {name}",
            "is something between this machine and the store that answers for it?",
        )
    return answer[name]


def tag_in(asked: Asked, answer: Mapping[str, Any], name: str = "ETag") -> str:
    """The ETag of an answer without its quotes. StoreUnreachable when it is not there, or cut off."""
    tag = str(needed(asked, answer, name)).removeprefix("W/")
    if not tag.strip('"') or tag.startswith('"') != (len(tag) > 1 and tag.endswith('"')):
        raise StoreUnreachable(f"{asked.what}: the answer is cut off in its {name}")
    return tag.strip('"')


def lacks_operation(status: int, body: bytes) -> bool:
    """Whether a store says that it does not know such a request at all."""
    if status in (405, 501):
        return True
    return code_in(body) in ("NotImplemented", "MethodNotAllowed", "UnsupportedOperation")


def code_in(body: bytes) -> str:
    """The error code in an answer; "" where there is none."""
    code = _CODE.search(body.decode(errors="replace"))
    return unescape(code[1]) if code else ""


def unreachable(asked: Asked, endpoint: str, why: str) -> StoreUnreachable:
    return StoreUnreachable(
        f"{asked.what}: no answer from {endpoint}: {why}",
        f"is {endpoint} the right endpoint, and can this machine reach it?",
    )


def _is_fault_of_ours(error: BaseException) -> bool:
    """Whether botocore wrapped something that has nothing to do with the network: trying again would hide it."""
    if type(error) is not HTTPClientError:
        return False
    import urllib3.exceptions  # noqa: PLC0415 - whoever raised that has loaded it; others do without

    return not isinstance(_inner(error), OSError | urllib3.exceptions.HTTPError)


def _inner(error: BaseException) -> Exception | None:
    """What botocore wrapped."""
    wrapped: Exception | None = getattr(error, "kwargs", {}).get("error")
    return wrapped


def _from_client(asked: Asked, error: ClientError) -> CloudrunError:
    told = error.response.get("Error", {})
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    code = str(told.get("Code", ""))
    # Where the answer has no body, botocore gives the status for a code.
    return error_of(asked, status, "" if code.isdigit() else code, str(told.get("Message", "")))


def _from_obstore(asked: Asked, endpoint: str, error: BaseException) -> CloudrunError:
    text, _, rest = str(error).partition(_REST)
    found = _STATUS.search(text)
    if found:
        return _from_text(asked, int(found[1]), text[found.end() :])
    if "redirect without LOCATION" in text:
        return error_of(asked, 301, "PermanentRedirect")
    status = next((status for kind, status in _STATUS_OF if isinstance(error, kind)), None)
    if status:
        return error_of(asked, status, "")
    return unreachable(asked, endpoint, _cause(rest) or text.rpartition(" - ")[2])


def _from_text(asked: Asked, status: int, text: str) -> CloudrunError:
    code, message = _CODE.search(text), _MESSAGE.search(text)
    return error_of(asked, status, unescape(code[1]) if code else "", unescape(message[1]) if message else "")


def _cause(debug: str) -> str:
    """What lies at the bottom of a failed connection: ``Connection refused`` rather than ``error sending request``."""
    found = [*_CAUSES.finditer(debug)] or [*_KIND.finditer(debug)]
    return str(found[-1][found[-1].lastindex or 0]) if found else ""
