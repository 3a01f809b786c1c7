"""The picture of a run: well-formed, with a point for each measurement, at its place."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ElementTree

import pytest

from quire.bench import plot as plots
from quire.bench.records import Failure, RequestRecord
from quire.bench.svg import Panel, figure, ticks

SVG = "{http://www.w3.org/2000/svg}"


def make_records(count: int, num_events: int) -> list[RequestRecord]:
    records = []
    for index in range(count):
        started_s = 10.0 + index
        times = [started_s + 0.5 + 0.01 * (number + index) for number in range(num_events)]
        records.append(
            RequestRecord(
                index=index, due_s=started_s, dispatched_s=started_s, started_s=started_s,
                ended_s=times[-1], event_times=times,
            )
        )  # fmt: skip
    failed = RequestRecord(index=count, due_s=0, dispatched_s=0, started_s=0, failure=Failure("x", "y"))
    return [*records, failed]


def circles(svg: str) -> list[list[tuple[float, float]]]:
    """Places of the points of each panel."""
    panels = ElementTree.fromstring(svg).iter(f"{SVG}g")
    return [[(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in g.iter(f"{SVG}circle")] for g in panels]


def test_every_request_and_every_interval_is_a_point():
    svg = plots.plot(make_records(7, 5), 10.0, 'a <model> & "more"')
    assert [len(panel) for panel in circles(svg)] == [7, 0, 28, 0]
    texts = [text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert 'a <model> & "more"' in texts and "7 requests answered, 1 failed" in texts
    assert sum(1 for _ in ElementTree.fromstring(svg).iter(f"{SVG}polyline")) == 2


def test_many_points_are_thinned_and_the_largest_stays(monkeypatch):
    monkeypatch.setattr(plots, "MAX_POINTS", 50)
    records = make_records(90, 2)
    records[41].event_times = [20.0 + 41, 25.0 + 41]
    svg = plots.plot(records, 10.0, "t")
    assert [len(panel) for panel in circles(svg)] == [45, 0, 45, 0]
    highest = min(y for _, y in circles(svg)[2])
    assert sum(y == highest for _, y in circles(svg)[2]) == 1
    assert "45 of 90 points" in svg


def test_levels_and_the_curve_are_percentiles_of_all_values(monkeypatch):
    monkeypatch.setattr(plots, "MAX_POINTS", 10)
    records = make_records(101, 1)  # 500, 510, ... 1500 ms
    svg = ElementTree.fromstring(plots.plot(records, 10.0, "t"))
    texts = [text.text for text in svg.iter(f"{SVG}text")]
    assert "p50 1000" in texts and "p99 1490" in texts
    (curve, *_) = [line.attrib["points"].split() for line in svg.iter(f"{SVG}polyline")]
    heights = [float(point.partition(",")[2]) for point in curve]
    assert len(curve) == 101 and heights == sorted(heights, reverse=True)
    steps = [before - after for before, after in itertools.pairwise(heights)]
    assert max(steps) - min(steps) < 0.21  # evenly spread values make a straight line


def test_a_run_without_an_answer_has_a_picture_too():
    assert circles(plots.plot(make_records(0, 1), 0.0, "t")) == [[], [], [], []]


def test_points_are_where_their_values_say():
    points = [(0.0, 0.0), (5.0, 50.0), (10.0, 100.0)]
    svg = figure("t", "s", [[Panel(title="a", x_label="x", y_label="y", points=points)]])
    (x0, y0), (x1, y1), (x2, y2) = circles(svg)[0]
    assert (x1 - x0, y1 - y0) == pytest.approx((x2 - x1, y2 - y1), abs=0.11)
    assert x0 < x2 and y0 > y2


@pytest.mark.parametrize(
    ("high", "expected"),
    [(10, [0, 2, 4, 6, 8, 10]), (0.8, [0, 0.2, 0.4, 0.6, 0.8]), (149, [0, 50, 100, 150]), (0.0, [0, 0.2])],
)
def test_axes_have_round_numbers(high: float, expected: list[float]):
    assert ticks(0.0, high) == pytest.approx(expected)
