"""Rows of rounds that a run went back by because their bytes were damaged; kept until other rounds are."""

from __future__ import annotations

import msgspec

from .database import Database

TABLES = ("rounds", "evaluations", "plan", "counted", "patches")  # with a row for each round
KEY = "forgotten"  # of the row of `meta`


def keep(db: Database, number: int) -> None:
    """Keep the rows of all rounds after this one, which are about to be removed."""
    rows = {
        table: db.all(f"SELECT * FROM {table} WHERE round > ?", (number,))  # noqa: S608 - names of ours
        for table in TABLES
    }
    db.put("meta", KEY, msgspec.json.encode(msgspec.msgpack.encode(rows)).decode())


def put_back(db: Database, number: int, model: str) -> bool:
    """Put the rows of the rounds up to `number` back, in a transaction; False where none are kept of that
    round, or it had another model. `model`: its digest."""
    kept = db.one("SELECT value FROM meta WHERE key = ?", (KEY,))
    tables = msgspec.msgpack.decode(msgspec.json.decode(kept[0], type=bytes)) if kept else {}
    if [number, model] not in [row[:2] for row in tables.get("rounds", ())]:
        return False
    for table, row in ((table, row) for table, rows in tables.items() for row in rows if row[0] <= number):
        db.put(table, *row)
    return True
