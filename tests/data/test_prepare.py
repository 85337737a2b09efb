import pytest
from toy_tokenizer import toy_tokenizer

from gdtrain.data.prepare import CUT_AWAY, NO_TARGET, TOO_LONG, prepare
from gdtrain.data.schema import Columns, parse_record
from gdtrain.errors import UserError

TOKENIZER = toy_tokenizer("plain")
# "<|im_start|>user\n" + prompt + "<|im_end|>\n<|im_start|>assistant\n" + completion + "<|im_end|>\n"
AROUND = 6 + 2 + 11 + 2


def rows(*pairs):
    return [
        parse_record({"prompt": "p" * p, "completion": "c" * c}, f"train.jsonl:{i}", Columns())[0]
        for i, (p, c) in enumerate(pairs, start=1)
    ]


def test_nothing_lost():
    samples, counts = prepare(rows((6, 3), (1, 1)), TOKENIZER, max_seq_length=64, mask_prompt=True)
    assert [len(sample.ids) for sample in samples] == [AROUND + 9, AROUND + 2]
    assert (counts.rows_read, counts.rows_kept, counts.supervised_tokens) == (2, 2, 4 + 2)
    assert counts.summary() == "2 of 2 rows kept, 53 tokens, 6 supervised"


def test_c18_a_prompt_that_leaves_no_answer_is_dropped_and_counted():
    samples, counts = prepare(rows((6, 3), (90, 3)), TOKENIZER, max_seq_length=40, mask_prompt=True)
    assert [sample.where for sample in samples] == ["train.jsonl:1"]
    assert counts.rows_dropped == {CUT_AWAY: 1}
    assert (counts.tokens_lost, counts.supervised_lost, counts.rows_truncated) == (AROUND + 93, 4, 0)
    with pytest.raises(UserError, match=r"no row is left to learn from: 2 whose supervised tokens were all cut off"):
        prepare(rows((90, 3), (91, 3)), TOKENIZER, max_seq_length=40, mask_prompt=True)


def test_c42_truncate_drop_or_error():
    data = rows(*[(2, 2)] * 7, *[(2, 50)] * 3)
    samples, counts = prepare(data, TOKENIZER, max_seq_length=40, on_long="truncate", mask_prompt=True)
    assert [len(s.ids) for s in samples] == [25] * 7 + [40] * 3
    assert (counts.rows_truncated, counts.tokens_lost) == (3, 3 * 33)
    assert counts.supervised_lost == 3 * 32  # all of the cut but the newline after the end token
    assert counts.supervised_tokens + counts.supervised_lost == 7 * 3 + 3 * 51
    assert counts.summary() == (
        "10 of 10 rows kept, 295 tokens, 78 supervised; 3 rows cut to 40 tokens; lost 99 tokens, 96 supervised"
    )
    samples, counts = prepare(data, TOKENIZER, max_seq_length=40, on_long="drop", mask_prompt=True)
    assert (len(samples), dict(counts.rows_dropped)) == (7, {TOO_LONG: 3})
    assert "3 rows dropped longer than max_seq_length" in counts.summary()
    with pytest.raises(UserError, match=r"train\.jsonl:8: 73 tokens, but max_seq_length is 40\ntrain\.jsonl:9"):
        prepare(data, TOKENIZER, max_seq_length=40, on_long="error", mask_prompt=True)


def test_a_row_of_one_token_teaches_nothing():
    data = [parse_record({"text": text}, "train.jsonl:1", Columns())[0] for text in ("", "a")]
    samples, counts = prepare(data, TOKENIZER, max_seq_length=8)
    assert len(samples) == 1
    assert counts.rows_dropped == {NO_TARGET: 1}
    assert (counts.tokens, counts.tokens_lost, counts.supervised_tokens) == (2, 1, 1)


def test_supervise_last_is_passed_on():
    turns = [("user", "q"), ("assistant", "abc"), ("user", "r"), ("assistant", "d")]
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    data = [parse_record(row, "train.jsonl:1", Columns())[0]]
    for supervise, tokens in (("all", 4 + 2), ("last", 2)):
        _, counts = prepare(data, TOKENIZER, max_seq_length=99, mask_prompt=True, supervise=supervise)
        assert counts.supervised_tokens == tokens


def test_rows_that_cannot_be_encoded_are_told_together():
    system = {"messages": [{"role": "system", "content": "s"}, {"role": "assistant", "content": "a"}]}
    data = [parse_record(system, f"train.jsonl:{i}", Columns())[0] for i in range(1, 40)]
    with pytest.raises(UserError) as caught:
        prepare(data, TOKENIZER, max_seq_length=99)
    shown = str(caught.value).splitlines()
    assert shown[20] == "train.jsonl:20: the chat template refuses the conversation: System role not supported"
    assert len(shown) == 22


def test_no_records_and_bad_options():
    assert prepare([], TOKENIZER, max_seq_length=8)[0] == []
    with pytest.raises(UserError, match="max_seq_length: 1"):
        prepare([], TOKENIZER, max_seq_length=1)
    with pytest.raises(UserError, match="on_long: 'cut'; accepted are truncate, drop and error"):
        prepare([], TOKENIZER, max_seq_length=8, on_long="cut")
