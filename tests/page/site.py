"""The docs site in headless Chromium, opened as files: `make test-site`. `drive_site.py` says what is tried."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.page.run import find_browser, playwright_python

if __name__ == "__main__":
    drive = Path(__file__).with_name("drive_site.py")
    raise SystemExit(subprocess.run([playwright_python(), drive, sys.argv[1], find_browser()], check=False).returncode)
