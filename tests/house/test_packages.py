"""The scripts that build and accompany the Debian package. `make test-deb` installs it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEBIAN = ROOT / "deploy/debian"
SCRIPTS = [DEBIAN / name for name in ("build", "postinst", "prerm", "postrm")] + [ROOT / "deploy/libraries"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_one_that_its_shell_reads_and_stops_at_an_error(script: Path):
    first, text = script.read_text().splitlines()[0], script.read_text()
    assert first in ("#!/bin/sh", "#!/bin/bash") and re.search(r"^set -eu?", text, re.MULTILINE)
    assert script.stat().st_mode & 0o111
    done = subprocess.run([first[2:], "-n", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_package_starts_what_its_unit_starts_and_purges_what_it_makes():
    unit, build = (ROOT / "deploy/systemd/quire.service").read_text(), (DEBIAN / "build").read_text()
    (program,) = re.findall(r"^ExecStart=(\S+)", unit, re.MULTILINE)
    assert f'"$root{program}"' in build and "/etc/quire/server.yaml" in unit
    assert set(re.findall(r"@(\w+)@", (DEBIAN / "control").read_text())) == set(re.findall(r"s/@(\w+)@/", build))
    purge = (DEBIAN / "postrm").read_text()
    for name in re.findall(r"^(?:Cache|State)Directory=(\w+)", unit, re.MULTILINE):
        assert f"/var/lib/{name}" in purge and f"/var/cache/{name}" in purge
