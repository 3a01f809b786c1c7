"""What subcommands share. Called by `cli.main` and the subcommands; no state."""

from __future__ import annotations

import argparse

from quire.config import QuireConfig
from quire.config.hf_config import parse_hf_config
from quire.config.resolve import resolve
from quire.entrypoints.args import config_from_args, describe_config
from quire.models.hub import resolve_model_path
from quire.models.model_dir import read_model_dir
from quire.platforms.detect import detect_platform


def print_config(args: argparse.Namespace) -> int:
    """Show every setting, what each auto became on this machine for this model, and why; returns the exit status."""
    return print_resolved(config_from_args(args))


def print_resolved(config: QuireConfig) -> int:
    """As `print_config`, of a configuration."""
    path = resolve_model_path(config.model.model, config.model.revision, config.load.download_dir)
    arch = parse_hf_config(read_model_dir(path).config)
    config, decisions = resolve(config, detect_platform(config.device.device), arch)
    print(describe_config(config, decisions))
    return 0
