"""A Python with the packages that vLLM's examples import and Quire has no use for: this one's, and a few more."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

PACKAGES = (
    "fastapi", "pybase64", "pillow", "websockets", "opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-grpc",
)  # fmt: skip


def python_with_packages(folder: Path) -> str:
    """Its path; made below `folder` once for a list of packages. pip fetches the packages."""
    python = folder / "bin" / "python"
    done, wanted = folder / "done", " ".join(PACKAGES)
    if not done.exists() or done.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
        standard = sysconfig.get_path("stdlib")
        own = [path for path in sys.path if path and not path.endswith(".zip")]
        own = [path for path in own if not path.startswith(standard) or "site-packages" in path]
        (site / "shared.pth").write_text("\n".join([*own, ""]))
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
        done.write_text(wanted)
    return str(python)
