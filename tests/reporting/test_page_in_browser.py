"""The page in headless Chromium: nothing loaded, nothing cut off, legible on a phone and in the dark, every point in
its place. Each check is also shown a page with the fault that it is there for."""

import itertools
import math
import re
import time

import pytest
from browser import NAMES, find_chromium
from report_records import CONFIG, header, long_run, run, stop, train, val

from gdtrain.reporting.page import render

PHONE, DESK = 360, 1400
LONG = "a-very-long-name-without-any-space-" * 5


def short_losses():
    """Few points, far apart, on a linear axis."""
    at = [0, 10, 20, 30, 40]
    losses = [3.0, 2.4, 1.1, 2.7, 1.6]
    return [header(iterations=50), *(train(n, loss=x) for n, x in zip(at, losses, strict=True)), val(40, 2.05)]


PAGES = {
    "running": lambda: render(run(40), CONFIG, name="running"),
    "finished": lambda: render(run(), CONFIG, name="finished"),
    "stopped": lambda: render([*run(40), stop(41, LONG)], CONFIG, name=LONG),
    "resumed": lambda: render([*run(60), header("resume", iteration=40, device=LONG)], CONFIG),
    "broken": lambda: render(run(40), CONFIG, running=False),
    "header": lambda: render([header(model=f"/folder/{LONG}", kernel_reason=LONG)], f"model: {LONG}\n"),
    "one": lambda: render([header(), train(10), val(10, 3.0)], CONFIG),
    "long": lambda: render(long_run(), CONFIG),
    "large": lambda: render([header(), train(10**9, loss=1e30, tokens_per_second=1e9, grad_norm=1e-30)], CONFIG),
}
# Text with less contrast to what is behind it than WCAG's 4.5, or smaller than 12 pixels, and lines with less than 3.
FAULTS = """(() => {
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(c => c / 255)
    .map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const contrast = (one, other) => {
    const [a, b] = [light(one), light(other)].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  };
  const behind = element => {
    for (; element; element = element.parentElement) {
      const colour = parse(getComputedStyle(element).backgroundColor);
      if (colour[3] !== 0) return colour;
    }
    return [255, 255, 255];
  };
  const faults = [];
  for (const element of document.body.querySelectorAll('*')) {
    const style = getComputedStyle(element), name = element.tagName + '.' + element.getAttribute('class');
    const text = [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim());
    if (text && !['SCRIPT', 'title', 'PROGRESS'].includes(element.tagName)) {
      const found = contrast(parse(style.color), behind(element));
      if (found < 4.5) faults.push(`${name}: contrast ${found.toFixed(2)}`);
      if (parseFloat(style.fontSize) < 12) faults.push(`${name}: ${style.fontSize}`);
    }
    if (element.matches('path.line:not(.behind), path.dots, path.ring, path.mark')) {
      const found = contrast(parse(style.stroke), behind(element));
      if (found < 3) faults.push(`${name}: contrast ${found.toFixed(2)} of a line`);
    }
  }
  return faults;
})()"""
# What reaches beyond the window, or out of a box that does not scroll.
OUTSIDE = """(() => {
  const width = document.documentElement.clientWidth, faults = [];
  if (document.documentElement.scrollWidth > width) faults.push('the page scrolls sideways');
  for (const element of document.body.querySelectorAll('*')) {
    if (element.closest('.box, pre, svg, script')) continue;
    const box = element.getBoundingClientRect();
    const outside = box.width && (box.right > width + 0.5 || box.left < -0.5);
    if (outside) faults.push(element.tagName + '.' + element.className);
  }
  return faults;
})()"""
# For a chart: the points of its lines and the middles of the labels of both axes, in pixels of the window.
GEOMETRY = """(key => {
  const svg = document.querySelector(`#${key} svg`), matrix = svg.getScreenCTM();
  const points = path => [...path.getAttribute('d').matchAll(/(-?\\d+) (-?\\d+)/g)]
    .map(([, x, y]) => new DOMPoint(x, y).matrixTransform(matrix)).map(p => [p.x, p.y]);
  const middle = span => {
    const text = document.createRange();
    text.selectNodeContents(span);
    const box = text.getBoundingClientRect();
    return [span.textContent, (box.left + box.right) / 2, (box.top + box.bottom) / 2];
  };
  return {
    lines: [...svg.querySelectorAll('path.line')].map(path => ({points: points(path), x: path.dataset.x})),
    columns: [...document.querySelectorAll(`#${key} .xs span:not(.first):not(.last)`)].map(middle),
    rows: [...document.querySelectorAll(`#${key} .ys span`)].map(middle),
  };
})"""


