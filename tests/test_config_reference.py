"""docs/config.md is what scripts/config_reference.py makes of the schema of today."""

import sys
from pathlib import Path

import pytest

from gdtrain.config import RunConfig
from gdtrain.config_section import Section

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "scripts"))

import config_reference  # noqa: E402


def sections(section: type[Section]) -> list[type[Section]]:
    return [section, *(deeper for child in section.__subclasses__() for deeper in sections(child))]


def test_page_agrees():
    """python scripts/config_reference.py writes it anew."""
    assert config_reference.PAGE.read_text(encoding="utf-8") == config_reference.page()


def test_every_key_is_there():
    lines = config_reference.page().splitlines()
    for section in sections(Section):
        for key, field in section.model_fields.items():
            assert any(line.startswith(f"| `{key}` | ") and str(field.description) in line for line in lines), key


def test_what_is_accepted():
    """The words for limits that are spread over validators, unions and nested annotations."""
    expected = {
        "val_batches": "whole number from 1, or `-1`",
        "clear_cache_threshold": "whole number of bytes, or `500MB`, `2GB`",
        "epochs": "number above 0",
        "seed": "whole number from 0 below 4294967296",
        "dtype": "`float32`, `bfloat16`, `float16`",
        "hf_dataset": "list of sections, or one",
    }
    page = config_reference.page()
    for key, words in expected.items():
        assert f"| `{key}` | {words} | " in page


def test_a_default_that_is_not_mlx_lms_needs_a_reason(monkeypatch):
    """Negative control: another default without a reason makes no page; with one it is in the table."""
    monkeypatch.setitem(config_reference.CONFIG_DEFAULTS, "seed", 7)
    monkeypatch.setattr(config_reference, "REASONS", config_reference.REASONS | {"seed": "why not"})
    assert "| `seed` | `0` | `7` | why not |" in config_reference.page()
    monkeypatch.setattr(config_reference, "REASONS", {})
    with pytest.raises(KeyError):
        config_reference.page()


def test_groups_hold_every_key_once():
    keys = [key for _, group in config_reference._groups() for key in group]
    assert keys == list(RunConfig.model_fields)
