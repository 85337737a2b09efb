"""gdtrain finetune: which rows and tokens of the data are learnt."""

import math
from pathlib import Path

import pytest
import yaml
from command import adapter, finish, metrics, write_config, write_rows
from mini import toy_tokenizer, write_checkpoint


def test_override_wins_and_is_saved(config):
    """C39."""
    config(lora_parameters={"rank": 8}, seed=3)
    out = finish("finetune", "c.yaml", "--set", "lora_parameters.rank=2", "--set", "seed=4")
    saved = yaml.safe_load(Path("run/config.yaml").read_text())
    assert (saved["lora_parameters"]["rank"], saved["seed"]) == (2, 4)
    assert "  rank: 2\n" in out
    assert {min(x.shape) for x in adapter("run").values()} == {2}
    assert metrics("run")[-1]["iteration"] == 2


@pytest.mark.parametrize("rate", ["1e-5", "'1e-5'", "1.0e-5"])
def test_numbers_may_be_written_in_any_way(rate, config):
    """C37."""
    with config().open("a") as file:
        file.write(f"learning_rate: {rate}\n")
    text = Path("c.yaml").read_text().replace("learning_rate: 0.005\n", "")
    Path("c.yaml").write_text(text)
    finish("finetune", "c.yaml", "--set", "iters=1")
    assert metrics("run", "train")[0]["learning_rate"] == pytest.approx(1e-5, rel=1e-6)


TEXT = {"text": "abcdefgh"}
PAIR = {"prompt": "123456", "completion": "abc"}
CHAT = {"messages": [{"role": "user", "content": "123456"}, {"role": "assistant", "content": "abc"}]}
ROUNDS = {"messages": [turn for _ in range(3) for turn in CHAT["messages"]]}
# The plain template adds "<|im_start|>user\n" and "<|im_end|>\n", "<|im_start|>assistant\n" and "<|im_end|>\n".
FRAME = (6 + 2) + (11 + 2)
KINDS = {
    "text": (TEXT, {}, 8),  # eight characters and the end, of which the first is no target
    "pair": (PAIR, {}, FRAME + 9 - 1),
    "chat": (CHAT, {}, FRAME + 9 - 1),
    "pair, masked": (PAIR, {"mask_prompt": True}, 3 + 1),  # C19: the completion and the end of the turn
    "chat, masked": (CHAT, {"mask_prompt": True}, 3 + 1),
    "three rounds": (ROUNDS, {"mask_prompt": True}, 3 * (3 + 1)),  # C23
    "the last of three": (ROUNDS, {"mask_prompt": True, "supervise": "last"}, 3 + 1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_data(kind, config):
    row, keys, supervised = KINDS[kind]
    config(data="rows", batch_size=4, iters=1, **keys)
    write_rows("rows/train.jsonl", [row] * 4)
    write_rows("rows/valid.jsonl", [row])
    finish("finetune", "c.yaml")
    assert metrics("run", "header")[0]["supervised_tokens"] == 4 * supervised
    assert metrics("run", "train")[0]["supervised_tokens"] == 4 * supervised
    assert [record["supervised_tokens"] for record in metrics("run", "val")] == [supervised, supervised]


def test_empty_answer(config):
    """C17: only the end of the turn counts."""
    config(data="rows", mask_prompt=True)
    write_rows("rows/train.jsonl", [PAIR, {"prompt": "123", "completion": ""}])
    finish("finetune", "c.yaml")
    assert metrics("run", "header")[0]["supervised_tokens"] == 4 + 1
    assert all(math.isfinite(record["loss"]) for record in metrics("run", "train"))


def test_row_whose_answer_is_cut_off(config):
    """C18: skipped and counted."""
    config(data="rows", mask_prompt=True, max_seq_length=40)
    write_rows("rows/train.jsonl", [PAIR, {"prompt": "1" * 50, "completion": "abc"}, PAIR])
    out = finish("finetune", "c.yaml")
    assert "train: 2 of 3 rows kept" in out
    assert out.count("cut off") == 1
    assert metrics("run", "header")[0]["train_rows"] == 2


@pytest.mark.parametrize(
    ("on_long", "kept", "said"), [("truncate", 3, "1 rows cut to 40"), ("drop", 2, "1 rows dropped")]
)
def test_long_rows(on_long, kept, said, config):
    """C42."""
    config(data="rows", max_seq_length=40, on_long=on_long)
    write_rows("rows/train.jsonl", [TEXT, {"text": "a" * 60}, TEXT])
    out = finish("finetune", "c.yaml")
    assert f"train: {kept} of 3 rows kept" in out
    assert out.count(said) == 1
    assert "lost" in out
    assert metrics("run", "header")[0]["train_rows"] == kept


def test_windows_file(config):
    """C33: byte order mark, CRLF, blank lines."""
    config(data="rows")
    Path("rows").mkdir()
    Path("rows/train.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "abc"}\r\n\r\n{"text": "abc"}\r\n\r\n')
    assert "train: 2 of 2 rows kept" in finish("finetune", "c.yaml")


def test_no_validation_rows(config):
    """C31: one warning, training goes on."""
    config()
    Path("data/valid.jsonl").unlink()
    out = finish("finetune", "c.yaml")
    assert out.count("warning") == 1
    assert "no validation rows" in out
    assert "Val loss" not in out
    assert metrics("run", "val") == []
    assert not Path("run/best").exists()
    assert Path("run/adapters.safetensors").is_file()


def test_fewer_validation_rows_than_a_batch(config):
    """C30."""
    config(batch_size=4)
    write_rows("data/valid.jsonl", [TEXT])
    write_rows("data/train.jsonl", [TEXT] * 4)
    finish("finetune", "c.yaml")
    records = metrics("run", "val")
    assert [(record["iteration"], record["supervised_tokens"]) for record in records] == [(0, 8), (2, 8)]
    assert all(0 < record["loss"] < 50 for record in records)


def test_empty_answers_are_counted(config):
    """They train the end of the turn only: a model that falls silent."""
    write_rows("data/train.jsonl", [{"prompt": "a", "completion": ""}, *[{"prompt": "a", "completion": "b"}] * 3])
    config(mask_prompt=True)
    assert "1 rows with one supervised token only (an empty answer?)" in finish("finetune", "c.yaml")


def test_model_with_thinking_template(work):
    """The think block that Qwen's template writes belongs to the answer, unless inference writes it."""
    write_checkpoint(Path("thinking"), tokenizer=toy_tokenizer("qwen"))
    write_rows("rows/train.jsonl", [PAIR] * 2)
    write_config(model="thinking", data="rows", adapter_path="run", iters=1, batch_size=2, mask_prompt=True)
    finish("finetune", "c.yaml", "--set", "enable_thinking=false")
    assert metrics("run", "header")[0]["supervised_tokens"] == 2 * (3 + 1)
