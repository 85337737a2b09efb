"""report_to and report.html in a whole run: what the services get is what metrics.jsonl has, and the page is there."""

import sys
from pathlib import Path

import pytest
from absent import Absent
from command import call, finish, metrics
from tensorboard_events import scalars

RUN = {"iters": 4, "steps_per_report": 1, "steps_per_eval": 2, "save_every": 2}


def test_tensorboard_gets_the_records(config):
    pytest.importorskip("tensorboardX")
    config(**RUN, report_to="tensorboard")
    finish("finetune", "c.yaml", "--set", "iters=2")
    finish("finetune", "c.yaml", "--resume")
    for kind, name in (("train", "train_loss"), ("val", "val_loss")):
        found = [(step, value) for step, found, value in scalars(Path("run/tensorboard")) if found == name]
        assert found == [(r["iteration"], pytest.approx(r["loss"], rel=1e-6)) for r in metrics("run", kind)]


@pytest.mark.parametrize(("service", "package"), [("wandb", "wandb"), ("tensorboard", "tensorboardX")])
def test_a_package_that_is_not_there(service, package, config, monkeypatch):
    """An error before anything is read or written."""
    for name in [package, *(name for name in sys.modules if name.startswith(package + "."))]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Absent(package), *sys.meta_path])
    config(**RUN, report_to=service)
    result = call("finetune", "c.yaml")
    assert result.code == 2
    assert (
        f'report_to: {service} needs {package}, which is not installed: pip install "gdtrain[{service}]"' in result.err
    )
    assert "rows kept" not in result.out
    assert not Path("run").exists()


def test_the_page_goes_with_the_run(config, monkeypatch):
    """Written with the first record and when the run ends, also where it ends on a fault."""
    config(**RUN)
    finish("finetune", "c.yaml")
    page = Path("run/report.html").read_text(encoding="utf-8")
    assert 'http-equiv="refresh"' not in page
    for record in metrics("run", "val"):
        assert f"{record['loss']:.3f}" in page

    def fail(*args):
        raise RuntimeError("[metal::malloc] Resource limit (499000) exceeded.")

    monkeypatch.setattr("gdtrain.training.loop.accumulate", fail)
    assert call("finetune", "c.yaml").code == 3
    page = Path("run/report.html").read_text(encoding="utf-8")
    assert "too many buffers at once" in page
    assert 'http-equiv="refresh"' not in page
