"""A model of the Hub: what can be wrong is found before its weights are downloaded."""

import fnmatch
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
