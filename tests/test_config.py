"""The schema of a run and its file: values, faults with their lines, overrides, the dump, the ready configs."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from gdtrain.config import SCHEDULES, LoraParameters, OptimizerConfig, RunConfig
from gdtrain.config_file import dump_yaml, load_config
from gdtrain.config_section import Section
from gdtrain.errors import UserError

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))
BASE = "model: tiny\ndata: rows\n"


@pytest.fixture
def load(tmp_path, monkeypatch):
    """load("key: value\n", *overrides): the text after a valid beginning of two lines, so that it starts on line 3."""
    monkeypatch.chdir(tmp_path)

    def loader(text="", *overrides, base=BASE):
        Path("c.yaml").write_text(base + text, encoding="utf-8")
        return load_config(Path("c.yaml"), overrides)

    return loader


@pytest.fixture
def faults(load):
    """The lines of the error that a text must give."""

    def loader(text="", *overrides, base=BASE):
        with pytest.raises(UserError) as caught:
            load(text, *overrides, base=base)
        return str(caught.value).split("\n")

    return loader


# Values


def test_defaults_are_those_of_the_contract(load):
    config = load()
    expected = {
        "num_layers": -1,
        "grad_checkpoint": True,
        "val_batches": -1,
        "train": True,
        "kernel": "auto",
        "chunk_size": None,
        "packing": False,
        "on_long": "truncate",
        "supervise": "all",
        "enable_thinking": None,
        "epochs": None,
        "max_grad_norm": None,
        "early_stopping_patience": None,
        "keep_checkpoints": 3,
        "memory_limit_gb": None,
        "cache_limit_gb": None,
        "wired_limit_gb": None,
        "dtype": None,
    }
    assert {key: getattr(config, key) for key in expected} == expected
    assert config.lora_parameters == LoraParameters(
        rank=8, scale=20.0, dropout=0.0, keys=None, alpha=None, rslora=False
    )


def test_every_other_default_is_that_of_mlx_lm(load):
    defaults = pytest.importorskip("mlx_lm.lora").CONFIG_DEFAULTS
    on_purpose = {"model", "data", "num_layers", "grad_checkpoint", "val_batches", "train"}
    config = load().model_dump() | {"config": None}
    for key in defaults.keys() - on_purpose - {"lora_parameters", "optimizer_config"}:
        assert config[key] == defaults[key], key
    assert {key: config["lora_parameters"][key] for key in defaults["lora_parameters"]} == defaults["lora_parameters"]
    assert config["optimizer_config"].keys() == defaults["optimizer_config"].keys()


def test_a_config_of_mlx_lm_works_unchanged(load):
    defaults = pytest.importorskip("mlx_lm.lora").CONFIG_DEFAULTS
    config = load(base=yaml.safe_dump(defaults | {"train": True}))
    assert (config.num_layers, config.val_batches, config.grad_checkpoint) == (16, 25, False)


@pytest.mark.parametrize("text", ["1e-5", "'1e-5'", "1.0e-5", "0.00001", "1E-5", ".00001"])
def test_ways_to_write_a_learning_rate(load, text):  # C37
    rate = load(f"learning_rate: {text}\n").learning_rate
    assert rate == 1e-5
    assert type(rate) is float


@pytest.mark.parametrize("text", ["abc", "true", "[1]", ".inf", ".nan", "'inf'", "1e999", "-1e-5", "'1e-5x'", "{}"])
def test_what_is_not_a_learning_rate(faults, text):  # C37
    (line,) = faults(f"learning_rate: {text}\n")
    assert line.startswith("c.yaml:3: learning_rate: must be")


@pytest.mark.parametrize("text", ["3.7", "true", "abc", "'3.7'", "0", "-5", "[3]", ".inf", "1" + "0" * 400])
def test_what_is_not_a_number_of_iterations(faults, text):
    (line,) = faults(f"iters: {text}\n")
    assert line.startswith("c.yaml:3: iters: must be")


@pytest.mark.parametrize("text", ["1000", "1e3", "1_000", "'1000'", "1000.0"])
def test_ways_to_write_a_whole_number(load, text):
    iters = load(f"iters: {text}\n").iters
    assert iters == 1000
    assert type(iters) is int


@pytest.mark.parametrize(("text", "size"), [("0", 0), ("2GB", 2 * 10**9), ("2g", 2 * 10**9), ("1.5 MB", 1_500_000)])
def test_sizes(load, text, size):
    assert load(f"clear_cache_threshold: {text}\n").clear_cache_threshold == size


def test_null_means_not_set(load):
    config = load("iters: null\nepochs: 2\noptimizer: null\nlora_parameters: {scale: null, alpha: 16}\nconfig: null\n")
    assert (config.iters, config.epochs, config.optimizer) == (1000, 2, "adam")
    assert config.lora_parameters.resolved_scale == 2
    assert not config.was_set("iters")


def test_was_set(load):
    config = load("lora_parameters: {rank: 8}\n")
    assert config.was_set("model")
    assert config.was_set("lora_parameters.rank")
    assert not config.was_set("lora_parameters.scale")
    assert not config.was_set("lr_schedule.warmup")
    assert not config.was_set("seed")


@pytest.mark.parametrize(
    ("text", "scale"),
    [("{}", 20), ("{scale: 3}", 3), ("{alpha: 32, rank: 16}", 2), ("{alpha: 32, rank: 16, rslora: true}", 8)],
)
def test_resolved_scale(load, text, scale):
    assert load(f"lora_parameters: {text}\n").lora_parameters.resolved_scale == scale


def test_optimizer_arguments(load):
    config = load("optimizer: AdamW\noptimizer_config:\n  adam: {eps: 1}\n  adamw: {eps: 1e-6, betas: [0.9, 0.98]}\n")
    assert config.optimizer == "adamw"
    assert config.optimizer_arguments == {"eps": 1e-6, "betas": [0.9, 0.98]}
    assert load().optimizer_arguments == {}


def test_optimizer_arguments_exist_in_mlx():
    optimizers = pytest.importorskip("mlx.optimizers")
    classes = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD", "adafactor": "Adafactor", "muon": "Muon"}
    for name, field in OptimizerConfig.model_fields.items():
        accepted = set(inspect.signature(getattr(optimizers, classes[name])).parameters) - {"learning_rate"}
        assert set(type(field.default).model_fields) == accepted


def test_schedules_are_those_of_mlx():
    schedulers = pytest.importorskip("mlx.optimizers.schedulers")
    for name, (names, required) in SCHEDULES.items():
        parameters = inspect.signature(getattr(schedulers, name)).parameters.values()
        assert tuple(parameter.name for parameter in parameters) == names
        assert sum(parameter.default is parameter.empty for parameter in parameters) == required


def test_schedule(load):
    schedule = load("lr_schedule: {name: cosine_decay, warmup: 100, arguments: [1e-5, 1000, 1e-7]}\n").lr_schedule
    assert (schedule.name, schedule.arguments, schedule.warmup) == ("cosine_decay", [1e-5, 1000, 1e-7], 100)


def test_hub_datasets_one_or_several(load):
    base = "model: tiny\n"
    one = load("hf_dataset: {path: billsum, prompt_feature: text, config: {name: x}}\n", base=base).hf_dataset
    assert [(source.path, source.prompt_feature, source.config) for source in one] == [
        ("billsum", "text", {"name": "x"})
    ]
    assert (one[0].train_split, one[0].valid_split, one[0].test_split) == ("train[:80%]", "train[-10%:]", None)
    assert [source.path for source in load("hf_dataset: [{path: a}, {path: b}]\n", base=base).hf_dataset] == ["a", "b"]


@pytest.mark.parametrize("kernel", ["auto", "fused", "recurrent", "chunked", "replay", "reference", "native"])
def test_kernels_pass_the_schema(load, kernel):
    assert load(f"kernel: {kernel}\n").kernel == kernel


def test_the_config_cannot_be_changed_by_accident(load):
    config = load()
    with pytest.raises(ValidationError):
        config.iters = 3


# Faults: one value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: 1", "train: must be true or false, not 1"),
        ("mask_prompt: 'yes'", "mask_prompt: must be true or false, not 'yes'"),
        ("model2: x", "model2: unknown key; did you mean 'model'?"),
        ("adapter_path: 3", "adapter_path: must be text, not 3 (quote it if it is a name)"),
        ("adapter_path: ''", "adapter_path: must not be empty"),
        ("batch_size: 0", "batch_size: must be at least 1, not 0"),
        ("max_seq_length: -1", "max_seq_length: must be at least 2, not -1"),
        ("val_batches: 0", "val_batches: must be -1 (all) or at least 1, not 0"),
        ("num_layers: -2", "num_layers: must be -1 (all) or at least 1, not -2"),
        ("keep_checkpoints: 0", "keep_checkpoints: must be at least 1, not 0"),
        ("chunk_size: 0", "chunk_size: must be at least 1, not 0"),
        ("steps_per_eval: 0", "steps_per_eval: must be at least 1, not 0"),
        ("epochs: 0", "epochs: must be more than 0, not 0"),
        ("max_grad_norm: 0", "max_grad_norm: must be more than 0, not 0"),
        ("seed: -1", "seed: must be at least 0, not -1"),
        ("memory_limit_gb: -3", "memory_limit_gb: must be more than 0, not -3"),
        (
            "kernel: metal",
            "kernel: must be one of auto, fused, recurrent, chunked, replay, reference or native, not 'metal'",
        ),
        ("fine_tune_type: qlora", "fine_tune_type: must be one of lora, dora or full, not 'qlora'"),
        ("optimizer: lion", "optimizer: must be one of adam, adamw, sgd, adafactor or muon, not 'lion'"),
        ("dtype: int8", "dtype: must be one of float32, bfloat16 or float16, not 'int8'"),
        ("on_long: cut", "on_long: must be one of truncate, drop or error, not 'cut'"),
        ("supervise: first", "supervise: must be one of all or last, not 'first'"),
        ("config: other.yaml", "config: must be null or left out, not 'other.yaml'"),
        ("clear_cache_threshold: 2TB", "must be a number of bytes or a size such as 500MB or 2GB, not '2TB'"),
        ("lora_parameters: 8", "lora_parameters: must be a mapping of keys to values, not 8"),
        ("lora_parameters: {dropout: 1}", "lora_parameters.dropout: must be less than 1, not 1"),
        ("lora_parameters: {dropout: -0.1}", "lora_parameters.dropout: must be at least 0, not -0.1"),
        ("lora_parameters: {rank: 0}", "lora_parameters.rank: must be at least 1, not 0"),
        ("lora_parameters: {keys: q_proj}", "lora_parameters.keys: must be a list, not 'q_proj'"),
        ("lora_parameters: {keys: []}", "lora_parameters.keys: must not be empty"),
        ("lora_parameters: {keys: [a, 3]}", "lora_parameters.keys.1: must be text, not 3"),
        (
            "optimizer_config: {lion: {}}",
            "optimizer_config.lion: unknown key; valid keys: adafactor, adam, adamw, muon, sgd",
        ),
        ("optimizer_config: {adam: {beta: 1}}", "optimizer_config.adam.beta: unknown key; did you mean 'betas'?"),
        ("optimizer_config: {adam: {betas: [1]}}", "optimizer_config.adam.betas: needs 2 entries"),
        ("optimizer_config: {adam: {betas: [1, 2, 3]}}", "optimizer_config.adam.betas: takes 2 entries, not 3"),
        ("lr_schedule: {arguments: [1, 2]}", "lr_schedule.name: required"),
        ("lr_schedule: {name: cosine, arguments: [1, 2]}", "lr_schedule.name: must be one of cosine_decay, "),
        (
            "lr_schedule: {name: cosine_decay, arguments: [1]}",
            "lr_schedule.arguments: cosine_decay takes [init, decay_steps[, end]], not 1 numbers",
        ),
        (
            "lr_schedule: {name: linear_schedule, arguments: [1, 0, 0]}",
            "lr_schedule.arguments: steps of linear_schedule must be at least 1, not 0",
        ),
        (
            "lr_schedule: {name: exponential_decay, arguments: [-1, 0.5]}",
            "lr_schedule.arguments: init of exponential_decay must not be negative: -1",
        ),
    ],
)
def test_one_faulty_value(faults, text, message):
    (line,) = faults(text + "\n")
    assert line.startswith("c.yaml:3: ")
    assert message in line


# Faults: names


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("lora_layer: 8", "num_layers"),  # C38
        ("lora_layers: 8", "num_layers"),
        ("learning-rate: 1", "learning_rate"),
        ("lerning_rate: 1", "learning_rate"),
        ("Batch_Size: 1", "batch_size"),
        ("lr: 1", "learning_rate"),
        ("max_length: 1", "max_seq_length"),
        ("num_train_epochs: 1", "epochs"),
        ("lora_rank: 1", "lora_parameters.rank"),
        ("rank: 1", "lora_parameters.rank"),
        ("warmup: 1", "lr_schedule.warmup"),
        ("lora_parameters: {rnak: 1}", "rank"),
        ("lora_parameters: {lora_rank: 1}", "rank"),
        ("lora_parameters: {r: 1}", "rank"),
    ],
)
def test_unknown_key_with_the_name_that_was_meant(faults, text, meant):  # C38
    (line,) = faults(text + "\n")
    assert line.startswith(f"c.yaml:3: {text.replace(': {', '.', 1).split(':')[0]}: unknown key; ")
    assert line.endswith(f"did you mean '{meant}'?")


def test_unknown_key_without_a_near_name_lists_the_valid_ones(faults):  # C38
    (line,) = faults("mtp_loss: true\n")
    assert line.startswith("c.yaml:3: mtp_loss: unknown key; valid keys: adapter_path, batch_size, ")


def test_unknown_key_that_belongs_to_the_top_level(faults):
    (line,) = faults("lora_parameters:\n  num_layers: 3\n")
    assert line == "c.yaml:4: lora_parameters.num_layers: unknown key; did you mean 'num_layers' (top level)?"


def test_unknown_key_with_null_and_keys_that_are_not_text(faults):
    lines = faults("nothing_like_it: null\n2: x\ntrue: y\n")
    assert [line.split(": unknown")[0] for line in lines] == [
        "c.yaml:3: nothing_like_it",
        "c.yaml:4: 2",
        "c.yaml:5: true",
    ]


def test_every_alias_points_at_a_key():
    from gdtrain.config_faults import _ALIASES, _names

    for name, target in _ALIASES.items():
        *parents, leaf = target.split(".")
        known = _names(parents) + (_names(["hf_dataset"]) if name == "subset" else [])
        assert leaf in known, name
        assert name not in RunConfig.model_fields


# Faults: several keys


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("iters: 5\nepochs: 2", "c.yaml:4: epochs: set together with iters"),
        ("iters: 3\ngrad_accumulation_steps: 4", "c.yaml:4: grad_accumulation_steps: 4 is more than iters (3)"),
        ("grad_accumulation_steps: 1001", "c.yaml:3: grad_accumulation_steps: 1001 is more than iters (1000)"),
        ("lora_parameters:\n  scale: 20\n  alpha: 2", "c.yaml:5: lora_parameters.alpha: set together with scale"),
        ("lora_parameters:\n  rslora: true", "c.yaml:4: lora_parameters.rslora: true needs alpha"),
        ("hf_dataset: {path: x}", "c.yaml:3: hf_dataset: set together with data"),
        ("supervise: last", "c.yaml:3: supervise: last needs mask_prompt: true"),
        ("project_name: x", "c.yaml:3: project_name: would be ignored without report_to: wandb"),
        (
            "project_name: x\nreport_to: tensorboard",
            "c.yaml:3: project_name: would be ignored without report_to: wandb",
        ),
    ],
)
def test_contradictions(faults, text, message):
    (line,) = faults(text + "\n")
    assert line.startswith(message)


def test_what_only_looks_like_a_contradiction(load):
    load("epochs: 1\ngrad_accumulation_steps: 2000\n")
    load("lora_parameters: {alpha: 2, scale: null}\n")
    load("mask_prompt: true\nsupervise: last\n")


def test_model_and_data_are_required(faults):
    assert faults("seed: 1\n", base="") == [
        "c.yaml: model: required",
        "c.yaml: data: required: a folder or a Hub dataset (or set hf_dataset)",
    ]
    assert faults("", base="model: null\ndata: x\n") == ["c.yaml:1: model: required"]


def test_hub_dataset_faults(faults):
    assert faults("hf_dataset:\n  path: x\n  name: y\n", base="model: tiny\n")[0].startswith(
        "c.yaml:4: hf_dataset.name: unknown key; "
    )
    assert faults("hf_dataset:\n - path: x\n - pth: y\n", base="model: tiny\n") == [
        "c.yaml:4: hf_dataset.1.path: required",
        "c.yaml:4: hf_dataset.1.pth: unknown key; did you mean 'path'?",
    ]
    assert faults("hf_dataset: {path: 3}\n", base="model: tiny\n") == [
        "c.yaml:2: hf_dataset.path: must be text, not 3 (quote it if it is a name)"
    ]
    assert faults("hf_dataset: {path: x}\ntest: true\n", base="model: tiny\n") == [
        "c.yaml:3: test: true needs hf_dataset.test_split"
    ]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("wandb", ["wandb"]),
        ("TensorBoard", ["tensorboard"]),
        ("wandb, tensorboard", ["wandb", "tensorboard"]),
        ("[tensorboard, wandb]", ["tensorboard", "wandb"]),
        ("' wandb,wandb,'", ["wandb"]),
        ("''", None),
        ("[]", None),
        ("null", None),
    ],
)
def test_services(load, text, names):
    config = load(f"report_to: {text}\n")
    assert config.report_to == names
    assert load(dump_yaml(config), base="").report_to == names


@pytest.mark.parametrize("text", ["swanlab", "wandb,swanlab", "[wandb, '']", "[wandb, 3]", "true", "{}"])
def test_what_is_not_a_service(faults, text):
    (line,) = faults(f"report_to: {text}\n")
    assert line.startswith("c.yaml:3: report_to: must be wandb, tensorboard or both, not ")


def test_project(load):
    assert load("report_to: wandb,tensorboard\nproject_name: x\n").project_name == "x"


def test_columns_of_the_data(faults, load):
    config = load("prompt_feature: q\ncompletion_feature: a\n")
    assert (config.prompt_feature, config.completion_feature, config.chat_feature) == ("q", "a", None)
    load("prompt_feature: text\ncompletion_feature: summary\n")
    assert faults("prompt_feature: q\ncompletion_feature: q\n") == [
        "c.yaml:3: prompt_feature: 'q' is completion_feature's column too"
    ]
    assert faults("completion_feature: prompt\n") == [
        "c.yaml:3: completion_feature: 'prompt' is prompt_feature's column too"
    ]
    assert faults("hf_dataset: {path: x}\ntext_feature: body\n", base="model: tiny\n") == [
        "c.yaml:3: text_feature: would be ignored with hf_dataset; set hf_dataset.text_feature"
    ]


def test_all_faults_are_reported_at_once_in_the_order_of_the_file(faults):
    lines = faults(
        "learning_rate: abc\n"  # 3
        "report_to: swanlab\n"
        "lora_parameters:\n"
        "  rnak: 4\n"  # 6
        "  alpha: 1\n"
        "  scale: 1\n"
        "iters: 2\n"  # 9
        "epochs: 2\n"
        "kernel: fast\n"
        "lr_schedule: {name: cosine_decay, arguments: [1]}\n"  # 12
        "seed: 0\n"
        "seed: 1\n",
        "batch_sise=3",
        "save_every=0",
    )
    assert [line.split(": ")[:2] for line in lines[:8]] == [
        ["c.yaml:3", "learning_rate"],
        ["c.yaml:4", "report_to"],
        ["c.yaml:6", "lora_parameters.rnak"],
        ["c.yaml:7", "lora_parameters.alpha"],
        ["c.yaml:10", "epochs"],
        ["c.yaml:11", "kernel"],
        ["c.yaml:12", "lr_schedule.arguments"],
        ["c.yaml:14", "seed"],
    ]
    assert sorted(lines[8:]) == [
        "--set batch_sise=3: unknown key; did you mean 'batch_size'?",
        "--set save_every=0: must be at least 1, not 0",
    ]


# The file


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "c.yaml: is empty"),
        (b"# only a comment\n", "c.yaml: is empty"),
        (b"- a\n", "c.yaml: must be a mapping"),
        (b"just text", "c.yaml: must be a mapping"),
        (
            b"model: m\nbad: [1,\nx: 2\n",
            "c.yaml:4:1: not valid YAML: expected ',' or ']', but got '<stream end>' (while ",
        ),
        (b"model: 'm\n", "c.yaml:2:1: not valid YAML: "),
        (b"model: m\n\tx: 2\n", "c.yaml:2:1: not valid YAML: "),
        (b"model: m\nx: \xff\n", "c.yaml:2: not UTF-8 (byte 0xff)"),
        (b"model: m\nx: \x00\n", "c.yaml:2: not valid YAML: character #x0000 is not allowed"),
        (b"model: m\n---\nmodel: n\n", "c.yaml:2:1: not valid YAML: "),
        (b"model: !!python/name:os.system\n", "c.yaml:1:8: not valid YAML: "),
        (b"? [a]\n: 1\n", "c.yaml:1:3: not valid YAML: found unhashable key"),
        (b"model: 2024-13-45\n", "c.yaml: not valid YAML: month must be in 1..12"),
        (b"model: " + b"[" * 3000, "c.yaml: not valid YAML: nested too deeply"),
        (b"data: &a [*a]\n", "c.yaml: not valid YAML: nested too deeply"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, monkeypatch, content, message):
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_config(Path("c.yaml"))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(UserError, match=r"nothing\.yaml: no such file"):
        load_config(tmp_path / "nothing.yaml")
    with pytest.raises(UserError, match="is a folder"):
        load_config(tmp_path)


def test_bom_crlf_and_unicode(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_bytes("\ufeffmodel: modèle\r\ndata: données\r\n".encode())
    assert (load_config(path).model, load_config(path).data) == ("modèle", "données")


def test_duplicate_keys(faults):
    lines = faults("lora_parameters:\n  rank: 4\n  rank: 5\nmodel: other\n")
    assert lines == [
        "c.yaml:5: lora_parameters.rank: duplicate key, first set on line 4",
        "c.yaml:6: model: duplicate key, first set on line 1",
    ]


def test_anchors_and_merge_keys(load, faults):
    config = load(
        "optimizer_config:\n  adam: &a {eps: 1e-6}\n  adamw:\n    <<: *a\n    eps: 1e-7\n    weight_decay: 0\n"
    )
    assert config.optimizer_config.adamw.eps == 1e-7
    assert config.optimizer_config.adam.eps == 1e-6


# Overrides


def test_the_command_line_wins(load):  # C39
    config = load(
        "iters: 5\nlora_parameters: {rank: 4, dropout: 0.1}\n",
        *[
            "iters=7",
            "lora_parameters.rank=16",
            "lora_parameters.keys=[a, b]",
            "lr_schedule=",
            "optimizer_config.adam.eps=1e-6",
        ],
    )
    assert config.iters == 7
    assert config.lora_parameters == LoraParameters(rank=16, dropout=0.1, keys=["a", "b"])
    assert config.optimizer_config.adam.eps == 1e-6
    saved = yaml.safe_load(dump_yaml(config))
    assert (saved["iters"], saved["lora_parameters"]["rank"]) == (7, 16)


def test_an_override_mends_a_fault_of_the_file(load):
    assert load("iters: abc\nlora_parameters: {rnak: 3}\n", "iters=3", "lora_parameters={rank: 4}").iters == 3
    assert load("iters: 3\n", "iters=null", "epochs=2").epochs == 2
    assert load("", "seed=1", "seed=2", "model=a=b").model == "a=b"


def test_an_override_leaves_an_alias_alone(load):
    text = "optimizer_config:\n  adam: &a {eps: 1}\n  adamw: *a\n"
    config = load(text, "optimizer_config.adamw.eps=2")
    assert (config.optimizer_config.adam.eps, config.optimizer_config.adamw.eps) == (1, 2)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("iters", "--set iters: must be key=value"),
        ("=3", "--set =3: must be key=value"),
        ("lora_parameters..rank=3", "--set lora_parameters..rank=3: must be key=value"),
        ("model=[1", "--set model=[1: not valid YAML: "),
        ("data.x=3", "--set data.x=3: data is not a mapping in c.yaml"),
        ("lora_parameters.rnak=3", "--set lora_parameters.rnak=3: unknown key; did you mean 'rank'?"),
        (
            "lora_parameters={rnak: 3}",
            "--set lora_parameters={rnak: 3}: lora_parameters.rnak: unknown key; did you mean",
        ),
        ("learning_rate=abc", "--set learning_rate=abc: must be a number, not 'abc'"),
        ("epochs=3", "--set epochs=3: set together with iters"),
    ],
)
def test_faulty_overrides(faults, override, message):
    (line,) = faults("iters: 5\n", override)
    assert line.startswith(message)


# The resolved config


@pytest.mark.parametrize(
    "text",
    [
        "",
        "epochs: 2.5\n",
        "learning_rate: 1e-7\nclear_cache_threshold: 2GB\nadapter_path: '1e-5'\nresume_adapter_file: 'null'\n",
        "lora_parameters: {alpha: 32, rank: 16, rslora: true, keys: [self_attn.q_proj, 'on']}\n",
        "optimizer: muon\noptimizer_config: {muon: {ns_steps: 3}, adam: {betas: [0.9, 0.98], bias_correction: true}}\n",
        "lr_schedule: {name: step_decay, arguments: [1e-5, 0.5, 10], warmup: 5, warmup_init: 1e-9}\n",
        "mask_prompt: true\nsupervise: last\nenable_thinking: false\ndtype: float32\nmemory_limit_gb: 30\n",
    ],
)
def test_round_trip(load, text):
    config = load(text)
    dumped = dump_yaml(config)
    again = load(base=dumped)
    assert again == config
    assert dump_yaml(again) == dumped


def test_round_trip_of_hub_datasets(load):
    config = load(
        "hf_dataset: [{path: a, config: {name: é, n: 1e-3}}, {path: b, test_split: test}]\n", base="model: m\n"
    )
    assert load(base=dump_yaml(config)) == config


def test_dump_shows_every_key_in_the_order_of_the_schema(load):
    keys = list(yaml.safe_load(dump_yaml(load())))
    assert keys == [key for key in RunConfig.model_fields if key != "config"]


# The ready configs and the module itself


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_ready_configs(path, load):
    config = load_config(path)
    assert load(base=dump_yaml(config)) == config
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0] == f"# gdtrain finetune configs/{path.name}"
    without_reason = [line for line in lines if line and "#" not in line and not line.startswith("    - ")]
    assert [line for line in without_reason if line != "lora_parameters:"] == []


def test_the_promised_ready_configs_are_there():
    assert {path.name for path in CONFIGS} >= {
        "quickstart.yaml",
        "qwen3.5-0.8b.yaml",
        "qwen3.5-4b-4bit-16gb.yaml",
        "qwen3.5-9b-36gb.yaml",
        "qwen3.5-27b-8bit-64gb.yaml",
        "qwen3.5-35b-a3b.yaml",
        "qwen3-next-80b-a3b.yaml",
    }


def _sections(section: type[BaseModel]) -> list[type[BaseModel]]:
    return [section, *(deeper for child in section.__subclasses__() for deeper in _sections(child))]


def test_every_key_has_a_one_line_description():
    for section in _sections(Section):
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name}"
            assert "\n" not in field.description


def test_reading_a_config_imports_nothing_heavy():
    code = """import sys, gdtrain.config_file
print([name for name in ("mlx", "mlx_lm", "transformers", "datasets") if name in sys.modules])"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
