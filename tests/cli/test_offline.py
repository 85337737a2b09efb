"""C55: with local files nothing touches the network, in any command."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from command import SCRIPT, environ, write_config, write_rows
from main_run import ROWS
from mini import toy_tokenizer, write_checkpoint

from gdtrain.cli import app

# Python imports sitecustomize before anything else. Every way to a connection or to a name notes the attempt and fails.
NO_NETWORK = """
import os, socket

def refuse(*args, **kwargs):
    with open(os.environ["ATTEMPTS"], "a") as file:
        print(args, file=file)
    raise OSError("no network in this test")

for name in ("connect", "connect_ex", "sendto", "sendmsg"):
    setattr(socket.socket, name, refuse)
for name in ("getaddrinfo", "gethostbyname", "gethostbyname_ex", "create_connection"):
    setattr(socket, name, refuse)
"""
BENCH = ["--shape", "2,4,32,16", "--tokens", "8", "--backend", "auto", "--repeats", "1"]
COMMANDS = {
    "finetune": ["c.yaml"],
    "eval": ["run"],
    "bench-shapes": BENCH,
    "init": ["model", "--output", "new.yaml"],
    "check": ["c.yaml"],
    "plan": ["c.yaml"],
    "doctor": [],
    "generate": ["run", "--prompt", "t1", "--max-tokens", "2"],
    "fuse": ["run", "--output", "fused"],
    "export": ["run", "--format", "peft", "--output", "adapter"],
    "report": ["run"],
}
PRESENT = list(typer.main.get_command(app).commands)


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    """(child, attempts): child(*command, **environment) runs a process that notes and refuses every connection in the
    file `attempts`. Its folder holds `model`, data, c.yaml, and `run` once finetune ran."""
    folder = tmp_path_factory.mktemp("offline")
    (folder / "sitecustomize.py").write_text(NO_NETWORK)
    attempts = folder / "attempts"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_checkpoint(Path("model"), tokenizer=toy_tokenizer("plain"))
        for split, rows in ROWS.items():
            write_rows(f"data/{split}.jsonl", rows)
        write_config(model="model", data="data", adapter_path="run", iters=2, batch_size=2)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))

    def child(*command: str, **environment: str) -> subprocess.CompletedProcess:
        env = environ(PYTHONPATH=path, ATTEMPTS=str(attempts), HF_HOME=str(folder / "hf")) | environment
        return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)

    done = child(SCRIPT, "finetune", "c.yaml")
    assert done.returncode == 0, done.stderr
    return child, attempts


def test_every_command_is_tried():
    assert set(PRESENT) == COMMANDS.keys()


@pytest.mark.parametrize("name", COMMANDS)
def test_no_network_is_needed(name, offline):
    child, attempts = offline
    done = child(SCRIPT, name, *COMMANDS[name])
    assert done.returncode == 0, done.stderr
    assert not attempts.exists(), attempts.read_text()


VARIANTS = {
    "finetune, HF_HUB_OFFLINE": (["finetune", "c.yaml", "--set", "adapter_path=other"], {"HF_HUB_OFFLINE": "1"}),
    "eval, HF_HUB_OFFLINE": (["eval", "run"], {"HF_HUB_OFFLINE": "1"}),
    "the embedded model": (["finetune", "c.yaml", "--set", "model=tiny", "--set", "adapter_path=small"], {}),
}


@pytest.mark.parametrize("case", VARIANTS)
def test_no_network_in_other_settings(case, offline):
    child, attempts = offline
    arguments, environment = VARIANTS[case]
    done = child(SCRIPT, *arguments, **environment)
    assert done.returncode == 0, done.stderr
    assert not attempts.exists(), attempts.read_text()


def test_a_hub_id_is_one_message(offline):
    """A connection is tried here, and only here."""
    child, attempts = offline
    done = child(SCRIPT, "finetune", "c.yaml", "--set", "model=owner/mini")
    assert done.returncode == 2
    assert "model: owner/mini is neither a folder here nor to be had from the Hub: " in done.stderr
    assert "Traceback" not in done.stderr
    assert attempts.exists()
    attempts.unlink()


def test_connections_are_refused_indeed(offline):
    """The control of the tests above."""
    child, attempts = offline
    done = child(sys.executable, "-c", "import socket; socket.create_connection(('127.0.0.1', 9))")
    assert "no network in this test" in done.stderr
    assert "127.0.0.1" in attempts.read_text()
    attempts.unlink()
