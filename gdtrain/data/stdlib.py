"""`data: python-stdlib`: functions of the installed Python's standard library, to be summarised in one sentence.

Built on the user's machine from sources that are already there, so that the quickstart needs no download and
this project ships no copy of them.
"""

import ast
import hashlib
import json
import os
import platform
import re
import shutil
import sysconfig
import tempfile
import tokenize
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from gdtrain.data.cache_folder import cache_folder
from gdtrain.data.sources import SPLITS
from gdtrain.errors import UserError

STDLIB = "python-stdlib"

MIN_RECORDS = 2_000  # A whole CPython 3.11 gives 5,600: fewer than this means that half of the library is missing.
MAX_PROMPT_CHARS = 2_000
MAX_COMPLETION_CHARS = 200  # A longer "sentence" is a table or a list that lost its line breaks.
MIN_COMPLETION_WORDS = 2
MANIFEST = "dataset.json"

# Of the salts 0 to 39 one that divides CPython 3.11's functions 92 / 4 / 4, with no file of more than 60 functions
# in valid or test (without a salt mailbox.py is half of valid).
SPLIT_SALT = 27

# Not part of the library proper, or tables rather than functions (encodings, pydoc_data).
SKIPPED_FOLDERS = {
    *("site-packages", "dist-packages", "lib-dynload", "__pycache__", "__phello__", "ensurepip"),
    *("test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "encodings", "pydoc_data"),
}
# Generated when Python was built: they differ from machine to machine.
SKIPPED_FILES = re.compile(r"^_sysconfigdata_|^_sysconfig_vars_")

# The end of a sentence: a stop and a space, the stop not being that of an abbreviation or an initial.
SENTENCE_END = re.compile(r"(?<!\be\.g)(?<!\bi\.e)(?<!\betc)(?<!\bvs)(?<!\bcf)(?<!\b[A-Z])[.!?][\"')]*(?=\s)")


def build_stdlib_dataset(cache_root: Path | None = None) -> Path:
    """Writes train.jsonl, valid.jsonl and test.jsonl, or finds them written, and returns their folder.

    A record is {"prompt": source of a function without its docstring, "completion": first sentence of the
    docstring}. All functions of a file are in the same split. Beside them lies dataset.json: the records of each
    split, and how many functions were left out and why.

    cache_root: the folder for caches; by default the user's.
    Raises UserError when the library's sources are missing or the folder cannot be written.
    """
    folder = _cache_folder(cache_root)
    if _is_complete(folder):
        return folder
    splits, left_out = _collect()
    _write(folder, splits, left_out)
    return folder


def iter_stdlib_sources() -> Iterator[tuple[str, str]]:
    """Yields (path relative to the library, text) of every source file used, in the order of the paths.

    Raises UserError when there are none.
    """
    for name, text in _read_sources(_stdlib_root()):
        if text is not None:
            yield name, text


def split_of(module: str) -> str:
    """The split of a file, from its path (forward slashes) alone: about 90 / 5 / 5 in a hundred."""
    bucket = int(hashlib.sha256(f"{SPLIT_SALT}:{module}".encode()).hexdigest()[:8], 16) % 100
    return "train" if bucket < 90 else "valid" if bucket < 95 else "test"


def first_sentence(docstring: str) -> str:
    """The first sentence of a docstring's first paragraph, on one line, white space normalised."""
    paragraph = re.split(r"\n\s*\n", docstring.strip(), maxsplit=1)[0]
    line = " ".join(paragraph.split())
    end = SENTENCE_END.search(line)
    return line[: end.end()] if end else line


def _stdlib_root() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _read_sources(root: Path) -> Iterator[tuple[str, str | None]]:
    """(relative path, text) of each file; text None where the bytes are not in the encoding they declare."""
    names = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        relative = Path(folder).relative_to(root)
        names += [(relative / f).as_posix() for f in files if f.endswith(".py") and not SKIPPED_FILES.match(f)]
    if not names:
        raise UserError(_missing(f"has no .py files in {root}"))
    for name in sorted(names):
        try:
            with tokenize.open(root / name) as file:
                yield name, file.read()
        except (SyntaxError, UnicodeDecodeError):
            yield name, None
        except OSError as error:
            raise UserError(f"data: {STDLIB}: cannot read {root / name}: {error.strerror}.") from error


def _missing(fault: str) -> str:
    return (
        f"data: {STDLIB} is built from the sources of the standard library, but this Python {fault}. "
        "Install the full Python (on Debian or Ubuntu: the package libpython3-stdlib), or name a data set of your own."
    )


def _collect() -> tuple[dict[str, list[dict[str, str]]], Counter[str]]:
    root = _stdlib_root()
    splits: dict[str, list[dict[str, str]]] = {split: [] for split in SPLITS}
    left_out: Counter[str] = Counter()
    seen: set[str] = set()
    for name, text in _read_sources(root):
        tree = None if text is None else _parse(text)
        if text is None or tree is None:
            left_out["file does not parse"] += 1
            continue
        lines = text.split("\n")  # As ast counts them: splitlines() would also break at form feeds.
        for node in _functions(tree):
            docstring = ast.get_docstring(node)
            if docstring is None:
                continue
            prompt, completion = _without_docstring(node, lines), first_sentence(docstring)
            # The same function in two files (os.path on two systems, say) must not reach two splits.
            reason = "same source seen before" if prompt in seen else _reason_to_leave_out(prompt, completion)
            if reason or prompt is None:
                left_out[reason or ""] += 1
                continue
            seen.add(prompt)
            splits[split_of(name)].append({"prompt": prompt, "completion": completion})
    total = sum(map(len, splits.values()))
    if total < MIN_RECORDS or not all(splits.values()):
        raise UserError(_missing(f"gives only {total} functions with a docstring in {root}"))
    return splits, left_out


def _parse(text: str) -> ast.Module | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Invalid escapes in the library's own strings.
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError, RecursionError):
            return None


