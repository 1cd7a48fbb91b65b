"""The store in one file: opened once, by one process, and kept whatever happens to it.

    callers ──▶ queue ──▶ writer thread ── one transaction, one sync ──▶ file
            ──▶ queue ──▶ reader thread ◀── a snapshot ────────────────── file

What is acknowledged is on the disk. The reader sees it, since it looks only after it is asked.
"""

from __future__ import annotations

import os
from typing import Final

from stanchion.adapters.lane import Lane
from stanchion.adapters.sqlite.batch import read_together, write_together
from stanchion.adapters.sqlite.opening import MEMORY, resolved
from stanchion.adapters.sqlite.statements import read_statements
from stanchion.adapters.store.sqlite import dead_letters, inbox, retention
from stanchion.adapters.store.sqlite.file import open_reader, open_writer, shut
from stanchion.adapters.store.sqlite.parts import (
    SqliteDefinitions,
    SqliteJobs,
    SqliteOutbox,
    SqliteRuns,
)
from stanchion.core.model import Instant, RunId, TenantId
from stanchion.ports.clock import Clock
from stanchion.ports.records import DeadLetter, Drift, Page

__all__ = ["SqliteStore"]

_SQL = read_statements(__package__, "sql", "store.sql")
_DAY_MS: Final = 86_400_000
_TIMEOUT_S: Final = 2.0
_QUEUE_MAX: Final = 10_000


class SqliteStore(SqliteRuns, SqliteJobs, SqliteOutbox, SqliteDefinitions):
    """See ``ports.store.Store``. Made by ``open``."""

    _audited = ""
    """Where the last audit stopped."""

    @classmethod
    async def open(
        cls,
        path: str | os.PathLike[str],
        *,
        clock: Clock,
        key_ttl_ms: int = _DAY_MS,
        timeout_s: float = _TIMEOUT_S,
        queue_max: int = _QUEUE_MAX,
    ) -> SqliteStore:
        """Open the file, made if it is not there. Raises ``BackendRefused`` if that is not safe.

        ``key_ttl_ms``: how long an idempotency key is known after its run ended. ``timeout_s``: how
        long a caller waits. ``queue_max``: how many may.
        """
        where = resolved(path)
        writer = await Lane.open(
            f"{where} (writer)",
            lambda: open_writer(where, clock),
            write_together,
            shut,
            queue_max=queue_max,
        )
        try:
            reader = writer
            if where != MEMORY:
                reader = await Lane.open(
                    f"{where} (reader)",
                    lambda: open_reader(where, clock),
                    read_together,
                    lambda db: db.connection.close(),
                    queue_max=queue_max,
                )
        except BaseException:
            await writer.close()
            raise
        return cls(
            path=where,
            writer=writer,
            reader=reader,
            clock=clock,
            key_ttl_ms=key_ttl_ms,
            timeout_s=timeout_s,
        )

    # ── Housekeeping ─────────────────────────────────────────────────────────────────────────────

    async def bury(self, run_id: RunId, entry_id: str, *, cause: str) -> DeadLetter | None:
        return await self._write(lambda db: dead_letters.bury(db, run_id, entry_id, cause))

    async def count_failure(self, run_id: RunId, entry_id: str) -> int:
        return await self._write(lambda db: inbox.count_failure(db, run_id, entry_id))

    async def list_dead_letters(
        self, tenant: TenantId | None, *, cursor: str | None = None, limit: int = 100
    ) -> Page[DeadLetter]:
        return await self._read(lambda db: dead_letters.list_letters(db, tenant, cursor, limit))

    async def replay_dead_letter(self, letter_id: str, *, actor: str) -> DeadLetter | None:
        return await self._write(lambda db: dead_letters.replay(db, letter_id, actor))

    async def audit_slots(self, *, limit: int) -> tuple[Drift, ...]:
        drifts, self._audited = await self._write(
            lambda db: retention.audit(db, self._audited, limit)
        )
        return drifts

    async def purge(self, *, finished_before: Instant, limit: int) -> int:
        return await self._write(lambda db: retention.purge(db, finished_before, limit))

    async def now(self) -> Instant:
        return self._clock.now()

    async def ping(self) -> None:
        """Answers if it can be read and written: whoever asks wants to know if work would go on."""
        await self._read(lambda db: db.first(_SQL["look"]))
        await self._write(lambda db: db.run(_SQL["leave_a_mark"]))

    async def close(self) -> None:
        try:
            await self._reader.close()
        finally:
            await self._writer.close()
