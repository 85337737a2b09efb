"""The script around NVIDIA's checkers, with a program of the same name in their place."""

import sys

import checkers
import mlx.core as mx
import pytest
from metal.emulator import emulated

MEMCHECK = "========= ERROR SUMMARY: {} errors"
RACECHECK = "========= RACECHECK SUMMARY: {} hazards displayed (0 errors, 0 warnings)"
KERNELS = ("intra", "forward", "reverse", "delta", "pairs", "keys", "gates", "recurrent_scan", "recurrent_reverse")


@pytest.fixture
def sanitizer(tmp_path, monkeypatch):
    """Makes one that prints some lines and ends with a code."""

    def make(*lines, code=0):
        file = tmp_path / "compute-sanitizer"
        file.write_text(f"#!{sys.executable}\nimport sys\nprint({chr(10).join(lines)!r})\nsys.exit({code})\n")
        file.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))

    return make


def run(*arguments):
    with pytest.raises(SystemExit) as end:
        checkers.main(list(arguments))
    return end.value.code


@pytest.mark.parametrize("summary", [MEMCHECK, RACECHECK])
def test_clean(summary, sanitizer, capsys):
    sanitizer(checkers.DONE, summary.format(0))
    assert run() == 0
    out = capsys.readouterr().out
    assert [tool for tool in checkers.TOOLS if f"{tool}: clean" not in out] == []
    assert out.count("SUMMARY") == 3


FAULTS = {
    "errors": ((checkers.DONE, MEMCHECK.format(2)), 0),
    "one error": ((checkers.DONE, "========= ERROR SUMMARY: 1 error"), 0),
    "hazards": ((checkers.DONE, RACECHECK.format(1)), 0),
    "no summary": ((checkers.DONE,), 0),
    "no end": ((MEMCHECK.format(0),), 0),
    "exit code": ((checkers.DONE, MEMCHECK.format(0)), 3),
}


@pytest.mark.parametrize("case", FAULTS)
def test_faults(case, sanitizer, capsys):
    lines, code = FAULTS[case]
    sanitizer(*lines, code=code)
    assert run("--tool", "memcheck") == 1
    out = capsys.readouterr().out
    assert f"memcheck: FAILED, exit code {code}" in out
    assert lines[-1] in out


def test_not_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "compute-sanitizer" in run()


def test_launches(monkeypatch, capsys):
    """Every kernel of both backends, in the emulator."""
    monkeypatch.setattr(checkers, "CASES", (((1, 2, 32, 32), 1, 20, "float32", 16),))
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    with emulated(sanitize=False) as launches:
        checkers.main(["--launch"])
    mx.set_default_device(device)
    assert capsys.readouterr().out == checkers.DONE + "\n"
    names = {launch.text.name for launch in launches}
    assert [kernel for kernel in KERNELS if not any(kernel in name for name in names)] == []
