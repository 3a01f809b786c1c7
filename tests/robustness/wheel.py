"""`make test-wheel`: the newest wheel in dist/, installed into a fresh environment, answers a prompt.

The packages it needs come from the environment that runs this, so that nothing is downloaded.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
VENV = ROOT / "build" / "wheel-venv"
CODE = """
import pathlib, quire
from quire import LLM, SamplingParams
from quire.kernels.native.library import examine_tiers, load_library
for path in (quire.__file__, load_library().__file__):
    assert pathlib.Path(path).is_relative_to({venv!r}), path
tiers = {{report.name: report.problem or "runs here" for report in examine_tiers()}}
assert "portable" in tiers and (len(tiers) == 5 or {machine!r} != "x86_64"), tiers
llm = LLM("leaf", max_model_len=512)
answer = llm.chat([{{"role": "user", "content": "What is 17 plus 25?"}}], SamplingParams(temperature=0, max_tokens=32))
assert "42" in answer[0].outputs[0].text, answer
print(tiers)
print(answer[0].outputs[0].text.strip())
"""


def newest_wheel() -> Path:
    """The wheel that was built last."""
    wheels = sorted((ROOT / "dist").glob("quire-*.whl"), key=lambda path: path.stat().st_mtime)
    if not wheels:
        sys.exit("no wheel in dist/: run make wheel first")
    return wheels[-1]


def check_contents(wheel: Path) -> None:
    """One module, the embedded model, and nothing from outside of the package."""
    names = zipfile.ZipFile(wheel).namelist()
    assert sum("_quire_native" in name for name in names) == 1, "the wheel needs one native module"
    for name in ("", "draft/", "eagle/", "medusa/"):
        assert f"quire/assets/leaf/{name}model.safetensors" in names, f"the wheel lacks quire/assets/leaf/{name}"
    strangers = [name for name in names if not name.startswith("quire")]
    assert not strangers, f"the wheel holds {strangers}"


def main() -> int:
    """Exit code 0 when the installed wheel answers."""
    wheel = newest_wheel()
    check_contents(wheel)
    shutil.rmtree(VENV, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    python = VENV / "bin" / "python"
    install = ["install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([str(python), "-m", "pip", *install], check=True)
    site = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    # A path alone: what is installed there as editable is not seen.
    (Path(site) / "runtime.pth").write_text(sysconfig.get_path("purelib") + "\n")
    machine = sysconfig.get_platform().rpartition("-")[2]
    with tempfile.TemporaryDirectory() as elsewhere:
        environment = {"PATH": f"{VENV / 'bin'}:/usr/bin:/bin", "HOME": elsewhere}
        code = CODE.format(venv=str(VENV), machine=machine)
        subprocess.run([str(python), "-c", code], cwd=elsewhere, env=environment, check=True)
        command = [str(VENV / "bin" / "quire"), "generate", "Tell me a short story about a fox", "--max-tokens", "16"]
        subprocess.run(command, cwd=elsewhere, env=environment, check=True)
    print(f"test-wheel: {wheel.name} ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
