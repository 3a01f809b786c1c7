"""Costs of a model over several ranks, from a calibration of one process and from what connects them.

Called by `quire plan`. What was measured of products and attention is divided by the cores that there are now over
those that were measured; sampling and what requests cost once are not divided, as one rank does that for all.
"""

from __future__ import annotations

from quire.simulator.calibration import CalibratedCosts, Calibration
from quire.simulator.costs import StepShape
from quire.simulator.division import Exchanges


class DividedCosts:
    """The cost model of a calibration, over ranks.

    Args:
        speedup: cores now over cores of the calibration.
    """

    def __init__(self, calibration: Calibration, seed: int, speedup: float, exchanges: Exchanges) -> None:
        self._measured = CalibratedCosts(calibration, seed)
        self._calibration, self._speedup = calibration, speedup
        self.exchanges = exchanges

    def step_seconds(self, shape: StepShape) -> float:
        """What is divided and what is not, by the measured ratio, and the exchanges."""
        whole = self._calibration.fitted_seconds(shape)
        alone = self._calibration.sampling_s * shape.num_sampling + self._calibration.new_s * shape.num_new
        share = ((whole - alone) / self._speedup + alone) / whole if whole else 1.0
        return self._measured.step_seconds(shape) * share + self.exchanges.seconds(shape)

    def gap_seconds(self, shape: StepShape) -> float:
        """Seconds between two steps."""
        return self._measured.gap_seconds(shape)

    @property
    def request_s(self) -> float:
        """Seconds from a client's call to the queue."""
        return self._measured.request_s

    @property
    def request_each_s(self) -> float:
        """Seconds between requests that come at once."""
        return self._measured.request_each_s

    def delivery_seconds(self, num_tokens: int) -> float:
        """Seconds from a step's end to its tokens' delivery."""
        return self._measured.delivery_seconds(num_tokens)
