from __future__ import annotations

from pathlib import Path

from quire.utils.paths import why_no_directory, why_no_file


def test_what_is_wrong_with_a_path_is_said_and_a_directory_is_made(tmp_path: Path):
    (tmp_path / "file").touch()
    assert why_no_file(tmp_path / "file") is None and why_no_file(tmp_path / "new") is None
    assert not (tmp_path / "new").exists()
    assert why_no_file(tmp_path) == "it is not a file"
    assert why_no_file(tmp_path / "away" / "new") == f"there is no directory {tmp_path / 'away'}"
    assert why_no_directory(tmp_path / "a" / "b") is None and (tmp_path / "a" / "b").is_dir()
    assert why_no_directory(tmp_path / "file") == "it is not a directory"
    assert why_no_directory(tmp_path / "file" / "below") == "Not a directory"
