"""The compilers that the harness needs, and what it keeps of their work."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path


class MissingCompiler(RuntimeError):
    """No compiler of the kind was found. A test that needs it fails: without it nothing was checked."""


def find(variable: str, candidates: tuple[str, ...], advice: str) -> str:
    """The compiler that the environment variable names, else the first candidate on the PATH.

    Raises:
        MissingCompiler: with `advice`.
    """
    named = os.environ.get(variable)
    found = next((path for c in ((named,) if named else candidates) if (path := shutil.which(c))), None)
    if found is None:
        raise MissingCompiler(f"{variable}: {named or ' or '.join(candidates)} not found: {advice}")
    return found


def major_version(compiler: str) -> int:
    """19 for clang 19.1.7."""
    words = subprocess.run([compiler, "-dumpversion"], capture_output=True, text=True, check=True).stdout
    return int(words.split(".")[0])


@cache
def version(compiler: str) -> str:
    """What `compiler --version` says."""
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout


def cached(key: str, suffix: str, make: list[str], text: str = "") -> Path:
    """The file that the command makes where it says `{}` of `text`, its standard input; unless it is there already.

    `key` stands for all else that the file depends on.

    Several processes may ask for it at once: each makes its own, and a whole one takes the name.

    Raises:
        RuntimeError: the command failed; its words.
    """
    digest = hashlib.sha256("\0".join((key, *make, text)).encode()).hexdigest()[:32]
    path = cache_folder() / f"{digest}{suffix}"
    if path.exists():
        return path
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=suffix)
    os.close(handle)
    try:
        command = [name if word == "{}" else word for word in make]
        done = subprocess.run(command, input=text, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr.strip())
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)
    return path


@cache
def cache_folder() -> Path:
    """Where compiled kernels stay, of this user alone; GDTRAIN_METAL_CACHE names another folder."""
    named = os.environ.get("GDTRAIN_METAL_CACHE")
    folder = Path(named) if named else Path(tempfile.gettempdir()) / f"gdtrain-metal-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise RuntimeError(f"{folder} belongs to another user; set GDTRAIN_METAL_CACHE")
    return folder
