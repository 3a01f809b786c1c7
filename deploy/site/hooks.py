"""What makes a site of the Markdown that GitHub shows: navigation, pages outside of docs, and files that pages link to.

mkdocs calls the functions named `on_...` (mkdocs.yml names this file). A link of a page is a path in the repository; a
file that is no page of its own (source code, manifests) becomes a page below `source/`, so that the site is whole
without a network. Notebooks become pages too. The functions without mkdocs are tested by tests/house/test_site.py.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

ROOT = Path(__file__).parents[2]
OUTSIDE = ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md")
LINK = re.compile(r"(\]\()(?!https?:|#|mailto:)([^)\s#]+)(#[^)\s]*)?(\))")
FENCE = re.compile(r"^(```.*?^```[ ]*$)", re.DOTALL | re.MULTILINE)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "toml", ".md": "markdown"}
MAX_BYTES = 200_000
SHIM = "https://unpkg.com/iframe-worker/shim"  # what the theme loads for pages that are opened as files
FILE_WORKER = "assets/javascripts/file-worker.js"  # in its place


def origin(uri: str) -> str:
    """The path in the repository of a page of the site."""
    if uri in OUTSIDE:
        return uri
    return "docs/" + (uri.removesuffix(".md") if uri.endswith(".ipynb.md") else uri)


def site_uri(path: str) -> str:
    """The page (or image) of the site that shows a path of the repository."""
    if path in OUTSIDE:
        return path
    inside = path.removeprefix("docs/")
    if inside != path and path.endswith(".ipynb"):
        return f"{inside}.md"
    if inside != path and (path.endswith(".md") or inside.startswith("images/")):
        return inside
    return f"source/{path}/index.md" if (ROOT / path).is_dir() else f"source/{path}.md"


def outside_code(markdown: str) -> list[str]:
    """The parts of a page: those with an odd index are fenced blocks."""
    return FENCE.split(markdown)


def linked_paths(markdown: str, path: str) -> set[str]:
    """Paths of the repository that the page `path` links to."""
    return {
        posixpath.normpath(posixpath.join(posixpath.dirname(path), unquote(found[2])))
        for text in outside_code(markdown)[::2]
        for found in LINK.finditer(text)
    }


def with_site_links(markdown: str, uri: str) -> str:
    """The page with its links to files of the repository made links to pages of the site."""

    def replaced(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin(uri)), unquote(found[2])))
        target = site_uri(path)
        anchor = "" if target.startswith("source/") else found[3] or ""
        return f"{found[1]}{posixpath.relpath(target, posixpath.dirname(uri) or '.')}{anchor}{found[4]}"

    parts = outside_code(markdown)
    return "".join(part if i % 2 else LINK.sub(replaced, part) for i, part in enumerate(parts))


def for_python_markdown(markdown: str) -> str:
    """The page with lists as Python-Markdown reads them: indented by four, after an empty line."""
    parts = outside_code(markdown)
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"^( +)(?=[-*] |\d+\. )", r"\1\1", parts[i], flags=re.MULTILINE)
        parts[i] = re.sub(r"^(\*\*\w+\.\*\*)\n(?=- )", r"\1\n\n", parts[i], flags=re.MULTILINE)
    return "".join(parts)


def source_page(path: str) -> str:
    """A page that shows a file or the contents of a folder; the search leaves it out."""
    head = f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n"
    whole = ROOT / path
    if whole.is_dir():
        names = sorted(one.name + "/" * one.is_dir() for one in whole.iterdir() if one.name[0] not in "._")
        return head + "\n".join(f"- `{name}`" for name in names) + "\n"
    data = whole.read_bytes()
    if len(data) > MAX_BYTES or b"\0" in data:
        return f"{head}{len(data)} bytes, not shown.\n"
    return f"{head}````{LANGUAGES.get(whole.suffix, 'text')}\n{data.decode()}\n````\n"


def notebook_page(path: Path) -> str:
    """A notebook as Markdown: texts, code, and what the code printed."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", ()):
            shown = output.get("text") or output.get("data", {}).get("text/plain") or ""
            parts.append(f"```text\n{''.join(shown).rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def text_of(uri: str) -> str:
    """The Markdown of a page."""
    path = ROOT / origin(uri)
    return notebook_page(path) if path.suffix == ".ipynb" else path.read_text()


def named(nav: Any) -> list[str]:
    """Every page and folder that a navigation names."""
    if isinstance(nav, str):
        return [nav]
    children = nav.values() if isinstance(nav, dict) else nav
    return [one for child in children for one in named(child)]


def pages() -> list[str]:
    """Every page of the site but those of sources."""
    docs = ROOT / "docs"
    found = [*docs.rglob("*.md"), *(docs / "notebooks").glob("*.ipynb")]
    return [*OUTSIDE, *sorted(site_uri(one.relative_to(ROOT).as_posix()) for one in found)]


def expanded(nav: Any, all_pages: list[str]) -> Any:
    """The navigation with every FOLDER/* replaced by its pages that are not named elsewhere, by name."""
    taken = set(named(nav))

    def walk(one: Any) -> Any:
        if isinstance(one, dict):
            return {key: walk(value) for key, value in one.items()}
        found: list[Any] = []
        for child in one:
            if isinstance(child, str) and child.endswith("/*"):
                found += [page for page in all_pages if page.startswith(child[:-1]) and page not in taken]
            else:
                found.append(child if isinstance(child, str) else walk(child))
        return found

    return without_empty(walk(nav))


def without_empty(nav: Any) -> Any:
    """The navigation without sections that have no pages."""
    if isinstance(nav, list):
        return [one for one in map(without_empty, nav) if one]
    if isinstance(nav, dict):
        return {key: value for key, value in ((k, without_empty(v)) for k, v in nav.items()) if value}
    return nav


def on_config(config: Any) -> Any:
    """Called by mkdocs with its settings."""
    config.nav = expanded(config.nav, pages())
    return config


def on_files(files: Any, config: Any) -> Any:
    """Called by mkdocs with the files of docs: adds those of other places."""
    from mkdocs.structure.files import File, InclusionLevel

    for notebook in [one for one in files if one.src_uri.endswith(".ipynb")]:
        files.remove(notebook)
    texts = {uri: (ROOT / origin(uri)) for uri in pages()}
    markdown = {
        uri: notebook_page(path) if path.suffix == ".ipynb" else path.read_text() for uri, path in texts.items()
    }
    for uri, text in markdown.items():
        if files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, content=text))
    linked = {path for uri, text in markdown.items() for path in linked_paths(text, origin(uri))}
    for path in sorted(linked):
        uri = site_uri(path)
        if uri.startswith("source/") and os.path.exists(ROOT / path):
            page = File.generated(config, uri, content=source_page(path))
            page.inclusion = InclusionLevel.NOT_IN_NAV
            files.append(page)
    files.append(File.generated(config, FILE_WORKER, content=Path(__file__).with_name("file-worker.js").read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Called by mkdocs with the text of each page."""
    uri = page.file.src_uri
    return markdown if uri.startswith("source/") else for_python_markdown(with_site_links(markdown, uri))


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Called by mkdocs with each page as HTML."""
    return output.replace(SHIM, posixpath.relpath(FILE_WORKER, posixpath.dirname(page.file.dest_uri) or "."))


def on_post_template(output: str, template_name: str, config: Any) -> str:
    """Called by mkdocs with the page of errors and the map of the site."""
    return output.replace(SHIM, f"/{FILE_WORKER}")
