"""The check of what is installed, before MLX is imported."""

from importlib.metadata import PackageNotFoundError, version

import pytest

from gdtrain import versions
from gdtrain.errors import UserError


def install(monkeypatch, platform="linux", **changed):
    """Pretend: name=None is not installed, name="1.2" is that version; _ stands for - in names."""
    changed = {name.replace("_", "-"): value for name, value in changed.items()}

    def pretended(name):
        value = changed[name] if name in changed else version(name)
        if value is None:
            raise PackageNotFoundError(name)
        return value

    monkeypatch.setattr(versions, "version", pretended)
    monkeypatch.setattr(versions.sys, "platform", platform)


ONLY_CPU = {"mlx_cpu": "0.32.4", "mlx_cuda_12": None, "mlx_cuda_13": None}


def test_what_is_tested_passes(monkeypatch):
    install(monkeypatch, **ONLY_CPU)
    versions.check_versions()


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"mlx": "0.31.2"}, r"mlx 0\.31\.2 is installed; gdtrain needs mlx.*0\.32\.4"),
        ({"mlx_lm": "0.40.0"}, r"mlx-lm 0\.40\.0 is installed"),
        ({"mlx_lm": None}, "mlx-lm is not installed"),
        ({**ONLY_CPU, "mlx_cpu": None}, r'no build for this machine; pip install one of "gdtrain\[cpu\]"'),
        ({**ONLY_CPU, "mlx_cuda_13": "0.32.4"}, "mlx-cpu and mlx-cuda-13 are installed and overwrite each other"),
    ],
)
def test_what_is_not(changed, named, monkeypatch):
    install(monkeypatch, **changed)
    with pytest.raises(UserError, match=named):
        versions.check_versions()


def test_macos_needs_no_extra(monkeypatch):
    install(monkeypatch, platform="darwin", mlx_cpu=None, mlx_cuda_12=None, mlx_cuda_13=None)
    versions.check_versions()
