"""One life of a supervisor: everything is started here, and joined here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from runner.checkpoint.layout import attempt_name
from runner.core.events import Noticed, Progressed, Started, StoreStruggled
from runner.core.policy import Policy
from runner.core.record import Entry, is_worth_a_line, redacted, to_line
from runner.core.state import Ending, may_write
from runner.monitors.api import Monitor, watch
from runner.supervisor.executor import Executor
from runner.supervisor.inbox import Inbox
from runner.supervisor.journal import Journal
from runner.supervisor.loop import supervise
from runner.supervisor.session import Session
from runner.supervisor.shipper import Shipper

SHIP_PATIENCE = 10.0
RELEASE_PATIENCE = 5.0
# News that changes nobody's fate. A store that struggles must not be asked more often for telling so.
CAN_WAIT = (Progressed, StoreStruggled, Noticed)


def live(
    session: Session,
    policy: Policy,
    inbox: Inbox,
    started: Started,
    monitors: Sequence[Monitor],
    tell: Callable[[Entry], None],
) -> Ending:
    """Run the session to its end; ``tell`` hears of every turn of the loop."""
    journal = Journal(lambda run, attempt, n: session.local.journal_segment(run, attempt_name(attempt, session.id), n))
    shipper = Shipper(
        session.store,
        session.local,
        session.id,
        every=session.spec.logs.upload_every,
        clock=session.clock,
        complain=lambda text: inbox.post(Noticed(text)),
    )

    def record(entry: Entry) -> None:
        if is_worth_a_line(entry):
            line, ledger = redacted(to_line(entry), session.secrets.redact_text), entry.state.ledger
            place = ledger.run if may_write(ledger) else 0
            journal.write(line, ledger.run, ledger.attempt, durable=not isinstance(entry.event, Progressed))
            shipper.record(line, place, urgent=not isinstance(entry.event, CAN_WAIT))
        tell(entry)

    executor = Executor(session)
    watches = [watch(monitor, inbox.post, session.leaving) for monitor in monitors]
    shipper.start()
    inbox.post(started)
    try:
        return supervise(policy, inbox, executor.perform, record, session.clock)
    finally:
        executor.close()
        journal.close()
        shipper.close(SHIP_PATIENCE)
        session.lease.close(RELEASE_PATIENCE)
        for thread in watches:
            thread.join(1.0)
