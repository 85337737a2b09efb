"""Kills a run again and again and goes on with it: python tests/cli/kill_runs.py FOLDER KILLS. c.yaml and data are in
the folder.

Prints JSON: {"kills", "in_writing": kills that left a part of a file or folder, "iterations": of the newest checkpoint
after each kill}. Of five kills, -9, four come at a random moment after the checkpoint that the run began with has a
successor, and one at any moment from the start of the process on.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import datasets  # noqa: F401  # what a run imports, once for all of them
import mlx.core as mx
import transformers  # noqa: F401

import gdtrain.cli
import gdtrain.commands.finetune
from gdtrain.files import PARTIAL
from gdtrain.run_directory import checkpoint_folders
from gdtrain.training.checkpoint import read_checkpoint

RUN = Path("run")


def fork(*args: object, output: Path) -> int:
    """Start `gdtrain ...` in a fork, its output appended to a file. MLX has not computed yet in this process."""
    if process := os.fork():
        return process
    try:
        mx.disable_compile()
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
        sys.argv = ["gdtrain", *map(str, args)]
        gdtrain.cli.main()
    except SystemExit as end:
        os._exit(int(end.code or 0))
    finally:
        os._exit(99)


def main(folder: str, kills: str) -> None:
    os.chdir(folder)
    draw = random.Random(0)
    newest, in_writing = [0], 0
    for kill in range(int(kills)):
        process = fork("finetune", "c.yaml", *(["--resume"] if newest[-1] else []), output=Path("log"))
        anywhere = kill % 5 == 4
        while not anywhere and (not (folders := checkpoint_folders(RUN)) or int(folders[-1].name) <= newest[-1]):
            time.sleep(0.002)
            if os.waitpid(process, os.WNOHANG)[0]:
                sys.exit(f"a run ended by itself:\n{Path('log').read_text()[-2000:]}")
        time.sleep(draw.uniform(0, 1.2 if anywhere else 0.15))
        os.kill(process, signal.SIGKILL)
        if os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) != -signal.SIGKILL:
            sys.exit("a run ended before it was killed")
        in_writing += any((RUN / "checkpoints").glob(PARTIAL + "*")) or any(RUN.glob(PARTIAL + "*"))
        newest.append(read_checkpoint(checkpoint_folders(RUN)[-1]).iteration)
    print(json.dumps({"kills": int(kills), "in_writing": in_writing, "iterations": newest[1:]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
