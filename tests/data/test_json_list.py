import io
import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdtrain.data.json_list import JsonListError, read_json_list

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=3), v, max_size=3),
    max_leaves=6,
)


def read(text: str | bytes, block: int = 4) -> list:
    return list(read_json_list(io.BytesIO(text.encode() if isinstance(text, str) else text), block))


@given(st.lists(values, max_size=5), st.integers(1, 9), st.sampled_from([None, 1]), st.booleans())
def test_what_json_reads(items, block, indent, escaped):
    text = json.dumps(items, indent=indent, ensure_ascii=escaped)
    for content in (text, "\ufeff \r\n" + text + "\n\n"):
        assert read(content, block) == items


@pytest.mark.parametrize("number", ["-0.0", "1.5e7", "1e-5", "12345678901234567890.25"])
@pytest.mark.parametrize("block", range(1, 9))
def test_a_number_goes_on_in_the_next_block(number, block):
    assert read(f"[{number},{number}]", block) == [float(number)] * 2


@given(st.text('[]{},:"\\ 1-.eEtrue\nna\u00e9', max_size=14), st.integers(1, 5))
def test_what_json_refuses_is_refused(text, block):
    try:
        expected, reason = json.loads(text), "instead of a list"
    except json.JSONDecodeError:
        expected, reason = None, "not valid JSON"
    if isinstance(expected, list):
        assert read(text, block) == expected
    else:
        with pytest.raises(JsonListError, match=reason):
            read(text, block)


def test_lines_of_faults():
    for text, line, reason in [
        ('[{"a": 1},\n {"a": tru},\n 3]', 2, "Expecting value"),
        ('[1,\n2,\n{"a" 1}]', 3, "Expecting ':' delimiter"),
        ("[1\n2]", 2, "Expecting ',' delimiter"),
        ("[1]\n\n2", 3, "Extra data"),
        ('[1,\n"a', 2, "Unterminated string"),
        ("[1,\n2\n", 3, "Expecting ',' delimiter"),
        ("", 1, "Expecting value"),
        ('{"a": 1}\n{"a": 2}', 2, "Extra data"),
    ]:
        for block in (1, 3, 1000):
            with pytest.raises(JsonListError, match=reason) as caught:
                read(text, block)
            assert caught.value.line == line, (text, block)
    with pytest.raises(UnicodeDecodeError):
        read(b'["\xff"]')
    with pytest.raises(UnicodeDecodeError):
        read('["é"]'.encode()[:3])


def test_a_long_file_is_not_in_memory():
    """The peak does not grow with the file: 200 KB of it at once, where the whole has 4 MB."""
    text = json.dumps([{"text": "a" * 1000}] * 4000).encode()
    tracemalloc.start()
    assert sum(1 for _ in read_json_list(io.BytesIO(text), 1 << 14)) == 4000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000


def test_a_fault_in_the_middle_is_told_before_the_rest_is_read():
    class File(io.BytesIO):
        given = 0

        def read(self, size=-1):
            block = super().read(size)
            self.given += len(block)
            return block

    file = File(b"[{} {}," + b" " * 100_000 + b"1]")
    with pytest.raises(JsonListError, match="delimiter"):
        list(read_json_list(file, 100))
    assert file.given <= 200
