"""A cost model measured on one machine with one model: fitted to observed steps, kept as JSON.

A step is taken to last T(tokens) + s * sampled rows + c * context of decoding rows + p * pairs of prompts' attention +
q * prompts' earlier tokens + n * new requests; T is linear between knots, and nothing is negative. The ratios of
measured to fitted times are kept too, in the order in which they came, and stretches of them are followed in a
simulation: percentiles of a perfectly even machine would be too good, and a machine is slow for a while rather than for
a step.

Sources: Lawson and Hanson 1974, chapter 23 (non-negative least squares); Kuensch 1989 (resampling of blocks).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from quire.core.kv_spec import KVCacheSpec, spec_from_fields
from quire.errors import ConfigError, ValidationError
from quire.scheduler.setup import SchedulerSetup
from quire.simulator.costs import StepShape
from quire.simulator.observed import StepSample

VERSION = 3
KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192, 16384)
MIN_STEPS = 50
FIT_ROUNDS = 4
STRETCH_S = 1.0
GOOD_ERROR, ROUGH_ERROR = 0.10, 0.20
MAX_CALIBRATION_BYTES = 1 << 24


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Measured costs; seconds.

    Attributes:
        knots, knot_s: seconds of a step of so many tokens, before what follows.
        sampling_s, context_s, pair_s, new_s, prompt_context_s: per sampled row, per token of context, per pair, per new
            request, per earlier token of a prompt.
        gap_s: constant, per row, per new request.
        request_wait_s: from a client's call to the queue.
        request_each_s: after which the next of several requests that come at once is queued.
        delivery_s: constant, and per token of the step.
        quiet_ratios, prompt_ratios: (seconds since the first step, measured over fitted seconds), of steps without and
            with prompts, in order.
        num_steps, median_error: what the fit rests on, and the median of |measured / fitted - 1|.
        setup: of the scheduler that was measured.
        num_threads: compute threads of the process that was measured; 0 = a file that does not say.
        num_replicas: engines that ran beside each other, this one among them, each under the same load.
    """

    version: int
    model: str
    machine: str
    knots: list[int]
    knot_s: list[float]
    sampling_s: float
    context_s: float
    pair_s: float
    new_s: float
    prompt_context_s: float
    gap_s: tuple[float, float, float]
    request_wait_s: float
    request_each_s: float
    delivery_s: tuple[float, float]
    quiet_ratios: list[tuple[float, float]]
    prompt_ratios: list[tuple[float, float]]
    num_steps: int
    median_error: float
    setup: SchedulerSetup
    num_threads: int = 0
    num_replicas: int = 1

    def fitted_seconds(self, shape: StepShape) -> float:
        """Seconds of a step without chance."""
        at_tokens = float(np.interp(shape.num_tokens, self.knots, self.knot_s))
        if shape.num_tokens > self.knots[-1]:
            at_tokens *= shape.num_tokens / self.knots[-1]
        return (
            at_tokens + self.sampling_s * shape.num_sampling + self.context_s * shape.decode_context
            + self.pair_s * shape.prompt_pairs + self.new_s * shape.num_new
            + self.prompt_context_s * shape.prompt_context
        )  # fmt: skip


def verdict(median_error: float) -> str:
    """What the error of a fit says about plans that are made with it."""
    if median_error <= GOOD_ERROR:
        return f"good: an idle machine stays within {GOOD_ERROR:.0%}"
    if median_error <= ROUGH_ERROR:
        return f"fair: an idle machine stays within {GOOD_ERROR:.0%}; plan with a margin of about {median_error:.0%}"
    return (
        f"rough: the machine was busy, or its speed varies; plans may be off by {median_error:.0%} and more: "
        "calibrate again when nothing else runs"
    )


class CalibratedCosts:
    """The cost model of a calibration; chance follows from the seed."""

    def __init__(self, calibration: Calibration, seed: int = 0) -> None:
        self._calibration = calibration
        self._rng = np.random.default_rng(seed)
        self._quiet = _Series(calibration.quiet_ratios)
        self._prompt = _Series(calibration.prompt_ratios)
        self._left_s = 0.0

    def step_seconds(self, shape: StepShape) -> float:
        """The fitted seconds times a ratio that was measured."""
        if self._left_s <= 0.0:
            self._left_s = STRETCH_S
            place_s = float(self._rng.uniform(0.0, max(self._quiet.end_s, self._prompt.end_s)))
            self._quiet.seek(place_s)
            self._prompt.seek(place_s)
        series = self._prompt if shape.num_prompt_tokens else self._quiet
        seconds = self._calibration.fitted_seconds(shape) * series.next()
        self._left_s -= seconds
        return seconds

    def gap_seconds(self, shape: StepShape) -> float:
        """Seconds between two steps."""
        constant, per_row, per_new = self._calibration.gap_s
        return constant + per_row * shape.num_rows + per_new * shape.num_new

    @property
    def request_s(self) -> float:
        """Seconds from a client's call to the queue."""
        return self._calibration.request_wait_s

    @property
    def request_each_s(self) -> float:
        """Seconds between requests that come at once."""
        return self._calibration.request_each_s

    def delivery_seconds(self, num_tokens: int) -> float:
        """Seconds from a step's end to its tokens' delivery."""
        constant, per_token = self._calibration.delivery_s
        return constant + per_token * num_tokens


