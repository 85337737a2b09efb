"""gdtrain finetune with packing: true."""

import re

from command import finish, metrics, write_rows


def test_a_packed_run(config):
    """Twelve documents of 21 tokens in rows of at most 64 positions: three in a row of 60, four rows an epoch."""
    write_rows("rows/train.jsonl", [{"text": "abcdefghij" * 2}] * 12)
    write_rows("rows/valid.jsonl", [{"text": "abcdefghij"}])
    config(data="rows", iters=4, batch_size=2, packing=True, max_seq_length=65, steps_per_report=1)
    out = finish("finetune", "c.yaml")
    documents = len("abcdefghij" * 2) + 1
    (rows,) = re.findall(r"^packing: 12 rows of data in (\d+) rows of an epoch$", out, re.MULTILINE)
    assert int(rows) == -(-12 // (64 // (documents - 1)))
    assert "\npadding: 6.2 % of the positions of an epoch\n" in out  # 240 of 4 x 64 are used
    trained = metrics("run", "train")
    assert len(trained) == 4
    assert sum(record["supervised_tokens"] for record in trained) == 2 * 12 * (documents - 1)
