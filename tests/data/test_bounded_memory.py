"""Records are read one at a time: what is in memory does not grow with the file."""

import csv
import gc
import json
import tracemalloc

import pytest
from toy_tokenizer import toy_tokenizer

from gdtrain.data import records as records_module
from gdtrain.data.prepare import prepare
from gdtrain.data.records import check_records
from gdtrain.data.schema import Record
from gdtrain.errors import UserError

TEXT = "a b c " * 80
ROWS = 4000  # 2 MB


def write(folder, suffix: str, rows: int) -> None:
    folder.mkdir(exist_ok=True)
    file = folder / f"train{suffix}"
    items = [{"prompt": f"{TEXT} {i}", "completion": "x"} for i in range(rows)]
    if suffix == ".jsonl":
        file.write_text("".join(json.dumps(item) + "\n" for item in items))
    elif suffix == ".json":
        file.write_text(json.dumps(items))
    elif suffix == ".csv":
        with file.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, list(items[0]))
            writer.writeheader()
            writer.writerows(items)
    else:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(items), file, row_group_size=500)


def most_memory(work) -> int:
    """Bytes at the peak of work(), over what there was before."""
    gc.collect()
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_checking_and_reading_take_no_more_for_a_longer_file(suffix, tmp_path):
    """All records as a list would be 3 MB more; that is seen, below. Here is room for blocks of text and counters."""

    def read():
        assert sum(1 for _ in check_records(str(tmp_path), None, mask_prompt=True).train) > 0

    peaks = []
    for rows in (ROWS // 4, ROWS // 4, ROWS):  # the first time modules are loaded
        write(tmp_path, suffix, rows)
        peaks.append(most_memory(read))
    assert peaks[2] - peaks[1] < 400_000


def test_a_list_of_the_records_would_be_seen(tmp_path):
    """Negative control of the test above."""

    def read():
        assert list(check_records(str(tmp_path), None, mask_prompt=True).train)

    peaks = []
    for rows in (ROWS // 4, ROWS // 4, ROWS):
        write(tmp_path, ".jsonl", rows)
        peaks.append(most_memory(read))
    assert peaks[2] - peaks[1] > 2_000_000


def test_few_records_are_alive_while_they_are_tokenised(tmp_path, monkeypatch):
    """At no time more than one, of which the next is made."""
    write(tmp_path, ".jsonl", 2500)
    checked = check_records(str(tmp_path), None, mask_prompt=True).train
    alive = []

    def parse(*args):
        if len(alive) % 500 == 0:
            alive.append(sum(isinstance(item, Record) for item in gc.get_objects()))
        else:
            alive.append(0)
        return real(*args)

    real = records_module.parse_record
    monkeypatch.setattr(records_module, "parse_record", parse)
    samples, _ = prepare(checked, toy_tokenizer("plain"), max_seq_length=16)
    assert len(samples) == 2500
    assert max(alive) <= 1 + 1


def test_a_million_faults_are_counted_and_twenty_kept(tmp_path):
    (tmp_path / "train.jsonl").write_text("[]\n" * 50_000)

    def read():
        with pytest.raises(UserError, match=r"50000 faults\n(.*\n){20}\.\.\. and 49980 more"):
            check_records(str(tmp_path), None, mask_prompt=True)

    read()
    assert most_memory(read) < 300_000
