"""`make test-docs`: every fenced block of all Markdown is executed, or has its reason; notebooks are executed, too.

`python -m tests.docs.run [PAGE ...]`; the last line counts blocks.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.docs.blocks import DATA, PYTHON, ROOT, Block, blocks_of, pages, problem
from tests.docs.notebooks import code_cells, notebooks, run_in_kernel
from tests.docs.notebooks import problem as notebook_problem
from tests.docs.session import Failure, Session, matches


@contextlib.contextmanager
def inside(home: Path) -> Iterator[None]:
    """The page's directory is the current one, and modules in it can be imported."""
    before, modules = os.getcwd(), set(sys.modules)
    os.chdir(home)
    sys.path.insert(0, str(home))
    try:
        yield
    finally:
        os.chdir(before)
        sys.path.remove(str(home))
        for name in set(sys.modules) - modules:
            if str(getattr(sys.modules[name], "__file__", "") or "").startswith(str(home)):
                del sys.modules[name]


def run_python(block: Block, text: str, names: dict[str, Any], home: Path) -> None:
    """Execute a block of Python; the blocks of a page share their names.

    Raises:
        Failure: it prints something else than the page shows.
    """
    printed = io.StringIO()
    with inside(home), contextlib.redirect_stdout(printed):
        exec(compile("\n" * block.line + text, block.page, "exec"), names)
    if not matches(block.printed, printed.getvalue()):
        raise Failure(f"shown:\n{block.printed}\nprinted:\n{printed.getvalue()}")


def run_block(block: Block, session: Session, names: dict[str, Any]) -> None:
    """Do what a block says."""
    if block.language in DATA:
        path = session.home / (block.note("file") or f"block.{block.language}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.replaced())
        path.chmod(0o600)
        if command := block.note("check"):
            session.run(Block(block.page, block.line, "console", f"$ {command.replace('FILE', path.name)}\n"))
    elif block.language in PYTHON:
        session.prepare(block)
        text = session.addressed(block.replaced())
        if name := block.note("file"):
            path = session.home / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        run_python(block, text, names, session.home)
    else:
        session.run(block)


def run_page(page: str, counts: Counter[str], text: str | None = None) -> list[str]:
    """Run a page's blocks in order; returns what failed."""
    failures = []
    names: dict[str, Any] = {"__name__": "block"}
    with tempfile.TemporaryDirectory(prefix="quire-docs-") as folder:
        session = Session(Path(folder))
        try:
            for block in blocks_of(page, text):
                counts["blocks"] += 1
                if error := problem(block):
                    failures.append(f"{block.place}: {error}")
                elif block.note("shown"):
                    counts["shown"] += 1
                    counts[f"shown: {block.note('shown').partition(';')[0]}"] += 1
                else:
                    counts["run"] += 1
                    if error := failure_of(block, session, names):
                        failures.append(f"{block.place}:\n{error}")
        finally:
            try:
                session.close()
            except Failure as error:
                failures.append(f"{page}: {error}")
    return failures


def failure_of(block: Block, session: Session, names: dict[str, Any]) -> str:
    """What went wrong when the block was run; "" = nothing."""
    try:
        run_block(block, session, names)
    except Failure as error:
        return str(error)
    except Exception:
        return traceback.format_exc(limit=-4)
    return ""


def main() -> int:
    """Exit code 0 when every block does what its page says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="*", help="paths in the repository; default: all")
    chosen: list[str] = parser.parse_args().pages
    counts: Counter[str] = Counter()
    failures: list[str] = []
    for page in [one for one in chosen if one.endswith(".md")] if chosen else pages():
        start, before = time.monotonic(), counts["run"]
        found = run_page(page, counts)
        failures += found
        if counts["run"] > before or found:
            print(
                f"{page}: {counts['run'] - before} run, {len(found)} failed, {time.monotonic() - start:.1f} s",
                flush=True,
            )
        for one in found:
            print(f"  {one}", flush=True)
    for path in notebooks():
        if not chosen or str(path.relative_to(ROOT)) in chosen:
            counts["blocks"] += (num_cells := len(code_cells(path)))
            counts["run"] += num_cells
            if error := notebook_problem(path) or run_in_kernel(path):
                failures.append(f"{path.name}: {error}")
            print(f"{path.relative_to(ROOT)}: {num_cells} cells run, {bool(error):d} failed\n{error}", flush=True)
    for reason, count in sorted(counts.items()):
        if reason.startswith("shown: "):
            print(f"{count:4} {reason}")
    print(
        f"{counts['blocks']} blocks: {counts['run']} run, {counts['shown']} shown for a reason, {len(failures)} failed"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
