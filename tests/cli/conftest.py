"""A mini checkpoint, data and one finished run, made once; every test works in a directory of its own."""

import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from command import call, run, write_config, write_rows
from main_run import ITERATIONS, MAIN_RUN, ROWS
from mini import toy_tokenizer, write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mini qwen3_5 with one token a byte and the plain chat template: <|im_start|>role\\ncontent<|im_end|>\\n."""
    return write_checkpoint(tmp_path_factory.mktemp("model") / "mini", tokenizer=toy_tokenizer("plain"))


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with `data`."""
    monkeypatch.chdir(tmp_path)
    for split, rows in ROWS.items():
        write_rows(f"data/{split}.jsonl", rows)
    return tmp_path


@pytest.fixture
def config(work: Path, checkpoint: Path):
    """config(key=value, ...): writes c.yaml for a run of two iterations on the mini checkpoint."""

    def write(**keys):
        base = {"model": str(checkpoint), "data": "data", "adapter_path": "run", "iters": 2, "batch_size": 2}
        return write_config(**(base | {"learning_rate": 5e-3} | keys))

    return write


@pytest.fixture(scope="session")
def finished(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory):
    """(result, folder) of a whole run in a process of its own; the folder holds c.yaml, data and run. Not to change."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for split, rows in ROWS.items():
            write_rows(f"data/{split}.jsonl", rows)
        write_config(model=str(checkpoint), **MAIN_RUN)
        result = run("finetune", "c.yaml", "--set", f"iters={ITERATIONS}", TERM="xterm-256color")
    return result, folder


@pytest.fixture
def trained(finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that folder as the current directory."""
    shutil.copytree(finished[1], tmp_path, dirs_exist_ok=True)
    saved = tmp_path / "run" / "config.yaml"
    saved.write_text(saved.read_text().replace(str(finished[1] / "data"), str(tmp_path / "data")))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def family_run(tmp_path_factory: pytest.TempPathFactory):
    """family_run(family): the folder of a short run of that family, with `model`, c.yaml, data and run; made once."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(folder)
                for split, rows in ROWS.items():
                    write_rows(f"data/{split}.jsonl", rows)
                write_checkpoint(Path("model"), family, tokenizer=toy_tokenizer("plain"))
                write_config(model="model", **MAIN_RUN)
                mx.disable_compile()
                result = call("finetune", "c.yaml", "--set", "iters=2")
                assert (result.code, result.err) == (0, "")
                Path("console.txt").write_text(result.out, encoding="utf-8")
            made[family] = folder
        return made[family]

    return make