class _Series:
    """Ratios in the order in which they were measured; after the last comes the first."""

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        self._times = [at_s for at_s, _ in points]
        self._ratios = [ratio for _, ratio in points]
        self._next = 0

    @property
    def end_s(self) -> float:
        """When the last was measured."""
        return self._times[-1]

    def seek(self, at_s: float) -> None:
        """Go to the first that was measured then or later."""
        self._next = bisect_left(self._times, at_s)

    def next(self) -> float:
        """The ratio here."""
        place = self._next % len(self._ratios)
        self._next = place + 1
        return self._ratios[place]


def fit(
    steps: Sequence[StepSample],
    waits_s: Sequence[float],
    deliveries: Sequence[tuple[int, float]],
    *,
    request_each_s: float,
    model: str,
    machine: str,
    setup: SchedulerSetup,
    num_threads: int = 0,
    num_replicas: int = 1,
) -> Calibration:
    """A calibration from what was observed.

    Args:
        waits_s: seconds from clients' calls to the queue.
        request_each_s: as of `Calibration`.
        deliveries: (tokens of a step, mean seconds from its end to their delivery).

    Raises:
        ValidationError: too little was observed.
    """
    if len(steps) < MIN_STEPS or not waits_s or not deliveries:
        raise ValidationError(
            f"{len(steps)} steps were observed, a calibration needs {MIN_STEPS}", hint="calibrate for more seconds"
        )
    measured = np.array([step.seconds for step in steps])
    most = max(step.shape.num_tokens for step in steps)
    knots = [knot for knot in KNOTS if knot < most] + [most]
    design = np.array([_features(step.shape, knots) for step in steps])
    weights = 1 / measured
    kept = np.ones(len(steps), dtype=np.bool_)
    for _ in range(FIT_ROUNDS):
        found = nonnegative_least_squares(design[kept] * weights[kept, None], measured[kept] * weights[kept])
        fitted = np.maximum(design @ found, 1e-6)
        ratios = measured / fitted
        weights = 1 / fitted  # by measured times, slow steps would count for less than quick ones
        kept = (ratios > 0.5) & (ratios < 2.0)
        if kept.sum() < MIN_STEPS:
            kept[:] = True
    knot_s = _filled(knots, found[: len(knots)], design[:, : len(knots)])
    sampling_s, context_s, pair_s, new_s, prompt_context_s = found[len(knots) :].tolist()
    times = np.array([step.end_s for step in steps]) - steps[0].end_s
    has_prompt = np.array([step.shape.num_prompt_tokens > 0 for step in steps])
    gaps = [step for step in steps if step.gap_s is not None]
    return Calibration(
        version=VERSION, model=model, machine=machine, knots=knots, knot_s=knot_s, sampling_s=sampling_s,
        context_s=context_s, pair_s=pair_s, new_s=new_s, prompt_context_s=prompt_context_s, gap_s=_fit_gaps(gaps),
        request_wait_s=float(np.median(waits_s)), request_each_s=request_each_s, delivery_s=_fit_line(deliveries),
        quiet_ratios=_series(times[~has_prompt], ratios[~has_prompt]),
        prompt_ratios=_series(times[has_prompt], ratios[has_prompt]),
        num_steps=len(steps), median_error=float(np.median(np.abs(ratios - 1))), setup=setup,
        num_threads=num_threads, num_replicas=num_replicas,
    )  # fmt: skip


def _features(shape: StepShape, knots: Sequence[int]) -> list[float]:
    """Weights of the knots beside the number of tokens, then the other terms."""
    hats = [0.0] * len(knots)
    place = min(max(1, int(np.searchsorted(knots, shape.num_tokens))), len(knots) - 1) if len(knots) > 1 else 0
    if place == 0:
        hats[0] = 1.0
    else:
        low, high = knots[place - 1], knots[place]
        share = min(1.0, max(0.0, (shape.num_tokens - low) / (high - low)))
        hats[place - 1], hats[place] = 1 - share, share
    return [
        *hats, shape.num_sampling, shape.decode_context, shape.prompt_pairs, shape.num_new, shape.prompt_context,
    ]  # fmt: skip


