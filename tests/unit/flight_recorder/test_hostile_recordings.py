"""A recording may come from anywhere: nothing in it runs, whatever it names."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.cli.main import main
from quire.flight_recorder import records
from quire.flight_recorder.records import MAGIC, Head, frame
from tests.unit.scheduler.harness import make_setup

REQUEST = "quire.core.request:Request"
SCHEDULER = "quire.scheduler.scheduler:Scheduler"


def deep(levels: int) -> bytes:
    return b"\x92\xa5tuple\x91" * levels + b"\xc0"


def replayed(directory: Path, state: Any) -> int:
    """Exit code of `quire replay` for a recording that begins with this state."""
    data = state if isinstance(state, bytes) else msgspec.msgpack.encode(state)
    path = directory / "hostile.qfr"
    head = Head(records.VERSION, "0", "run", 0, 0.0, 0.0, make_setup(), False, zlib.compress(data))
    path.write_bytes(MAGIC + frame(head))
    return main(["replay", str(path)])


@pytest.mark.parametrize("form", ["enum", "struct", "object"])
@pytest.mark.parametrize(
    "name",
    [
        "quire.core.logprobs:np.f2py.subprocess.Popen",
        "quire.flight_recorder.snapshot:enum.sys.modules",
        "quire.core.request:EngineCoreRequest",
        "quire.core.serial:msgspec.Struct",
        "quire.scheduler.setup:make_scheduler",
        "quire.scheduler.scheduler:Scheduler.__init__",
        "quire.scheduler.scheduler:Scheduler.__class__",
        "quire.core.hidden",
        "builtins:eval",
        "builtins:exec",
        "os:system",
        "subprocess:Popen",
        "",
    ],
)
def test_a_recording_that_names_a_program_runs_nothing(tmp_path, monkeypatch, capsys, name, form):
    monkeypatch.chdir(tmp_path)
    command = ["sh", "-c", "touch was_run"]
    value: list[Any] = ["object", 0, name, {"args": command}] if form == "object" else [form, name, command]
    assert replayed(tmp_path, value) == 2
    assert replayed(tmp_path, ["object", 0, SCHEDULER, {"surprise": value}]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["hostile.qfr"]
    assert "is not an allowed class" in capsys.readouterr().err


@pytest.mark.parametrize(
    "state",
    [
        ["enum", REQUEST, 1],
        ["enum", "quire.core.sampling_params:SamplingParams", {}],
        ["struct", REQUEST, {}],
        ["struct", "quire.core.request:RequestStatus", 0],
        ["object", 0, "quire.core.request:RequestStatus", {}],
        ["object", 0, "quire.core.sampling_params:SamplingParams", {"max_tokens": 1}],
        ["enum", ["quire.core.request:RequestStatus"], 0],
    ],
)  # fmt: skip
def test_a_listed_class_stands_only_where_one_of_its_kind_does(tmp_path, capsys, state):
    assert replayed(tmp_path, ["object", 0, SCHEDULER, {"_table": state}]) == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize(
    "state",
    [
        ["object", 0, SCHEDULER, {"schedule": 7}],
        ["object", 0, SCHEDULER, {"__class__": 7}],
        ["object", 0, SCHEDULER, {"__dict__": 7}],
        ["object", 0, REQUEST, {"handle": 7}],
        ["object", 0, REQUEST, {"from_message": 7}],
        ["object", 0, REQUEST, {"not a field": 7}],
        ["object", 0, REQUEST, {"unknown": 7}],
        ["_class__", 7],
        ["value", None],
        ["made"],
        [["list"], 0, []],
        [],
        ["kept", 1, 2, 3],
        ["again", 99],
        ["array", 0, "O", [1], b"12345678"],
        ["array", 0, "<i4,(1000000000,)<i4", [1], b"1234"],
        ["array", 0, "<i4", [1 << 40], b"1234"],
        ["column", "tuple", 0, ["equal", 1 << 50, []]],
        ["column", "tuple", 0, ["ragged", [-1], ["values", []]]],
        deep(100_000),
        b"\x91" * 2_000_000,
        b"\x00" * ((1 << 28) + 1),
        {"not": "a node"},
    ],
    ids=lambda state: str(state[:40] if isinstance(state, bytes) else state)[:40],
)  # fmt: skip
def test_a_state_of_another_form_is_refused_without_a_traceback(tmp_path, capsys, state):
    inner = state if isinstance(state, bytes) else ["object", 0, SCHEDULER, {"surprise": state}]
    if isinstance(state, dict):
        inner = state
    code, err = replayed(tmp_path, inner), capsys.readouterr().err
    assert "Traceback" not in err
    assert code == (0 if isinstance(state, dict) else 2), err
