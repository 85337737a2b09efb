"""The versions of MLX and mlx-lm that this package was tested with, checked before either is imported."""

import sys
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from gdtrain.errors import UserError

_CHECKED = ("mlx", "mlx-lm")
# mlx itself holds no device code on Linux: that is in one of these, which overwrite each other.
_BUILDS = {"mlx-cpu": "cpu", "mlx-cuda-12": "cuda12", "mlx-cuda-13": "cuda13"}


def check_versions() -> None:
    """Compare what is installed with the ranges of this distribution's own metadata.

    Raises:
        UserError: a package is missing or outside its range; names both and the command that mends it.
    """
    ranges = {r.name: r.specifier for r in map(Requirement, requires("gdtrain") or []) if not r.marker}
    for name in _CHECKED:
        wanted = f'pip install "{name}{ranges[name]}"'
        try:
            installed = version(name)
        except PackageNotFoundError:
            raise UserError(f"{name} is not installed; gdtrain needs {name}{ranges[name]}: {wanted}") from None
        if not ranges[name].contains(installed, prereleases=True):
            raise UserError(f"{name} {installed} is installed; gdtrain needs {name}{ranges[name]}: {wanted}")
    if sys.platform == "linux":
        _check_build()


def _check_build() -> None:
    extras = ", ".join(f'"gdtrain[{extra}]"' for extra in _BUILDS.values())
    installed = [name for name in _BUILDS if _is_installed(name)]
    if not installed:
        raise UserError(f"MLX has no build for this machine; pip install one of {extras}")
    if len(installed) > 1:
        raise UserError(
            f"{' and '.join(installed)} are installed and overwrite each other: pip uninstall them and mlx, "
            f"then pip install one of {extras}"
        )


def _is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True
