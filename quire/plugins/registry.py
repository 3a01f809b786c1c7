"""Finds what other installed packages add to Quire by entry point, and loads what a setting names.

Called by the registry of each kind, which gives the base class; this package imports nothing that a plugin extends. A
name that is built in is never looked up, so that a start without plugins reads no package's metadata. Only metadata is
read until a plugin is loaded; nothing is loaded because it is installed. No state. How to write one:
docs/how-to/plugins.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire import envs
from quire.errors import ConfigError, QuireError, unknown_name
from quire.logger import get_logger
from quire.plugins.kinds import PluginKind
from quire.version import __version__

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

logger = get_logger(__name__)

PAGE = "docs/how-to/plugins.md"


@dataclass(frozen=True, slots=True)
class Plugin:
    """A plugin as its package's metadata describes it.

    Attributes:
        kind: what it is.
        name: by which a setting names it.
        value: "module:Class".
        package: the distribution, as pip lists it.
        version: of the package.
    """

    kind: PluginKind
    name: str
    value: str
    package: str
    version: str

    def __str__(self) -> str:
        return f"{self.kind.name} {self.name!r} of {self.package} {self.version} ({self.value})"

    @property
    def is_allowed(self) -> bool:
        """Whether QUIRE_PLUGINS lets its package add anything."""
        allowed = envs.plugins()
        return allowed is None or self.package in allowed


def installed(kind: PluginKind, name: str | None = None) -> list[Plugin]:
    """The plugins of a kind, or those of one name, in the order in which modules are searched for; imports none.

    The current directory does not count where Python put it first by itself.

    Cost: reads a small file for each installed package, about 10 ms for a hundred.
    """
    return [_described(kind, point, package, version) for point, package, version in _points(kind.group, name)]


def plugin_names(kind: PluginKind) -> list[str]:
    """The names that a setting may have because of plugins."""
    return sorted({plugin.name for plugin in installed(kind) if plugin.is_allowed})


def find_plugin(kind: PluginKind, name: str) -> Plugin | None:
    """The plugin of this name; None when no package has one. Imports nothing.

    Raises:
        ConfigError: more than one package has it, or QUIRE_PLUGINS does not allow the one that has.
    """
    found = installed(kind, name)
    if not found:
        return None
    allowed = [plugin for plugin in found if plugin.is_allowed]
    packages = " and ".join(sorted(f"{plugin.package} {plugin.version}" for plugin in found))
    if not allowed:
        raise ConfigError(
            f"{kind.setting}={name!r} is a plugin of {packages}, which QUIRE_PLUGINS does not allow",
            hint="add the package to QUIRE_PLUGINS, or use another value", field=kind.setting,
        )  # fmt: skip
    if len(allowed) > 1:
        raise ConfigError(
            f"{kind.setting}={name!r} is ambiguous: {packages} both have a {kind.name} of this name",
            hint="uninstall one of them, or name the other one in QUIRE_PLUGINS", field=kind.setting,
        )  # fmt: skip
    return allowed[0]


def load_plugin(kind: PluginKind, name: str, base: type) -> Any:
    """The class of the plugin of this name; None when no package has one.

    Args:
        base: what it must be derived from: `kind.base`.

    Raises:
        ConfigError: as `find_plugin`; or it cannot be imported, is not such a class, leaves out some of its methods,
            or was written for another version of the contract. Names the package and the fix.
    """
    plugin = find_plugin(kind, name)
    return None if plugin is None else load(plugin, base)


def load(plugin: Plugin, base: type) -> type:
    """The class of a plugin; as `load_plugin`."""
    found = import_object(plugin.value, str(plugin), plugin.kind.setting)
    if not (isinstance(found, type) and base in found.__mro__):
        raise _bad(plugin, f"is not derived from {base.__name__}", f"derive it from {plugin.kind.base}")
    _check_contract(plugin, found)
    missing = _missing(found, base)
    if missing:
        raise _bad(plugin, f"lacks {', '.join(missing)}", f"see {plugin.kind.base}")
    logger.debug("plugin loaded: %s", plugin)
    return found


def import_object(value: str, label: str, setting: str) -> Any:
    """What "module:name" stands for.

    Args:
        label: what it is to the user.
        setting: that names it.

    Raises:
        ConfigError: the module or the name does not exist, or the module fails while it is imported.
    """
    import importlib

    module_name, path = (part.strip() for part in value.partition("[")[0].partition(":")[::2])
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a foreign module may raise anything
        raise ConfigError(
            f"{label}: cannot import {module_name!r}: {type(error).__name__}: {error}",
            hint="check the module's name, and that its package is installed with all it needs", field=setting,
        ) from error  # fmt: skip
    for part in filter(None, path.split(".")):
        if not hasattr(found, part):
            raise ConfigError(
                f"{label}: module {module_name!r} has no {path!r}",
                hint="check the class name, and that its package is made for this version of Quire", field=setting,
            )  # fmt: skip
        found = getattr(found, part)
    return found


def unknown_choice(kind: PluginKind, name: str, built_in: Iterable[str], *, field: str | None = None) -> QuireError:
    """The error for a name that neither Quire nor a plugin has; lists both."""
    return unknown_name(kind.setting, name, [*built_in, *plugin_names(kind)], ConfigError, field=field or kind.setting)


def problems_of(kind: PluginKind, built_in: Sequence[str]) -> dict[Plugin, str]:
    """What keeps installed plugins of a kind from ever being used, as far as metadata shows it.

    Args:
        built_in: names that Quire has itself, which go before plugins.
    """
    plugins, problems = installed(kind), {}
    for plugin in plugins:
        others = [one.package for one in plugins if one.name == plugin.name and one is not plugin and one.is_allowed]
        if not kind.base:
            problems[plugin] = f"this version of Quire does not have an interface for {kind.name}s yet"
        elif not plugin.is_allowed:
            problems[plugin] = "QUIRE_PLUGINS does not allow its package"
        elif plugin.name in built_in:
            problems[plugin] = f"never used: a built-in {kind.name} has this name; rename it"
        elif others:
            problems[plugin] = f"ambiguous: {', '.join(others)} also has one of this name"
    return problems


def _points(group: str, name: str | None) -> Iterator[tuple[EntryPoint, str, str]]:
    """Entry points with the name and version of their distributions; of two copies of one, the first counts."""
    from importlib.metadata import distributions  # late, as below: only a start with plugins takes the time

    from quire.utils.children import search_path

    seen: set[str] = set()
    for distribution in distributions(path=search_path()):
        points = distribution.entry_points.select(group=group)
        if not len(points):
            continue
        package = distribution.metadata["Name"] or "a package without a name"
        if package not in seen:
            seen.add(package)
            yield from ((point, package, distribution.version) for point in points if name in (None, point.name))


def _described(kind: PluginKind, point: EntryPoint, package: str, version: str) -> Plugin:
    return Plugin(kind, point.name, point.value, package, version)


def _check_contract(plugin: Plugin, found: type) -> None:
    kind, declared = plugin.kind, getattr(found, "quire_contract", None)
    if declared is None and kind.may_omit_contract:
        declared = 1
    if declared is None:
        raise _bad(
            plugin, "does not declare quire_contract, the contract version it was written for",
            f"write quire_contract = {kind.contract} in the class, once it fits {kind.base} ({PAGE})",
        )  # fmt: skip
    if declared != kind.contract or isinstance(declared, bool):
        what = f"was written for version {declared!r} of the contract; Quire {__version__} has version {kind.contract}"
        is_newer = isinstance(declared, int) and declared > kind.contract
        raise _bad(
            plugin, what, "update Quire" if is_newer else f"install a version of {plugin.package} that was made for it"
        )


def _missing(found: type, base: type) -> list[str]:
    """What `base` asks of a class and `found` leaves out; a protocol asks for all that it has."""
    is_protocol = getattr(base, "_is_protocol", False)
    names = set(getattr(found, "__abstractmethods__", ()))
    for name, kind in inspect.get_annotations(base).items():
        if (is_protocol or str(kind).startswith("ClassVar")) and not hasattr(found, name):
            names.add(name)
    for name, member in vars(base).items():
        is_asked = inspect.isfunction(member) and (name == "__call__" or not name.startswith("_"))
        if is_protocol and is_asked and getattr(found, name) is member:
            names.add(name)
    return sorted(names)


def _bad(plugin: Plugin, what: str, hint: str) -> ConfigError:
    return ConfigError(f"{plugin} {what}", hint=hint, field=plugin.kind.setting)
