"""Downloads: what is fetched, resumed, verified and refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from quire.errors import HubUnreachableError, ModelError, NotEnoughDiskError
from quire.models import hub_download, hub_file
from quire.models.hub import resolve_model_path
from quire.models.hub_cache import HubCache
from quire.models.pull import cached_model, pull_model
from tests.hub.files import GGUF, SAFETENSORS, WANTED, content
from tests.hub.server import TOKEN, Hub, oid_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_file, "RETRY_WAITS_S", (0.0, 0.0))


def files_below(directory: Path) -> list[str]:
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())


def test_what_is_needed_is_fetched_and_nothing_that_could_run(hub: Hub, cache: Path):
    commit = hub.repo("org/tiny", SAFETENSORS)
    found = pull_model("org/tiny")
    assert found.path == cache / "models--org--tiny" / "snapshots" / commit
    assert files_below(found.path) == WANTED
    assert all((found.path / name).read_bytes() == SAFETENSORS[name] for name in WANTED)
    assert (cache / "models--org--tiny" / "refs" / "main").read_text() == commit
    before = len(hub.requests)
    assert pull_model("org/tiny").path == found.path
    assert not any("resolve" in one.path or one.is_content for one in hub.requests[before:])


def test_a_start_resolves_a_model_of_the_hub_by_the_same_rules(hub: Hub):
    hub.repo("org/tiny", SAFETENSORS)
    hub.repo("org/tiny-GGUF", GGUF)
    assert files_below(resolve_model_path("org/tiny", None, None)) == WANTED
    assert resolve_model_path("org/tiny-GGUF", None, None).name == "tiny-Q4_K_M.gguf"


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("org/tiny", ["tiny-Q4_K_M.gguf"]),
        ("org/tiny:q8_0", ["tiny-Q8_0.gguf"]),
        ("org/tiny:tiny-Q8_0.gguf", ["tiny-Q8_0.gguf"]),
        ("org/tiny:BF16", ["BF16/tiny-BF16-00001-of-00002.gguf", "BF16/tiny-BF16-00002-of-00002.gguf"]),
    ],
)
def test_of_gguf_files_those_of_one_quantization_are_fetched(hub: Hub, name: str, files: list[str]):
    commit = hub.repo("org/tiny", GGUF)
    found = pull_model(name)
    directory = HubCache(Path(os.environ["HF_HOME"]) / "hub").snapshot("org/tiny", commit)
    assert files_below(directory) == files and found.path == directory / files[0]


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: Hub):
    first = hub.repo("org/tiny", SAFETENSORS)
    changed = {**SAFETENSORS, "config.json": b'{"n": 2}'}
    second = hub.repos["org/tiny"].commit(changed, "v2/next")
    assert pull_model("org/tiny", "v2/next").path.name == second
    assert pull_model("org/tiny", first).path.name == first
    assert cached_model("org/tiny", "v2/next") != cached_model("org/tiny", first)
    assert sum(one.num_bytes for one in hub.sent("model.safetensors")) == len(SAFETENSORS["model.safetensors"])
    with pytest.raises(ModelError, match="has no revision 'gone'"):
        pull_model("org/tiny", "gone")


def test_included_files_take_the_place_of_the_needed_ones(hub: Hub):
    hub.repo("org/tiny", SAFETENSORS)
    assert files_below(pull_model("org/tiny", include=["*.md", "config*"]).path) == ["README.md", "config.json"]
    with pytest.raises(ModelError, match=r"no file that matches \*\.xyz"):
        pull_model("org/tiny", include=["*.xyz"])


def test_a_download_whose_process_was_killed_continues_where_it_ended(hub: Hub, cache: Path):
    files = {**SAFETENSORS, "model.safetensors": content(30 << 20, 11)}
    hub.repo("org/tiny", files)
    hub.stalls["model.safetensors"] = 20 << 20
    command = [sys.executable, "-m", "quire", "pull", "org/tiny"]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        assert hub.is_stalled.wait(60)
        (partial,) = iter_until(lambda: list((cache / "models--org--tiny" / "blobs").glob("*.incomplete")))
        iter_until(lambda: partial.stat().st_size >= 19 << 20)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    kept = partial.stat().st_size
    assert 19 << 20 <= kept <= 20 << 20
    hub.stalls.clear()
    hub.go.set()
    hub.requests.clear()
    path = pull_model("org/tiny").path
    assert (path / "model.safetensors").read_bytes() == files["model.safetensors"]
    (rest,) = hub.sent("model.safetensors")
    assert rest.range == f"bytes={kept}-{(30 << 20) - 1}" and rest.num_bytes == (30 << 20) - kept
    assert not list(path.parents[1].glob("blobs/*.incomplete"))


def iter_until(condition):
    """Its first value that is true."""
    while not (value := condition()):
        pass
    return value


def test_of_two_downloads_at_once_one_fetches_and_the_other_waits(hub: Hub):
    hub.repo("org/tiny", SAFETENSORS)
    hub.stalls["model.safetensors"] = 100_000
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(pull_model("org/tiny").path)) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert hub.is_stalled.wait(60)
    iter_until(lambda: len([one for one in hub.requests if "/tree/" in one.path]) == 2)
    hub.go.set()
    for thread in threads:
        thread.join()
    assert found[0] == found[1] and (found[0] / "model.safetensors").read_bytes() == SAFETENSORS["model.safetensors"]
    assert sum(one.num_bytes for one in hub.sent("model.safetensors")) == 300_000


def test_a_cache_that_cannot_be_written_to_serves_what_it_has(hub: Hub, cache: Path):
    hub.repo("org/tiny", SAFETENSORS)
    path = pull_model("org/tiny").path
    before = {one: one.lstat().st_mtime_ns for one in cache.rglob("*")}
    assert pull_model("org/tiny").path == path
    assert before == {one: one.lstat().st_mtime_ns for one in cache.rglob("*")}, "nothing was written"


def test_a_connection_that_breaks_again_and_again_is_resumed_each_time(hub: Hub):
    hub.repo("org/tiny", SAFETENSORS)
    hub.breaks["model.safetensors"] = [100_000, 0, 50_000, 0, 0, 60_000]
    path = pull_model("org/tiny").path
    assert (path / "model.safetensors").read_bytes() == SAFETENSORS["model.safetensors"]
    assert sum(one.num_bytes for one in hub.sent("model.safetensors")) == 300_000


def test_one_that_never_sends_anything_is_given_up_and_what_came_is_kept(hub: Hub, cache: Path):
    hub.repo("org/tiny", SAFETENSORS)
    hub.breaks["model.safetensors"] = [100_000] + [0] * 9
    with pytest.raises(HubUnreachableError, match="broke after 100000 of 300000 bytes"):
        pull_model("org/tiny")
    (partial,) = cache.rglob("*.incomplete")
    assert partial.stat().st_size == 100_000 and cached_model("org/tiny") is None


def test_a_hub_that_ignores_ranges_sends_the_whole_file_again(hub: Hub):
    hub.repo("org/tiny", SAFETENSORS)
    hub.ignores_ranges = True
    hub.breaks["model.safetensors"] = [100_000]
    path = pull_model("org/tiny").path
    assert (path / "model.safetensors").read_bytes() == SAFETENSORS["model.safetensors"]


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"], ids=["SHA-256", "git"])
def test_a_file_with_a_wrong_checksum_is_refused_and_removed(hub: Hub, cache: Path, name: str):
    hub.repo("org/tiny", SAFETENSORS)
    data = SAFETENSORS[name]
    hub.lies[name] = data[:-1] + bytes([data[-1] ^ 1])
    with pytest.raises(ModelError, match="its checksum is wrong") as caught:
        pull_model("org/tiny")
    assert caught.value.field == name
    assert oid_of(name, data) not in "".join(files_below(cache)) and cached_model("org/tiny") is None
    hub.lies.clear()
    assert (pull_model("org/tiny").path / name).read_bytes() == data


def test_verify_finds_what_is_damaged_on_the_disk_and_fetches_it_again(hub: Hub):
    hub.repo("org/tiny", SAFETENSORS)
    path = pull_model("org/tiny").path
    blob = (path / "model.safetensors").resolve()
    blob.write_bytes(b"x" + blob.read_bytes()[1:])
    assert not pull_model("org/tiny").plan.missing, "the size is right"
    assert [file.name for file in pull_model("org/tiny", verifies=True).plan.missing] == ["model.safetensors"]
    assert (path / "model.safetensors").read_bytes() == SAFETENSORS["model.safetensors"]
    blob.write_bytes(b"short")
    assert pull_model("org/tiny").plan.missing and blob.stat().st_size == 300_000


def test_offline_and_without_a_hub_what_is_there_is_used(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    hub.repo("org/tiny", SAFETENSORS)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="not in the local cache, and HF_HUB_OFFLINE is set"):
        resolve_model_path("org/tiny", None, None)
    assert not hub.requests
    monkeypatch.delenv("HF_HUB_OFFLINE")
    path = resolve_model_path("org/tiny", None, None)
    num = len(hub.requests)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve_model_path("org/tiny", None, None) == path and len(hub.requests) == num
    with pytest.raises(ModelError, match="not in the local cache"):
        resolve_model_path("org/tiny", "v2", None)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    hub.status = 503
    assert resolve_model_path("org/tiny", None, None) == path
    with pytest.raises(HubUnreachableError, match="answers 503"):
        pull_model("org/tiny")


def test_what_is_not_on_the_hub_private_or_gated_is_refused_by_name(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    hub.repo("org/private", SAFETENSORS, is_private=True)
    hub.repo("org/gated", SAFETENSORS, is_gated=True)
    with pytest.raises(ModelError, match="'org/gone' is not on the hub") as caught:
        pull_model("org/gone")
    assert "HF_TOKEN" in str(caught.value.hint)
    with pytest.raises(ModelError, match="or it is private"):
        pull_model("org/private")
    with pytest.raises(ModelError, match="'org/gated' is restricted") as caught:
        pull_model("org/gated")
    assert f"accept its terms at {hub.endpoint}/org/gated" in str(caught.value.hint)
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    with pytest.raises(ModelError, match="restricted") as caught:
        pull_model("org/gated")
    assert "has no access" in str(caught.value.hint)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert files_below(pull_model("org/private").path) == files_below(pull_model("org/gated").path) == WANTED


def test_the_token_goes_to_the_hub_and_not_to_where_it_keeps_its_files(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    hub.repo("org/private", SAFETENSORS, is_private=True)
    path = Path(os.environ["HF_HOME"]) / "token"
    path.parent.mkdir(parents=True)
    path.write_text(TOKEN + "\n")
    pull_model("org/private")
    assert {one.token for one in hub.requests if not one.is_content} == {TOKEN}
    assert {one.token for one in hub.requests if one.is_content} == {None}


def test_a_disk_with_too_little_room_is_found_before_anything_is_fetched(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    hub.repo("org/tiny", SAFETENSORS)
    usage = hub_download.shutil.disk_usage("/")
    monkeypatch.setattr(hub_download.shutil, "disk_usage", lambda path: usage._replace(free=200_000))
    with pytest.raises(NotEnoughDiskError, match=r"needs 29\d\.\d KiB more, 195\.3 KiB is free"):
        pull_model("org/tiny")
    assert not any(one.is_content for one in hub.requests)


def test_lists_of_many_files_come_in_pages(hub: Hub):
    hub.repo("org/many", {**SAFETENSORS, **{f"notes/{i}.md": b"x" for i in range(50)}})
    hub.page_size = 7
    assert files_below(pull_model("org/many").path) == WANTED


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"pytorch_model.bin": b"x", "config.json": b"{}"}, "only pytorch_model.bin, which Quire does not open"),
        ({"README.md": b"x"}, "has no .safetensors file"),
        ({"a-Q8_0.gguf": b"x", "a-Q2_K.gguf": b"y"}, "has no Q4_K_M file, which is the default"),
        ({"a-Q4_K_M.gguf": b"x", "b-Q4_K_M.gguf": b"y"}, "several models of Q4_K_M: a-Q4_K_M.gguf, b-Q4_K_M.gguf"),
        ({"a-Q4_K_M-00002-of-00003.gguf": b"x"}, "lacks a-Q4_K_M-00001-of-00003.gguf, a-Q4_K_M-00003-of-00003.gguf"),
    ],
)
def test_a_repository_without_files_to_run_is_refused_before_anything_is_fetched(
    hub: Hub, files: dict[str, bytes], said: str
):
    hub.repo("org/tiny", files)
    with pytest.raises(ModelError) as caught:
        pull_model("org/tiny")
    assert said in str(caught.value) and caught.value.hint
    assert not any("resolve" in one.path for one in hub.requests)


@pytest.mark.parametrize("name", ["../../evil.json", "/etc/evil.json", "a//b.json", "a\\..\\b.json", "..", "a\nb.json"])
def test_a_hub_cannot_write_outside_of_the_cache(hub: Hub, cache: Path, name: str):
    hub.repo("org/evil", {**SAFETENSORS, name: b"{}"})
    with pytest.raises(ModelError, match="malformed answer"):
        pull_model("org/evil")
    assert not cache.exists()


@pytest.mark.parametrize("endpoint", ["ftp://x", "localhost:1", "http://"])
def test_an_endpoint_that_is_no_address_is_refused(hub: Hub, monkeypatch: pytest.MonkeyPatch, endpoint: str):
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(ModelError, match="HF_ENDPOINT"):
        pull_model("org/tiny")
