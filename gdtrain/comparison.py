"""A model before and after its adapter, on the same rows: in all, and record by record."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gdtrain.data.conversation import Sample
from gdtrain.evaluation import Evaluation

_WORST = 10


@dataclass(frozen=True)
class Comparison:
    """Two evaluations of the same samples, one by one."""

    samples: Sequence[Sample]
    base: Evaluation
    tuned: Evaluation

    def lines(self) -> Iterator[str]:
        """For a person: both, how many rows became better, and the ten that became worse by most or better by least."""
        yield f"{'':>12}  {'loss':>10}  {'perplexity':>10}"
        for name, result in (("base", self.base), ("tuned", self.tuned)):
            yield f"{name:>12}  {result.loss:>10.4f}  {result.perplexity:>10.4g}"
        yield f"{'difference':>12}  {self.tuned.loss - self.base.loss:>+10.4f}"
        records = self.records()
        better = sum(record["difference"] < 0 for record in records)
        worst = records[:_WORST]
        yield f"{better:,} of {len(records):,} rows have a lower loss than before; the {len(worst)} worst:"
        yield f"{'base':>10}  {'tuned':>10}  {'difference':>10}  row"
        for record in worst:
            base, tuned, difference = (record[key] for key in ("base", "tuned", "difference"))
            yield f"{base:>10.4f}  {tuned:>10.4f}  {difference:>+10.4f}  {record['row']}"

    def records(self) -> list[dict[str, Any]]:
        """Of each row its place and its two losses per supervised token, the greatest increase first; for JSON."""
        found = []
        for i, tuned in self.tuned.row_losses.items():
            base = self.base.row_losses[i]
            found.append({"row": self.samples[i].where, "base": base, "tuned": tuned, "difference": tuned - base})
        return sorted(found, key=lambda record: -record["difference"])
