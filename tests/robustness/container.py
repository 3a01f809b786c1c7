"""`make test-container`: the image, run by runc as it declares, passes OpenAI's client and drains on SIGTERM.

No daemon takes part: runc makes the namespaces and starts the process. The root file system is read-only, the process
is not root and has no capabilities, and only volumes of the image can be written. The network is the host's, so that
the server is reached on the loopback. Root, runc and the files of `deploy/container/build` are needed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai

START_S, END_S = 120.0, 60.0
MOST_BYTES = 1_000_000_000
NAME = "quire-test"


def image_config(archive: Path) -> dict[str, Any]:
    """What the image declares: {"Entrypoint", "Cmd", "Env", "User", "Volumes", "Healthcheck", ...}."""
    with tarfile.open(archive) as files:
        (manifest,) = json.load(files.extractfile("manifest.json"))  # type: ignore[arg-type]
        config: dict[str, Any] = json.load(files.extractfile(manifest["Config"]))["config"]  # type: ignore[arg-type]
    return config


def bundle(root: Path, config: dict[str, Any], arguments: list[str], folder: Path) -> None:
    """Write runc's config.json: the image's process, read-only, with its volumes in memory."""
    subprocess.run(["runc", "spec"], cwd=folder, check=True)
    spec = json.loads((folder / "config.json").read_text())
    user, _, group = config["User"].partition(":")
    spec["root"] = {"path": str(root), "readonly": True}
    spec["process"].update(
        terminal=False,
        user={"uid": int(user), "gid": int(group)},
        args=[*config["Entrypoint"], *arguments],
        env=config["Env"],
        cwd=config["WorkingDir"],
        capabilities={kind: [] for kind in ("bounding", "effective", "permitted", "inheritable", "ambient")},
        noNewPrivileges=True,
    )
    for volume in config["Volumes"]:
        options = ["nosuid", "nodev", f"uid={user}", f"gid={group}", "mode=0700"]
        spec["mounts"].append({"destination": volume, "type": "tmpfs", "source": "tmpfs", "options": options})
    spec["linux"]["namespaces"] = [
        one for one in spec["linux"]["namespaces"] if one["type"] not in ("network", "cgroup")
    ]
    (folder / "config.json").write_text(json.dumps(spec))


def in_container(*command: str) -> subprocess.CompletedProcess[str]:
    """A further process in the running container."""
    return subprocess.run(["runc", "exec", NAME, *command], capture_output=True, text=True)


@contextmanager
def running(folder: Path, url: str) -> Iterator[subprocess.Popen[str]]:
    """The container from its readiness to its end."""
    process = subprocess.Popen(
        ["runc", "run", "--bundle", str(folder), NAME],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    lines: list[str] = []
    assert process.stdout is not None
    ready = threading.Event()

    def read() -> None:
        for line in process.stdout or ():
            lines.append(line)
            if f"listening on {url}" in line:
                ready.set()

    threading.Thread(target=read, daemon=True).start()
    try:
        begin = time.monotonic()
        while not ready.wait(0.1):
            if process.poll() is not None or time.monotonic() - begin > START_S:
                raise AssertionError("the server did not start:\n" + "".join(lines))
        yield process
    finally:
        if process.poll() is None:
            subprocess.run(["runc", "delete", "--force", NAME], check=False)
            process.wait(END_S)


def check_confined() -> None:
    """Not root, nothing to write to but volumes, healthy."""
    assert in_container("/usr/bin/id", "-u").stdout.strip() == "10001"
    written = in_container("/usr/bin/touch", "/opt/quire/new")
    assert "Read-only file system" in written.stderr, written
    assert in_container("/usr/bin/touch", "/var/cache/quire/new").returncode == 0
    status = in_container("/bin/sh", "-c", "grep ^CapEff /proc/1/status").stdout
    assert status.split()[1].strip("0") == "", status


def check_client(client: openai.OpenAI) -> None:
    """Models, an answer, a stream and a choice."""
    assert [model.id for model in client.models.list()] == ["leaf"]
    question: Any = [{"role": "user", "content": "What is 27 + 58?"}]
    answer = client.chat.completions.create(model="leaf", messages=question, temperature=0)
    assert "85" in str(answer.choices[0].message.content)
    stream = client.chat.completions.create(model="leaf", messages=question, temperature=0, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == answer.choices[0].message.content
    choices = {"structured_outputs": {"choice": ["even", "odd"]}}
    chosen = client.chat.completions.create(model="leaf", messages=question, temperature=0, extra_body=choices)
    assert chosen.choices[0].message.content in ("even", "odd")


def check_drain(client: openai.OpenAI, process: subprocess.Popen[str]) -> int:
    """SIGTERM in the middle of a stream: it ends whole, then the container with status 0. Returns its tokens."""
    stream = client.completions.create(
        model="leaf",
        prompt="Once upon a time",
        max_tokens=400,
        stream=True,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    chunks = [next(stream)]
    subprocess.run(["runc", "kill", NAME, "TERM"], check=True)
    chunks += list(stream)
    assert chunks[-1].choices[0].finish_reason == "length", chunks[-1]
    assert process.wait(END_S) == 0, f"exit status {process.returncode}"
    return len(chunks)


def main() -> int:
    """Exit code 0 when everything holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("built", type=Path, help="folder that deploy/container/build wrote")
    built = parser.parse_args().built.resolve()
    if shutil.which("runc") is None:
        sys.exit("no runc: apt-get install runc")
    config, root = image_config(built / "quire.tar"), built / "rootfs"
    size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    assert size <= MOST_BYTES, f"{size} bytes unpacked"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    config["Env"].append(f"QUIRE_PORT={port}")
    with tempfile.TemporaryDirectory() as folder:
        bundle(root, config, ["serve", "--port", str(port), "--shutdown-timeout", "30"], Path(folder))
        begin = time.monotonic()
        with running(Path(folder), url) as process:
            start_s = time.monotonic() - begin
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
            check_confined()
            command = config["Healthcheck"]["Test"]
            assert in_container(*command[1:]).returncode == 0, "the health check fails"
            check_client(client)
            num_chunks = check_drain(client, process)
    print(f"test-container: {size / 1e6:.0f} MB, ready in {start_s:.1f} s, drained a stream of {num_chunks} chunks: ok")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main())
