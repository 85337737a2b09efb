"""What is released is whole: the wheel has every file of both packages, and runs where there is no repository."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PACKAGES = {"gdtrain": ROOT / "gdtrain", "gdkernels": ROOT / "kernels" / "gdkernels"}
METADATA = f"gdtrain-{PROJECT['version']}.dist-info"


def build(what: str, source: Path, to: Path) -> Path:
    """A wheel or an sdist of a folder, as `python -m build` makes it, with the setuptools of this environment."""
    program = f"from setuptools.build_meta import build_{what}; build_{what}({str(to)!r})"
    done = subprocess.run([sys.executable, "-c", program], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (made,) = to.iterdir()
    return made


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """Of a copy, so that nothing is left in the repository."""
    pytest.importorskip("setuptools", minversion="77", reason="the licence is written as setuptools 77 reads it")
    source = tmp_path_factory.mktemp("source")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("gdtrain", "kernels", "configs"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    return build("sdist", source, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """Of the sdist, as an index makes it for those who ask for no wheel."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


def files():
    """Every file of the two packages, by its name in a wheel."""
    found = {f"gdtrain/configs/{file.name}" for file in (ROOT / "configs").glob("*.yaml")}
    for name, folder in PACKAGES.items():
        for file in folder.rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                found.add(f"{name}/{file.relative_to(folder).as_posix()}")
    return found


def test_the_wheel_has_every_file(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    inside = {name for name in names if not name.startswith(METADATA)}
    assert inside == files()
    assert f"{METADATA}/licenses/LICENSE" in names
    for kind in (".metal", ".h", "tiny/model.safetensors", "tiny/chat_template.jinja", "configs/quickstart.yaml"):
        assert any(name.endswith(kind) for name in inside), kind


def test_a_link_is_not_packed_as_one(wheel):
    config = zipfile.ZipFile(wheel).read("gdtrain/configs/quickstart.yaml")
    assert config == (ROOT / "configs" / "quickstart.yaml").read_bytes()
    assert (ROOT / "gdtrain" / "configs").resolve() == ROOT / "configs"


def test_metadata(wheel):
    archive = zipfile.ZipFile(wheel)
    text = archive.read(f"{METADATA}/METADATA").decode()
    assert "License-Expression: Apache-2.0" in text
    assert "Description-Content-Type: text/markdown" in text
    assert "gdtrain = gdtrain.cli:main" in archive.read(f"{METADATA}/entry_points.txt").decode()


def test_it_runs_without_the_repository(wheel, tmp_path):
    """Unpacked, and before this environment's own gdtrain; a step reads every file that a run needs."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    (tmp_path / "work").mkdir()
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "MLX_DISABLE_COMPILE": "1"}

    def python(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        done = subprocess.run(
            command, cwd=tmp_path / "work", env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    places = python("-c", "import gdtrain, gdkernels; print(gdtrain.__file__, gdkernels.__file__)").split()
    assert [Path(place).parents[1] for place in places] == [tmp_path / "site"] * 2
    said = python("-m", "gdtrain", "finetune", "quickstart", "--set", "iters=1", "--dry-run")
    assert f"gdtrain {PROJECT['version']}" in said
    assert "longest batch: " in said
    assert "dry run: nothing is written" in said


def test_versions_agree():
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.findall(r"^## (\S+), (.+)$", changes, re.MULTILINE)[0]
    assert newest[0] == PROJECT["version"]
    assert newest[1] == "unreleased" or re.fullmatch(r"\d{4}-\d{2}-\d{2}", newest[1])
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]


def test_the_same_papers_everywhere():
    """In CITATION.cff and in docs/kernels.md."""
    number = r"\d{4}\.\d{5}"
    cited = {
        match
        for paper in yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["references"]
        for match in re.findall(number, paper["url"])
    }
    page = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    assert cited == set(re.findall(rf"arxiv\.org/abs/({number})", page))
    assert cited >= {"2412.06464", "2406.06484", "2106.09685", "2402.09353", "2312.03732"}
