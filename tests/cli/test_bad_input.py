"""Every kind of bad input: exit code 2, one message with the place and what is accepted, and nothing written."""

import json
import os
import shutil
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from command import call, finish, run, write_rows
from mini import toy_tokenizer, write_checkpoint

GOOD = {"prompt": "a", "completion": "b"}


def snapshot() -> dict[str, bytes | None]:
    """Every file and folder below the current directory, with contents."""
    return {str(p): p.read_bytes() if p.is_file() else None for p in sorted(Path().rglob("*"))}


def refuse(*args: object, named: tuple[str, ...], command=call) -> str:
    """Run what must be refused; returns the message, which has to contain all of `named`."""
    before = snapshot()
    result = command(*args)
    assert result.code == 2, result
    assert result.err.startswith("gdtrain: ")
    assert result.err.count("gdtrain: ") == 1
    assert "Traceback" not in result.err + result.out
    assert [text for text in named if text not in result.err] == [], result.err
    assert len(result.err.splitlines()) <= 30
    assert snapshot() == before
    return result.err


@pytest.fixture
def no_weights(monkeypatch):
    """Fail if weights are read: faults of config and data are to be found before."""

    def forbidden(*args, **kwargs):
        raise AssertionError("weights were read")

    monkeypatch.setattr("gdtrain.model.load.load_weights", forbidden)


# In processes of their own

PROCESSES = {
    "no config": (["finetune", "none.yaml"], ("none.yaml", "no such file")),
    "unknown key": (["finetune", "c.yaml", "--set", "lora_layer=8"], ("lora_layer", "num_layers")),
    "bad data": (["finetune", "c.yaml", "--set", "data=bad"], ("train.jsonl:2", "JSON")),
    "missing hub data": (["finetune", "c.yaml", "--set", "data=nodata"], ("data: nodata", "directory")),
    "missing hub model": (["finetune", "c.yaml", "--set", "model=no/model"], ("model: no/model", "folder")),
    "corrupt weights": (["finetune", "c.yaml", "--set", "model=broken"], ("model: broken", "safetensors")),
    "no run": (["eval", "data"], ("data", "config.yaml")),
}


@pytest.mark.parametrize("case", PROCESSES)
def test_real_process(case, config, checkpoint):
    config()
    Path("bad").mkdir()
    Path("bad/train.jsonl").write_text(json.dumps(GOOD) + '\n{"prompt": "a", "comp', encoding="utf-8")
    shutil.copytree(checkpoint, "broken")
    Path("broken/model.safetensors").write_bytes(b"junk" * 100)
    arguments, named = PROCESSES[case]
    refuse(*arguments, named=named, command=lambda *args: run(*args, HF_HUB_OFFLINE="1"))


def test_debug_shows_the_traceback(work):
    plain, debug = run("finetune", "none.yaml"), run("finetune", "none.yaml", "--debug")
    assert (plain.code, debug.code) == (2, 2)
    assert "Traceback" not in plain.err
    assert debug.err.startswith("Traceback")
    assert "UserError" in debug.err
    assert debug.err.endswith(plain.err)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["finetune"], "'config'"),
        (["fine"], "'fine'"),
        (["finetune", "c.yaml", "--bogus"], "--bogus"),
        (["eval", "run", "--adapter", "/no/such/folder"], "--adapter"),
    ],
)
def test_usage(arguments, named, config):
    config()
    before = snapshot()
    result = call(*arguments)
    assert result.code == 2
    assert result.err.startswith("Usage: ")
    assert named in result.err
    assert snapshot() == before


@pytest.mark.parametrize(("package", "released"), [("mlx", "0.31.2"), ("mlx-lm", "0.99.0")])
def test_unsupported_version(package, released, work, tmp_path_factory):
    """C68. Metadata of another version comes first on the path of the child."""
    folder = tmp_path_factory.mktemp("path")
    info = folder / f"{package.replace('-', '_')}-{released}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {released}\n", encoding="utf-8")
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    refuse(
        "finetune",
        "c.yaml",
        named=(f"{package} {released} is installed", f"{package}<", ">=0.32", "pip install"),
        command=lambda *args: run(*args, PYTHONPATH=path),
    )


