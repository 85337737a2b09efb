"""Where the embedded model lies."""

from importlib.resources import files
from pathlib import Path

from gdtrain.errors import UserError

TINY = "tiny"


def tiny_model_path() -> Path:
    """The folder of the model `tiny`: a small Qwen3.5 hybrid with its tokenizer, made by scripts/make_tiny.py.

    Raises UserError when it was not installed as files (the package imported from a zip archive, say).
    """
    folder = Path(str(files("gdtrain.model") / "tiny"))
    if not (folder / "model.safetensors").is_file():
        raise UserError(f"model: tiny: {folder} has no model.safetensors. Install gdtrain again, not from a zip file.")
    return folder
