"""Every part of the engine with every division of a model over processes, as the page of the matrix says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.errors import QuireClientError
from quire.flight_recorder.reader import read_recording
from quire.flight_recorder.replay import Replay
from tests.effort import effort
from tests.models.checkpoints import VOCAB_SIZE
from tests.parallel.circumstances import Answers, answers
from tests.parallel.divided_parts import DIVISIONS, PARTS, REFUSED, write_models

CELLS = [(part, division) for part in PARTS for division in DIVISIONS]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("mixtral"))


@pytest.fixture(scope="module")
def plain() -> dict[str, Answers]:
    """Answers of one process, filled as they are needed."""
    return {}


def found(model: Path, part: str, path: Path, **division: Any) -> Answers:
    settings = {"dtype": "float32", **PARTS[part].settings(path, model)}
    return answers(model, VOCAB_SIZE, structured=True, **{"num_ranks": 1, **settings, **division})


@pytest.mark.parametrize(
    ("part", "division"),
    effort([("recorder", "pipeline"), ("hooks", "both")], CELLS),
)
def test_cell(model: Path, plain: dict[str, Answers], tmp_path: Path, part: str, division: str):
    meant, sizes = REFUSED.get((part, division)), DIVISIONS[division][1]
    if meant is not None:
        with pytest.raises(QuireClientError) as caught:
            found(model, part, tmp_path, **sizes)
        assert caught.value.field == meant[0] and meant[1] in caught.value.message
        return
    alone = part if PARTS[part].changes_bytes else "captured"
    if alone not in plain:
        plain[alone] = found(model, alone, tmp_path / "alone")
    assert found(model, part, tmp_path, **sizes) == plain[alone]
    if part == "recorder":
        replayed = Replay(read_recording(tmp_path)).run()
        assert replayed.first_difference is None and replayed.num_steps > 20
