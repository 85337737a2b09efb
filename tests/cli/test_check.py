"""gdtrain check: counts, lengths and samples, in a terminal and piped, and no weights."""

import os
import pty
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from command import SCRIPT, Result, call, environ, finish, run, write_rows
from mini import toy_tokenizer

from gdtrain.data.conversation import Sample
from gdtrain.model import load
from gdtrain.reporting.histogram import histogram
from gdtrain.reporting.samples import KEPT, choose_marks, encodable, marked, spread, stretches

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
END = "<|im_end|>"
ROUNDS = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "⟦one⟧?"},
    {"role": "assistant", "content": "1 😀"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "2\nlines"},
]


@pytest.fixture(autouse=True)
def no_weights(monkeypatch):
    """Fail if weights are read; the function that reads them."""

    def forbidden(*args, **kwargs):
        raise AssertionError("weights were read")

    real = load.load_weights
    monkeypatch.setattr(load, "load_weights", forbidden)
    return real


@pytest.fixture
def chats(config, checkpoint):
    """Two rows of data with three rounds of one kind each, and a config for them; a template with a system role."""
    tokenizer = toy_tokenizer("suffix")
    Path("model").mkdir()
    for file in checkpoint.iterdir():
        (Path("model") / file.name).symlink_to(file)
    for name in ("tokenizer_config.json", "chat_template.jinja", "tokenizer.json"):
        (Path("model") / name).unlink(missing_ok=True)
    tokenizer.save_pretrained("model")
    write_rows("rows/train.jsonl", [{"messages": ROUNDS}, {"messages": ROUNDS[1:3]}])
    config(model="model", data="rows", mask_prompt=True)


def samples(out: str) -> dict[str, str]:
    """The shown samples by their place, marks included."""
    parts = re.split(r"^--- (\S+): [\d,]+ tokens, [\d,]+ supervised\n", out, flags=re.M)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def in_terminal(*args: str, **environment: str) -> tuple[int, str]:
    """Exit code and output of the command in a terminal of 200 columns."""
    ours, theirs = pty.openpty()
    changes = {"TERM": "xterm-256color", "COLUMNS": "200"} | environment
    process = subprocess.Popen([SCRIPT, *args], stdout=theirs, stderr=theirs, stdin=theirs, env=environ(**changes))
    os.close(theirs)
    read = b""
    while True:
        try:
            block = os.read(ours, 65536)
        except OSError:  # Linux: the other side is closed
            break
        if not block:
            break
        read += block
    os.close(ours)
    return process.wait(timeout=60), read.decode().replace("\r\n", "\n")


def test_exactly_what_is_supervised_is_marked(chats):
    out = finish("check", "c.yaml", "--show", "2")
    assert "supervised tokens stand between ⟪ and ⟫, which the samples do not contain" in out  # ⟦ is in the data
    shown = samples(out)
    assert list(shown) == ["train.jsonl:1", "train.jsonl:2"]
    assert re.findall("⟪(.*?)⟫", shown["train.jsonl:1"], re.S) == ["1 😀" + END, "2\nlines" + END]
    assert shown["train.jsonl:1"].replace("⟪", "").replace("⟫", "").startswith("<|im_start|>system\ns<|im_end|>\n")
    assert re.findall("⟪(.*?)⟫", shown["train.jsonl:2"], re.S) == ["1 😀" + END]
    assert "\x1b" not in out
    last = samples(finish("check", "c.yaml", "--set", "supervise=last"))["train.jsonl:1"]
    assert re.findall("⟪(.*?)⟫", last, re.S) == ["2\nlines" + END]
    everything = samples(finish("check", "c.yaml", "--set", "mask_prompt=false"))["train.jsonl:2"]
    first, rest = everything.split("⟪")
    assert (first, rest.rstrip("\n")[-1]) == ("<|im_start|>", "⟫")  # nothing predicts the first token


def test_in_a_terminal_with_and_without_colour(chats):
    code, out = in_terminal("check", "c.yaml", "--show", "2")
    assert code == 0
    assert "⟪" not in out
    found = re.findall(r"\x1b\[30;42m(.*?)\x1b\[0m", out[out.index("--- train.jsonl:1") :], re.S)
    assert "".join(found) == f"1 😀{END}2↵lines{END}1 😀{END}"  # rich leaves newlines without colour
    code, plain = in_terminal("check", "c.yaml", "--show", "2", NO_COLOR="1")
    assert code == 0
    assert f"⟪2\nlines{END}⟫" in plain
    assert "42m" not in plain


