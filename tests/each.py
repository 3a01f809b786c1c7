"""`each`: the cases of a test as a loop within it, in place of tests of their own.

For thousands of cases of which each takes less than pytest takes for a test. The first case that fails is named in the
captured output, and ends its test.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from quire.utils.checks import shown


def each(names: str | Sequence[str], cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As `pytest.mark.parametrize`; what a test gets otherwise, such as fixtures, is the same in all cases.

    Args:
        names: of the arguments that a case gives: one, or as many as each of `cases` has, also divided by commas.
    """
    given_names = names.replace(" ", "").split(",") if isinstance(names, str) else names
    values = [(case,) if len(given_names) == 1 else tuple(case) for case in cases]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**others: Any) -> None:
            for case in values:
                given = dict(zip(given_names, case, strict=True))
                try:
                    test(**others, **given)
                except BaseException:
                    print("in the case " + ", ".join(f"{name} = {shown(value)}" for name, value in given.items()))
                    raise

        signature = inspect.signature(test)
        left = [one for name, one in signature.parameters.items() if name not in given_names]
        run.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return run

    return decorate
