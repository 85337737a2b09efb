"""gdtrain export: an adapter for another library."""

import json
import os
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from command import adapter, call, finish
from huggingface_hub.errors import LocalTokenNotFoundError

from gdtrain.config_file import load_config


def test_mlx_lm(trained):
    out = finish("export", "run", "--format", "mlx-lm", "--output", "alone")
    assert sorted(os.listdir("alone")) == ["adapter_config.json", "adapters.safetensors"]
    assert out.splitlines()[-1] == "saved: alone (adapters.safetensors, adapter_config.json)"
    for name, x in adapter("run").items():
        np.testing.assert_array_equal(adapter("alone")[name], x)
    assert json.loads(Path("alone/adapter_config.json").read_text()) == json.loads(
        Path("run/adapter_config.json").read_text()
    )
    base = load_config(Path("c.yaml")).model
    tokens = mx.array([[1, 2, 3, 4]])
    one, two = (mlx_lm.load(base, adapter_path=folder)[0](tokens) for folder in ("run", "alone"))
    assert mx.array_equal(one, two)


def test_peft(trained):
    out = finish("export", "run", "--format", "peft", "--output", "peft")
    assert sorted(os.listdir("peft")) == ["adapter_config.json", "adapter_model.safetensors"]
    base = load_config(Path("c.yaml")).model
    assert f"base {base}" in out
    config = json.loads(Path("peft/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == base
    ours, theirs = adapter("run"), mx.load("peft/adapter_model.safetensors")
    assert len(ours) == len(theirs)
    for name, x in ours.items():
        named = name.replace("language_model.", "base_model.model.").replace("lora_a", "lora_A.weight")
        np.testing.assert_array_equal(np.array(theirs[named.replace("lora_b", "lora_B.weight")]).T, x)


def test_checkpoint_and_base(trained):
    finish("export", "run", "--format", "mlx-lm", "--output", "one", "--checkpoint", "best", "--model", "Org/Model")
    for name, x in adapter("run/best").items():
        np.testing.assert_array_equal(adapter("one")[name], x)
    assert json.loads(Path("one/adapter_config.json").read_text())["model"] == "Org/Model"
    finish("export", "one", "--format", "peft", "--output", "two")
    assert json.loads(Path("two/adapter_config.json").read_text())["base_model_name_or_path"] == "Org/Model"


@pytest.mark.parametrize("output", ["alone", "peft/deep/er"])
def test_the_base_is_not_needed(output, trained, checkpoint):
    text = Path("run/config.yaml").read_text()
    Path("run/config.yaml").write_text(text.replace(str(checkpoint), "Org/Model"))
    finish("export", "run", "--format", "peft", "--output", output)
    assert len(os.listdir(output)) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--format", "gguf", "--output", "x"], "--format: 'gguf'; accepted: peft, mlx-lm"),
        (["run", "--format", "peft", "--output", "run"], "--output: run is not empty"),
        (["run", "--format", "peft", "--output", "x", "--checkpoint", "9"], "run has no '9'"),
        (["data", "--format", "peft", "--output", "x"], "data is no run directory"),
    ],
)
def test_faults(arguments, message, trained):
    before = sorted(os.listdir())
    result = call("export", *arguments)
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert sorted(os.listdir()) == before


def test_a_broken_run(trained):
    Path("run/adapters.safetensors").write_bytes(b"hello")
    result = call("export", "run", "--format", "mlx-lm", "--output", "x")
    assert (result.code, "cannot be read" in result.err) == (2, True)
    Path("run/adapters.safetensors").unlink()
    result = call("export", "run", "--format", "mlx-lm", "--output", "x")
    assert (result.code, "adapters.safetensors does not exist" in result.err) == (2, True)
    assert not Path("x").exists()


@pytest.fixture
def hub(monkeypatch):
    """What the Hub was asked for, in order; `refuse` makes a call fail."""
    asked, faults = [], {}

    def answer(name, value):
        def call(self, *args, **keys):
            if name in faults:
                raise faults[name]
            asked.append((name, args, keys))
            return value

        return call

    monkeypatch.setattr("huggingface_hub.HfApi.whoami", answer("whoami", {"name": "me"}))
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", answer("create_repo", "https://hub/me/lora"))
    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", answer("upload_folder", None))
    return asked, faults


def test_push(trained, hub):
    """Asked for an account before anything is written; then the folder goes there as it is."""
    asked, _ = hub
    out = finish("export", "run", "--format", "peft", "--output", "peft", "--push-to", "me/lora")
    assert [name for name, _, _ in asked] == ["whoami", "create_repo", "upload_folder"]
    assert (asked[1][1], asked[1][2]) == (("me/lora",), {"private": True, "exist_ok": True})
    assert asked[2][2]["repo_id"] == "me/lora"
    assert asked[2][2]["folder_path"] == Path("peft")
    assert out.splitlines()[-1] == "uploaded: https://hub/me/lora (private, if it is new)"


def test_push_is_refused(trained, hub):
    _, faults = hub
    arguments = ("export", "run", "--format", "peft", "--output", "peft", "--push-to")
    assert "accepted: OWNER/NAME" in call(*arguments, "lora").err
    faults["whoami"] = OSError("no route to host")
    assert call(*arguments, "me/lora").err == "gdtrain: --push-to: the Hub cannot be reached: no route to host\n"
    faults["whoami"] = LocalTokenNotFoundError("no token")
    assert "run `hf auth login`" in call(*arguments, "me/lora").err
    assert not Path("peft").exists()
    del faults["whoami"]
    faults["upload_folder"] = OSError("the connection was closed\nand more")
    result = call(*arguments, "me/lora")
    assert result.code == 2
    assert "me/lora: the connection was closed; what was to be uploaded is in peft" in result.err
    assert len(os.listdir("peft")) == 2
