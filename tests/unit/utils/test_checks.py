from __future__ import annotations

import numpy as np
import pytest

from quire.errors import ConfigError, ValidationError
from quire.utils.checks import check_bool, check_float, check_int, check_int_list, check_text, shown


def test_integers_of_any_integer_type_pass_and_become_python_ints() -> None:
    assert type(check_int("x", np.int16(3))) is int
    assert check_int("x", 10**30, 0, 10**31) == 10**30


@pytest.mark.parametrize("value", [True, 1.0, "1", None, np.float32(1), [1]], ids=repr)
def test_what_is_no_integer_is_refused(value: object) -> None:
    with pytest.raises(ValidationError, match="x must be an integer"):
        check_int("x", value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.1, 1.1, 10**400], ids=str)
def test_floats_out_of_range_or_not_finite_are_refused_with_the_range(value: float) -> None:
    with pytest.raises(ValidationError, match=r"hint: x must be a finite number in \[0, 1\]"):
        check_float("x", value, 0.0, 1.0)


def test_an_open_lower_bound_excludes_itself() -> None:
    with pytest.raises(ValidationError, match=r"in \(0, 1\]"):
        check_float("x", 0.0, 0.0, 1.0, above=0.0)
    assert check_float("x", np.float32(0.5), 0.0, 1.0, above=0.0) == 0.5


@pytest.mark.parametrize("value", [0, 1, "true", None], ids=repr)
def test_only_true_and_false_are_bools(value: object) -> None:
    with pytest.raises(ValidationError, match="true or false"):
        check_bool("x", value)


def test_text_is_text() -> None:
    with pytest.raises(ConfigError, match="x must be a string"):
        check_text("x", b"bytes", ConfigError)


def test_integer_lists_come_from_sequences_sets_and_arrays() -> None:
    assert check_int_list("x", (1, 2), 0, 9) == [1, 2]
    assert check_int_list("x", np.array([1, 2], dtype=np.uint8), 0, 9) == [1, 2]
    assert check_int_list("x", [np.int64(1), 2], 0, 9) == [1, 2]
    assert sorted(check_int_list("x", {1, 2}, 0, 9)) == [1, 2]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1, True], r"x\[1\] must be an integer"), ([1, 10], r"x\[1\]=10"), ("12", "a list"), ({1: 2}, "a list"),
        (5, "a list"),
    ],
    ids=["bool", "out of range", "text", "dict", "number"],
)  # fmt: skip
def test_what_is_no_list_of_allowed_integers_is_refused_with_the_place(value: object, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        check_int_list("x", value, 0, 9)


def test_long_values_are_shortened_in_messages() -> None:
    assert len(shown("x" * 10**6)) < 100 and len(shown(list(range(10**4)))) < 100
