"""A hub on the loopback for tests: what huggingface_hub and `quire pull` ask of one, and faults on demand.

Large files come from a second address, as they do from the public hub's content network, which must not see the token.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_of_the_test"
LARGE = (".safetensors", ".gguf", ".bin")
ROUTE = re.compile(r"/api/models/(?P<info>[\w.\-]+/[\w.\-]+)/(?P<kind>revision|tree)/(?P<at>[^/?]+)$")
RESOLVE = re.compile(r"/(?P<repo>[\w.\-]+/[\w.\-]+)/resolve/(?P<at>[^/]+)/(?P<name>.+)$")


@dataclass
class Repo:
    """A repository: files by revision, and who may read them."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    is_private: bool = False
    is_gated: bool = False

    def commit(self, files: Mapping[str, bytes], branch: str = "main") -> str:
        """A new commit on a branch; returns its hash."""
        digest = hashlib.sha1(
            repr(sorted((name, hashlib.sha256(data).digest()) for name, data in files.items())).encode()
        )
        self.commits[digest.hexdigest()] = dict(files)
        self.refs[branch] = digest.hexdigest()
        return digest.hexdigest()

    def at(self, revision: str) -> str | None:
        return self.refs.get(revision) or (revision if revision in self.commits else None)


@dataclass
class Request:
    """What was asked, and how many bytes of a body were sent."""

    method: str
    path: str
    range: str | None
    token: str | None
    is_content: bool
    num_bytes: int = 0


def oid_of(name: str, data: bytes) -> str:
    """Under which the hub lists a file: SHA-256 of a large one, as git does it of others."""
    return hashlib.sha256(data).hexdigest() if name.endswith(LARGE) else git_oid(data)


