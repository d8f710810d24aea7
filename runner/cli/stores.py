"""What a spec needs from its stores, asked of them: ``validate --online``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice

from runner.dataset.source import NOTHING_LEFT_OUT, Source, nothing_error, objects_of
from runner.errors import CloudrunError
from runner.spec import JobSpec, Problem, problem_at, unmet_store_needs
from runner.storage.retrying import Retry
from runner.wiring.places import PATIENCE_OF_A_LOOK, open_job, open_source

Question = Callable[[], object]
"""Raises the error that ``submit`` would meet."""


def unmet_in_stores(spec: JobSpec, environ: Mapping[str, str]) -> Iterator[Problem]:
    """A store that cannot be written, and datasets that are not there or may not be read: in this order, which is that
    of ``submit``, each with the exit code that ``submit`` would leave with.

    A small object is written to a bucket, and removed; of folders nothing is changed.
    """
    known = {problem.key: problem for problem in unmet_store_needs(spec, environ)}
    for key, question in _questions(spec, environ):
        if key in known:
            yield known[key]
        else:
            yield from _asked(spec, key, question)


def _questions(spec: JobSpec, environ: Mapping[str, str]) -> Iterator[tuple[str, Question]]:
    retry = Retry(PATIENCE_OF_A_LOOK)
    yield "store", partial(_write, spec, environ)
    for index, data in enumerate(spec.data):
        yield f"data.{index}.source", partial(_find, open_source(spec, data, environ, retry))


def _write(spec: JobSpec, environ: Mapping[str, str]) -> None:
    """Raises where that cannot be. To prove whether it keeps to conditions, a bucket is written to."""
    if not spec.store_url(environ).startswith("file://"):
        _ = open_job(spec, environ).store.exclusive


def _find(source: Source) -> None:
    """Raises DataError where there is nothing."""
    if not any(islice(objects_of(source), 1)):
        raise nothing_error(source, 0, NOTHING_LEFT_OUT)


def _asked(spec: JobSpec, key: str, question: Question) -> Iterator[Problem]:
    try:
        question()
    except CloudrunError as error:
        yield problem_at(spec, key, error.message, error.hint, exit_code=error.exit_code)
