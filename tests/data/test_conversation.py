import json

import numpy as np
import pytest
from chats import runs
from mlx_lm.tokenizer_utils import TokenizerWrapper
from toy_tokenizer import TEMPLATES, toy_tokenizer

from gdtrain.data import conversation
from gdtrain.data.conversation import Sample, encode, encode_all
from gdtrain.data.schema import Columns, Record, parse_record
from gdtrain.errors import UserError

TOKENIZERS = {name: toy_tokenizer(name) for name in TEMPLATES}
END = {name: "<|eot_id|>" if name == "llama" else "<|im_end|>" for name in TEMPLATES}
ROUNDS = [
    ("user", "one?"),
    ("assistant", "1."),
    ("user", "two?"),
    ("assistant", "2."),
    ("user", "3?"),
    ("assistant", "3"),
]


def record(messages, tools=None) -> Record:
    rows = [dict(zip(("role", "content"), m, strict=True)) if isinstance(m, tuple) else m for m in messages]
    return parse_record({"messages": rows, "tools": tools}, "train.jsonl:7", Columns())[0]


def encoded(name, messages, tools=None, *, mask_prompt=True, supervise="all", enable_thinking=None) -> Sample:
    options = {"mask_prompt": mask_prompt, "supervise": supervise, "enable_thinking": enable_thinking}
    return encode(record(messages, tools), TOKENIZERS[name], **options)


def full_render(name, messages, tools=None, **options) -> list[int]:
    rows = list(record(messages, tools).messages)
    return TOKENIZERS[name].apply_chat_template(rows, tools=tools, return_dict=False, **options)


def test_text_gets_one_end_token():
    tokenizer = TOKENIZERS["plain"]
    for text in ("abc", "abc<|im_end|>"):
        item = parse_record({"text": text}, "train.jsonl:1", Columns())[0]
        sample = encode(item, tokenizer, mask_prompt=False)
        assert tokenizer.decode(sample.ids) == "abc<|im_end|>"
        assert sample.supervised.tolist() == [False, True, True, True]
    with pytest.raises(UserError, match=r"train\.jsonl:1: mask_prompt"):
        encode(item, tokenizer, mask_prompt=True)


@pytest.mark.parametrize("name", TEMPLATES)
def test_dtypes_and_everything_supervised_without_a_mask(name):
    sample = encoded(name, ROUNDS, mask_prompt=False)
    assert sample.ids.dtype == np.int32
    assert sample.supervised.dtype == np.bool_
    assert sample.ids.tolist() == full_render(name, ROUNDS)
    assert not sample.supervised[0]
    assert sample.supervised[1:].all()


def test_c17_an_empty_answer_counts_its_end_token():
    for name in ("plain", "strips", "suffix", "llama"):
        assert runs(encoded(name, [("user", "hello"), ("assistant", "")]), TOKENIZERS[name]) == [END[name]]
    null = [("user", "hello"), {"role": "assistant", "content": None}]
    assert runs(encoded("plain", null), TOKENIZERS["plain"]) == ["<|im_end|>"]


def test_c19_a_completion_counts_its_tokens_and_the_end_token():
    item = parse_record({"prompt": "prompt", "completion": "abc"}, "train.jsonl:1", Columns())[0]
    sample = encode(item, TOKENIZERS["plain"], mask_prompt=True)
    assert sample.supervised.sum() == 3 + 1
    assert runs(sample, TOKENIZERS["plain"]) == ["abc<|im_end|>"]
    assert not sample.supervised[-1]  # the newline that the template writes after the end


@pytest.mark.parametrize("name", ["plain", "strips", "suffix", "llama"])
def test_c23_every_turn_or_the_last(name):
    end = END[name]
    assert runs(encoded(name, ROUNDS), TOKENIZERS[name]) == ["1." + end, "2." + end, "3" + end]
    assert runs(encoded(name, ROUNDS, supervise="last"), TOKENIZERS[name]) == ["3" + end]
    unanswered = [*ROUNDS, ("user", "four?")]
    assert runs(encoded(name, unanswered, supervise="last"), TOKENIZERS[name]) == ["3" + end]


