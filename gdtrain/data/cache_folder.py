"""Where gdtrain keeps what it can make again."""

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """Of the user, as the system has it: $XDG_CACHE_HOME/gdtrain, ~/.cache/gdtrain, on macOS ~/Library/Caches/gdtrain.

    A relative $XDG_CACHE_HOME is ignored, as its specification says.
    """
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if configured.is_absolute():
        return configured / "gdtrain"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "gdtrain"