def test_missing_package(work, monkeypatch):
    def version(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("gdtrain.versions.version", version)
    refuse("finetune", "c.yaml", named=("mlx is not installed", "pip install"))


# The config

CONFIGS = {
    "empty": ("", ("c.yaml", "empty")),
    "not a mapping": ("- a\n- b\n", ("c.yaml", "mapping")),
    "bad YAML": ("model: tiny\ndata: [a, b\niters: 3\n", ("c.yaml:3", "not valid YAML", "line 2")),
    "no UTF-8": (b"model: tiny\n# \xff\n", ("c.yaml:2", "UTF-8")),
    "unknown key": ("model: tiny\ndata: data\nlora_layer: 8\n", ("c.yaml:3", "lora_layer", "num_layers")),
    "unsupported key": ("model: tiny\ndata: data\nmtp_loss: true\n", ("c.yaml:3", "mtp_loss")),
    "nested typo": (
        "model: tiny\ndata: data\nlora_parameters:\n  rnak: 8\n",
        ("c.yaml:4", "lora_parameters.rnak", "'rank'"),
    ),
    "wrong type": ("model: tiny\ndata: data\niters: many\n", ("c.yaml:3", "iters", "number", "many")),
    "not a number": ("model: tiny\ndata: data\nlearning_rate: abc\n", ("c.yaml:3", "learning_rate", "abc")),
    "no choice": ("model: tiny\ndata: data\noptimizer: lion\n", ("c.yaml:3", "optimizer", "adamw", "lion")),
    "out of range": ("model: tiny\ndata: data\nbatch_size: 0\n", ("c.yaml:3", "batch_size", "at least 1")),
    "no model": ("data: data\n", ("c.yaml", "model", "required")),
    "no data": ("model: tiny\n", ("c.yaml", "data", "required")),
    "duplicate key": ("model: tiny\ndata: data\niters: 3\niters: 4\n", ("c.yaml:4", "iters", "line 3")),
    "window never full": (
        "model: tiny\ndata: data\niters: 3\ngrad_accumulation_steps: 4\n",
        ("c.yaml:4", "grad_accumulation_steps", "4", "3"),
    ),
    "two faults": ("model: tiny\ndata: data\niters: x\nseed: y\n", ("c.yaml:3: iters", "c.yaml:4: seed")),
}


@pytest.mark.parametrize("case", CONFIGS)
@pytest.mark.parametrize("command", ["finetune", "eval"])
def test_config_file(command, case, work, no_weights):
    text, named = CONFIGS[case]
    Path("c.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    refuse(command, "c.yaml", named=named)


def test_config_is_a_folder(work, no_weights):
    refuse("finetune", "data", named=("data", "folder", "YAML"))


def test_config_is_missing(work, no_weights):
    refuse("finetune", "none/c.yaml", named=("none/c.yaml", "no such file"))
    refuse("eval", "none/c.yaml", named=("none/c.yaml", "run directory", "YAML"))


OVERRIDES = {
    "unknown key": ("lora_layer=8", ("--set lora_layer=8", "num_layers")),
    "nested unknown key": ("lora_parameters.rnk=8", ("--set lora_parameters.rnk=8", "rank")),
    "no value": ("iters", ("--set iters", "key=value")),
    "wrong type": ("iters=many", ("--set iters=many", "number")),
    "bad YAML": ("data=[a", ("--set data=[a", "not valid YAML")),
    "below a number": ("iters.x=1", ("--set iters.x=1", "iters")),
}


@pytest.mark.parametrize("case", OVERRIDES)
def test_override(case, config, no_weights):
    config()
    override, named = OVERRIDES[case]
    refuse("finetune", "c.yaml", "--set", override, named=named)
    refuse("eval", "c.yaml", "--set", override, named=named)


# The data

MIXED = [GOOD] * 6 + [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
SEVEN = "".join(json.dumps(GOOD) + "\n" for _ in range(6))
DATA = {
    "no train file": (None, {}, ("data: rows", "train.jsonl", "valid.jsonl")),
    "empty": ("", {}, ("train.jsonl", "no records")),
    "blank": ("\n \n", {}, ("train.jsonl", "no records")),
    "truncated": (SEVEN + '{"prompt": "a", "compl\n', {}, ("train.jsonl:7:", "not valid JSON", "column")),
    "no object": (SEVEN + "[1, 2]\n", {}, ("train.jsonl:7:", "list")),
    "missing field": (SEVEN + '{"prompt": "a"}\n', {}, ("train.jsonl:7:", "completion")),
    "number for text": (SEVEN + '{"prompt": "a", "completion": 3}\n', {}, ("train.jsonl:7:", "completion", "string")),
    "mixed kinds": ("".join(json.dumps(r) + "\n" for r in MIXED), {}, ("train.jsonl:7:", "messages", "train.jsonl:1")),
    "several": ('{"prompt": 1}\n{"text": 2}\n', {}, ("train.jsonl:1:", "train.jsonl:2:")),
    "text with mask_prompt": ('{"text": "a"}\n' * 3, {"mask_prompt": True}, ("train.jsonl:1", "mask_prompt", "prompt")),
    "only prompts survive": (
        '{"prompt": "a long question", "completion": "b"}\n' * 3,
        {"mask_prompt": True, "max_seq_length": 10},
        ("no row is left", "3", "max_seq_length is 10"),
    ),
    "nothing supervised": (
        '{"messages": [{"role": "user", "content": "a"}]}\n' * 3,
        {"mask_prompt": True},
        ("train.jsonl", "assistant"),
    ),
    "too long, an error": (
        SEVEN,
        {"on_long": "error", "max_seq_length": 10},
        ("train.jsonl:1", "tokens", "max_seq_length is 10"),
    ),
    "fewer rows than a batch": (SEVEN, {"batch_size": 7}, ("batch_size: 7", "6 training rows")),
    "epochs below a window": (SEVEN, {"iters": None, "epochs": 1, "grad_accumulation_steps": 4}, ("4", "3 iterations")),
}


@pytest.mark.parametrize("case", DATA)
def test_data(case, config, no_weights):
    text, keys, named = DATA[case]
    write_rows("rows/valid.jsonl", [])
    if text is not None:
        Path("rows/train.jsonl").write_text(text, encoding="utf-8")
    config(data="rows", **keys)
    refuse("finetune", "c.yaml", named=named)


@pytest.mark.parametrize("data", ["./none", "/no/such/folder", "data/train.jsonl"])
def test_data_is_no_folder(data, config, no_weights):
    config(data=data)
    refuse("finetune", "c.yaml", named=("data: ", data.removeprefix("./"), "directory"))


def test_faulty_validation_row(config, no_weights):
    """The other splits are checked before the training too."""
    config()
    write_rows("data/valid.jsonl", [GOOD, {"prompt": "a"}])
    refuse("finetune", "c.yaml", named=("valid.jsonl:2:", "completion"))


def test_test_without_test_rows(config, no_weights):
    config(test=True)
    Path("data/test.jsonl").unlink()
    refuse("finetune", "c.yaml", named=("test.jsonl",))


def test_many_faults_are_cut_short(config, no_weights):
    config()
    write_rows("data/train.jsonl", [{"prompt": i} for i in range(50)])
    message = refuse("finetune", "c.yaml", named=("train.jsonl:1:", "more"))
    assert "train.jsonl:40:" not in message


# The model


def edit_config(folder: Path, **text_keys: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["text_config"].update(text_keys)
    (folder / "config.json").write_text(json.dumps(config))


def drop_tensor(folder: Path) -> None:
    tensors = dict(mx.load(str(folder / "model.safetensors")))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(sorted(tensors.items())[1:]))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1000])


MODELS = {
    "no config.json": (lambda m: (m / "config.json").unlink(), ("config.json",)),
    "config.json no JSON": (lambda m: (m / "config.json").write_text("{"), ("config.json", "not valid JSON")),
    "config.json a list": (lambda m: (m / "config.json").write_text("[]"), ("config.json",)),
    "another type": (
        lambda m: (m / "config.json").write_text('{"model_type": "llama"}'),
        ("'llama'", "qwen3_5, qwen3_5_moe, qwen3_next"),
    ),
    "no type": (lambda m: (m / "config.json").write_text("{}"), ("qwen3_5, qwen3_5_moe, qwen3_next",)),
    "hardly a config": (lambda m: (m / "config.json").write_text('{"model_type": "qwen3_5"}'), ()),
    "no sizes": (lambda m: (m / "config.json").write_text('{"model_type": "qwen3_next"}'), ("vocab_size",)),
    "a size that is text": (lambda m: edit_config(m, hidden_size="x"), ("hidden_size",)),
    "heads do not divide": (lambda m: edit_config(m, linear_num_value_heads=3), ("3", "2")),
    "another size": (lambda m: edit_config(m, intermediate_size=32), ("mlp",)),
    "more blocks": (lambda m: edit_config(m, num_hidden_layers=5), ("layers.4",)),
    "no weights": (lambda m: (m / "model.safetensors").unlink(), ("model*.safetensors",)),
    "empty weights": (lambda m: (m / "model.safetensors").write_bytes(b""), ("cannot be loaded",)),
    "corrupt weights": (lambda m: (m / "model.safetensors").write_bytes(b"junk" * 99), ("model.safetensors",)),
    "truncated weights": (lambda m: cut(m / "model.safetensors"), ("cannot be loaded", "cut off")),
    "a tensor missing": (drop_tensor, ("Missing 1 param",)),
    "no tokenizer.json": (lambda m: (m / "tokenizer.json").unlink(), ("tokenizer",)),
    "corrupt tokenizer": (lambda m: (m / "tokenizer.json").write_text("{"), ("tokenizer",)),
    "no chat template": (lambda m: (m / "chat_template.jinja").unlink(), ("chat template", "text records")),
}


@pytest.mark.parametrize("case", MODELS)
def test_model_folder(case, config, checkpoint):
    spoil, named = MODELS[case]
    shutil.copytree(checkpoint, "spoilt")
    spoil(Path("spoilt"))
    config(model="spoilt")
    refuse("finetune", "c.yaml", named=named)


@pytest.mark.parametrize("model", ["none", "./none", "/no/such/folder", "~/no-such-folder-at-home"])
def test_no_model_folder(model, config, no_weights):
    config(model=model)
    refuse("finetune", "c.yaml", named=("model: ", "no folder", model.removeprefix("~"), "tiny"))


def test_tokens_beyond_the_vocabulary(config, work):
    """An index past the embedding reads whatever lies there."""
    write_checkpoint(Path("small"), tokenizer=toy_tokenizer("plain"), vocab_size=128)
    config(model="small")
    refuse("finetune", "c.yaml", named=("128", "token"))


# What is trained, and where it goes


def test_unknown_lora_key(config):
    config(lora_parameters={"keys": ["self_attn.q_proj", "mlp.experts.0.up_proj"]})
    refuse(
        "finetune",
        "c.yaml",
        named=("lora_parameters.keys", "'mlp.experts.0.up_proj'", "mlp.up_proj", "linear_attn.in_proj_qkv"),
    )


def test_names_of_the_other_family(config):
    """C49."""
    config(lora_parameters={"keys": ["linear_attn.in_proj_qkvz"]})
    refuse("finetune", "c.yaml", named=("'linear_attn.in_proj_qkvz'", "did you mean 'linear_attn.in_proj_qkv'"))


def test_too_many_blocks(config):
    config(num_layers=99)
    refuse("finetune", "c.yaml", named=("num_layers: 99", "1 to 4"))


@pytest.mark.parametrize("kernel", ["fused", "recurrent", "native"])
def test_kernel_that_cannot_run_here(kernel, config):
    config(kernel=kernel)
    refuse("finetune", "c.yaml", named=("kernel", repr(kernel), "chunked", "replay", "reference"))


def make_adapter(config, **lora: object) -> None:
    config(adapter_path="earlier", iters=1, lora_parameters=lora)
    finish("finetune", "c.yaml")


def test_adapter_to_start_from_has_other_shapes(config):
    make_adapter(config, rank=4)
    config(resume_adapter_file="earlier/adapters.safetensors", lora_parameters={"rank": 2})
    refuse("finetune", "c.yaml", named=("earlier", "rank is 4", "2 here"))
    Path("earlier/adapter_config.json").unlink()
    refuse("finetune", "c.yaml", named=("earlier/adapters.safetensors", "(64, 4)", "(64, 2)"))


def test_adapter_to_start_from_has_other_names(config):
    make_adapter(config, keys=["mlp.up_proj"])
    config(resume_adapter_file="earlier/adapters.safetensors", lora_parameters={"keys": ["mlp.down_proj"]})
    refuse("finetune", "c.yaml", named=("earlier/adapters.safetensors", "mlp.up_proj", "mlp.down_proj"))


@pytest.mark.parametrize("file", ["none.safetensors", "data", "text.safetensors", "text.bin", "array.npy"])
def test_adapter_to_start_from_is_none(file, config):
    Path("text.safetensors").write_text("text")
    Path("text.bin").write_text("text")
    np.save("array.npy", np.zeros(3))
    config(resume_adapter_file=file)
    refuse("finetune", "c.yaml", named=(file,))


@pytest.mark.parametrize("path", ["c.yaml", "c.yaml/run"])
def test_adapter_path_is_a_file(path, config):
    config(adapter_path=path)
    refuse("finetune", "c.yaml", named=("adapter_path", path))


# Evaluation


def test_eval_of_what_is_no_run(work, no_weights):
    refuse("eval", "data", named=("data", "no run directory", "config.yaml"))
    refuse("eval", "none", named=("none", "does not exist", "run directory", "YAML"))
    refuse("eval", "data/train.jsonl", named=("data/train.jsonl:2",))


@pytest.mark.parametrize("checkpoint_name", ["7", "0", "latest", "", "-5", "²"])
def test_eval_of_a_checkpoint_that_is_not_there(checkpoint_name, trained, no_weights):
    refuse(
        "eval",
        "run",
        "--checkpoint",
        checkpoint_name,
        named=("--checkpoint", f"{checkpoint_name!r}", "last, best, 20, 22"),
    )


def test_eval_of_an_unknown_split(trained, no_weights):
    refuse("eval", "run", "--split", "nonsense", named=("--split", "'nonsense'", "train, valid, test"))


def test_eval_of_a_split_without_rows(trained, no_weights):
    Path("data/test.jsonl").unlink()
    refuse("eval", "run", "--split", "test", named=("data", "test.jsonl"))


def test_eval_of_a_config_without_its_adapter(config):
    """C59."""
    config(adapter_path="no/such/run")
    refuse("eval", "c.yaml", named=("no/such/run", "does not exist"))


@pytest.mark.parametrize("file", ["adapters.safetensors", "adapter_config.json", "config.yaml"])
def test_eval_of_an_incomplete_run(file, trained):
    Path("run", file).unlink()
    refuse("eval", "run", named=(file,))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"fine_tune_type": "lora", "num_layers": 4}'])
def test_eval_of_a_spoilt_adapter_config(text, trained):
    Path("run/adapter_config.json").write_text(text)
    refuse("eval", "run", named=("run/adapter_config.json",))


@pytest.mark.parametrize("target", ["data", "none/result.json", "run/config.yaml/result.json"])
def test_result_that_cannot_be_written(target, trained):
    refuse("eval", "run", "--json", target, named=("--json", target))


@pytest.mark.parametrize("keys", [{"num_layers": 99}, {"lora_parameters": {"keys": ["q_prj"]}}])
def test_targets_are_checked_before_weights_are_read(keys, config, monkeypatch):
    """mlx-lm maps the file; what would take time and memory is the evaluation."""

    def forbidden(*args):
        raise AssertionError("weights were read")

    monkeypatch.setattr("gdtrain.session.mx.eval", forbidden)
    config(**keys)
    refuse("finetune", "c.yaml", named=("99" if "num_layers" in keys else "q_proj",))
