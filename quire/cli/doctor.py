"""What will be slow or fail on this machine, with this model and these settings, and the fix.

    quire doctor
    quire doctor ./model --port 8000 --api-key-file keys

Takes the flags of `quire serve`. Reads the machine, the installation, the model's descriptions and the headers of its
weights; starts nothing. The exit status is 0 if nothing fails, 1 otherwise.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator

from quire import envs
from quire.cli.doctor_checks import CHECKS, FAILS, Finding, check_machine, check_processes, check_settings, of_error
from quire.cli.doctor_facts import read_facts
from quire.cli.inspect import model_on_disk
from quire.cli.serve import settings_from_args
from quire.config import QuireConfig
from quire.config.build import SERVER_SECTIONS, build_config
from quire.entrypoints.args import add_engine_arguments
from quire.errors import ConfigError, QuireError
from quire.logger import configure_logging
from quire.plan.inspection import inspect_model
from quire.server.checks import check_files, check_together

EXIT_FAILS = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="As --model.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    add_engine_arguments(parser, also=SERVER_SECTIONS)
    parser.set_defaults(models=None)


def run(args: argparse.Namespace) -> int:
    """Print what was found; returns the exit status."""
    configure_logging(envs.log_level("WARNING"))
    findings = list(find(args))
    if args.json:
        print(json.dumps({"checks": len(CHECKS), "findings": [dataclasses.asdict(one) for one in findings]}))
    else:
        for one in sorted(findings, key=lambda one: one.kind != FAILS):
            print(f"{one.kind:<6}{one.name}: {one.what}")
            if one.fix:
                print(f"      fix: {one.fix}")
        count = "1 finding" if len(findings) == 1 else f"{len(findings) or 'no'} findings"
        print(f"{len(CHECKS)} checks of the machine and those of the settings: {count}")
    return EXIT_FAILS if any(one.kind == FAILS for one in findings) else 0


def find(args: argparse.Namespace) -> Iterator[Finding]:
    """Everything that is found; what is wrong with the settings does not keep the machine from being checked."""
    facts = read_facts()
    yield from check_machine(facts)
    try:
        engine_settings, server = settings_from_args(args)
        engine = build_config(**engine_settings)
    except QuireError as error:
        yield of_error("settings", error)
        return
    yield from check_settings(engine, server)
    yield from check_processes(facts, engine, server)
    try:
        check_files(server, engine.scheduler.scheduling_policy)
        check_together(engine, server)
    except QuireError as error:
        yield of_error("files", error)
    yield from _check_model(engine)


def _check_model(engine: QuireConfig) -> Iterator[Finding]:
    """Whether the model would start here; one that is not on this disk is described by the hub, if that is reached."""
    try:
        with model_on_disk(engine.model.model, engine.model.revision, engine.load.download_dir) as path:
            found = inspect_model(engine, path, 1, None)
    except QuireError as error:
        yield of_error("model", error)
        return
    for problem in found.problems:
        yield of_error("model", ConfigError(problem.message, hint=problem.hint))
