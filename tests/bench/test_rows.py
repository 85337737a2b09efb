"""A row for everything that was asked for, whatever happens to it."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from gdkernels import BACKENDS, Choice

import gdtrain.bench.rows as rows_module
from gdtrain.bench.rows import Limits, run_case
from gdtrain.bench.shapes import LOOP, Case, Shape

CASE = Case("tiny", Shape(1, 2, 16, 8), 1, 24, "bfloat16")
LIMITS = Limits(10**9, repeats=1)


def run(*backends, case=CASE, limits=LIMITS):
    return {row.backend: row for row in run_case(case, backends, limits)}


def test_measured():
    rows = run("chunked", "auto", LOOP)
    assert list(rows) == [LOOP, "chunked", "auto"]
    for row in rows.values():
        assert (row.status, row.note, row.repeats) == ("ok", "", 1)
        assert row.forward_ms > 0
        assert row.bytes_per_token == pytest.approx(1e9 * row.peak_memory_gb / 24)
        assert 1e-5 < row.error < 2e-2  # bfloat16 against float32
        assert row.error_tensor
    assert rows["auto"].path == "chunked"
    assert rows["chunked"].auto
    assert "CPU" in rows["chunked"].reason
    assert rows[LOOP].speedup == 1
    assert rows["chunked"].speedup == rows[LOOP].forward_backward_ms / rows["chunked"].forward_backward_ms


def test_reference_of_the_errors_has_none():
    rows = run("chunked", "replay", case=CASE._replace(dtype="float32"))
    assert (rows["chunked"].error, rows["chunked"].note) == (None, "the reference of the errors")
    assert rows["replay"].error < 1e-4


def test_over_budget():
    case = Case("", Shape(1, 2, 64, 64), 1, 120, "bfloat16")
    rows = run(LOOP, "chunked", case=case, limits=Limits(10_000_000, repeats=1))
    assert rows[LOOP].status == "skipped"
    assert rows[LOOP].note == "needs 0.017 GB, the budget is 0.010 GB"
    assert rows[LOOP].forward_ms is None
    assert rows["chunked"].status == "ok"
    assert rows["chunked"].speedup is None


@pytest.mark.parametrize("backend", ["chunked", "auto"])
def test_over_budget_without_a_self_test(backend, monkeypatch):
    """A row that does not fit compiles nothing."""

    def explain(*sizes, **options):
        raise AssertionError("the self-test ran")

    monkeypatch.setattr(rows_module, "explain", explain)
    row = run(backend, limits=Limits(1000, repeats=1))[backend]
    assert (row.status, row.path, row.auto) == ("skipped", "chunked", True)
    assert row.estimated_memory_gb > 0


def test_path_after_a_failed_self_test_has_to_fit_too(monkeypatch):
    """`auto` expects one path and takes another, which needs more."""
    monkeypatch.setattr(rows_module, "explain", lambda *sizes, **options: Choice("replay", "chunked failed"))
    monkeypatch.setattr(rows_module, "estimate_bytes", lambda case, path: 2000 if path == "replay" else 500)
    row = run("auto", limits=Limits(1000, repeats=1))["auto"]
    assert (row.status, row.path, row.reason) == ("skipped", "replay", "chunked failed")


def test_refused_by_its_sizes(monkeypatch):
    refusing = replace(BACKENDS["fused"], refusal=lambda sizes: "it needs a GPU")
    monkeypatch.setitem(rows_module.BACKENDS, "fused", refusing)
    row = run("fused")["fused"]
    assert (row.status, row.path, row.auto, row.estimated_memory_gb) == ("refused", "", False, None)
    assert "needs a GPU" in row.note


def test_reference_over_budget(monkeypatch):
    """The row is measured, without its error."""
    estimate = rows_module.estimate_bytes
    monkeypatch.setattr(rows_module, "estimate_bytes", lambda c, b: 10**12 if c.dtype == "float32" else estimate(c, b))
    row = run("chunked")["chunked"]
    assert row.status == "ok"
    assert (row.error, row.note) == (None, "error not measured: the reference needs 1000.0 GB")


def test_slow(monkeypatch):
    monkeypatch.setattr(rows_module, "_SLOW_SECONDS", 0)
    long = CASE._replace(T=200)
    row = run("replay", case=long)["replay"]
    assert row.status == "skipped"
    assert row.note.startswith("would take about")
    assert row.note.endswith("--slow runs it")
    assert run("replay", case=long, limits=Limits(10**9, 1, slow=True))["replay"].status == "ok"
    assert run("replay")["replay"].status == "ok"  # too short to guess


def test_refused(monkeypatch):
    def refuse(*sizes, backend="auto", **options):
        raise ValueError(f"backend {backend!r} needs a GPU\nsecond line")

    monkeypatch.setattr(rows_module, "explain", refuse)
    row = run("chunked")["chunked"]
    assert (row.status, row.note, row.path) == ("refused", "backend 'chunked' needs a GPU", "")


@pytest.mark.parametrize(
    ("error", "note"),
    [
        (RuntimeError("[malloc] Unable to allocate 10 bytes."), "out of memory"),
        (RuntimeError("kernel did not compile\nline 1"), "RuntimeError: kernel did not compile"),
        (IndexError("a bug"), "IndexError: a bug"),
    ],
)
def test_failure_is_a_row(error, note, monkeypatch):
    whole = rows_module.layer_rule

    def broken(inputs, backend, *options):
        if backend == "replay":
            raise error
        return whole(inputs, backend, *options)

    monkeypatch.setattr(rows_module, "layer_rule", broken)
    rows = run("replay", "chunked")
    assert (rows["replay"].status, rows["replay"].note) == ("failed", note)
    assert rows["chunked"].status == "ok"


def test_not_finite_is_said(monkeypatch):
    made = rows_module.results

    def results(*arguments):
        tensors = made(*arguments)
        if arguments[1][0].dtype == mx.bfloat16:
            tensors["dk"] = np.full_like(tensors["dk"], np.nan)
        return tensors

    monkeypatch.setattr(rows_module, "results", results)
    row = run("chunked")["chunked"]
    assert (row.status, row.error, row.note) == ("ok", None, "dk is not finite")


def test_tf32_device_compares_with_replay(monkeypatch):
    monkeypatch.setattr(rows_module, "products_are_exact", lambda: False)
    rows = run("chunked", "replay", case=CASE._replace(dtype="float32"))
    assert rows["chunked"].error < 1e-4
    assert rows["replay"].note == "the reference of the errors"


def test_repeats_shrink_where_one_takes_seconds():
    limits = Limits(1)
    usual = limits.count(1.0)
    assert usual >= 5
    assert limits.count(4000) == 2
    assert limits.count(60_000) == 1
    assert Limits(1, repeats=7).count(60_000) == 7
