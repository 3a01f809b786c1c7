"""The registry of plugins: what is found, what is loaded, and what is refused, before anything is built on it."""

from __future__ import annotations

import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.plugins import (
    KINDS,
    SCHEDULING_POLICY,
    TOOL_PARSER,
    PluginKind,
    find_plugin,
    import_object,
    installed,
    load_plugin,
    plugin_names,
    problems_of,
    unknown_choice,
)

KIND = PluginKind(name="lens", group="quire.lenses", setting="lens", base="tests.unit.test_plugins:Lens", contract=2)
Install = Callable[..., None]

MODULE = """
from tests.unit.test_plugins import Lens

class Good(Lens):
    quire_contract = 2
    def look(self): return "good"
class Old(Good):
    quire_contract = 1
class New(Good):
    quire_contract = 3
class Mute(Lens):
    def look(self): return ""
class Half(Lens):
    quire_contract = 2
class Other:
    quire_contract = 2
lens = Good()
"""


class Lens(ABC):
    """What plugins of this test are."""

    @abstractmethod
    def look(self) -> str: ...


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a package on the path whose entry points are `name = module:Class` lines of a group."""

    def put(package: str, points: str, module: str = MODULE, group: str = KIND.group, version: str = "1.5") -> None:
        root = tmp_path / package
        info = root / f"{package}-{version}.dist-info"
        info.mkdir(parents=True)
        (root / f"{package}_lenses.py").write_text(module)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{points}\n")
        monkeypatch.syspath_prepend(str(root))

    yield put
    for name in [name for name in sys.modules if name.endswith("_lenses")]:
        del sys.modules[name]


def test_a_plugin_is_found_by_its_name_and_loaded_as_a_class(install: Install):
    install("acme", "sharp = acme_lenses:Good")
    found = load_plugin(KIND, "sharp", Lens)
    assert found().look() == "good"
    assert load_plugin(KIND, "blunt", Lens) is None
    assert str(find_plugin(KIND, "sharp")) == "lens 'sharp' of acme 1.5 (acme_lenses:Good)"


def test_a_configuration_without_plugins_reads_no_package_s_metadata():
    code = "import sys; from quire.config.build import build_config; import quire.parsers.registry\n" \
        "build_config(model='leaf', scheduling_policy='fair', attention_backend='native_cpu')\n" \
        "assert 'importlib.metadata' not in sys.modules"  # fmt: skip
    subprocess.run([sys.executable, "-c", code], check=True)


def test_to_list_plugins_imports_none_of_them(install: Install):
    install("acme", "sharp = acme_lenses:Good", module="raise SystemExit('imported')")
    assert plugin_names(KIND) == ["sharp"] and [one.package for one in installed(KIND)] == ["acme"]
    assert "acme_lenses" not in sys.modules


@pytest.mark.parametrize(
    ("target", "what", "fix"),
    [
        ("acme_lenses:Lost", "module 'acme_lenses' has no 'Lost'", "made for this version"),
        ("acme_lost:Good", "cannot import 'acme_lost': ModuleNotFoundError", "installed with all it needs"),
        ("acme_lenses:Other", "is not derived from Lens", "derive it from tests.unit.test_plugins:Lens"),
        ("acme_lenses:lens", "is not derived from Lens", "derive it from tests.unit.test_plugins:Lens"),
        ("acme_lenses:Half", "lacks look", "see tests.unit.test_plugins:Lens"),
        ("acme_lenses:Old", "version 1 of the contract; Quire .* has version 2", "install a version of acme"),
        ("acme_lenses:New", "version 3 of the contract; Quire .* has version 2", "update Quire"),
        ("acme_lenses:Mute", "does not declare quire_contract", "write quire_contract = 2"),
        ("a b c", "cannot import", "installed with all it needs"),
    ],
)
def test_a_plugin_that_cannot_be_used_is_refused_with_its_package_and_the_fix(
    install: Install, target: str, what: str, fix: str
):
    install("acme", f"sharp = {target}")
    with pytest.raises(ConfigError, match=what) as caught:
        load_plugin(KIND, "sharp", Lens)
    assert caught.value.message.startswith("lens 'sharp' of acme 1.5") and fix in (caught.value.hint or "")
    assert caught.value.field == "lens"


@pytest.mark.parametrize("line", ["raise RuntimeError('broken')", "import sys; sys.exit(3)", "def f(:"])
def test_whatever_a_module_does_while_it_is_imported_is_an_error_in_words(install: Install, line: str):
    install("acme", "sharp = acme_lenses:Good", module=line)
    with pytest.raises(ConfigError, match="acme 1.5 .*: cannot import 'acme_lenses': "):
        load_plugin(KIND, "sharp", Lens)


def test_a_name_that_two_packages_have_is_ambiguous_and_both_are_named(
    install: Install, monkeypatch: pytest.MonkeyPatch
):
    install("acme", "sharp = acme_lenses:Good")
    install("zeiss", "sharp = zeiss_lenses:Good")
    with pytest.raises(ConfigError, match=r"ambiguous: acme 1.5 and zeiss 1.5 both have a lens"):
        load_plugin(KIND, "sharp", Lens)
    assert [("ambiguous" in what) for what in problems_of(KIND, []).values()] == [True, True]
    monkeypatch.setenv("QUIRE_PLUGINS", "zeiss")
    found = find_plugin(KIND, "sharp")
    assert found is not None and found.package == "zeiss"


def test_of_two_copies_of_a_package_the_first_on_the_path_counts(install: Install, tmp_path: Path):
    install("acme", "sharp = acme_lenses:Lost")
    (tmp_path / "acme").rename(tmp_path / "older")
    sys.path.append(str(tmp_path / "older"))
    install("acme", "sharp = acme_lenses:Good", version="2.0")
    try:
        assert [one.version for one in installed(KIND)] == ["2.0"]
    finally:
        sys.path.remove(str(tmp_path / "older"))


@pytest.mark.parametrize("allowed", ["", "zeiss, other"])
def test_a_package_that_the_environment_does_not_allow_adds_nothing(
    install: Install, monkeypatch: pytest.MonkeyPatch, allowed: str
):
    install("acme", "sharp = acme_lenses:Good")
    monkeypatch.setenv("QUIRE_PLUGINS", allowed)
    assert plugin_names(KIND) == []
    with pytest.raises(ConfigError, match="plugin of acme 1.5, which QUIRE_PLUGINS does not allow"):
        load_plugin(KIND, "sharp", Lens)
    monkeypatch.setenv("QUIRE_PLUGINS", "acme,other")
    assert plugin_names(KIND) == ["sharp"]


def test_a_name_that_nobody_has_is_refused_with_built_in_names_and_plugins(install: Install):
    install("acme", "sharp = acme_lenses:Good")
    error = unknown_choice(KIND, "xyz", ["plain"])
    assert error.hint == "valid: plain, sharp" and error.field == "lens"


def test_a_plugin_behind_a_built_in_name_or_of_a_kind_without_an_interface_is_listed_as_useless(install: Install):
    install("acme", "plain = acme_lenses:Good")
    bare = PluginKind(name="wire", group="quire.wires", setting="wire", base="")
    install("wires", "thin = wires_lenses:Good", group=bare.group)
    assert "never used: a built-in lens has this name" in next(iter(problems_of(KIND, ["plain"]).values()))
    assert "not have an interface for wires yet" in next(iter(problems_of(bare, []).values()))


def test_a_package_in_the_current_directory_alone_is_not_found(install: Install, tmp_path: Path):
    """Whoever starts Quire beside somebody else's files runs none of them, though a model names their plugin."""
    install("acme", "sharp = acme_lenses:Good")
    sys.path.remove(str(tmp_path / "acme"))
    code = "from quire.plugins import PluginKind, installed\n" \
        "print(installed(PluginKind(name='lens', group='quire.lenses', setting='lens', base='')))"  # fmt: skip
    root = str(Path(__file__).parents[2])
    for place, found in ((tmp_path / "acme", False), (tmp_path, True)):
        path = [root] if place != tmp_path else [root, str(tmp_path / "acme")]
        program = f"import sys; sys.path[1:1] = {path!r}\n{code}"
        result = subprocess.run([sys.executable, "-c", program], cwd=place, capture_output=True, text=True, check=True)
        assert ("sharp" in result.stdout) is found


def test_a_parser_that_is_older_than_contracts_was_written_for_the_first(install: Install):
    install(
        "acme", "loud = acme_lenses:Loud", group=TOOL_PARSER.group,
        module="from quire.parsers.base import ToolCallParser\nclass Loud(ToolCallParser):\n    def parse(self): yield",
    )  # fmt: skip
    from quire.parsers.registry import tool_call_parser

    assert tool_call_parser("loud").__name__ == "Loud"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.base], ids=lambda kind: kind.setting)
def test_every_kind_names_a_base_class_that_is_there(kind: PluginKind):
    assert isinstance(import_object(kind.base, kind.name, kind.setting), type)
    assert kind.group.startswith("quire.") and len({one.group for one in KINDS}) == len(KINDS)
    assert kind.contract >= 1 and SCHEDULING_POLICY in KINDS
