"""Scales, thinning and lines: every value in its place."""

import math
import re

import pytest

from gdtrain.reporting.charts import SIDE, Chart, Line, draw, readable
from gdtrain.reporting.scales import choose, iterations, linear, logarithmic, short
from gdtrain.reporting.thinning import thin


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 1, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (1.146, 2.46, ["1.0", "1.5", "2.0", "2.5"]),
        (0, 22.1, ["0", "5", "10", "15", "20", "25"]),
        (0, 0.0376, ["0.00", "0.01", "0.02", "0.03", "0.04"]),
        (0, 1.84e-3, ["0", "5e-4", "1e-3", "1.5e-3", "2e-3"]),
        (0, 12_345, ["0", "5k", "10k", "15k"]),
        (0, 1e-5, ["0", "2e-6", "4e-6", "6e-6", "8e-6", "1e-5"]),
        (-3, 3, ["-4", "-2", "0", "2", "4"]),
    ],
)
def test_linear_ticks(low, high, ticks):
    scale = linear(low, high)
    assert scale.labels() == ticks
    assert scale.low <= low
    assert scale.high >= high
    assert (scale.place(scale.low), scale.place(scale.high)) == (0, 1)


@pytest.mark.parametrize("value", [0.0, 1e-5, 7.3, 1e30, -2.0])
def test_one_value_has_a_scale(value):
    scale = linear(value, value)
    assert scale.low <= value <= scale.high
    assert 2 <= len(scale.ticks) <= 8
    assert len(scale.labels()) == len(scale.ticks)


@pytest.mark.parametrize(("low", "high"), [(1.0, 10.0), (0.02, 9.3), (1e-30, 1e30), (0.3, 31), (1e-5, 1e-3)])
def test_logarithmic_ticks(low, high):
    scale = logarithmic(low, high)
    assert 3 <= len(scale.ticks) <= 7
    assert all(scale.low <= tick <= scale.high for tick in scale.ticks)
    assert scale.low < low < high < scale.high
    assert scale.place(math.sqrt(scale.low * scale.high)) == pytest.approx(0.5)


@pytest.mark.parametrize("last", [0, 1, 2, 3, 7, 20, 100, 137, 1400, 2000, 99_999, 100_000, 10**9])
def test_iterations_are_whole_and_end_where_the_run_does(last):
    scale = iterations(last)
    assert (scale.low, scale.high) == (0, max(1, last))
    assert all(isinstance(tick, int) for tick in scale.ticks)
    assert 2 <= len(scale.ticks) <= 7
    assert len(set(scale.labels())) == len(scale.ticks)


def test_choice_of_scale():
    assert not choose([9.3, 6.8], zero=False, log_from=10).log
    assert choose([9.3, 0.5], zero=False, log_from=10).log
    assert not choose([9.3, 0.0], zero=False, log_from=10).log
    assert not choose([9.3, -1], zero=False, log_from=10).log
    assert choose([9.3, 6.8], zero=False, log_from=10).low > 5
    assert choose([9.3, 6.8], zero=True, log_from=math.inf).low == 0
    assert choose([0.0, 0.0], zero=True, log_from=10).high > 0


def test_numbers():
    values = [7.5706, 0.037554, 12345.6, 1.84e-3, 0.0, 1e-5, 732.52, 3e20, -0.5, 0.01]
    texts = ["7.571", "0.03755", "12,346", "1.84e-3", "0.000", "1e-5", "732.5", "3e20", "-0.5000", "0.01000"]
    assert [readable(value) for value in values] == texts
    assert [short(value) for value in (0, 5, 9000, 15_000, 2.5e6, 3e9, 5e-4)] == [
        *("0", "5", "9000", "15k", "2.5M", "3G", "5e-4")
    ]


# Thinning


def test_few_points_are_all_kept():
    points = thin([0, 5, 7], [1.0, None, 2.0], 7, 480)
    assert points.points == [(0, 1.0), (5, None), (7, 2.0)]
    assert points.means == []


