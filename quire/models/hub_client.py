"""HubClient: asks a hub for the files of a model, over the interface that huggingface_hub uses, and for parts of them.

Called by downloads and by `quire inspect`. Python's own HTTP client: a broken transfer is resumed where it broke, and a
start pays for no other library. Everything that the hub says is checked here: names of files, sizes, hashes. No state.

Source: huggingface.co/docs/hub/api, "Repository listing API"; the headers are those of huggingface_hub's file_download.
"""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any
from urllib.parse import quote, urlsplit

from quire import envs
from quire.errors import HubUnreachableError, ModelError
from quire.models.hub_cache import COMMIT
from quire.version import __version__

TIMEOUT_S = 30.0
MAX_ANSWER_BYTES = 64 << 20
MAX_FILES = 100_000
MAX_FILE_BYTES = 1 << 44
NETWORK_ERRORS = (OSError, http.client.HTTPException)
TRANSIENT = (408, 429, 500, 502, 503, 504)


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository.

    Attributes:
        name: with its directories.
        num_bytes: its size.
        digest: SHA-256 of a large file, else the SHA-1 that git gives it; contents are kept under it.
    """

    name: str
    num_bytes: int
    digest: str


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to HTTP addresses; the token goes to the host that it was meant for alone."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        """As `urllib`, which drops the token; a redirect within the host gets it again."""
        target = urlsplit(newurl)
        if target.scheme not in ("http", "https") or (req.type == "https" and target.scheme != "https"):
            raise urllib.error.HTTPError(req.full_url, code, f"redirect to {newurl[:200]}", headers, fp)
        found = super().redirect_request(req, fp, code, msg, headers, newurl)
        token = req.unredirected_hdrs.get("Authorization")
        if found is not None and token is not None and target.netloc == urlsplit(req.full_url).netloc:
            found.add_unredirected_header("Authorization", token)
        return found

    def http_error_308(self, req: Any, fp: Any, code: int, msg: str, headers: Any) -> Any:
        """Python 3.10 does not follow these."""
        return self.http_error_302(req, fp, code, msg, headers)


class HubClient:
    """A hub.

    Args:
        endpoint: its address; None = HF_ENDPOINT, else the public one.
        token: to show; None = HF_TOKEN, or what `hf auth login` has kept.
        timeout_s: of connections, and of silence while data comes.

    Raises:
        ModelError: the address is not one.
    """

    def __init__(self, endpoint: str | None = None, token: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self.endpoint = endpoint or envs.hub_endpoint()
        parts = urlsplit(self.endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ModelError(
                f"HF_ENDPOINT={self.endpoint[:200]!r} is not an address", hint="for example https://huggingface.co",
                field="HF_ENDPOINT",
            )  # fmt: skip
        self._token = token or envs.hub_token()
        self._timeout_s = timeout_s
        self._opener = urllib.request.build_opener(_Redirects)

    def commit(self, repo: str, revision: str) -> str:
        """The commit that a branch or tag is at.

        Raises:
            ModelError: there is no such repository or revision, or access to it is refused.
            HubUnreachableError: the hub does not answer.
        """
        answer, _ = self._json(repo, revision, f"/api/models/{repo}/revision/{quote(revision, safe='')}")
        commit = answer.get("sha") if isinstance(answer, dict) else None
        if not isinstance(commit, str) or not COMMIT.fullmatch(commit):
            raise self._malformed(repo, f"a commit is {str(commit)[:60]!r}")
        return commit

    def files(self, repo: str, commit: str) -> list[HubFile]:
        """All files of a commit. Raises as `commit`."""
        found: list[HubFile] = []
        path: str | None = f"/api/models/{repo}/tree/{commit}?recursive=true"
        while path is not None:
            answer, headers = self._json(repo, commit, path)
            if not isinstance(answer, list) or len(found) + len(answer) > MAX_FILES:
                raise self._malformed(repo, "the list of files is not one, or too long")
            found += [self._file(repo, entry) for entry in answer if not _is_folder(entry)]
            path = _next_page(headers.get("Link"))
        return found

    @contextmanager
    def open(self, repo: str, commit: str, name: str, begin: int, end: int) -> Iterator[tuple[IO[bytes], int]]:
        """The bytes `begin` to `end` - 1 of a file, as a stream, and where it begins: 0 if the hub sends all of it.

        Raises:
            ModelError: as `commit`.
            HubUnreachableError: the hub does not answer; reading may raise `NETWORK_ERRORS`, too.
        """
        request = self._request(f"{self.endpoint}/{repo}/resolve/{commit}/{quote(name)}")
        request.add_header("Range", f"bytes={begin}-{end - 1}")
        with self._open(repo, commit, request) as response:
            if response.status != 206:
                yield response, 0
                return
            given = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
            if given is None or int(given[1]) != begin:
                raise self._malformed(repo, f"{name} comes from another place than was asked for")
            yield response, begin

    def _json(self, repo: str, revision: str, path: str) -> tuple[Any, http.client.HTTPMessage]:
        with self._open(repo, revision, self._request(self.endpoint + path)) as response:
            try:
                text = response.read(MAX_ANSWER_BYTES + 1)
                if len(text) > MAX_ANSWER_BYTES:
                    raise self._malformed(repo, "an answer is too long")
                return json.loads(text), response.headers
            except NETWORK_ERRORS as error:
                raise self._unreachable(error) from error
            except (ValueError, RecursionError) as error:
                raise self._malformed(repo, "an answer is not JSON") from error

    def _request(self, url: str) -> urllib.request.Request:
        request = urllib.request.Request(url, headers={"User-Agent": f"quire/{__version__}"})
        request.add_header("Accept-Encoding", "identity")
        if self._token is not None:
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        return request

    @contextmanager
    def _open(self, repo: str, revision: str, request: urllib.request.Request) -> Iterator[Any]:
        try:
            response = self._opener.open(request, timeout=self._timeout_s)
        except urllib.error.HTTPError as error:
            with error:
                raise self._refused(repo, revision, error) from error
        except NETWORK_ERRORS as error:
            raise self._unreachable(error) from error
        except ValueError as error:  # a token or address with characters that a header cannot have
            raise ModelError(f"the hub cannot be asked: {error}", hint="check HF_TOKEN and HF_ENDPOINT") from error
        with response:
            yield response

    def _refused(self, repo: str, revision: str, error: urllib.error.HTTPError) -> ModelError:
        """The error for an answer that is none: what is wrong, and what to do."""
        kind = error.headers.get("X-Error-Code", "")
        if error.code in TRANSIENT:
            return HubUnreachableError(
                f"the hub at {self.endpoint} answers {error.code} {error.reason}", hint="try again later", field="model"
            )
        if kind == "GatedRepo" or (error.code == 403 and not kind):
            problem, hint = f"access to model {repo!r} is restricted", self._gated_hint(repo)
        elif kind == "RevisionNotFound":
            problem, hint = f"model {repo!r} has no revision {revision[:80]!r}", "see its branches, tags and commits"
            return ModelError(problem, hint=hint, field="revision")
        elif kind == "EntryNotFound":
            problem, hint = f"model {repo!r} lacks a file that it lists", "try again later"
        elif error.code in (401, 404):
            problem = f"model {repo!r} is not on the hub at {self.endpoint}, or it is private"
            hint = "check the name" + ("; HF_TOKEN was sent" if self._token else ", or set HF_TOKEN for a private one")
        else:
            reason = error.headers.get("X-Error-Message") or error.reason
            problem, hint = f"the hub answers {error.code}: {str(reason)[:200]}", "check the name, and HF_ENDPOINT"
        return ModelError(problem, hint=hint, field="model")

    def _gated_hint(self, repo: str) -> str:
        page = f"accept its terms at {self.endpoint}/{repo}"
        return page + ("; the token in use has no access" if self._token else " and set HF_TOKEN to your access token")

    def _unreachable(self, error: Exception) -> HubUnreachableError:
        reason = getattr(error, "reason", None) or error
        return HubUnreachableError(
            f"the hub at {self.endpoint} cannot be reached: {str(reason)[:200]}",
            hint="check the network, HF_ENDPOINT and proxies; or use a local directory", field="model",
        )  # fmt: skip

    def _malformed(self, repo: str, problem: str) -> ModelError:
        return ModelError(
            f"the hub at {self.endpoint} gives a malformed answer about {repo!r}: {problem}",
            hint="check HF_ENDPOINT", field="model",
        )  # fmt: skip

    def _file(self, repo: str, entry: Any) -> HubFile:
        """A checked entry of a list of files."""
        fields = entry if isinstance(entry, dict) else {}
        large = fields.get("lfs") if isinstance(fields.get("lfs"), dict) else None
        name, size, digest = fields.get("path"), fields.get("size"), (large or fields).get("oid")
        if not isinstance(name, str) or not _is_safe(name):
            raise self._malformed(repo, f"a file is named {str(name)[:100]!r}")
        if not isinstance(size, int) or not 0 <= size <= MAX_FILE_BYTES:
            raise self._malformed(repo, f"{name[:100]!r} has size {str(size)[:40]!r}")
        length = 40 if large is None else 64
        if not isinstance(digest, str) or not re.fullmatch(f"[0-9a-f]{{{length}}}", digest):
            raise self._malformed(repo, f"{name[:100]!r} has the hash {str(digest)[:80]!r}")
        return HubFile(name, size, digest)


def _next_page(link: str | None) -> str | None:
    """The path of the next page, which is asked of the same hub whatever host the link names."""
    found = re.search(r'<[^>]*?(/api/models/[^>]+)>;\s*rel="next"', link or "")
    return found[1] if found else None


def _is_folder(entry: Any) -> bool:
    return isinstance(entry, dict) and entry.get("type") == "directory"


def _is_safe(name: str) -> bool:
    """Whether a name stays below the directory that it is put in."""
    parts = name.split("/")
    return (
        len(name) <= 1000 and name.isprintable() and "\\" not in name and not any(p in ("", ".", "..") for p in parts)
    )