def test_c23_qwen_history_has_no_think_block_and_the_last_turn_has():
    end = "<|im_end|>"
    expected = ["1." + end, "2." + end, "\n</think>\n\n3" + end]
    assert runs(encoded("qwen", ROUNDS), TOKENIZERS["qwen"]) == expected
    assert runs(encoded("qwen", ROUNDS, enable_thinking=False), TOKENIZERS["qwen"]) == [*expected[:2], "3" + end]


@pytest.mark.parametrize("enable_thinking", [None, True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_c24_ids_equal_the_full_render(name, enable_thinking):
    think = "<think>\nwhy\n</think>\n\n"
    options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    for answers in (("a", "b"), (think + "a", "b"), ("a", think + "b"), (think + "a", think + "b")):
        messages = [("user", "q"), ("assistant", answers[0]), ("user", "r"), ("assistant", answers[1])]
        for mask_prompt in (False, True):
            sample = encoded(name, messages, mask_prompt=mask_prompt, enable_thinking=enable_thinking)
            assert sample.ids.tolist() == full_render(name, messages, **options)


def test_think_blocks_of_the_answer_are_supervised():
    messages = [("user", "q"), ("assistant", "<think>\nwhy\n</think>\n\nb")]
    rest = "why\n</think>\n\nb<|im_end|>"
    for name, thinking, expected in [
        ("strips", None, "<think>\n" + rest),
        ("plain", None, "<think>\n" + rest),
        ("suffix", None, rest),  # inference is given the "<think>\n"
        ("qwen", None, rest),
        ("qwen", True, rest),
        ("qwen", False, "<think>\n" + rest),  # inference would be given an empty block, which this turn has not
    ]:
        sample = encoded(name, messages, enable_thinking=thinking)
        assert runs(sample, TOKENIZERS[name]) == [expected], name
    explicit = [("user", "q"), {"role": "assistant", "content": "b", "reasoning_content": "why"}]
    assert runs(encoded("qwen", explicit), TOKENIZERS["qwen"]) == [rest]


def test_a_token_that_is_partly_prompt_is_no_target():
    tokenizer = toy_tokenizer("qwen", merges=(("Ċ", "Ċ"),))
    item = record([("user", "q"), ("assistant", "b")])
    # "<think>\n\n</think>" has one token "\n\n"; the prompt of inference ends in the middle of it.
    assert runs(encode(item, tokenizer, mask_prompt=True), tokenizer) == ["</think>\n\nb<|im_end|>"]
    assert runs(encode(item, tokenizer, mask_prompt=True, enable_thinking=False), tokenizer) == ["b<|im_end|>"]


def test_trimmed_offsets_lose_no_token():
    merges = (("Ċ", "Ċ"), ("Ġ", "b"))
    tokenizer = toy_tokenizer("plain", merges=merges, trim_offsets=True)
    item = record([("user", "q \n\n"), ("assistant", " b b \n\n")])
    assert runs(encode(item, tokenizer, mask_prompt=True), tokenizer) == [" b b \n\n<|im_end|>"]


CALL = {"city": "Zürich", "days": [1, 2], "quote": '"<|im_end|>"'}
CALLS = [
    ("user", "weather?"),
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "weather", "arguments": CALL}}]},
    {"role": "tool", "content": "sun"},
    {"role": "tool", "content": "<|im_start|>assistant\nrain<|im_end|>"},
    ("assistant", "Both."),
]
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "<|im_start|>assistant"}}]


def test_c26_arguments_as_a_string_or_an_object():
    call = {"function": {"name": "weather", "arguments": json.dumps(CALL)}}
    texts = [*CALLS[:1], {"role": "assistant", "tool_calls": [call]}, *CALLS[2:]]
    one, other = encoded("qwen", CALLS, TOOLS), encoded("qwen", texts, TOOLS)
    assert one.ids.tolist() == other.ids.tolist() == full_render("qwen", CALLS, TOOLS)
    assert one.supervised.tolist() == other.supervised.tolist()


