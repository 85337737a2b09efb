"""The page as text: what it says of every state of a run, and that it needs nothing else."""

import re
import time
from html.parser import HTMLParser

import pytest
from report_records import CONFIG, header, long_run, run, stop, train, val

from gdtrain.reporting.page import render

REFRESH = '<meta http-equiv="refresh"'
LINKS = re.compile(
    r"""(?:src|href|url|action|srcset|poster|data)\s*[=(]\s*["']?\s*([^"'>\s)]+)|@import|https?://""", re.I
)


def text_of(page):
    """What a reader sees, without style and script."""
    page = re.sub(r"<(style|script)>.*?</\1>", "", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))


class Nesting(HTMLParser):
    """Every element is closed, in order."""

    VOID = ("meta", "link", "br")

    def __init__(self, page):
        super().__init__()
        self.open, self.faults = [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.faults.append((tag, self.getpos()))


@pytest.mark.parametrize(
    "records",
    [
        run(),
        run(40),
        [header()],
        [],
        [header(), val(0, 3.0)],
        [header(), train(10)],
        [header(), val(0, None), train(1, loss=None, grad_norm=None)],
        [*run(40), stop(40, "x < y"), header("resume", iteration=40)],
        [header(odd=float("inf"), list=[1, [2.5, None]], nested={"a": 1})],
        [{"kind": "header"}, {"kind": "train", "iteration": 3}, {"kind": "val", "iteration": 3}],
    ],
)
def test_is_well_formed_and_loads_nothing(records):
    page = render(records, CONFIG)
    found = Nesting(page)
    assert (found.open, found.faults) == ([], [])
    assert [link[0] for link in LINKS.finditer(page)] == ['href="data:,']
    assert "default-src 'none'" in page


def test_finished():
    page = render(run(), CONFIG, name="my-run")
    text = text_of(page)
    assert REFRESH not in page
    assert "my-run" in text
    assert "finished, 100 iterations" in text
    assert "resumed" not in text
    assert page == render(iter(run()), CONFIG, name="my-run")


def test_running():
    page = render(run(40), CONFIG)
    assert REFRESH in page
    assert "running, 40 of 100 iterations" in text_of(page)
    assert '<progress max="100" value="40"' in page


def test_a_run_ends_with_its_last_validation_and_not_before():
    records = run()
    assert records[-1]["kind"] == "val"
    assert REFRESH in render(records[:-1], CONFIG)
    assert REFRESH not in render([record for record in records if record["kind"] != "val"], CONFIG)


def test_stopped():
    page = render([*run(40), stop(41, "loss is <nan>")], CONFIG)
    assert REFRESH not in page
    assert "stopped at iteration 41 of 100 loss is &lt;nan&gt;" in text_of(page)


def test_broken_off():
    page = render(run(40), CONFIG, running=False)
    assert REFRESH not in page
    assert "broken off, 40 of 100 iterations" in text_of(page)
    assert "--resume" in page
    assert "broken off" not in render(run(), CONFIG, running=False)


def test_header_only():
    page = render([header()], CONFIG)
    assert REFRESH in page
    assert "running, 0 of 100 iterations" in text_of(page)
    assert "none yet" in page
    assert page.count("no values yet") == 5


# A run that was resumed


def test_later_records_count():
    again = [train(n, loss=0.5) for n in range(45, 101, 5)]
    records = [*run(60), header("resume", iteration=40, mlx="0.33.0", iterations=200), *again, val(100, 0.25)]
    text = text_of(render(records, CONFIG))
    assert "resumed at iteration 40; 5 records after it no longer count; mlx 0.33.0 instead of 0.32.4" in text
    assert "iterations 200 instead of 100" in text
    assert "running, 100 of 200 iterations" in text
    loss = render(records, CONFIG).split('id="loss-title">')[1]
    data = dict(zip(*(re.search(rf'data-{axis}="([^"]*)"', loss)[1].split() for axis in "xy"), strict=True))
    assert list(data) == [str(n) for n in range(5, 101, 5)]
    assert {data[str(n)] for n in range(45, 101, 5)} == {"0.5000"}
    assert data["40"] != "0.5000"
    assert "1.500" not in re.search(r"<tbody>.*</tbody>", render(records, CONFIG))[0]  # validation 60 is of no run now


def test_a_stop_before_a_resume_is_not_the_end():
    page = render([*run(40), stop(40, "interrupted"), header("resume", iteration=40)], CONFIG)
    assert REFRESH in page
    assert "interrupted" not in page
    assert "resumed at iteration 40" in page


def test_a_second_header_and_repeated_records():
    """Without an iteration, as another version might write it: nothing is taken away, the later ones count."""
    second = {key: value for key, value in header().items() if key != "iteration"}
    page = render([*run(40), second, train(40, loss=9.0), train(45, loss=8.0)], CONFIG)
    assert "resumed at iteration 40" in page
    assert 'data-x="5 10 15 20 25 30 35 40 45"' in page
    assert "9.000 8.000" in page


# Figures


def test_table():
    page = render(run(), CONFIG)
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", page)
    cells = [[re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row)] for row in rows]
    assert cells[0] == ["Iter", "Val loss", "Peak mem"]
    assert cells[1:3] == [["0", "3.200", "21.50 GB"], ["20", "2.300", "21.50 GB"]]
    assert cells[4] == ["60", "best 1.500", "21.50 GB"]
    assert len(cells) == 1 + 6
    assert page.count(">best<") == 1