def _filled(knots: Sequence[int], values: np.ndarray, hats: np.ndarray) -> list[float]:
    """Knots that no step was near get what lies between their neighbours; more tokens never cost less."""
    seen = hats.sum(axis=0) > 0.5
    seen[-1] = True
    filled = np.interp(knots, np.array(knots)[seen], values[seen])
    return [float(one) for one in np.maximum.accumulate(filled)]


def _fit_gaps(steps: Sequence[StepSample]) -> tuple[float, float, float]:
    if not steps:
        return 0.0, 0.0, 0.0
    gaps = np.maximum(np.array([step.gap_s for step in steps], dtype=np.float64), 0.0)
    most = np.percentile(gaps, 99)
    rows = np.array([[1.0, step.shape.num_rows, step.shape.num_new] for step in steps])
    constant, per_row, per_new = nonnegative_least_squares(rows[gaps <= most], gaps[gaps <= most]).tolist()
    return constant, per_row, per_new


def _fit_line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    delays = np.maximum(np.array([delay for _, delay in points]), 0.0)
    kept = delays <= np.percentile(delays, 99)
    rows = np.array([[1.0, count] for count, _ in points])
    constant, per_token = nonnegative_least_squares(rows[kept], delays[kept]).tolist()
    return constant, per_token


def _series(times_s: np.ndarray, ratios: np.ndarray) -> list[tuple[float, float]]:
    """As the calibration keeps them; a machine that was seen on no such step is taken to be even."""
    if not len(ratios):
        return [(0.0, 1.0)]
    return [(round(float(at_s), 4), round(float(ratio), 4)) for at_s, ratio in zip(times_s, ratios, strict=True)]


def nonnegative_least_squares(rows: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The x >= 0 that makes |rows @ x - targets| least.

    Args:
        rows: [n, m] float64.
        targets: [n] float64.

    Returns:
        [m] float64.
    """
    scale = np.sqrt((rows**2).sum(axis=0))
    scale[scale == 0] = 1.0
    rows = rows / scale
    num = rows.shape[1]
    x, free = np.zeros(num), np.zeros(num, dtype=np.bool_)
    for _ in range(10 * num):
        gradient = rows.T @ (targets - rows @ x)
        gradient[free] = -np.inf
        if free.all() or gradient.max() <= 1e-9:
            break
        free[int(gradient.argmax())] = True
        while True:
            trial = np.zeros(num)
            trial[free] = np.linalg.lstsq(rows[:, free], targets, rcond=None)[0]
            negative = free & (trial <= 0)
            if not negative.any():
                x = trial
                break
            step = (x[negative] / np.maximum(x[negative] - trial[negative], 1e-300)).min()
            x = x + step * (trial - x)
            free &= x > 1e-12
            x[~free] = 0.0
            if not free.any():
                break
    found: np.ndarray = x / scale
    return found


def save_calibration(calibration: Calibration, path: Path) -> None:
    """Write it as JSON.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(calibration)))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", field="calibrate") from None


def _decode_spec(kind: type, value: Any) -> Any:
    if kind is not KVCacheSpec:
        raise NotImplementedError(f"no encoding for {kind}")
    return spec_from_fields(value)


def load_calibration(path: Path) -> Calibration:
    """Read what `save_calibration` wrote.

    Raises:
        ConfigError: the file cannot be read.
        ValidationError: it is not a calibration, or of another version.
    """
    try:
        if path.stat().st_size > MAX_CALIBRATION_BYTES:
            raise ConfigError(f"{path} is not a calibration: it is larger than 16 MiB", field="calibration")
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}",
            hint="create one with quire plan --calibrate",
            field="calibration",
        ) from None
    try:
        calibration = msgspec.json.decode(data, type=Calibration, dec_hook=_decode_spec)
    except (msgspec.DecodeError, ValueError) as error:
        raise ValidationError(f"{path} is not a calibration: {error}", field="calibration") from None
    lengths = {len(calibration.knots), len(calibration.knot_s)}
    if (
        calibration.version != VERSION
        or len(lengths) != 1
        or not calibration.quiet_ratios * len(calibration.prompt_ratios)
    ):
        raise ValidationError(
            f"{path} has format version {calibration.version}",
            hint="create it again: quire plan --calibrate",
            field="calibration",
        )
    return calibration
