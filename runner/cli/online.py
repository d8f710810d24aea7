"""What a spec needs from stores in the cloud, asked of them: ``validate --online``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice

from runner.dataset.source import NOTHING_LEFT_OUT, Source, nothing_error, objects_of
from runner.errors import CloudrunError
from runner.spec import JobSpec, Problem, problem_at
from runner.storage.retrying import Retry
from runner.wiring.places import PATIENCE_OF_A_LOOK, open_job, open_source


def unmet_in_cloud(spec: JobSpec, environ: Mapping[str, str]) -> Iterator[Problem]:
    """Datasets that are not there or may not be read, and a store that cannot be written: a small object is written
    to it, and removed.
    """
    retry = Retry(PATIENCE_OF_A_LOOK)
    for index, data in enumerate(spec.data):
        if not data.source.startswith("file://"):
            yield from _asked(spec, f"data.{index}.source", partial(_find, open_source(spec, data, environ, retry)))
    if not spec.store_url(environ).startswith("file://"):
        yield from _asked(spec, "store", partial(_write, spec, environ))


def _find(source: Source) -> None:
    """Raises DataError where there is nothing."""
    if not any(islice(objects_of(source), 1)):
        raise nothing_error(source, 0, NOTHING_LEFT_OUT)


def _write(spec: JobSpec, environ: Mapping[str, str]) -> bool:
    """Raises where that cannot be. To prove whether it keeps to conditions, the store is written to."""
    return open_job(spec, environ).store.exclusive


def _asked(spec: JobSpec, key: str, question: Callable[[], object]) -> Iterator[Problem]:
    try:
        question()
    except CloudrunError as error:
        yield problem_at(spec, key, error.message, error.hint)