def test_c27_tool_calls_are_supervised_and_tool_results_are_not():
    first, second = runs(encoded("qwen", CALLS, TOOLS), TOKENIZERS["qwen"])
    assert first.startswith("\n</think>\n\n<tool_call>\n<function=weather>\n<parameter=city>\nZürich\n")
    assert first.endswith('\n"<|im_end|>"\n</parameter>\n</function>\n</tool_call><|im_end|>')
    assert second == "\n</think>\n\nBoth.<|im_end|>"


@pytest.mark.parametrize(("name", "key"), [("f", "<|im_end|"), ("<|im_end|", "k"), ("f", "<|im_start|")])
def test_names_that_the_template_completes_to_its_own_tokens(name, key):
    call = {"role": "assistant", "tool_calls": [{"name": name, "arguments": {key: "v"}}]}
    said = f"<tool_call>\n<function={name}>\n<parameter={key}>\nv\n</parameter>\n</function>\n</tool_call>"
    sample = encoded("qwen", [("user", "q"), call], enable_thinking=False)
    assert runs(sample, TOKENIZERS["qwen"]) == [said + "<|im_end|>"]


def test_a_wrapper_gives_what_the_tokenizer_inside_gives():
    for name in TEMPLATES:
        wrapped = encode(record(ROUNDS), TokenizerWrapper(TOKENIZERS[name]), mask_prompt=True)
        plain = encoded(name, ROUNDS)
        assert wrapped.ids.tolist() == plain.ids.tolist()
        assert wrapped.supervised.tolist() == plain.supervised.tolist()


def test_templates_without_special_tokens():
    tokenizer = toy_tokenizer("plain", special=False)
    item = record([("user", "<|im_end|>?"), ("assistant", "a"), ("user", "b"), ("assistant", "c <|im_end|> d")])
    assert runs(encode(item, tokenizer, mask_prompt=True), tokenizer) == ["a<|im_end|>", "c <|im_end|> d<|im_end|>"]


def test_what_cannot_be_exact_names_the_record():
    tokenizer = toy_tokenizer("plain")
    for template, reason in [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "nothing before an assistant turn"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "drops an assistant message"),
        ("{{ raise_exception('Never.') }}", "refuses the conversation: Never."),
        (TEMPLATES["plain"] + "{{ eos_token }}", "ends a conversation differently"),
        (TEMPLATES["llama"].replace("| trim + '<|eot_id|>'", "| trim"), "no end of turn|does not close"),
    ]:
        tokenizer.chat_template = template
        with pytest.raises(UserError, match=rf"^train\.jsonl:7: .*({reason})"):
            encode(record([("user", "q"), ("assistant", "a")]), tokenizer, mask_prompt=True)
    tokenizer.chat_template = None
    with pytest.raises(UserError, match=r"^train\.jsonl:7: the tokenizer has no chat template"):
        encode(record([("user", "q"), ("assistant", "a")]), tokenizer, mask_prompt=False)
    with pytest.raises(UserError, match=r"^train\.jsonl:7: .*System role not supported"):
        encoded("plain", [("system", "s"), ("user", "q"), ("assistant", "a")])


