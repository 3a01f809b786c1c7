"""ExampleConnector: keeps blocks as files in a directory that several engines may share. The names are vLLM's."""

from __future__ import annotations

from pathlib import Path

from quire.config.kv_transfer import FIELD
from quire.errors import ConfigError
from quire.kv_transfer.block_files import SafetensorsFiles
from quire.kv_transfer.stored_blocks import StoredBlocks


class SharedFilesConnector(StoredBlocks):
    """Blocks as files in `shared_storage_path`."""

    quire_contract = 1
    extra_config_keys = ("shared_storage_path",)

    def open_storage(self) -> SafetensorsFiles:
        """As `StoredBlocks`."""
        path = self.config.kv_connector_extra_config.get("shared_storage_path")
        if not isinstance(path, str) or not path:
            raise ConfigError(
                f"{FIELD}: {self.config.kv_connector} needs shared_storage_path, a directory",
                hint='add "kv_connector_extra_config": {"shared_storage_path": "/path"}', field=FIELD,
            )  # fmt: skip
        return SafetensorsFiles(Path(path).expanduser(), self.layout)
