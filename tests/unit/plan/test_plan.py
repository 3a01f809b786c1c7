"""`quire plan` from the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from quire.cli.main import main
from quire.simulator.calibration import fit, save_calibration
from tests.unit.flight_recorder.test_recording import record_some
from tests.unit.scheduler.harness import make_setup
from tests.unit.simulator.test_costs import samples

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}  # fmt: skip
LOAD = ["--num-requests", "15", "--rate", "20", "--prompt-tokens", "100", "--output-tokens", "10"]


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def plan(capsys: pytest.CaptureFixture[str], *args: str) -> dict:
    assert main(["plan", *args]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_deployment_is_sized_for_named_hardware(capsys, model, tmp_path):
    picture = tmp_path / "plan.svg"
    answer = plan(
        capsys, "--model", model, "--hardware", "H100", "-tp", "2", *LOAD, "--slo-ttft", "500", "--slo-itl", "50",
        "--find-replicas", "--plot", str(picture),
    )  # fmt: skip
    assert answer["simulated"] and answer["basis"]["hardware"]["source"]
    assert answer["replicas_needed"] == 1 and answer["figures"]["good_share"] >= 0.95
    assert answer["basis"]["assumptions"]["compute_share"] == 0.6
    assert picture.read_text().startswith("<svg")


def test_eight_devices_and_four_sockets_are_simulated(capsys, model):
    for flags, name, num_ranks in (
        (["--hardware", "H100", "-tp", "8", "--interconnect", "nvlink"], "nvlink", 8),
        (["--hardware", "Xeon", "-tp", "2", "-pp", "2", "--stage-interconnect", "100gbe", "-dp", "2"], "Xeon's own", 2),
    ):
        assert main(["plan", "--model", model, *flags, *LOAD]) == 0
        said = capsys.readouterr().out
        answer = json.loads(said.splitlines()[-1])
        assert "simulated: costs computed" in said and "embedding and head): " in said and name in said
        basis, steps = answer["basis"], answer["steps"]
        assert basis["interconnect"]["name"] == name and basis["memory"][0]["ranks"] == num_ranks
        assert len(basis["memory"]) == basis["pipeline_parallel"] and answer["kv_tokens"] > 10_000
        assert 0 < steps[0]["exchange_s"] < steps[0]["step_s"] < steps[-1]["step_s"]
        weights = sum(one["weights_bytes"] * one["ranks"] for one in basis["memory"])
        assert weights == pytest.approx(14.48e9, rel=0.01), "each weight once, norms on each rank"
    assert main(["plan", "--model", model, "--hardware", "H100", *LOAD, "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["steps"][0]["exchange_s"] == 0.0


def test_a_slower_device_is_slower(capsys, model):
    found = {
        name: plan(capsys, "--model", model, "--hardware", name, *LOAD)["figures"]["p50_itl_ms"]
        for name in ("H100", "L4")
    }
    assert 5 < found["L4"] / found["H100"] < 15


def test_assumed_drafts_shorten_answers_and_need_a_rate(capsys, model):
    hardware = ["--model", model, "--hardware", "H100", *LOAD]
    plain, drafting = (
        plan(capsys, *hardware, *more) for more in ([], ["--speculative-tokens", "4", "--acceptance-rate", "0.8"])
    )
    assert drafting["figures"]["p50_tpot_ms"] < 0.7 * plain["figures"]["p50_tpot_ms"]
    assert drafting["basis"]["speculation"] == {"num_tokens": 4, "acceptance_rate": 0.8, "source": "assumed"}
    assert "speculation" not in plain["basis"]
    model_flags = ["--speculative-tokens", "4", "--acceptance-rate", "0.8", "--speculative-model", model]
    num_blocks = []
    for flags in ([], model_flags):
        assert main(["plan", *hardware, *flags]) == 0
        num_blocks.append(int(re.search(r"(\d+) blocks of", capsys.readouterr().out)[1]))
    assert num_blocks[1] < 0.4 * num_blocks[0], "weights are twice as many, and pages twice as large"
    assert main(["plan", *hardware, "--speculative-model", model]) == 2
    assert "--speculative-model needs" in capsys.readouterr().err
    assert main(["plan", *hardware, "--speculative-tokens", "4"]) == 2
    assert "need each other" in capsys.readouterr().err


def test_settings_and_routing_are_compared(capsys, model):
    load = [*LOAD, "--prefix-tokens", "64", "--shared-prefixes", "5", "--replicas", "3"]
    answer = plan(capsys, "--model", model, "--hardware", "A100", *load, "--sweep", "--compare-routing")
    assert set(answer["routing"]) == {"round-robin", "least-loaded", "prefix-aware", "data-parallel"}
    assert answer["best_setting"] in answer["sweep"]


def test_a_flight_recording_is_a_trace_and_a_calibration_a_cost_model(capsys, tmp_path):
    record_some(tmp_path / "recording")
    calibration = fit(
        samples(300, 0.01), [0.001], [(1, 1e-4), (2, 1e-4)], request_each_s=1e-4,
        model="m", machine="here", setup=make_setup()
    )  # fmt: skip
    save_calibration(calibration, tmp_path / "c.json")
    answer = plan(capsys, "--calibration", str(tmp_path / "c.json"), "--trace", str(tmp_path / "recording"))
    assert answer["figures"]["num_answered"] >= 11  # one is aborted, maybe before its first token
    assert answer["basis"]["machine"] == "here" and answer["basis"]["replicas_beside"] == 1


def test_a_calibration_is_planned_over_ranks(capsys, model, tmp_path):
    calibration = fit(
        samples(300, 0.0), [0.001], [(1, 1e-4), (2, 1e-4)], request_each_s=1e-4,
        model="m", machine="here", setup=make_setup(), num_threads=2
    )  # fmt: skip
    save_calibration(calibration, tmp_path / "c.json")
    ranks = ["--calibration", str(tmp_path / "c.json"), "--model", model, "-tp", "2", *LOAD]
    steps = {}
    for threads in ("1", "2"):
        answer = plan(capsys, *ranks, "--interconnect", "shared-memory", "--num-threads", threads)
        assert answer["basis"]["speedup"] == int(threads)
        steps[threads] = answer["steps"][-1]
    assert steps["1"]["exchange_s"] == steps["2"]["exchange_s"] > 1e-3
    assert steps["2"]["step_s"] < 0.9 * steps["1"]["step_s"]
    assert main(["plan", *ranks]) == 2
    assert "--interconnect shared-memory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "either --hardware NAME or --calibration FILE"),
        (["--hardware", "H100"], "needs a model"),
        (["--hardware", "H1000", "--model", "MODEL"], "did you mean 'H100'"),
        (["--hardware", "H100", "--model", "MODEL", "--rate", "0"], "rate"),
        (["--hardware", "H100", "--model", "MODEL", "--routing", "prefix"], "routing"),
        (["--hardware", "H100", "--model", "MODEL", "-pp", "33"], "cannot be divided among 33 stages"),
        (["--hardware", "H100", "--model", "MODEL", "--enable-expert-parallel"], "0 experts"),
        (["--hardware", "H100", "--model", "MODEL", "-tp", "2", "--interconnect", "pcie"], "did you mean 'pcie"),
        (["--calibrate", "x.json", "--model", "MODEL", "-tp", "2"], "leave out -tp and -pp"),
        (["--calibrate", "x.json"], "needs a model"),
        (["--hardware", "H100", "--model", "MODEL", "--slo-ttft", "-5"], "--slo-ttft must be above 0"),
    ],
)
def test_mistakes_are_named(capsys, model, args, message):
    assert main(["plan", *[model if one == "MODEL" else one for one in args]]) == 2
    assert message in capsys.readouterr().err
