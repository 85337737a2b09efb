"""A model by its Hub id: downloaded, taken up where a connection broke, and used offline from then on."""

import threading
from pathlib import Path

import mlx.core as mx
import pytest
from command import metrics, run, write_config
from hub_server import Asked, Break, hub
from mini import toy_tokenizer, write_checkpoint

WEIGHTS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A checkpoint in two files, the second large, and two files that nobody needs."""
    folder = write_checkpoint(tmp_path_factory.mktemp("hub") / "mini", tokenizer=toy_tokenizer("plain"))
    tensors = sorted(mx.load(str(folder / "model.safetensors")).items())
    # huggingface_hub resumes by chunks of 10 MB; this one is dropped when it is loaded.
    large = ("mtp.fc.weight", mx.zeros((3_000_000,)))
    for name, part in zip(WEIGHTS, (tensors[::2], [*tensors[1::2], large]), strict=True):
        mx.save_safetensors(str(folder / name), dict(part))
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"other weights")
    (folder / "README.md").write_text("about")
    return folder


@pytest.fixture
def train(work):
    """train(endpoint): a run on owner/mini in a process of its own, its cache in `cache`."""
    write_config(model="owner/mini", data="data", adapter_path="run", iters=2, batch_size=2)

    def command(endpoint, **environment):
        settings = {"HF_HOME": str(work / "cache"), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        return run("finetune", "c.yaml", HF_ENDPOINT=endpoint, **settings | environment)

    return command


def test_only_what_is_needed_and_only_once(repository, train):
    with hub(repository) as (endpoint, asked):
        result = train(endpoint)
        assert (result.code, result.err) == (0, "")
        names = [request.file for request in asked]
        assert sorted(names) == sorted({p.name for p in repository.iterdir()} - {"pytorch_model.bin", "README.md"})
        assert set(names[-2:]) == set(WEIGHTS)  # after the data were checked against the tokenizer
        asked.clear()
        assert train(endpoint).code == 0
        assert asked == []
    offline = train("http://127.0.0.1:9", HF_HUB_OFFLINE="1")
    assert (offline.code, offline.err) == (0, "")
    assert len(metrics("run", "val")) == 2


def test_a_connection_that_ends_early_is_taken_up(repository, train):
    """Within the same command, from the last whole chunk."""
    end = (repository / WEIGHTS[1]).stat().st_size - 1000

    def serve(asked):
        if asked == Asked(WEIGHTS[1], 0):
            raise Break(end, reset=False)

    with hub(repository, serve) as (endpoint, asked):
        assert train(endpoint).code == 0
        first, second = (request.first for request in asked if request.file == WEIGHTS[1])
        assert (first, 10_000_000 < second <= end) == (0, True)


def test_a_download_that_broke_off_is_taken_up_by_the_next_run(repository, train):
    """One file comes whole, the connection of the other is reset."""
    whole, broken = threading.Event(), True

    def serve(asked):
        if asked.file == WEIGHTS[1] and broken:
            whole.wait(30)
            raise Break(1000, reset=True)

    with hub(repository, serve) as (endpoint, asked):
        watched = threading.Thread(target=_when_there, args=(Path("cache"), WEIGHTS[0], whole))
        watched.start()
        result = train(endpoint)
        watched.join()
        assert result.code == 2
        assert "model: the download of owner/mini broke off: " in result.err
        assert "Run the same command again: files that came whole are kept" in result.err
        assert "Traceback" not in result.err
        broken = False
        asked.clear()
        assert train(endpoint).code == 0
        assert [request.file for request in asked] == [WEIGHTS[1]]


def _when_there(cache: Path, name: str, event: threading.Event) -> None:
    for _ in range(600):
        if any(cache.rglob(name)):
            break
        threading.Event().wait(0.05)
    event.set()


def test_a_repository_that_is_not_there(repository, train):
    with hub(repository) as (endpoint, _):
        write_config(model="owner/other", data="data", adapter_path="run", iters=2, batch_size=2)
        result = train(endpoint)
    assert result.code == 2
    assert "model: owner/other is neither a folder here nor to be had from the Hub: " in result.err
    assert "Traceback" not in result.err
