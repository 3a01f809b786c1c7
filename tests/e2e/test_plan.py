"""A calibration of a real engine, and a plan made from it."""

from __future__ import annotations

import json
from pathlib import Path

from quire.cli.main import main
from quire.simulator.calibration import load_calibration
from tests.e2e.tiny_model import write_tiny_model


def test_a_machine_is_calibrated_and_planned_with(tmp_path: Path, capsys):
    model = write_tiny_model(tmp_path / "model", tmp_path / "marker")
    path = str(tmp_path / "tiny.json")
    settings = ["--max-num-seqs", "8", "--max-num-batched-tokens", "256"]
    assert main(["plan", "--model", str(model), "--calibrate", path, "--calibrate-seconds", "3", *settings]) == 0
    calibration = load_calibration(Path(path))
    assert calibration.num_steps > 100 and calibration.setup.scheduler.max_num_seqs == 8
    assert 0 < calibration.knot_s[0] < 1 and 0 < calibration.request_wait_s < 1 and calibration.delivery_s[0] >= 0
    capsys.readouterr()
    load = ["--rate", "5", "--num-requests", "30", "--prompt-tokens", "20", "--output-tokens", "10"]
    assert main(["plan", "--calibration", path, *load]) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer["basis"]["kind"] == "measured" and answer["figures"]["num_answered"] == 30
