"""A run's items, each in a row of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stanchion.adapters.sqlite.database import Database
from stanchion.adapters.sqlite.statements import read_statements
from stanchion.adapters.store.sqlite.codec import ITEM, encode, encode_text
from stanchion.core.model import Item, ItemKey, RunId, StepId

__all__ = ["put_items", "read_items"]

_SQL = read_statements(__package__, "sql", "state.sql")


def put_items(db: Database, run: int, items: Mapping[ItemKey, Item]) -> None:
    """Write the items that changed."""
    if items:
        db.run_each(
            _SQL["put_item"],
            (
                {"run": run, "step_id": step_id, "item": index, "state": encode(item)}
                for (step_id, index), item in items.items()
            ),
        )


def read_items(
    db: Database, run_id: RunId, wanted: Mapping[StepId, Sequence[int]]
) -> dict[ItemKey, Item]:
    """See ``ports.store.Runs.load_items``."""
    found: dict[ItemKey, Item] = {}
    for step_id, indexes in wanted.items():
        items = encode_text(list(indexes))
        rows = db.every(_SQL["read_items"], run_id=run_id, step_id=step_id, items=items)
        found |= {ItemKey(step_id, index): ITEM.decode(state) for index, state in rows}
    return found
