"""Configs that come with the package run by their bare name, from any folder."""

from pathlib import Path

import pytest
from command import call, finish, run

from gdtrain.config_file import load_config, shipped_config, shipped_configs
from gdtrain.errors import UserError

CONFIGS = Path(__file__).parents[2] / "configs"
NAMES = sorted(file.stem for file in CONFIGS.glob("*.yaml"))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_they_are_those_of_the_repository():
    assert "quickstart" in NAMES
    assert shipped_configs() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_same_config(name):
    assert load_config(Path(name), ["seed=3"]) == load_config(CONFIGS / f"{name}.yaml", ["seed=3"])


def test_a_file_here_goes_first():
    Path("quickstart").write_text("model: mine\ndata: mine\n")
    assert load_config(Path("quickstart")).model == "mine"


def test_a_folder_here_does_not():
    Path("quickstart").mkdir()
    assert load_config(Path("quickstart")).model == "tiny"


@pytest.mark.parametrize(
    "path", ["configs/quickstart", "quickstart.yaml", "../quickstart", "/quickstart", ".", "quick"]
)
def test_no_other_name_is_one(path):
    assert shipped_config(Path(path)) is None


def test_an_unknown_name():
    """The names that there are, where a name was meant; not where a path was."""
    for command in ("finetune", "check", "plan"):
        result = call(command, "quikstart")
        assert (result.code, result.out) == (2, "")
        assert result.err == f"gdtrain: quikstart: no such file; accepted: a YAML file, or {', '.join(NAMES)}\n"
    with pytest.raises(UserError, match=r"^none/quickstart: no such file$"):
        load_config(Path("none/quickstart"))


def test_a_fault_in_an_override():
    result = call("check", "quickstart", "--set", "iters=many")
    assert (result.code, result.out) == (2, "")
    assert "--set iters=many" in result.err


def test_commands_take_the_name():
    assert "model   tiny" in finish("plan", "quickstart")
    result = run("finetune", "quickstart", "--set", "iters=1", "--set", "val_batches=1", "--dry-run")
    assert (result.code, result.err) == (0, "")
    assert "model   tiny: 3 of 3 GDN layers" in result.out
    assert list(Path().iterdir()) == []