def git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Hub:
    """Serves `repos` until it is closed.

    Attributes:
        requests: in the order of their coming.
        lies: path of a file -> other contents that are sent for it.
        breaks: path -> bytes of a body after which the connection is closed; one for each request, then no more.
        stalls: path -> bytes after which nothing comes until `go` is set; `is_stalled` is set then.
        ignores_ranges: whole files are sent whatever was asked for.
        page_size: of lists of files.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[Request] = []
        self.lies: dict[str, bytes] = {}
        self.breaks: dict[str, list[int]] = {}
        self.stalls: dict[str, int] = {}
        self.go, self.is_stalled = threading.Event(), threading.Event()
        self.ignores_ranges = False
        self.status: int | None = None
        self.page_size = 1000
        self._servers = [ThreadingHTTPServer(("127.0.0.1", 0), self._handler(content)) for content in (False, True)]
        for server in self._servers:
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._servers[0].server_address[1]}"

    @property
    def content_endpoint(self) -> str:
        return f"http://127.0.0.1:{self._servers[1].server_address[1]}"

    def close(self) -> None:
        self.go.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def repo(self, name: str, files: Mapping[str, bytes], **options: bool) -> str:
        """A new repository; returns the commit of its files."""
        self.repos[name] = Repo(**options)
        return self.repos[name].commit(files)

    def sent(self, name: str) -> list[Request]:
        """Requests for the contents of a file."""
        return [one for one in self.requests if one.num_bytes and unquote(one.path).endswith("/" + name)]

    def _handler(self, is_content: bool) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub, Handler.is_content = hub, is_content
        return Handler


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub
    is_content: bool

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        path = urlsplit(self.path).path
        self.asked = Request(self.command, path, self.headers.get("Range"), token, self.is_content)
        self.hub.requests.append(self.asked)
        if self.hub.status is not None:
            return self._answer(self.hub.status, {}, b"")
        if self.is_content:
            return self._content(path)
        if found := ROUTE.match(path):
            return self._api(found["info"], found["kind"], unquote(found["at"]))
        if found := RESOLVE.match(path):
            return self._resolve(found["repo"], unquote(found["at"]), unquote(found["name"]))
        return self._answer(404, {}, b"")

    def _api(self, name: str, kind: str, revision: str) -> None:
        repo = self._visible(name)
        if repo is None:
            return
        commit = repo.at(revision)
        if commit is None:
            return self._refuse(404, "RevisionNotFound")
        if kind == "revision":
            siblings = [{"rfilename": file} for file in repo.commits[commit]]
            info = {
                "id": name,
                "modelId": name,
                "sha": commit,
                "private": repo.is_private,
                "siblings": siblings,
                "tags": [],
            }
            return self._json(info)
        files = sorted(repo.commits[commit].items())
        begin = int(parse_qs(urlsplit(self.path).query).get("cursor", ["0"])[0])
        page = files[begin : begin + self.hub.page_size]
        link = {}
        if begin + self.hub.page_size < len(files):
            query = f"recursive=true&cursor={begin + self.hub.page_size}"
            link = {"Link": f'<{self.hub.endpoint}/api/models/{name}/tree/{commit}?{query}>; rel="next"'}
        return self._json([_entry(*one) for one in page], link)

    def _resolve(self, name: str, revision: str, file: str) -> None:
        repo = self._visible(name)
        if repo is None:
            return
        if repo.is_gated and self.asked.token != TOKEN:
            return self._refuse(403 if self.asked.token else 401, "GatedRepo")
        commit = repo.at(revision)
        if commit is None:
            return self._refuse(404, "RevisionNotFound")
        data = repo.commits[commit].get(file)
        if data is None:
            return self._refuse(404, "EntryNotFound", {"X-Repo-Commit": commit})
        oid = oid_of(file, data)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{oid}"'}
        if not file.endswith(LARGE):
            return self._send(file, data, headers)
        location = f"{self.hub.content_endpoint}/{oid}/{name}/{commit}/{file}"
        linked = {"X-Linked-ETag": f'"{oid}"', "X-Linked-Size": str(len(data)), "Location": location}
        self._answer(302, {**headers, **linked}, b"")

    def _content(self, path: str) -> None:
        _, oid, org, repo, commit, file = path.split("/", 5)
        self._send(file, self.hub.repos[f"{org}/{repo}"].commits[commit][unquote(file)], {"ETag": f'"{oid}"'})

    def _send(self, file: str, data: bytes, headers: dict[str, str]) -> None:
        """A file or the range that was asked for, with the faults that the test wants."""
        data = self.hub.lies.get(file, data)
        begin, end, status = 0, len(data), 200
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.asked.range or "")
        if found and not self.hub.ignores_ranges:
            begin, end, status = int(found[1]), min(end, int(found[2] or end) + 1), 206
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(data)}"
        cut = None
        if self.command == "GET" and self.hub.breaks.get(file):
            cut = self.hub.breaks[file].pop(0)
        self._answer(status, headers, data[begin:end], cut, self.hub.stalls.get(file))

    def _visible(self, name: str) -> Repo | None:
        """The repository, if the caller may know of it."""
        repo = self.hub.repos.get(name)
        if repo is None or (repo.is_private and self.asked.token != TOKEN):
            self._refuse(404 if self.asked.token else 401, "RepoNotFound")
            return None
        return repo

    def _refuse(self, status: int, kind: str, headers: Mapping[str, str] | None = None) -> None:
        self._answer(status, {"X-Error-Code": kind, "X-Error-Message": kind, **(headers or {})}, b"")

    def _json(self, value: object, headers: Mapping[str, str] | None = None) -> None:
        self._answer(200, {"Content-Type": "application/json", **(headers or {})}, json.dumps(value).encode())

    def _answer(
        self, status: int, headers: Mapping[str, str], body: bytes, cut: int | None = None, stall: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        sent = 0
        try:
            for piece in _pieces(body, cut, stall):
                if stall is not None and sent >= stall:
                    self.hub.is_stalled.set()
                    self.hub.go.wait()
                self.wfile.write(piece)
                sent += len(piece)
                self.asked.num_bytes = sent
        except OSError:
            self.close_connection = True
        if cut is not None:
            self.close_connection = True


def _pieces(body: bytes, cut: int | None, stall: int | None) -> list[bytes]:
    body = body if cut is None else body[:cut]
    return [body] if stall is None else [body[:stall], body[stall:]]


def _entry(name: str, data: bytes) -> dict[str, object]:
    entry: dict[str, object] = {"type": "file", "path": name, "size": len(data), "oid": git_oid(data)}
    if name.endswith(LARGE):
        entry["lfs"] = {"oid": oid_of(name, data), "size": len(data), "pointerSize": 134}
    return entry
