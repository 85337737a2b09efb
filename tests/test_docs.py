"""What the documents name exists: commands with their options, links, config keys, and the messages of the program."""

import ast
import re
import shlex
from functools import lru_cache
from pathlib import Path

import pytest
import typer
import yaml
from pydantic import ValidationError

from gdtrain.cli import app
from gdtrain.config import RunConfig
from gdtrain.config_section import Contradictions, Section

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "kernels" / "README.md"])
COMMANDS = typer.main.get_command(app).commands
# Names with an underscore in the pages below that are no keys of a config.
OTHER_NAMES = {
    *("apply_chat_template", "load_dataset", "tool_calls", "reasoning_content", "model_type"),
    *("peak_memory_gb", "cache_memory_gb"),  # of metrics.jsonl
}
ABOUT_CONFIGS = ("data.md", "memory.md", "troubleshooting.md")


def texts(pages=None):
    """(name, text) of the pages."""
    return [(str(page.relative_to(ROOT)), page.read_text(encoding="utf-8")) for page in pages or PAGES]


def code(text):
    """Inline code. What lies in fences is taken out first."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def commands(text):
    """Every command line of gdtrain in a text: after "$ " in a block, or as inline code."""
    typed = re.findall(r"^\$ (.+)$", text, re.MULTILINE)
    words = [shlex.split(line, comments=True) for line in [*typed, *code(text)] if "gdtrain " in line]
    return [line[1:] for line in words if line and Path(line[0]).name == "gdtrain" and len(line) > 1]


def check_command(arguments):
    """Raises ValueError if there is no such command or it has no such option, or more arguments than it takes."""
    name, *rest = arguments
    if name.startswith("--"):
        return
    if name not in COMMANDS:
        raise ValueError(f"no command {name}")
    command = COMMANDS[name]
    options = {option for p in command.params for option in (*p.opts, *p.secondary_opts)} | {"--help"}
    flags = {option for p in command.params if getattr(p, "is_flag", False) for option in (*p.opts, *p.secondary_opts)}
    places = sum(p.param_type_name == "argument" for p in command.params)
    words = iter(rest)
    for word in words:
        option, equals, _ = word.partition("=")
        if option.startswith("--"):
            if option not in options:
                raise ValueError(f"{name} has no option {option}")
            if option not in flags and not equals:
                value = next(words, None)
                if option == "--set" and value not in (None, "KEY=VALUE"):
                    check_key(value.partition("=")[0])
        else:
            places -= 1
            if re.fullmatch(r"configs/.*", word) and not (ROOT / word).is_file():
                raise ValueError(f"no {word}")
    if places < 0:
        raise ValueError(f"{name} takes fewer arguments")


def check_key(key):
    """Raises ValueError if a config has no such key."""
    section = RunConfig
    for part in key.split("."):
        if section is None or part not in section.model_fields:
            raise ValueError(f"no key {key}")
        section = _section(section.model_fields[part].annotation)


def check_value(key, value):
    """Raises ValueError if a config has no such key, or it takes no such value, whatever else has to go with it."""
    check_key(key)
    values = {"model": "m"}
    section, _, name = key.rpartition(".")
    values |= {section: {name: value}} if section else {key: value}
    try:
        RunConfig.model_validate(values)
    except ValidationError as error:
        if any(not isinstance(fault.get("ctx", {}).get("error"), Contradictions) for fault in error.errors()):
            raise


def _section(annotation):
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(_section, getattr(annotation, "__args__", ()))), None)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands(page):
    for line in commands(page.read_text(encoding="utf-8")):
        check_command(line)


def test_commands_are_found():
    """Negative controls."""
    spoken = {line[0] for _, text in texts() for line in commands(text)}
    assert spoken >= {"finetune", "eval", "check", "plan", "doctor", "generate"}
    assert commands("$ .venv/bin/gdtrain eval x  # y\n`gdtrain check` and `gdtrain`") == [["eval", "x"], ["check"]]
    for wrong in (
        "train c.yaml",
        "eval x --spilt test",
        "check a b",
        "finetune c --set iter=3",
        "check configs/no.yaml",
    ):
        with pytest.raises(ValueError, match=r"no |fewer"):
            check_command(wrong.split())
    check_command(["finetune", "configs/quickstart.yaml", "--set", "lora_parameters.rank=16", "--dry-run"])


def anchors(text):
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links(page):
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    for link in links:
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), link


def test_wrong_values():
    """Negative control."""
    for key, value in (("on_long", "cut"), ("packing", "yes please"), ("iter", 3), ("lora_parameters.rank", "x")):
        with pytest.raises(ValueError, match=r"no key|validation error"):
            check_value(key, value)
    check_value("supervise", "last")


@pytest.mark.parametrize("page", ABOUT_CONFIGS)
def test_config_keys(page):
    (text,) = (text for name, text in texts() if name == f"docs/{page}")
    for words in code(text):
        if match := re.fullmatch(r"([a-z_]+(?:\.[a-z_]+)*): ([^… ]+)", words):
            check_value(match[1], yaml.safe_load(match[2]))
        elif re.fullmatch(r"[a-z]+(_[a-z]+)+(\.[a-z_]+)*", words) and words not in OTHER_NAMES:
            check_key(words)


def test_no_other_name_is_a_key():
    assert OTHER_NAMES & set(RunConfig.model_fields) == set()


@lru_cache
def constants():
    """Every text of the program, formatted ones with … in place of what is put in."""
    found = []
    for file in [*(ROOT / "gdtrain").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(p.value if isinstance(p, ast.Constant) else "…" for p in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def is_said(message):
    """Whether the program has a text with all parts of a message, in their order."""
    pattern = re.compile(".*".join(re.escape(part.strip()) for part in message.split("…")), re.DOTALL)
    return any(pattern.search(text) for text in constants())


def messages():
    """Of the first column of tables that begin with "message"."""
    (text,) = (text for name, text in texts() if name == "docs/troubleshooting.md")
    found, inside = [], False
    for line in text.splitlines():
        inside = line.startswith("| message") or (inside and line.startswith("|"))
        found += re.findall(r"^\| `([^`]+)` \|", line) if inside else []
    return found


@pytest.mark.parametrize("message", messages(), ids=lambda message: message.replace("…", "_"))
def test_messages(message):
    assert len(message.replace("…", "").strip()) > 3
    assert is_said(message)


def test_messages_are_found():
    assert len(messages()) > 40
    assert not is_said("… is not installed and never was")
    assert not is_said("accepted: … no such file")


def test_nothing_of_one_machine():
    """Documents are of the project alone."""
    for name, text in texts([*PAGES, ROOT / "CITATION.cff"]):
        assert not re.search(r"/(work|root|home|Users|tmp)/", text), name
