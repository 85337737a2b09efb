"""Axes of a chart: from a value to its place, round numbers for the ticks, and numbers as people read them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """An axis from `low` to `high`, linear or logarithmic, with its ticks."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def place(self, value: float) -> float:
        """0 at `low`, 1 at `high`."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def labels(self) -> list[str]:
        """One for every tick, all with as many decimals as the finest needs."""
        largest = max(map(abs, self.ticks))
        if self.log or largest < 0.01 or largest >= 10_000:
            return [short(tick, tick if self.log else largest) for tick in self.ticks]
        exact = (n for n in range(6) if all(math.isclose(round(t, n), t, abs_tol=1e-9) for t in self.ticks))
        decimals = next(exact, 6)
        return [f"{tick:.{decimals}f}" for tick in self.ticks]


def linear(low: float, high: float, count: int = 5) -> Scale:
    """About `count` steps of 1, 2 or 5 times a power of ten, from the one below `low` to the one above `high`."""
    if high - low <= 1e-6 * max(abs(low), abs(high)):
        low, high = (low - abs(low) / 10, high + abs(high) / 10) if low else (0.0, 1.0)
    step = _round_up((high - low) / count)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(i * step for i in range(first, last + 1))
    return Scale(min(low, ticks[0]), max(high, ticks[-1]), ticks)  # rounding may leave a tick short of its bound


def iterations(last: int, count: int = 6) -> Scale:
    """From 0 to `last` itself, whatever its digits: the axis ends where the run does. At most `count` steps."""
    last = max(1, last)
    step = next(step for power in _POWERS for m in (4, 8, 10, 20) if (step := m * power // 4) * count >= last)
    return Scale(0, last, tuple(range(0, last + 1, step)))


def logarithmic(low: float, high: float) -> Scale:
    """For values above zero. Ticks at powers of ten, and between them where these are few."""
    margin = (high / low) ** 0.03
    low, high = low / margin, high * margin
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [[m * 10.0**d for d in decades for m in steps if low <= m * 10.0**d <= high] for steps in _WITHIN_A_DECADE]
    ticks = next((ticks for ticks in found if len(ticks) >= 3), found[-1])
    return Scale(low, high, tuple(ticks[:: math.ceil(len(ticks) / 6)]), log=True)


def choose(values: Sequence[float], *, zero: bool, log_from: float) -> Scale:
    """The scale for these values: logarithmic where all are above zero and the largest is `log_from` times the
    smallest or more; else linear, from zero if `zero`."""
    low, high = min(values), max(values)
    if low > 1e-100 and high / low >= log_from:
        return logarithmic(low, high)
    if zero and low >= 0:
        return linear(0.0, high or 1.0)
    return linear(low, high)


def short(value: float, beside: float | None = None) -> str:
    """15000 as 15k, 0.0005 as 5e-4. beside: the number whose unit it shares, 15000 for a 5000 that is to be 5k."""
    size = abs(value if beside is None else beside)
    if value == 0:
        return "0"
    for least, unit, suffix in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= least:
            return f"{value / unit:.6g}{suffix}"
    return f"{value:.6g}" if size >= 0.01 else scientific(value, 6)


def scientific(value: float, digits: int) -> str:
    """With no more digits than the value has: 1.5e-5."""
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(exponent)}"


_POWERS = tuple(10**d for d in range(30))
_WITHIN_A_DECADE = ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8))


def _round_up(value: float) -> float:
    """To 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= value * (1 - 1e-9))