def test_piped_in_an_encoding_that_lacks_the_marks(chats):
    result = run("check", "c.yaml", PYTHONIOENCODING="ascii")
    assert (result.code, result.err) == (0, "")
    assert f"{{1 \\U0001f600{END}}}" in result.out


def test_quickstart():
    """In a process of its own, piped."""
    result = run("check", str(QUICKSTART), "--show", "1")
    assert (result.code, result.err) == (0, "")
    assert re.search(
        r"^train: [\d,]+ of [\d,]+ rows kept, [\d,]+ tokens, [\d,]+ supervised; [\d,]+ rows dropped", result.out, re.M
    )
    assert "padding: " in result.out
    assert len(samples(result.out)) == 1


def test_it_says_what_finetune_says(config, no_weights, monkeypatch):
    """The notes, counts, padding and warnings, word for word."""
    rows = [{"text": "a" * n} for n in (3, 9, 60, 5)]
    write_rows("rows/train.jsonl", [*rows, {"text": "", "id": 1}])
    config(data="rows", max_seq_length=40, enable_thinking=True, iters=1)
    checked = finish("check", "c.yaml", "--show", "0").split("\ntrain: tokens")[0].splitlines()
    monkeypatch.setattr(load, "load_weights", no_weights)
    trained = finish("finetune", "c.yaml").splitlines()
    said = [line for line in checked if line and not line.startswith("iterations: ")]
    assert [line for line in said if line not in trained] == []
    assert (
        "train: 4 of 5 rows kept, 60 tokens, 56 supervised; 1 rows cut to 40 tokens; 1 rows dropped without"
        in checked[2]
    )
    assert sum(line.startswith("padding: ") for line in said) == 1
    assert sum(line.startswith("warning: there are no validation rows") for line in said) == 1


@pytest.mark.parametrize(
    ("on_long", "kept", "lost"), [("truncate", 3, "lost 21 tokens"), ("drop", 2, "lost 61 tokens")]
)
def test_c42_long_rows(on_long, kept, lost, config):
    write_rows("rows/train.jsonl", [{"text": "abcdefgh"}, {"text": "a" * 60}, {"text": "abcdefgh"}])
    config(data="rows", max_seq_length=40, on_long=on_long)
    out = finish("check", "c.yaml")
    assert f"train: {kept} of 3 rows kept" in out
    assert lost in out
    assert "9 | " in out  # the histogram's row of the short ones


def test_c17_c18_empty_and_lost_answers(config):
    pairs = [("123456", "abc"), ("123", ""), ("1" * 50, "abc")]
    write_rows("rows/train.jsonl", [{"prompt": prompt, "completion": answer} for prompt, answer in pairs])
    config(data="rows", mask_prompt=True, max_seq_length=40)
    out = finish("check", "c.yaml")
    assert "train: 2 of 3 rows kept" in out
    assert "1 rows with one supervised token only (an empty answer?)" in out
    assert "1 rows dropped whose supervised tokens were all cut off" in out
    assert f"⟦{END}⟧" in samples(out)["train.jsonl:2"]


def refuse(*args: object, named: tuple[str, ...]) -> Result:
    result = call("check", *args)
    assert result.code == 2, result
    assert result.err.startswith("gdtrain: ")
    assert "Traceback" not in result.err
    assert [text for text in named if text not in result.err] == [], result.err
    return result


def test_what_the_user_can_mend(config):
    """C29, C32, C34, C36, C38."""
    config()
    refuse("none.yaml", named=("none.yaml", "no such file"))
    refuse("c.yaml", "--set", "lora_layer=8", named=("lora_layer", "num_layers"))
    refuse("c.yaml", "--set", "batch_size=99", named=("batch_size: 99", "training rows"))
    refuse("c.yaml", "--set", "train=false", named=("leave nothing to do",))
    refuse("c.yaml", "--set", "model=no/model", named=("model: no/model",))
    write_rows("bad/train.jsonl", [{"text": "a"}] * 6)
    refuse("c.yaml", "--set", "data=bad", "--set", "mask_prompt=true", named=("train.jsonl:1: mask_prompt is true",))
    with Path("bad/train.jsonl").open("a") as file:
        file.write('{"text": "tr\n{"messages": []}\n{"text": 5}\n')
    refuse(
        "c.yaml",
        "--set",
        "data=bad",
        named=("3 faults", "train.jsonl:7: not valid JSON", "train.jsonl:8: ", "train.jsonl:9: "),
    )