def test_extremes_and_ends_are_kept():
    at = list(range(1, 100_001))
    values = [math.sin(n * n) for n in at]
    values[54_320], values[777], values[0], values[-1] = 50.0, -50.0, 0.125, 0.25
    thinned = thin(at, values, 100_000, 480)
    kept = dict(thinned.points)
    assert (kept[54_321], kept[778], kept[1], kept[100_000]) == (50.0, -50.0, 0.125, 0.25)
    assert len(thinned.points) <= 2 * 480 + 2
    assert [n for n, _ in thinned.points] == sorted(kept)
    assert all(values[n - 1] == value for n, value in thinned.points)
    columns = [[] for _ in range(481)]  # an oracle of its own: the smallest and the largest of each column are there
    for n in at:
        columns[n * 480 // 100_000].append((values[n - 1], n))
    for column in columns:
        for value, n in (min(column), max(column)):
            assert kept[n] == value
    mean = math.fsum(value for value, _ in columns[100]) / len(columns[100])
    assert thinned.means[100][1] == pytest.approx(mean)


def test_gaps_of_a_thinned_line():
    at = list(range(10_000))
    thinned = thin(at, [None if 4000 <= n < 6000 else 1.0 for n in at], 9999, 100)
    gaps = [n for n, value in thinned.points if value is None]
    assert 18 <= len(gaps) <= 20
    assert all(4000 <= n < 6000 for n in gaps)
    assert all(not 4000 < n < 5999 for n, _ in thinned.means)


# Drawing


def chart(values, at=None, *, dotted=False, **settings):
    at = list(range(0, 10 * len(values), 10)) if at is None else at
    return Chart("k", "Title", "GB", [Line("one", "a", at, values, dotted)], readable, **settings)


def coordinates(svg, kind="line a"):
    """Points of the path of that class, as fractions of the height and width, from the lower left."""
    (path,) = re.findall(rf'<path class="{kind}"[^>]* d="([^"]*)"', svg)
    return [(int(x) / SIDE, 1 - int(y) / SIDE) for x, y in re.findall(r"(-?\d+) (-?\d+)", path)]


def test_points_are_where_they_belong():
    svg = draw(chart([0.0, 2.5, 5.0, 1.0]), 40)
    bound = 0.5 / SIDE + 1e-12  # coordinates are whole
    for found, expected in zip(coordinates(svg), [(0, 0), (0.25, 0.5), (0.5, 1), (0.75, 0.2)], strict=True):
        assert found == pytest.approx(expected, abs=bound)
    assert coordinates(svg, "dots a") == coordinates(svg)


def test_a_logarithmic_line():
    svg = draw(chart([1.0, 10.0, 100.0], log_from=50), 20)
    (_, low), (_, middle), (_, high) = coordinates(svg)
    assert high - middle == pytest.approx(middle - low, abs=1 / SIDE)
    assert "log scale" in svg


def test_gaps_and_single_points():
    svg = draw(chart([1.0, None, 2.0, 3.0]), 30)
    (path,) = re.findall(r'<path class="line a"[^>]* d="([^"]*)"', svg)
    assert path.count("M") == 2
    assert path.count("h0") == 1  # the first point, which has no neighbour, is a dot
    assert 'data-x="0 20 30" data-y="1.000 2.000 3.000"' in svg


@pytest.mark.parametrize("values", [[], [None], [None, None]])
def test_nothing_to_draw(values):
    svg = draw(chart(values), 0)
    assert "no values yet" in svg
    assert "<svg" not in svg


def test_one_point():
    svg = draw(chart([3.0], [0]), 0)
    assert coordinates(svg)[0][0] == 0
    assert '<path class="dots a"' in svg


def test_dots_only_while_they_can_be_told_apart():
    assert 'class="dots' in draw(chart([1.0] * 30), 300)
    assert 'class="dots' not in draw(chart([1.0] * 31), 310)
    assert 'class="dots' in draw(chart([1.0] * 31, dotted=True), 310)


def test_best_and_parts_are_marked():
    svg = draw(chart([3.0, 1.0, 2.0], zero=False, best=(10, 1.0)), 20, [10])
    assert coordinates(svg, "ring a") == [coordinates(svg)[1]]
    assert re.search(r'<path class="mark" d="M500 0V1000"/>', svg)
    assert "best <b>1.000</b> at 10" in svg


def test_for_those_who_do_not_see_it():
    svg = draw(chart([3.0, 1.0]), 10)
    assert 'role="img" aria-labelledby="k-title"' in svg
    assert '<title id="k-title">Title over iterations: one 3.000 at iteration 0, 1.000 at 10</title>' in svg


def test_text_of_others_is_escaped():
    line = Line("<b>&\"'", "a", [0], [1.0])
    svg = draw(Chart("k", "<i>", "<u>", [line], readable), 1)
    assert not re.search(r"<(b>&|i>|u>)", svg.replace("<i></i>", ""))
    assert "&lt;b&gt;&amp;&quot;&#x27;" in svg
