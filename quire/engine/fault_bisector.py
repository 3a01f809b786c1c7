"""FaultBisector: which of several requests makes their steps fail, found by running halves of them alone.

Used by the supervisor for requests that ran when a core died, and by the engine core for those of a step that raised.
Owns the groups that still have to prove themselves. A value without a clock or a process, so it is tested alone.
"""

from __future__ import annotations

from collections.abc import Iterable


class FaultBisector:
    """No request is a suspect at first, and all may run.

    While there are suspects, only one group of them may run; one who advanced (or ended) is cleared, and when a group
    is cleared the next may run. A group that fails is split; a group of one that fails is the faulty request.
    """

    def __init__(self) -> None:
        self._groups: list[list[int]] = []  # the last one may run

    def __bool__(self) -> bool:
        return bool(self._groups)

    def may_run(self, handle: int) -> bool:
        """Whether a request may run now."""
        return not self._groups or handle in self._groups[-1]

    def report_failure(self, handles: Iterable[int]) -> int | None:
        """What ran has failed, with these requests in it, none of which advanced.

        Returns:
            The faulty request, when it can only be this one; it is still to be cleared.
        """
        accused = sorted(set(handles))
        if self._groups:
            group = self._groups.pop()
            accused = [handle for handle in group if handle in set(accused)] or group
        if len(accused) == 1:
            self._groups.append(accused)
            return accused[0]
        half = len(accused) // 2
        self._groups += [accused[half:], accused[:half]]
        return None

    @property
    def is_empty(self) -> bool:
        """True while no request is suspected."""
        return not self._groups

    def clear(self, handle: int) -> bool:
        """A request advanced or ended; True when others may run because of it."""
        for group in self._groups:
            if handle in group:
                group.remove(handle)
        is_next = bool(self._groups) and not self._groups[-1]
        self._groups = [group for group in self._groups if group]
        return is_next