def test_a_real_process_has_no_traceback(config):
    config()
    result = run("check", "c.yaml", "--set", "data=nowhere", HF_HUB_OFFLINE="1")
    assert result.code == 2
    assert result.err.startswith("gdtrain: data: ")
    assert "Traceback" not in result.err


def test_nothing_is_written(config):
    config()
    before = sorted(Path().rglob("*"))
    finish("check", "c.yaml")
    assert sorted(Path().rglob("*")) == before


def test_tokenised_data_is_kept(config, monkeypatch, tmp_path_factory):
    """And said to be, where there is much of it."""
    monkeypatch.setattr("gdtrain.data.token_cache.WORTH_TOKENS", 0)
    caches = tmp_path_factory.mktemp("own")
    monkeypatch.setenv("XDG_CACHE_HOME", str(caches))
    config()
    first, second = (finish("check", "c.yaml").splitlines() for _ in range(2))
    cached = [line for line in second if line not in first]
    assert [line for line in second if line in first] == first
    assert len(cached) == 3
    assert all(
        re.fullmatch(rf"(train|valid|test): \d+ rows from the cache, {caches}/gdtrain/tokens/\w+\.tokens", line)
        for line in cached
    )


# What is shown


def sample(ids: list[int], supervised: list[int]) -> Sample:
    return Sample(np.array(ids, np.int32), np.array(supervised, np.bool_), "train.jsonl:1")


def test_characters_of_several_tokens_stay_whole():
    tokenizer = toy_tokenizer("plain")
    ids = tokenizer.encode("aé😀b")
    assert len(ids) == 8  # bytes
    whole = stretches(sample(ids, [0, *[1] * 6, 0]), tokenizer)
    assert marked(whole, ("<", ">")) == "a<é😀>b"
    cut = stretches(sample(ids, [0, 1, 1, 1, 1, 0, 0, 0]), tokenizer)
    assert "\ufffd" in marked(cut, ("<", ">"))


def test_control_characters_and_long_stretches():
    tokenizer = toy_tokenizer("plain")
    ids = tokenizer.encode("\x1b[31m\ta\u202e\n")
    (shown,) = stretches(sample(ids, [0] * len(ids)), tokenizer)
    assert shown.text == "\\x1b[31m\ta\\u202e\n"
    (long,) = stretches(sample(tokenizer.encode("ab" * KEPT + "xyz"), [0] * (2 * KEPT + 3)), tokenizer)
    assert "\n[... 3 characters are not shown ...]\n" in long.text
    assert long.text.endswith("xyz")


def test_marks_are_never_in_the_text():
    tokenizer = toy_tokenizer("plain")
    ids = tokenizer.encode("⟦«{<[( [supervised:")
    texts = [stretches(sample(ids, [0] * len(ids)), tokenizer)]
    assert choose_marks(texts, "utf-8") == ("⟪", "⟫")
    assert choose_marks(texts, "ascii") == ("[supervised::", "::supervised]")
    assert encodable("é", "ascii") == "\\xe9"


def test_spread():
    assert spread(3, 5) == [0, 1, 2]
    assert spread(10, 1) == [0]
    assert spread(101, 3) == [0, 50, 100]


def test_histogram():
    assert histogram([]) == []
    assert histogram([7]) == ["7 | " + "#" * 40 + " 1"]
    assert histogram([0, 0, 2], width=4) == ["0 | #### 2", "1 | 0", "2 | ## 1"]
    lines = histogram(list(range(1000)), width=10)
    assert len(lines) == 10
    assert lines[0] == "   0-99 | ########## 100"
    counts = [int(line.split()[-1].replace(",", "")) for line in histogram([5, 1500, 1501, 99_999])]
    assert sum(counts) == 4
    assert len(counts) <= 12
