"""Dead letters: what was tried as often as is allowed, kept for somebody to look at."""

from __future__ import annotations

from typing import Final

from stanchion.adapters.cursor import read_cursor, write_cursor
from stanchion.adapters.letters import event_letter_id, reborn, step_of
from stanchion.adapters.sqlite.database import Database
from stanchion.adapters.sqlite.statements import read_statements
from stanchion.adapters.store.sqlite import inbox
from stanchion.adapters.store.sqlite.codec import DEAD_LETTER, EVENT, encode
from stanchion.core.model import RunId, TenantId
from stanchion.ports.records import DeadLetter, DeadLetterKind, Page

__all__ = ["add", "bury", "list_letters", "replay"]

_SQL = read_statements(__package__, "sql", "dead_letters.sql")
_INBOX = read_statements(__package__, "sql", "inbox.sql")
_LIST: Final = "dead-letters"


def add(db: Database, run: int, letter: DeadLetter) -> None:
    """Keep a letter."""
    db.run(_SQL["add_letter"], id=letter.id, tenant=letter.tenant, run=run, body=encode(letter))


def bury(db: Database, run_id: RunId, entry_id: str, cause: str) -> DeadLetter | None:
    """See ``ports.store.Housekeeping.bury``."""
    found = db.first(_INBOX["find_entry"], run_id=run_id, entry_id=entry_id)
    if found is None:
        return None
    tenant, run, body = found
    event = EVENT.decode(body)
    letter = DeadLetter(
        id=event_letter_id(run_id, entry_id),
        kind=DeadLetterKind.EVENT,
        tenant=tenant,
        run_id=run_id,
        step_id=step_of(event),
        cause=cause,
        at=db.now(),
        event=event,
    )
    add(db, run, letter)
    inbox.drop(db, run, entry_id)
    return letter


def list_letters(
    db: Database, tenant: TenantId | None, cursor: str | None, limit: int
) -> Page[DeadLetter]:
    """See ``ports.store.Housekeeping.list_dead_letters``."""
    (after,) = (0,) if cursor is None else read_cursor(_LIST, cursor, tuple[int])
    if tenant is None:
        rows = db.every(_SQL["list_letters"], after=after, limit=limit + 1)
    else:
        rows = db.every(_SQL["list_letters_of_tenant"], tenant=tenant, after=after, limit=limit + 1)
    letters = tuple(DEAD_LETTER.decode(body) for _, body in rows[:limit])
    return Page(letters, write_cursor(_LIST, rows[limit - 1][0]) if len(rows) > limit else None)


def replay(db: Database, letter_id: str, actor: str) -> DeadLetter | None:
    """See ``ports.store.Housekeeping.replay_dead_letter``."""
    found = db.first(_SQL["take_letter"], id=letter_id)
    if found is None:
        return None
    body, run = found
    letter = DEAD_LETTER.decode(body)
    ended = db.first(_SQL["is_ended"], run=run)
    # A run that has ended hears nothing any more; its letter is taken out all the same.
    if ended is not None and ended[0] is None:
        inbox.put(db, run, *reborn(letter, actor), db.now())
    return letter
