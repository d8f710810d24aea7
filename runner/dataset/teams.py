"""Who brings files: threads of this process, and worker processes once there are many small ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from runner.dataset.crew import Crew, Post
from runner.dataset.fetch import Fetcher
from runner.dataset.fleet import THREADS, Fleet, processes_here
from runner.dataset.record import Entry
from runner.dataset.source import Source
from runner.dataset.task import Outcome, Recorded, Task
from runner.dataset.wire import Start
from runner.dataset.worklist import Todo


class Team:
    """Some who bring files, and how many tasks they have not answered."""

    def __init__(self, start: Callable[[Post], Crew | Fleet], post: Callable[[Answer], None]) -> None:
        self.flying = 0
        self.hands = start(lambda outcomes: post(Answer(self, outcomes)))

    def free(self) -> int:
        """How many tasks to hand them now: none while enough are waiting."""
        return self.hands.capacity - self.flying if self.flying <= self.hands.capacity // 2 else 0


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of some tasks of a team."""

    team: Team
    outcomes: list[Outcome]


class Teams:
    """Hands out tasks of one sync. Used by one thread; ``post`` is called from others."""

    def __init__(
        self, source: Source, entry: Entry, threads: int, stop: threading.Event, post: Callable[[Answer], None]
    ) -> None:
        self._source = source
        self._entry = entry
        self._threads = threads
        self._post = post
        self._dropped = threading.Event()
        self._fetcher = Fetcher(source.store, entry.files, entry.parts, lambda: stop.is_set() or self._dropped.is_set())
        self._crew: Team | None = None
        self._fleet: Team | None = None
        self._workers_can_open = source.opening is not None
        self.meter = self._fetcher.meter

    @property
    def flying(self) -> int:
        """Tasks that nobody has answered."""
        return sum(team.flying for team in self._teams())

    @property
    def lack_workers(self) -> bool:
        """True where worker processes could open the source and do not run yet."""
        return self._workers_can_open and self._fleet is None

    def call_workers(self) -> None:
        """Start the worker processes: they take over the small files."""
        source, entry = self._source, self._entry
        assert source.opening
        start = Start(source.opening, source.patience, entry.files, entry.parts, THREADS)
        try:
            self._fleet = Team(lambda post: Fleet(start, processes_here(), post, source.on_retry), self._post)
        except (OSError, RuntimeError):
            # No memory, process, thread or descriptor is left for them: our own threads do the same, more slowly.
            self._workers_can_open = False

    def free(self, todo: Todo) -> int:
        """How many tasks of this kind to hand out now."""
        return self._for(todo).free()

    def answered(self, answer: Answer) -> None:
        """Take note of an answer that came."""
        answer.team.flying -= len(answer.outcomes)
        if answer.team is self._fleet:
            self.meter.add(sum(one.size for one in answer.outcomes if isinstance(one, Recorded)))

    def hand(self, todo: Todo, tasks: Sequence[Task]) -> None:
        team = self._for(todo)
        team.flying += len(tasks)
        team.hands.hand(tasks)

    def drop(self) -> None:
        """Nobody waits for the outcomes any more: end what takes long."""
        self._dropped.set()

    def end(self) -> None:
        """Begin nothing more."""
        for team in self._teams():
            team.hands.end()

    def join(self, until: float) -> None:
        """Wait until all have ended, but not beyond ``until``, by the monotonic clock. What they began has been posted
        by then; what has not ended is abandoned, and puts no file into its place any more.
        """
        for team in self._teams():
            team.hands.join(until)
        self._fetcher.shut()

    def _teams(self) -> list[Team]:
        return [team for team in (self._fleet, self._crew) if team]

    def _for(self, todo: Todo) -> Team:
        if self._fleet and todo is Todo.SMALL:
            return self._fleet
        if self._crew is None:
            self._crew = Team(lambda post: Crew(self._fetcher, self._threads, post), self._post)
        return self._crew
