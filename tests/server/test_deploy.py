"""The files of deploy/ name settings, paths and metrics that exist; `make test-manifests test-container` runs them."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire.cli.serve import add_arguments, configs_from_args
from quire.entrypoints.args import QuireParser
from quire.server.http.access import OPEN_PATHS
from tests.robustness.alert_cases import CASES
from tests.server.test_metrics import documented

DEPLOY = Path(__file__).parents[2] / "deploy"


def manifests(name: str) -> dict[str, Any]:
    """Rendered objects by kind."""
    return {one["kind"]: one for one in yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text())}


@pytest.mark.parametrize("name", ["cpu.yaml", "gpu.yaml"])
def test_the_pods_settings_are_settings_of_the_server(name: str, tmp_path: Path):
    objects = manifests(name)
    settings = yaml.safe_load(objects["ConfigMap"]["data"]["server.yaml"])
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-some-length\n")
    keys.chmod(0o600)
    file = tmp_path / "server.yaml"
    file.write_text(yaml.safe_dump({**settings, "api_key_file": str(keys)}))
    container = objects["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    parser = QuireParser(prog="quire serve")
    add_arguments(parser)
    assert container["args"] == ["serve", "--config", "/etc/quire/settings/server.yaml"]
    _, server = configs_from_args(parser.parse_args(["--config", str(file)]))
    assert server.http.port == container["ports"][0]["containerPort"]
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > server.http.shutdown_timeout, "Kubernetes kills before the drain ends"


@pytest.mark.parametrize("name", ["cpu.yaml", "gpu.yaml"])
def test_probes_ask_paths_that_need_no_key_and_the_pod_may_do_nothing_else(name: str):
    pod = manifests(name)["Deployment"]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in OPEN_PATHS
    assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    is_gpu = "nvidia.com/gpu" in container["resources"]["limits"]
    assert is_gpu == (name == "gpu.yaml")


def test_the_dashboard_is_what_its_script_writes_and_names_documented_metrics_alone():
    script = runpy.run_path(str(DEPLOY / "grafana" / "dashboard.py"))
    assert (DEPLOY / "grafana" / "quire.json").read_text() == script["text"](), "run `make dashboards`"
    queries = [
        query
        for _, plots in [*script["ROWS"], script["REPLICAS"], script["SPECULATION"]]
        for plot in plots
        for query, _ in plot[2]
    ]
    rules = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())["groups"][0]["rules"]
    adapter = yaml.safe_load((DEPLOY / "prometheus" / "adapter.yaml").read_text())["rules"]["custom"]
    texts = [*queries, *(rule["expr"] for rule in rules), *(rule["metricsQuery"] for rule in adapter)]
    named = {name for text in texts for name in re.findall(r"\b(?:vllm|quire):\w+", text)}
    suffixes = ("", "_bucket", "_sum", "_count")
    known = {f"{name}{suffix}" for name in documented() for suffix in suffixes}
    assert len(named) > 20 and not named - known
    assert all({"summary", "description"} <= set(rule["annotations"]) for rule in rules)
    assert {rule["alert"] for rule in rules} == set(CASES), "tests/robustness/alert_cases.py has two cases of each"
