"""The boundary: what fits, and the next that does not."""

import pytest

from gdtrain.plan.search import largest_batch, longest_rows


def test_longest_rows(planner):
    plan = planner()
    for budget in (8_000_000, 30_000_000):
        found = longest_rows(plan, budget)
        assert found % 64 == 0
        assert plan.forecast(max_seq_length=found).total <= budget < plan.forecast(max_seq_length=found + 64).total


def test_no_longer_than_the_model_was_made_for(planner):
    assert longest_rows(planner(model={"max_position_embeddings": 300}), 10**12) == 256


def test_largest_batch(planner):
    plan = planner(max_seq_length=129)
    found = largest_batch(plan, 30_000_000)
    assert found > 1
    assert plan.forecast(batch_size=found).total <= 30_000_000 < plan.forecast(batch_size=found + 1).total


@pytest.mark.parametrize("search", [longest_rows, largest_batch])
def test_nothing_fits(search, planner):
    assert search(planner(), 1000) is None