@pytest.fixture
def show(browser, tmp_path):
    """show(page, width, dark=False): opens a page in the browser and returns it."""

    def shower(page, width=DESK, **settings):
        file = tmp_path / "report.html"
        file.write_text(page, encoding="utf-8")
        browser.open(file, width=width, **settings)
        return browser

    return shower


@pytest.fixture(scope="module")
def pages():
    return {name: make() for name, make in PAGES.items()}


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_nothing_is_loaded_cut_off_or_complained_about(show, pages, name, width):
    browser = show(pages[name], width)
    assert [address.rsplit("/", 1)[1] for address in browser.requests()] == ["report.html"]
    assert browser.complaints() == []
    assert browser.evaluate(OUTSIDE) == []


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_everything_can_be_read(show, pages, name, dark):
    for width in (PHONE, DESK):
        browser = show(pages[name], width, dark=dark)
        assert browser.evaluate(FAULTS) == []
        red = browser.evaluate("+getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]")
        assert red < 40 if dark else red > 215


def test_the_checks_see_their_faults(show, pages):
    page = pages["finished"]
    wide = page.replace("<main>", '<main><div style="width:500px">x</div>')
    assert show(wide, PHONE).evaluate(OUTSIDE) == ["the page scrolls sideways", "DIV."]
    faint = page.replace("--soft:#5a636e", "--soft:#999")
    assert any("contrast 2." in fault for fault in show(faint).evaluate(FAULTS))
    assert show(faint, dark=True).evaluate(FAULTS) == []
    assert any("of a line" in fault for fault in show(page.replace("--a:#2563c4", "--a:#8fb4f0")).evaluate(FAULTS))
    small = page.replace("font-size:.75rem", "font-size:.7rem")
    assert any("11.2px" in fault for fault in show(small).evaluate(FAULTS))
    asking = page.replace("<main>", '<main><img src="https://example.com/x.png"><script>alert(1)</script>')
    complaints = show(asking).complaints()
    assert any("img-src" in text for text in complaints)
    assert any("script-src" in text for text in complaints)
    free = re.sub(r"<meta http-equiv=.Content[^>]*>", "", page).replace("<main>", '<main><img src="http://a.b/c.png">')
    assert "http://a.b/c.png" in show(free).requests()


def interpolated(labels, value, *, log=False):
    """The pixel at which `value` lies between the labels [(text, pixel)], by the two that are furthest apart."""
    units = {"k": 1e3, "M": 1e6}
    read = [(float(text.rstrip("kM")) * units.get(text[-1], 1), pixel) for text, pixel in labels]
    (a, at_a), (b, at_b) = min(read), max(read)
    scale = math.log if log else float
    return at_a + (scale(value) - scale(a)) / (scale(b) - scale(a)) * (at_b - at_a)


def check_places(browser, key, lines, *, log=False):
    """That each line's points lie where the labels of the axes say, within 1.5 pixels: 0.5 for the whole coordinates in
    the SVG, 1 for the middle of a label's text, whose digits do not fill their line."""
    found = browser.evaluate(f"{GEOMETRY}({key!r})")
    columns = [(text, x) for text, x, _ in found["columns"]]
    rows = [(text, y) for text, _, y in found["rows"]]
    for line, values in zip(found["lines"], lines, strict=True):
        assert len(line["points"]) == len(values)
        for (x, y), (n, value) in zip(line["points"], values, strict=True):
            assert x == pytest.approx(interpolated(columns, n), abs=1.5)
            assert y == pytest.approx(interpolated(rows, value, log=log), abs=1.5)


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_points_are_where_the_axes_say(show, width):
    records = short_losses()
    browser = show(render(records, CONFIG), width)
    trained = [(r["iteration"], r["loss"]) for r in records if r["kind"] == "train"]
    check_places(browser, "loss", [trained, [(40, 2.05)]])
    memory = [[(n, value) for n, _ in trained] for value in (21.5, 14.2, 3.1)]
    check_places(browser, "memory", memory)
    check_places(browser, "speed", [[(n, 1800 + n % 7) for n, _ in trained]])
    check_places(browser, "rate", [[(n, 1e-5 * min(1, n / 20)) for n, _ in trained]])
    check_places(browser, "norm", [[(n, 1.5) for n, _ in trained]])
    with pytest.raises(AssertionError):  # the check can fail
        check_places(browser, "loss", [[(n, value + 0.05) for n, value in trained], [(40, 2.05)]])


