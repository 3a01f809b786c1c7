"""litellm against a server whose model writes what a script says; installs litellm into `build/clients/litellm` once.

`make test-litellm`. The last line is pass or fail.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.server.engines import WritingEngine
from tests.server.servers import RunningServer

FOLDER = Path("build/clients/litellm")
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def installed() -> str:
    """A Python that has litellm."""
    python = FOLDER / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", "litellm", "mcp"], check=True)
    return str(python)


def main() -> int:
    """Run the loop; 0 = it passed."""
    engine = WritingEngine()
    engine.write = lambda prompt, seed: "It is sunny." if "<tool_response>\nsunny" in prompt else CALL
    with RunningServer(engine) as server:
        script = Path(__file__).with_name("litellm_loop.py")
        status = subprocess.run([installed(), str(script), f"{server.url}/v1"], timeout=300, check=False).returncode
    print("fail" if status else "pass")
    return status


if __name__ == "__main__":
    sys.exit(main())
