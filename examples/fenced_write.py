"""Two holders of one lease, a long pause, and a refused write.

The first holder has the lease on an invoice. Then its process is paused for longer than the lease
lasts: a swapping machine, a stopped container, a long computation on the event loop. A paused
process cannot stop itself. The second holder gets the lease and pays the invoice. When the first
resumes, it writes at once.

One comparison in the UPDATE refuses that write.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import tempfile
import threading
from contextlib import closing
from pathlib import Path

import stanchion

TTL_S = 1.0

SCHEMA = """
CREATE TABLE invoices (
    id TEXT PRIMARY KEY,
    status TEXT NOT NULL,
    fence INTEGER NOT NULL DEFAULT 0    -- of the last writer
)
"""


class StaleWriter(Exception):
    """A holder of a newer lease has written."""


def set_status(db: sqlite3.Connection, invoice: str, status: str, fence: int | None) -> None:
    """Write, unless a holder of a newer lease has written. Without a fence nothing is written."""
    changed = db.execute(
        "UPDATE invoices SET status = ?, fence = ? WHERE id = ? AND fence <= ?",
        (status, fence, invoice, fence),
    )
    db.commit()
    if changed.rowcount == 0:
        raise StaleWriter(f"{invoice}: refused to set '{status}'")


async def first(url: str, file: Path, asleep: threading.Event, awake: threading.Event) -> None:
    """Hold the lease, pause for too long, write."""
    try:
        async with stanchion.Leases(url, ttl_s=TTL_S) as leases, leases.hold("invoice:42") as lease:
            say("first: has the lease and is paused")
            asleep.set()
            # Blocks the event loop: no renewal and no cancellation, as on a paused machine.
            awake.wait(60)
            say("first: resumes, does not know that its lease has expired, and writes")
            with closing(sqlite3.connect(file)) as db:
                try:
                    set_status(db, "42", "cancelled", lease.fence)
                except StaleWriter as refused:
                    say(f"first: {refused}")
            await asyncio.sleep(1)
            say("never printed: the lease is lost, and the body is cancelled while it waits")
    except stanchion.LeaseLost as lost:
        say(f"first: {lost}")


async def second(url: str, file: Path) -> None:
    """Wait for the lease, and write."""
    async with (
        stanchion.Leases(url, ttl_s=TTL_S) as leases,
        leases.hold("invoice:42", wait_s=10) as lease,
    ):
        say("second: has the lease, the first holder's has expired")
        with closing(sqlite3.connect(file)) as db:
            set_status(db, "42", "paid", lease.fence)
        say("second: has paid the invoice")


def main() -> int:
    """Run both holders, and check the invoice."""
    with tempfile.TemporaryDirectory() as directory:
        url, file = f"sqlite:{directory}/leases.db", Path(directory) / "invoices.db"
        with closing(sqlite3.connect(file)) as db:
            db.execute(SCHEMA)
            db.execute("INSERT INTO invoices (id, status) VALUES ('42', 'open')")
            db.commit()
        asleep, awake = threading.Event(), threading.Event()
        other = threading.Thread(target=lambda: asyncio.run(first(url, file, asleep, awake)))
        other.start()
        asleep.wait(60)
        asyncio.run(second(url, file))
        awake.set()
        other.join()
        with closing(sqlite3.connect(file)) as db:
            [(status,)] = db.execute("SELECT status FROM invoices").fetchall()
    say(f"the invoice is {status}")
    return 0 if status == "paid" else 1


def say(what: str) -> None:
    """Print at once from any thread."""
    print(what, flush=True)


if __name__ == "__main__":
    sys.exit(main())