def test_points_of_a_logarithmic_axis(show):
    losses = [(0, 9.0), (10, 2.0), (20, 0.35), (30, 0.08), (40, 0.02)]
    browser = show(render([header(), *(train(n, loss=x) for n, x in losses)], CONFIG))
    check_places(browser, "loss", [losses], log=True)


def test_lines_fill_their_charts(show, pages):
    """From the first iteration to the last, and not beyond the axes."""
    found = show(pages["long"]).evaluate(f"{GEOMETRY}('loss')")
    box = show(pages["long"]).evaluate(
        "(({left, right, top, bottom}) => [left, right, top, bottom])"
        "(document.querySelector('#loss .over').getBoundingClientRect())"
    )
    xs, ys = zip(*itertools.chain(*(line["points"] for line in found["lines"])), strict=True)
    assert (min(xs), max(xs)) == pytest.approx(box[:2], abs=1)
    assert box[2] - 1 <= min(ys)
    assert max(ys) <= box[3] + 1


def test_complete_without_javascript(show, pages):
    for page in pages.values():
        silent = re.sub(r"<script>.*</script>", "", page, flags=re.DOTALL)
        reading = "document.body.innerText.replace(/\\s+/g, ' ')"
        assert show(page).evaluate(reading) == show(silent).evaluate(reading)
        assert show(silent).evaluate("document.querySelectorAll('path.line').length") == page.count('<path class="line')


def test_read_out(show):
    browser = show(render(short_losses(), CONFIG))
    legend = "[...document.querySelectorAll('#loss .legend b')].map(b => b.textContent)"
    rest = browser.evaluate(legend)
    assert rest == ["1.600", "2.050", "2.050"]
    box = browser.evaluate(
        "(({left, top, width, height}) => [left, top, width, height])"
        "(document.querySelector('#loss .over').getBoundingClientRect())"
    )
    for n, shown in ((0, "3.000"), (10, "2.400"), (20, "1.100"), (30, "2.700")):
        x, y = box[0] + (n + 2) / 40 * box[2], box[1] + box[3] / 2
        browser.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        assert browser.evaluate(legend) == [shown, "2.050 at 40", "2.050"]
        assert browser.evaluate("document.querySelector('#loss .at').textContent") == f"iteration {n}"
    browser.send("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    assert browser.evaluate(legend) == rest
    assert browser.complaints() == []


def test_table_and_state(show, pages):
    browser = show(pages["finished"])
    rows = browser.evaluate("[...document.querySelectorAll('tr')].map(tr => [...tr.cells].map(td => td.innerText))")
    assert rows[0] == ["Iter", "Val loss", "Peak mem"]
    assert rows[1] == ["0", "3.200", "21.50 GB"]
    assert rows[4] == ["60", "best 1.500", "21.50 GB"]
    assert browser.evaluate("document.querySelector('.status').innerText") == "finished, 100 iterations"
    assert browser.evaluate("document.title") == "finished: finished, 100 iterations"


def test_text_of_others_runs_nothing(show):
    evil = "</pre></title><script>window.ran = 1</script><img src=x onerror='window.ran = 1'>"
    browser = show(render([header(model=evil, device=evil), stop(3, evil)], evil, name=evil))
    assert browser.evaluate("window.ran === undefined")
    assert browser.evaluate("document.querySelector('h1').textContent") == evil
    assert browser.evaluate("document.querySelector('pre').textContent") == evil
    assert browser.complaints() == []


def test_a_page_of_a_run_that_goes_on_follows_it(show, pages, tmp_path):
    """Reloaded by itself until the run has ended, and no longer then."""

    def faster(page):
        return page.replace('"refresh" content="30"', '"refresh" content="1"')

    browser = show(faster(pages["running"]))
    (tmp_path / "report.html").write_text(faster(pages["finished"]), encoding="utf-8")
    wait_until(lambda: browser.evaluate("document.title").startswith("finished"))
    browser.events.clear()
    (tmp_path / "report.html").write_text(pages["stopped"], encoding="utf-8")
    time.sleep(1.5)
    assert browser.evaluate("document.title").startswith("finished")
    assert browser.requests() == []


def wait_until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_no_browser_fails_under_ci_alone(monkeypatch, tmp_path, ci, outcome):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr("browser.MAC", str(tmp_path / "none"))
    with pytest.raises(outcome, match=NAMES[0]):
        find_chromium()
