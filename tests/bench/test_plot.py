"""The picture, and what is refused before anything runs."""

import importlib.util
from pathlib import Path

import pytest
from test_table import row

from gdtrain.bench.plot import check_plot, plot
from gdtrain.bench.shapes import LOOP
from gdtrain.errors import UserError


def test_without_matplotlib(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'--plot needs matplotlib.*"gdtrain\[plot\]"'):
        check_plot(Path("x.svg"))


def test_suffix():
    with pytest.raises(UserError, match=r"--plot: x\.pdf; accepted: .*\.svg or \.png"):
        check_plot(Path("x.pdf"))


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_plot(suffix, tmp_path):
    pytest.importorskip("matplotlib")
    rows = [
        row("seed-9b", 256, LOOP, 150.0, peak_memory_gb=7.0),
        row("seed-9b", 512, LOOP, 300.0, peak_memory_gb=14.0),
        row("seed-9b", 512, "chunked", 30.0, peak_memory_gb=1.0),
        row("seed-9b", 2048, LOOP, status="skipped", note="needs 54.9 GB"),
        row("batch-rows", 64, "chunked", status="failed", note="out of memory"),
    ]
    file = tmp_path / f"x.{suffix}"
    check_plot(file)
    plot(rows, file)
    head = file.read_bytes()[:100]
    assert (b"<?xml" in head) if suffix == "svg" else head.startswith(b"\x89PNG")