def test_merged_turns_are_refused():
    tokenizer = toy_tokenizer("plain")
    tokenizer.chat_template = r"""
{%- for m in messages %}
  {%- if loop.first or m.role != messages[loop.index0 - 1].role %}{{ '<|im_start|>' + m.role + '\n' }}{% endif %}
  {{- m.content }}
  {%- if loop.last or m.role != messages[loop.index0 + 1].role %}{{ '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
    assert runs(encode(record(ROUNDS), tokenizer, mask_prompt=True), tokenizer)[0] == "1.<|im_end|>"
    with pytest.raises(UserError, match=r"train\.jsonl:7: 2 assistant messages, but the chat template opens 1 turn"):
        encode(record([("user", "q"), ("assistant", "a"), ("assistant", "b")]), tokenizer, mask_prompt=True)


def test_a_template_that_looks_into_contents_for_its_own_tokens_is_refused():
    tokenizer = toy_tokenizer("plain")
    tokenizer.chat_template = TEMPLATES["plain"].replace(
        "message.content +", "('quoted' if '<|im_end|>' in message.content else message.content) +"
    )
    assert runs(encode(record(ROUNDS), tokenizer, mask_prompt=True), tokenizer)[0] == "1.<|im_end|>"
    with pytest.raises(UserError, match=r"train\.jsonl:7: a content holds the template's own tokens in a way"):
        encode(record([("user", "<|im_end|>"), ("assistant", "a")]), tokenizer, mask_prompt=True)


def test_an_edited_template_is_learnt_anew():
    tokenizer = toy_tokenizer("plain")
    item = record([("user", "q"), ("assistant", "a")])
    assert runs(encode(item, tokenizer, mask_prompt=True), tokenizer) == ["a<|im_end|>"]
    tokenizer.chat_template = TEMPLATES["llama"]
    assert runs(encode(item, tokenizer, mask_prompt=True), tokenizer) == ["a<|eot_id|>"]


def test_together_is_as_one_by_one(monkeypatch):
    """Text, chats and faults in any order, in groups of any size, with one tokenizer and with the wrapper."""
    records = [
        record(ROUNDS),
        parse_record({"text": "abc é😀 " * 9}, "train.jsonl:8", Columns())[0],
        record([("system", "refused"), ("user", "q"), ("assistant", "a")]),
        parse_record({"text": ""}, "train.jsonl:9", Columns())[0],
        *[record([("user", "q" * n), ("assistant", "b" * n)]) for n in range(9)],
    ]
    for tokenizer in (TOKENIZERS["plain"], TokenizerWrapper(TOKENIZERS["plain"])):
        for mask_prompt in (False, True):
            expected = []
            for item in records:
                try:
                    expected.append(encode(item, tokenizer, mask_prompt=mask_prompt))
                except UserError as error:
                    expected.append(error)
            for characters, count in ((1, 1000), (1 << 18, 2), (1 << 18, 1000), (150, 5)):
                monkeypatch.setattr(conversation, "CHARACTERS", characters)
                monkeypatch.setattr(conversation, "RECORDS", count)
                found = list(encode_all(records, tokenizer, mask_prompt=mask_prompt))
                assert len(found) == len(records)
                for one, other in zip(found, expected, strict=True):
                    assert type(one) is type(other)
                    if isinstance(one, UserError):
                        assert str(one) == str(other)
                    else:
                        assert (one.ids.tolist(), one.where) == (other.ids.tolist(), other.where)
                        assert one.supervised.tolist() == other.supervised.tolist()


def test_a_tokenizer_with_its_own_apply_chat_template_gives_its_own_ids():
    """Its ids are taken, and where they are not those of the rendered text the assistant's cannot be told."""

    class Own(type(TOKENIZERS["plain"])):
        extra: tuple[int, ...] = ()

        def apply_chat_template(self, *args, tokenize=True, **options):
            found = super().apply_chat_template(*args, tokenize=tokenize, **options)
            return [*found, *self.extra] if tokenize else found

        def encode(self, text, **options):
            return [*super().encode(text, **options), *self.extra]

    tokenizer = Own(tokenizer_object=TOKENIZERS["plain"].backend_tokenizer, eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATES["plain"]
    assert runs(encode(record(ROUNDS), tokenizer, mask_prompt=True), tokenizer)[0] == "1.<|im_end|>"
    plain = encoded("plain", ROUNDS, mask_prompt=False).ids.tolist()
    tokenizer.extra = (5,)
    assert encode(record(ROUNDS), tokenizer, mask_prompt=False).ids.tolist() == [*plain, 5]
    with pytest.raises(UserError, match=r"train\.jsonl:7: the tokenizer gives other ids for the rendered conversation"):
        encode(record(ROUNDS), tokenizer, mask_prompt=True)
    text = parse_record({"text": "a"}, "train.jsonl:8", Columns())[0]
    ids = encode(text, tokenizer, mask_prompt=False).ids.tolist()
    assert ids == [*TOKENIZERS["plain"].encode("a"), 5, tokenizer.eos_token_id]
