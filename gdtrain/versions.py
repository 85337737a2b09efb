"""The versions of MLX and mlx-lm that this package was tested with, checked before either is imported."""

from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from gdtrain.errors import UserError

_CHECKED = ("mlx", "mlx-lm")


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
