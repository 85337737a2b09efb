"""The command as a user meets it: in a process of its own, or main() in this one where many cases would be slow."""

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import mlx.core as mx
import numpy as np

import gdtrain.cli

SCRIPT = str(Path(sys.executable).with_name("gdtrain"))


class Result(NamedTuple):
    code: int
    out: str
    err: str


def run(*args: object, **environment: str) -> Result:
    """The installed script in a new process, in the current directory, its output piped."""
    command = [SCRIPT, *map(str, args)]
    done = subprocess.run(command, capture_output=True, env=environ(**environment), timeout=120, check=False)
    return Result(done.returncode, done.stdout.decode(), done.stderr.decode())


def environ(**changes: str) -> dict[str, str]:
    """Of a child: as here, uncompiled, without what would force or forbid colours."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    return inherited | {"MLX_DISABLE_COMPILE": "1"} | changes


def call(*args: object) -> Result:
    """main() in this process. Whatever it lets through besides SystemExit would be a traceback, and fails the test."""
    out, err = io.StringIO(), io.StringIO()
    arguments = mock.patch.object(sys, "argv", ["gdtrain", *map(str, args)])
    with arguments, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            gdtrain.cli.main()
        except SystemExit as end:
            return Result(end.code if isinstance(end.code, int) else 1, out.getvalue(), err.getvalue())


def finish(*args: object) -> str:
    """call() of what must succeed; returns its output."""
    result = call(*args)
    assert (result.code, result.err) == (0, ""), result.err
    return result.out


def write_rows(file: str | Path, rows: Iterable[Any]) -> None:
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_config(file: str | Path = "c.yaml", **keys: Any) -> Path:
    """A config; JSON values are YAML values."""
    Path(file).write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in keys.items()), encoding="utf-8")
    return Path(file)


def metrics(folder: str | Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The records of a run, of one kind or of all."""
    lines = Path(folder, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if kind in (None, record["kind"])]


def evaluated(*args: object) -> dict[str, Any]:
    """What `gdtrain eval ... --json` writes."""
    finish("eval", *args, "--json", "evaluated.json")
    return json.loads(Path("evaluated.json").read_text(encoding="utf-8"))


def adapter(folder: str | Path) -> dict[str, np.ndarray]:
    """The tensors of adapters.safetensors."""
    return {name: np.array(x) for name, x in mx.load(str(Path(folder, "adapters.safetensors"))).items()}


def distance(x: np.ndarray, y: np.ndarray) -> float:
    """Relative L2 of x to y."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    return float(np.linalg.norm(x - y) / np.linalg.norm(y))
