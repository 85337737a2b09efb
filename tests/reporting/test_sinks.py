"""What Weights & Biases and TensorBoard are sent. wandb is a stand-in; tensorboardX is the real one, its files read
back by the definition of the format."""

import errno
import json
import os
import sys
import types
from pathlib import Path

import pytest
from absent import Absent
from report_records import header, stop, train, val
from tensorboard_events import read_events, scalars, texts

from gdtrain.config import SERVICES
from gdtrain.errors import UserError
from gdtrain.reporting import sinks
from gdtrain.reporting.sinks import check_sinks, open_sinks

CONFIG = {"model": "tiny", "iters": 100, "lora_parameters": {"rank": 8, "alpha": None}}


def log(sink, *records):
    for record in records:
        values = {key: value for key, value in record.items() if key != "kind"}
        sink.log(record["kind"], record["iteration"], values)


# Packages


@pytest.mark.parametrize(("name", "package"), [("wandb", "wandb"), ("tensorboard", "tensorboardX")])
def test_an_absent_package_is_an_error_that_names_the_extra(monkeypatch, name, package):
    for module in [module for module in sys.modules if module.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "meta_path", [Absent(package), *sys.meta_path])
    with pytest.raises(UserError) as caught:
        check_sinks([name])
    assert str(caught.value) == (
        f'report_to: {name} needs {package}, which is not installed: pip install "gdtrain[{name}]"'
    )


def test_a_package_that_is_broken(monkeypatch):
    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name == "wandb":
                raise ImportError("libfoo.so is missing")

    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(UserError, match=r"wandb needs wandb, which cannot be imported \(libfoo\.so is missing\)"):
        check_sinks(["wandb"])


