"""`make test-deb`: the Debian package is checked, installed into a fresh Debian, used, upgraded, removed and purged.

As root, with mmdebstrap: the system is a directory in build/debian, its programs run by chroot. No systemd runs there.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOME = ROOT / "build" / "debian"
NEEDS = "python3,libgomp1,ca-certificates,passwd"
STATE = ("/etc/quire", "/var/lib/quire", "/var/cache/quire", "/opt/quire", "/usr/bin/quire")
LISTENING = re.compile(r"listening on (http://127\.0\.0\.1:\d+); ready in")
START_S = 300


def run(*command: object, check: bool = True) -> str:
    """What a command prints."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    if check and done.returncode:
        sys.exit(f"{' '.join(map(str, command))}: status {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout + done.stderr


def check_contents(package: Path) -> None:
    """Fields, owners, modes; nothing of the machine that built it."""
    fields = run("dpkg-deb", "--info", package)
    for field in ("Package: quire", "Depends: python3 (>= 3.", "Installed-Size: ", "Description: "):
        assert field in fields, f"no {field!r} in:\n{fields}"
    lines = run("dpkg-deb", "--contents", package).splitlines()
    assert all(" root/root " in line for line in lines), "a file of another owner than root"
    assert not [line for line in lines if line[8] == "w" and line[0] != "l"], "a file that anyone may write"
    names = [line.split()[5] for line in lines]
    for name in ("./opt/quire/bin/quire", "./lib/systemd/system/quire.service", "./etc/quire/server.yaml"):
        assert name in names, f"the package has no {name}"
    outside = [one for one in names if not re.match(r"\./($|opt/|lib/|etc/|usr/)", one)]
    assert not outside and not [one for one in names if one.endswith(".pyc")], outside


def check_unit(root: Path) -> None:
    """What the unit starts is there."""
    unit = (root / "lib/systemd/system/quire.service").read_text()
    (program,) = re.findall(r"^ExecStart=/(\S+)", unit, re.MULTILINE)
    assert os.access(root / program, os.X_OK), f"the unit starts /{program}, which is not a program"


def check_answers(root: Path) -> None:
    """As its user, with the settings and the key that the package made, the server answers and drains."""
    key = (root / "etc/quire/keys").read_text().strip()
    assert len(key) == 48 and (root / "etc/quire/keys").stat().st_mode & 0o777 == 0o600
    (root / "etc/quire/server.yaml").write_text("model: leaf\nhost: 127.0.0.1\nport: 0\nmax_num_seqs: 4\n")
    shutil.copy(root / "etc/quire/keys", root / "tmp/keys")  # as the unit's LoadCredential
    (root / "tmp/keys").chmod(0o644)
    (root / "dev/shm").mkdir(exist_ok=True)
    log = (HOME / "server.log").open("w+")
    serve = ["/usr/bin/quire", "serve", "--config", "/etc/quire/server.yaml", "--api-key-file", "/tmp/keys"]
    environment = {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/tmp",
        "QUIRE_CACHE_DIR": "/tmp/cache",
        "HF_HOME": "/tmp/hf",
    }
    mounts = f"mount -t proc proc {root}/proc && mount -t tmpfs tmpfs {root}/dev/shm -o mode=1777"
    command = ["unshare", "--mount", "sh", "-c", f'{mounts} && exec "$@"', "sh"]
    command += ["chroot", "--userspec=quire:quire", str(root), *serve]
    server = subprocess.Popen(command, stderr=log, stdout=log, env=environment)
    try:
        end = time.monotonic() + START_S
        while not (found := LISTENING.search(Path(log.name).read_text())):
            assert server.poll() is None and time.monotonic() < end, Path(log.name).read_text()[-3000:]
            time.sleep(0.1)
        request = urllib.request.Request(
            f"{found[1]}/v1/completions", b'{"prompt": "Once upon a time", "max_tokens": 8}',
            {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=START_S) as answer:
            assert b'"text"' in answer.read()
        server.terminate()
        assert server.wait(START_S) == 0, "SIGTERM did not end it cleanly"
    finally:
        server.kill()
        log.close()


def changed_copy(package: Path) -> Path:
    """The same package under a later version."""
    folder, later = HOME / "later", HOME / "quire_later.deb"
    shutil.rmtree(folder, ignore_errors=True)
    run("dpkg-deb", "--raw-extract", package, folder)
    control = folder / "DEBIAN/control"
    control.write_text(re.sub(r"(?m)^Version: .*", r"\g<0>+later", control.read_text()))
    run("dpkg-deb", "-Znone", "--root-owner-group", "--build", folder, later)
    shutil.rmtree(folder)
    return later


def main() -> int:
    """Exit code 0 when the package does what it should."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", type=Path)
    package = parser.parse_args().package.resolve()
    if os.geteuid() or not shutil.which("mmdebstrap"):
        sys.exit("needs root and mmdebstrap: apt-get install mmdebstrap")
    check_contents(package)
    HOME.mkdir(parents=True, exist_ok=True)
    root = HOME / "system"
    if not (root / "usr/bin/python3").exists():
        shutil.rmtree(root, ignore_errors=True)
        suite = os.environ.get("SUITE", "bookworm")
        run("mmdebstrap", "--quiet", "--variant=minbase", f"--include={NEEDS}", suite, root)

    def dpkg(action: str, name: str) -> str:
        return run("chroot", root, "env", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "dpkg", action, name)

    try:
        for number, one in enumerate((package, changed_copy(package))):
            shutil.copy(one, root / "tmp/quire.deb")
            dpkg("--install", "/tmp/quire.deb")
            if not number:
                check_unit(root)
                check_answers(root)
        assert "port: 0" in (root / "etc/quire/server.yaml").read_text(), "an upgrade replaced changed settings"
        assert "+later" in dpkg("--status", "quire")
        dpkg("--remove", "quire")
        assert (root / "etc/quire/keys").exists() and not (root / "opt/quire").exists()
    finally:
        run("chroot", root, "env", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "dpkg", "--purge", "quire", check=False)
    left = [one for one in STATE if (root / one[1:]).exists()]
    assert not left and "quire" not in (root / "etc/passwd").read_text(), f"a purge leaves {left}"
    megabytes = package.stat().st_size >> 20
    print(f"installed, answered, drained, upgraded, removed, purged: nothing left; {megabytes} MB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
