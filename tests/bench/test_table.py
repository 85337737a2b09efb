"""Rows as text, and the two published tables."""

from gdtrain.bench.rows import Row
from gdtrain.bench.shapes import LOOP, PRESETS
from gdtrain.bench.table import plain, tables


def row(shape, T, backend, ms=None, *, B=1, path=None, **more):
    measured = {} if ms is None else {"forward_ms": ms / 3, "forward_backward_ms": ms, "repeats": 20}
    return Row(shape, *PRESETS[shape].shape, B, T, "bfloat16", backend, path or backend, **measured, **more)


def test_seed_9b():
    rows = [
        row("seed-9b", 512, LOOP, 304.0, peak_memory_gb=14.2),
        row("seed-9b", 512, "replay", 296.34),
        row("seed-9b", 512, "fused", 28.21, auto=True, peak_memory_gb=3.04),
        row("seed-9b", 2048, LOOP, status="skipped", note="needs 54.9 GB, the budget is 36.0 GB"),
        row("seed-9b", 2048, "replay", 1233.5),
        row("seed-9b", 2048, "fused", 149.8, auto=True, peak_memory_gb=8.1),
    ]
    full, seed = tables(rows, "0.32.4", metal=True)
    assert list(plain(seed))[1:] == [
        "   T  use_kernel=False (ops) fwd+bwd  Python VJP (replay) fwd+bwd  Metal VJP (fused) fwd+bwd  "
        "Peak mem (Metal VJP)",
        " 512                        304.0 ms                     296.3 ms                    28.2 ms  "
        "             3.04 GB",
        "2048                         skipped                     1,234 ms                   149.8 ms  "
        "             8.10 GB",
    ]
    lines = list(plain(full))
    assert lines[0] == "seed-9b: Hk 16, Hv 64, Dk 192, Dv 128, bfloat16"
    assert "skipped: needs 54.9 GB, the budget is 36.0 GB" in lines[5]
    assert "fused (auto)" in lines[4]


def test_batch_rows():
    rows = [
        row("batch-rows", 64, LOOP, 30.0, B=2, error=3.1e-3, error_tensor="db"),
        row("batch-rows", 64, "replay", 12.0, B=2, error=1.7e-3, error_tensor="dk"),
        row("batch-rows", 64, "chunked", 6.0, B=2, auto=True, error=1.6e-3, error_tensor="dk"),
    ]
    _, seed = tables(rows, "0.32.4", metal=False)
    assert seed.heads == ["MLX", "B", LOOP, "list + stack (replay)", "auto (chunked)", "worst error of the three"]
    assert seed.cells == [["0.32.4", "2", "30.0 ms", "12.0 ms", "6.00 ms", "3.1e-03 db"]]


def test_nothing_measured():
    rows = [row("seed-9b", 256, LOOP, status="failed", note="out of memory")]
    full, seed = tables(rows, "0.32.4", metal=False)
    assert full.cells[0][-1] == "failed: out of memory"
    assert seed.cells == [["256", "failed", "-", "-", "-"]]


def test_long_notes_go_below_once():
    reason = "backend 'fused' is not available here: it needs a GPU as MLX's default device"
    rows = [row("seed-9b", T, "fused", path="-", status="refused", note=reason) for T in (256, 512)]
    full, _ = tables(rows, "0.32.4", metal=False)
    assert [cells[-1] for cells in full.cells] == ["refused: (1)", "refused: (1)"]
    assert full.footnotes == [f"(1) {reason}"]
    assert list(plain(full))[-1] == f"(1) {reason}"
