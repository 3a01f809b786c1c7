"""Draft models and heads that lie in their target's directory: what a method without a model means.

Called by `config_lookup`. `leaf` has them; a user may put others beside any model. Pure but for a look at the files.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from quire.config import QuireConfig
from quire.config.speculative import config_error

FOLDERS = {"draft_model": "draft", "eagle": "eagle", "eagle3": "eagle3", "medusa": "medusa"}
"""Method -> its folder in the target's directory."""


def with_shipped_drafter(config: QuireConfig, path: Path) -> QuireConfig:
    """`config` with the model of its method, where it names none and the method needs one.

    Args:
        path: the target's directory or file.

    Raises:
        ConfigError: there is none.
    """
    speculative = config.speculative
    method = None if speculative is None else speculative.model_method
    if speculative is None or speculative.model is not None or method not in FOLDERS:
        return config
    directory = path / FOLDERS[method]
    if not (directory / "config.json").is_file():
        raise config_error(
            f"method {method} needs a model, and the target has none in {directory}",
            'add "model": its directory or name',
        )
    return dataclasses.replace(config, speculation=dataclasses.replace(config.speculation, spec_model=str(directory)))
