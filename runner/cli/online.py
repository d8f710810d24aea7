"""What a spec needs from stores in the cloud, asked of them: ``validate --online``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice

from runner.dataset.source import objects_of
from runner.errors import CloudrunError
from runner.spec import Data, JobSpec, Problem, problem_at
from runner.storage.retrying import Retry
from runner.wiring import PATIENCE_OF_A_LOOK, open_job, open_source


def unmet_in_cloud(spec: JobSpec, environ: Mapping[str, str]) -> Iterator[Problem]:
    """Datasets that are not there or may not be read, and a store that cannot be written: a small object is written
    to it, and removed.
    """
    retry = Retry(PATIENCE_OF_A_LOOK)
    for index, data in enumerate(spec.data):
        if not data.source.startswith("file://"):
            is_there = partial(_is_there, spec, data, environ, retry)
            yield from _asked(spec, f"data.{index}.source", is_there, f"there are no objects at {data.source}")
    if not spec.store_url(environ).startswith("file://"):
        yield from _asked(spec, "store", partial(_can_be_written, spec, environ), "")


def _is_there(spec: JobSpec, data: Data, environ: Mapping[str, str], retry: Retry) -> bool:
    return any(islice(objects_of(open_source(spec, data, environ, retry)), 1))


def _can_be_written(spec: JobSpec, environ: Mapping[str, str]) -> bool:
    """Raises where it cannot; whether the store keeps to conditions is no matter."""
    return open_job(spec, environ).store.exclusive in (True, False)


def _asked(spec: JobSpec, key: str, question: Callable[[], bool], otherwise: str) -> Iterator[Problem]:
    try:
        if not question():
            yield problem_at(spec, key, otherwise, "check the URL: does the prefix end where a folder ends?")
    except CloudrunError as error:
        yield problem_at(spec, key, error.message, error.hint)
