"""Tokens by day, tenant, key and model, from the ledger of `quire serve --usage-ledger FILE`.

    quire usage usage.db --since 2026-11-01 --format csv
    quire usage --url http://127.0.0.1:8000 --api-key OPERATOR_KEY

Keys are shown by their fingerprint: the first 12 digits of their SHA-256.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
from urllib.parse import urlencode

from rich.console import Console
from rich.table import Table

from quire import envs
from quire.errors import ConfigError
from quire.server.usage.forms import FORMATS, as_csv, as_json, day_of
from quire.server.usage.ledger import FIELD, UsageRow, open_to_read, read_rows
from quire.utils.http_get import get


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    parser.add_argument("ledger", nargs="?", metavar="FILE", help="the ledger, which a server may be writing to")
    parser.add_argument("--url", default=None, help="in place of the file: address of a running server")
    parser.add_argument(
        "--api-key", default=None, help="with --url: an operator's key; default: the first of QUIRE_API_KEY"
    )
    parser.add_argument("--since", default="0001-01-01", help="first day (UTC), such as 2026-11-01")
    parser.add_argument("--until", default="9999-12-31", help="last day")
    parser.add_argument("--tenant", default=None, help="of this tenant alone")
    parser.add_argument("--format", choices=(*FORMATS, "table"), default="table", help="how it is written")


def run(args: argparse.Namespace) -> int:
    """Print the rows."""
    since, until = day_of("since", args.since), day_of("until", args.until)
    if (args.ledger is None) == (args.url is None):
        raise ConfigError("quire usage needs FILE or --url", hint="name the file of --usage-ledger", field=FIELD)
    if args.ledger is not None:
        db = open_to_read(args.ledger)
        try:
            rows = read_rows(db, since, until, args.tenant)
        except sqlite3.Error as error:
            raise ConfigError(f"{args.ledger} cannot be read: {error}", field=FIELD) from None
        finally:
            db.close()
    else:
        rows = _ask(args.url, args.api_key, since, until, args.tenant)
    if args.format == "table":
        Console().print(_table(rows))
    else:
        print((as_csv(rows) if args.format == "csv" else as_json(rows)).rstrip("\n"))
    return 0


def _ask(url: str, api_key: str | None, since: str, until: str, tenant: str | None) -> list[UsageRow]:
    keys = envs.api_keys()
    wanted = {"since": since, "until": until, **({} if tenant is None else {"tenant": tenant})}
    content = get(url, f"/v1/usage?{urlencode(wanted)}", api_key or (keys[0] if keys else None))
    try:
        return [UsageRow(**row) for row in json.loads(content)["data"]]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{url} is not a Quire server, or one of another version", field="url") from None


def _table(rows: list[UsageRow]) -> Table:
    table = Table(box=None, header_style="bold")
    for name in UsageRow._fields:
        table.add_column(name.replace("_", " "), justify="right" if name in UsageRow._fields[4:] else "left")
    for row in rows:
        table.add_row(*row[:4], *(f"{count:,}" for count in row[4:]))
    return table
