"""A model of the Hub: what can be wrong is found before its weights are downloaded."""

import fnmatch
import json
import shutil

import huggingface_hub
import mini
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from gdtrain.errors import UserError
from gdtrain.model.load import find_model, load_model, load_tokenizer


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """owner/mini is there; returns the patterns of each download."""
    source = mini.write_checkpoint(tmp_path / "source")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    asked = []

    def snapshot_download(name, allow_patterns):
        asked.append(allow_patterns)
        if name != "owner/mini":
            raise LocalEntryNotFoundError("no network\nand a second line")
        for file in source.iterdir():
            if any(fnmatch.fnmatch(file.name, pattern) for pattern in allow_patterns):
                shutil.copy(file, snapshot)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def test_weights_are_downloaded_last(hub):
    files = find_model("owner/mini")
    load_tokenizer(files)
    assert not list(files.folder.glob("*.safetensors"))
    model = load_model(files)
    assert list(files.folder.glob("model*.safetensors"))
    assert len(model.layers) == 4
    assert hub[1:] == [["model*.safetensors"]]


def test_not_to_be_had(hub):
    with pytest.raises(
        UserError, match=r"owner/other is neither a folder here nor to be had from the Hub: .*no network$"
    ):
        find_model("owner/other")


def test_a_folder_here_is_asked_of_nobody(hub, tmp_path, monkeypatch):
    """Not even where its name would be a Hub id."""
    mini.write_checkpoint(tmp_path / "owner" / "mini")
    monkeypatch.chdir(tmp_path)
    files = find_model("owner/mini")
    assert files.repository is None
    load_tokenizer(files)
    load_model(files)
    assert hub == []


def test_a_type_of_the_hub_that_is_unknown(hub, tmp_path):
    """Refused before weights are downloaded: without them a text model of a new name cannot be told."""
    config = tmp_path / "source" / "config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps(values | {"model_type": "qwen3_7"}))
    assert find_model("owner/mini").family == "qwen3_5"  # by its text_config
    config.write_text(json.dumps(values["text_config"] | {"model_type": "qwen3_7"}))
    with pytest.raises(UserError, match="owner/mini is of type 'qwen3_7'; accepted: qwen3_5, qwen3_5_moe, qwen3_next"):
        find_model("owner/mini")


@pytest.mark.parametrize("fault", [ConnectionResetError("reset by peer"), RuntimeError("of the library below")])
def test_a_download_that_breaks_off(fault, hub, monkeypatch):
    files = find_model("owner/mini")

    def broken(*args, **kwargs):
        raise fault

    monkeypatch.setattr(huggingface_hub, "snapshot_download", broken)
    with pytest.raises(UserError, match=r"download of owner/mini broke off: .*Run the same command again"):
        load_model(files)