def test_facts():
    text = text_of(render([header(wired_limit_gb=20, novel_key="novel <value>")], CONFIG))
    for fact in (
        "Versions gdtrain 0.1.0, mlx 0.32.4, mlx-lm 0.32.2",
        "Device gpu (Some Chip)",
        "Model some/model",
        "Kernel fused: self-test 3e-7",
        "Convolution kernel: self-test 1e-7",
        "Compiled off: slower on this device",
        "GDN layers 24 of 24 on the trainable path",
        "Parameters 60,608 trainable, 990,560 in all",
        "Rows 3,588",
        "Supervised tokens 51,649",
        "Longest batch 4 x 127 positions, 0.6 s, peak 0.037 GB",
        "Limits wired limit 20 GB",
        "novel_key novel &lt;value&gt;",
    ):
        assert fact in text


def test_values_that_are_not_finite_are_counted_and_left_out():
    records = [header(), val(0, None), train(5, loss=None), train(10), train(15, loss=float("nan")), val(20, 2.0)]
    text = text_of(render(records, CONFIG))
    assert "2 train losses are not finite" in text
    assert "1 validation loss is not finite" in text
    assert "0 not finite 21.50 GB" in text
    assert "best 2.000 at 20" in text


def test_config_is_shown_as_it_is():
    assert "<pre tabindex" in render([], CONFIG)
    assert CONFIG in render([], CONFIG)
    assert "a: &lt;/pre&gt;&lt;script&gt;" in render([], "a: </pre><script>")


def test_all_text_is_escaped():
    evil = "</title></script><script>alert(1)</script>\"'\ud800"
    hostile = header(**{key: evil for key, value in header().items() if isinstance(value, str) and key != "kind"})
    hostile[evil] = evil
    page = render([hostile, header("resume", iteration=0, kernel="a" + evil), stop(0, evil)], evil, name=evil)
    assert page.count("<script") == 1
    assert "alert(1)</script>" not in page
    page.encode()


# Size


@pytest.fixture(scope="module")
def long_records():
    return long_run()


def test_a_long_run_is_a_small_page(long_records):
    page = render(long_records, CONFIG)
    assert len(page) < 300_000
    assert "7.770" in page  # the outliers are there
    assert "0.01230" in page
    assert "means, extremes faint" in page
    assert "700 rows are left out; metrics.jsonl has them" in page
    assert "finished, 100,000 iterations" in page


def test_a_long_run_is_rendered_in_a_second(long_records):
    """Of processor time, the best of three: other tests may run on the same cores."""
    times = []
    for _ in range(3):
        start = time.process_time()
        render(long_records, CONFIG)
        times.append(time.process_time() - start)
    assert min(times) < 1
