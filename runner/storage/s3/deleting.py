"""Removing objects, a thousand with one request where the store can do that."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from xml.etree.ElementTree import Element

from runner.errors import CloudrunError, ObjectMissing, StoreUnreachable
from runner.storage.refusals import error_of
from runner.storage.s3.answers import document, error_in, lacks_operation
from runner.storage.s3.connection import Connection

_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_ESCAPED = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "\t": "&#9;", "\n": "&#10;", "\r": "&#13;"})
_STATUS_OF = {"AccessDenied": 403}
"""The status that the same refusal has as an answer of its own, where `error_of` needs one."""


class Deleter:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._one_by_one = False

    def delete(self, keys: Sequence[str]) -> None:
        in_bulk = [] if self._singly() else [key for key in keys if not _NOT_IN_XML.search(key)]
        if in_bulk and not self._bulk(in_bulk):
            self._one_by_one = True
            in_bulk = []
        for key in sorted(set(keys).difference(in_bulk)):
            self._single(key)

    def _singly(self) -> bool:
        with self._connection.asking("delete"):
            return self._one_by_one or not self._connection.provider.bulk_delete

    def _bulk(self, keys: Sequence[str]) -> bool:
        """False where the store has no such request. Raises the first refusal."""
        body = _request(keys)
        # Older stores accept this digest only, and no other.
        headers = {"Content-MD5": base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()}
        asked = self._connection.asked("delete")
        with self._connection.asking("delete"):
            answer = self._connection.wire.send(
                asked, "POST", query={"delete": ""}, headers=headers, body=body, refuse=False
            )
        if answer.status_code == 200:
            for error in self._refusals(answer.content):
                raise error
            return True
        if not lacks_operation(answer.status_code, answer.content):
            with self._connection.asking("delete"):
                raise error_in(asked, answer.status_code, answer.content)
        return False

    def _refusals(self, body: bytes) -> Iterator[CloudrunError]:
        asked = self._connection.asked("delete")
        root = document(asked, body)
        name = root.tag.rpartition("}")[2]
        if name == "Error":
            yield error_in(asked, 200, body)
        elif name != "DeleteResult":
            yield StoreUnreachable(f"{asked.what}: the answer to a deletion is <{name}>")
        for entry in root.iterfind("{*}Error"):
            key, code, message = (_text(entry, name) for name in ("Key", "Code", "Message"))
            error = error_of(self._connection.asked("delete", key), _STATUS_OF.get(code, 200), code, message)
            if not isinstance(error, ObjectMissing):
                yield error

    def _single(self, key: str) -> None:
        asked = self._connection.asked("delete", key)
        with suppress(ObjectMissing), self._connection.asking("delete", key):
            if self._connection.wire.send(asked, "DELETE", key=key).content:
                raise StoreUnreachable(f"{asked.what}: a page came where a deletion has no answer")


def _request(keys: Sequence[str]) -> bytes:
    objects = "".join(f"<Object><Key>{key.translate(_ESCAPED)}</Key></Object>" for key in keys)
    return f'<Delete xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Quiet>true</Quiet>{objects}</Delete>'.encode()


def _text(entry: Element, name: str) -> str:
    return entry.findtext(f"{{*}}{name}") or ""