def test_a_folder_called_wandb_is_not_the_package(monkeypatch, tmp_path):
    """wandb leaves one where it is run, and Python takes it for a package without files."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(UserError, match="wandb needs wandb, which is not installed"):
        check_sinks(["wandb"])
    sys.modules.pop("wandb", None)


def test_every_service_has_an_extra_and_a_sink():
    import tomllib

    project = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())["project"]
    for name in SERVICES:
        assert sinks._MODULES[name].split(".")[0] in project["optional-dependencies"][name][0]
    assert set(sinks._MODULES) == set(SERVICES)


def test_none_is_none(tmp_path):
    check_sinks([])
    assert open_sinks([], tmp_path, None, CONFIG) == []


# Weights & Biases


class FakeRun:
    def __init__(self, arguments):
        self.arguments, self.id = arguments, arguments["id"] or "abc123"
        self.logged, self.summary, self.steps, self.finished = [], {}, {}, False
        self.config = types.SimpleNamespace(update=self._update)
        self.updates = {}

    def define_metric(self, name, step_metric=None):
        self.steps[name] = step_metric

    def log(self, data):
        assert not self.finished
        self.logged.append(data)

    def finish(self):
        self.finished = True

    def _update(self, values, allow_val_change=False):
        assert allow_val_change
        self.updates |= values


@pytest.fixture
def wandb(monkeypatch):
    """A module with the parts of wandb 0.31 that are used, and with `runs`."""

    class Error(Exception):
        pass

    def init(project=None, name=None, dir=None, config=None, id=None, resume=None):
        arguments = {"project": project, "name": name, "dir": dir, "config": config, "id": id, "resume": resume}
        module.runs.append(FakeRun(arguments))
        return module.runs[-1]

    module = types.ModuleType("wandb")
    module.Error, module.init, module.runs = Error, init, []
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb(wandb, tmp_path):
    check_sinks(["wandb"])
    (sink,) = open_sinks(["wandb"], tmp_path, "project", CONFIG)
    log(
        sink,
        header(),
        val(0, 3.2),
        train(10, loss=2.5, grad_norm=None),
        {"kind": "save", "iteration": 10},
        stop(11, "r"),
    )
    sink.close()
    (run,) = wandb.runs
    assert run.arguments == {
        "project": "project",
        "name": tmp_path.name,
        "dir": str(tmp_path),
        "config": CONFIG,
        "id": None,
        "resume": None,
    }
    assert run.steps == {"*": "iteration"}
    assert run.updates["header"]["kernel"] == "fused"
    validation, training = run.logged
    assert validation == {
        "iteration": 0,
        "val_loss": 3.2,
        "val_time": 2.9,
        "val_supervised_tokens": 1006,
        "peak_memory": 21.5,
    }
    assert training == {
        "iteration": 10,
        "train_loss": 2.5,
        "learning_rate": 5e-6,
        "supervised_tokens": 500,
        "tokens_per_second": 1803.0,
        "iterations_per_second": 2.5,
        "peak_memory": 21.5,
        "active_memory": 14.2,
        "cache_memory": 3.1,
    }
    assert run.summary == {"stop": "r"}
    assert run.finished


def test_names_are_those_of_mlx_lm(wandb, tmp_path):
    """Those that its callbacks get, but trained_tokens, which counts from the start of the training."""
    import inspect

    trainer = inspect.getsource(pytest.importorskip("mlx_lm.tuner.trainer"))
    (sink,) = open_sinks(["wandb"], tmp_path, None, CONFIG)
    log(sink, val(0, 3.2), train(10))
    sent = {name for record in wandb.runs[0].logged for name in record}
    theirs = {name for name in sent if f'"{name}": ' in trainer}
    assert theirs == {
        *("iteration", "train_loss", "learning_rate", "iterations_per_second", "tokens_per_second", "peak_memory"),
        *("val_loss", "val_time"),
    }


def test_a_resumed_run_goes_on_under_its_id(wandb, tmp_path):
    open_sinks(["wandb"], tmp_path, None, CONFIG)[0].close()
    open_sinks(["wandb"], tmp_path, None, CONFIG, resumed_at=40)[0].close()
    open_sinks(["wandb"], tmp_path, None, CONFIG)[0].close()
    assert [(run.arguments["id"], run.arguments["resume"]) for run in wandb.runs] == [
        (None, None),
        ("abc123", "allow"),
        (None, None),
    ]


def test_wandb_refuses(wandb, tmp_path, monkeypatch):
    def refuse(**arguments):
        raise wandb.Error("No API key configured.")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(UserError, match=r"^report_to: wandb: No API key configured\.; WANDB_MODE=offline"):
        open_sinks(["wandb"], tmp_path, None, CONFIG)


# TensorBoard


def test_tensorboard(tmp_path):
    check_sinks(["tensorboard"])
    (sink,) = open_sinks(["tensorboard"], tmp_path, None, CONFIG)
    log(sink, header(), val(0, 3.2), train(10, loss=2.5, grad_norm=None))
    before = scalars(tmp_path / "tensorboard")  # readable while the run goes on
    log(sink, {"kind": "save", "iteration": 10, "path": "."}, stop(11, "why\n# not"))
    sink.close()
    assert scalars(tmp_path / "tensorboard") == before
    names = ["train_loss", "learning_rate", "supervised_tokens", "tokens_per_second", "iterations_per_second"]
    names += ["peak_memory", "active_memory", "cache_memory"]
    assert [name for step, name, _ in before if step == 10] == names
    assert [name for step, name, _ in before if step == 0] == [
        *("val_supervised_tokens", "val_time", "peak_memory", "val_loss")
    ]
    found = {(step, name): value for step, name, value in before}
    assert found[10, "train_loss"] == 2.5
    assert found[0, "val_loss"] == pytest.approx(3.2, rel=1e-7)  # float32 there
    text = texts(tmp_path / "tensorboard")
    assert json.loads(text["config"]) == CONFIG
    assert json.loads(text["header"])["kernel"] == "fused"
    assert text["stop"] == "    why\n    # not"


def test_tensorboard_forgets_what_a_resumed_run_replaces(tmp_path):
    """A session that starts at step 41, in a file of its own: TensorBoard then drops earlier events of this step on."""
    for resumed_at, loss in ((None, 2.0), (40, 1.0)):
        (sink,) = open_sinks(["tensorboard"], tmp_path, None, CONFIG, resumed_at=resumed_at)
        log(sink, train(41, loss=loss))
        sink.close()
    events = read_events(tmp_path / "tensorboard")
    assert [event.step for event in events if event.HasField("session_log")] == [41]
    assert [value for _, name, value in scalars(tmp_path / "tensorboard") if name == "train_loss"] == [2.0, 1.0]
    start = next(i for i, event in enumerate(events) if event.HasField("session_log"))
    losses = [i for i, event in enumerate(events) for value in event.summary.value if value.tag == "train_loss"]
    assert losses[0] < start < losses[1]


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "tensorboard").write_text("")
    with pytest.raises(UserError, match=r"^report_to: tensorboard: .* cannot be written: File exists"):
        open_sinks(["tensorboard"], tmp_path, None, CONFIG)


def test_a_disk_that_is_full(tmp_path, monkeypatch):
    """Raised at once by the record that does not fit; nothing waits."""
    (sink,) = open_sinks(["tensorboard"], tmp_path, None, CONFIG)

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left on device"):
        log(sink, train(10))


def test_what_was_opened_is_closed_when_the_next_fails(wandb, tmp_path):
    (tmp_path / "tensorboard").write_text("")
    with pytest.raises(UserError, match="tensorboard"):
        open_sinks(["wandb", "tensorboard"], tmp_path, None, CONFIG)
    assert wandb.runs[0].finished


def test_both(wandb, tmp_path):
    opened = open_sinks(["tensorboard", "wandb"], tmp_path, "p", CONFIG)
    for sink in opened:
        log(sink, train(10, loss=2.5))
        sink.close()
    assert (10, "train_loss", 2.5) in scalars(tmp_path / "tensorboard")
    assert wandb.runs[0].logged[0]["train_loss"] == 2.5
