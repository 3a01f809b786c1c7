"""Which class a `kv_transfer_config` names: a built-in one, a plugin's, or one in a module that the operator gave.

Called when a configuration is resolved (that the name exists) and by the engine core, which loads it. No state.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.config.kv_transfer import FIELD, KVTransferConfig
from quire.errors import ConfigError, nearest
from quire.kv_transfer.connector import CONTRACT_VERSION, KVConnector, KVConnectorRole
from quire.kv_transfer.layout import KVCacheLayout
from quire.plugins import KV_CONNECTOR, import_object, load_plugin, plugin_names

BUILT_IN: Mapping[str, str] = {
    "ExampleConnector": "quire.kv_transfer.shared_files:SharedFilesConnector",
    "SharedStorageConnector": "quire.kv_transfer.shared_files:SharedFilesConnector",  # its former name in vLLM
    "HiCacheConnector": "quire.kv_transfer.hicache:HiCacheConnector",
    "RedisConnector": "quire.kv_transfer.redis:RedisConnector",
    "MooncakeStoreConnector": "quire.kv_transfer.mooncake_store:MooncakeStoreConnector",
    "TCPConnector": "quire.kv_transfer.pull.connectors:TCPConnector",
    "NixlConnector": "quire.kv_transfer.pull.connectors:NixlConnector",
    "NixlPullConnector": "quire.kv_transfer.pull.connectors:NixlConnector",  # as vLLM names this direction
    "MooncakeConnector": "quire.kv_transfer.pull.connectors:MooncakeConnector",
    "LMCacheMPConnector": "quire.kv_transfer.lmcache:LMCacheConnector",
    "UCMConnector": "quire.kv_transfer.ucm.connector:UCMConnector",
    "MultiConnector": "quire.kv_transfer.multi:MultiConnector",
}
"""Name -> "module:Class", imported when it is named."""
ELSEWHERE: Mapping[str, tuple[str, str]] = {
    "LMCacheConnectorV1": (
        "keeps LMCache inside the engine, in vLLM's memory layout",
        "start `lmcache server` and name LMCacheMPConnector",
    ),
}
"""Connectors of vLLM that are not here: why, and what there is instead."""


def connector_class(config: KVTransferConfig) -> type[KVConnector]:
    """The class of the connector.

    Raises:
        ConfigError: there is none of this name, or it cannot be used, or has no such settings.
    """
    name, module = config.kv_connector, config.kv_connector_module_path
    label = f"{FIELD}: kv_connector {name!r}"
    if module is not None:
        found = _checked(import_object(f"{module}:{name}", f"{label} of {module}", FIELD), f"{label} of {module}")
    elif name in BUILT_IN:
        found = _checked(import_object(BUILT_IN[name], label, FIELD), label)
    elif name in ELSEWHERE:
        reason, hint = ELSEWHERE[name]
        raise ConfigError(f"{label} {reason}", hint=hint, field=FIELD)
    else:
        plugin = load_plugin(KV_CONNECTOR, name, KVConnector)
        if plugin is None:
            names = ", ".join([*BUILT_IN, *plugin_names(KV_CONNECTOR)])
            raise ConfigError(
                f"{label} is not a known connector",
                hint=f"valid: {names or 'none'}; or give the module of its class as kv_connector_module_path",
                field=FIELD,
            )
        found = plugin
    check_extra_config(found, config)
    return found


def check_extra_config(connector: type[KVConnector], config: KVTransferConfig) -> None:
    """Refuse keys that the connector does not have.

    Raises:
        ConfigError: there is one; the message names it and the nearest that there is.
    """
    known = connector.extra_config_keys
    for key in config.kv_connector_extra_config:
        if known is not None and key not in known:
            close = nearest(key, known)
            hint = f"did you mean {close!r}?" if close else f"keys are {', '.join(known) or 'none'}"
            raise ConfigError(
                f"{FIELD}: kv_connector_extra_config of {config.kv_connector} has no key {key!r}",
                hint=hint,
                field=FIELD,
            )


def make_connector(
    connector: type[KVConnector], config: KVTransferConfig, role: KVConnectorRole, layout: KVCacheLayout
) -> KVConnector:
    """One half of a connector.

    Raises:
        ConfigError: its constructor refuses the settings, the layout, or fails.
    """
    try:
        return connector(config, role, layout)
    except ConfigError:
        raise
    except Exception as error:  # a foreign class may raise anything
        raise ConfigError(
            f"{FIELD}: {config.kv_connector} cannot be made: {type(error).__name__}: {error}",
            hint="check kv_connector_extra_config, and the connector's own documentation", field=FIELD,
        ) from error  # fmt: skip


def _checked(found: object, label: str) -> type[KVConnector]:
    """A class that was imported by its name alone: what `load_plugin` checks of plugins."""
    if not (isinstance(found, type) and issubclass(found, KVConnector)):
        raise ConfigError(
            f"{label} is not derived from KVConnector", hint=f"derive it from {KV_CONNECTOR.base}", field=FIELD
        )
    declared = getattr(found, "quire_contract", None)
    if declared != CONTRACT_VERSION or isinstance(declared, bool):
        raise ConfigError(
            f"{label} was written for version {declared!r} of the contract; this is version {CONTRACT_VERSION}",
            hint=f"write quire_contract = {CONTRACT_VERSION} in the class, once it fits {KV_CONNECTOR.base}",
            field=FIELD,
        )
    return found
