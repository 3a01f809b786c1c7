"""Rows of the usage ledger as JSON and CSV, and the days that are asked for. Pure."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from datetime import date

from quire.errors import ValidationError
from quire.server.usage.ledger import COUNTS, UsageRow
from quire.utils.checks import shown

FORMATS = ("json", "csv")


def day_of(name: str, text: str) -> str:
    """A day as it is written in the ledger.

    Raises:
        ValidationError: it is not a date.
    """
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError:
        raise ValidationError(
            f"{name}={shown(text)} is not a valid day", hint="write it as 2026-11-23 (UTC)", field=name
        ) from None


def as_csv(rows: Sequence[UsageRow]) -> str:
    """One line a row, and the names of columns before."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(UsageRow._fields)
    writer.writerows(rows)
    return out.getvalue()


def as_json(rows: Sequence[UsageRow]) -> str:
    """One object: the rows, and their sums."""
    total = {name: sum(getattr(row, name) for row in rows) for name in COUNTS}
    return json.dumps({"object": "list", "data": [row._asdict() for row in rows], "total": total})