def _functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return sorted(found, key=lambda node: (node.lineno, node.col_offset))


def _without_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> str | None:
    """The dedented source, comments kept; None when nothing but the docstring is in the body or on its lines."""
    docstring = node.body[0]
    if len(node.body) == 1 or docstring.end_lineno is None or node.end_lineno is None:
        return None
    before = lines[docstring.lineno - 1].encode()[: docstring.col_offset]
    after = lines[docstring.end_lineno - 1].encode()[docstring.end_col_offset :].strip()
    if before.strip() or (after and not after.startswith(b"#")):
        return None
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    body = lines[docstring.end_lineno : node.end_lineno]
    while body and not body[0].strip():
        del body[0]
    # At most the function's own indentation: a string's line that starts further left stays where it is.
    indentation = re.compile(rf"^[ \t]{{0,{node.col_offset}}}")
    kept = lines[first - 1 : docstring.lineno - 1] + body
    return "\n".join(indentation.sub("", line).rstrip() for line in kept)


def _reason_to_leave_out(prompt: str | None, completion: str) -> str | None:
    if prompt is None:
        return "nothing left beside the docstring, or on its lines"
    if len(prompt) > MAX_PROMPT_CHARS:
        return f"source over {MAX_PROMPT_CHARS} characters"
    if len(completion) > MAX_COMPLETION_CHARS:
        return f"sentence over {MAX_COMPLETION_CHARS} characters"
    if len(completion.split()) < MIN_COMPLETION_WORDS:
        return f"sentence under {MIN_COMPLETION_WORDS} words"
    if completion in prompt:
        return "sentence stands in the source too"
    return None


def _cache_folder(cache_root: Path | None) -> Path:
    """Named after the Python version, this builder and the library's place, so that none is taken for another."""
    root = cache_folder() if cache_root is None else cache_root / "gdtrain"
    builder = hashlib.sha256(Path(__file__).read_bytes() + os.fsencode(_stdlib_root())).hexdigest()[:10]
    return root / STDLIB / f"{platform.python_version()}-{builder}"


def _is_complete(folder: Path) -> bool:
    try:
        sizes = json.loads((folder / MANIFEST).read_text())["bytes"]
        return all((folder / f"{split}.jsonl").stat().st_size == sizes[split] for split in SPLITS)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _write(folder: Path, splits: dict[str, list[dict[str, str]]], left_out: Counter[str]) -> None:
    """Everything into a temporary sibling, then one rename: a reader sees all of it or nothing."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".building-", dir=folder.parent) as scratch:
            built = Path(scratch, "new")
            built.mkdir()
            sizes = {}
            for split, records in splits.items():
                text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
                sizes[split] = (built / f"{split}.jsonl").write_bytes(text.encode())
            manifest = {
                "python": platform.python_version(),
                "records": {split: len(records) for split, records in splits.items()},
                "bytes": sizes,
                "left_out": dict(sorted(left_out.items())),
            }
            (built / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
            if folder.exists() and not _is_complete(folder):
                shutil.move(folder, Path(scratch, "incomplete"))
            try:
                built.rename(folder)
            except OSError:
                if not _is_complete(folder):  # Complete: another process built the same data meanwhile.
                    raise
    except OSError as error:
        raise UserError(
            f"data: {STDLIB}: cannot write the data set to {folder}: {error.strerror or error}. "
            "Set XDG_CACHE_HOME to a folder that can be written."
        ) from error
