"""Two documents in one row: nothing of one reaches the other, to the last bit."""

import inputs
import oracle
import pytest
from gdkernels import gated_delta_rule

T, CHUNK = 55, 16
PER_TOKEN = ("q", "k", "v", "log_decay", "beta")


@pytest.mark.parametrize("decay", ["mild", "one"])
@pytest.mark.parametrize("boundary", [1, 5, 15, 16, 17, 32, 40, 54])
@pytest.mark.parametrize("backend", inputs.BACKENDS)
def test_no_leak(backend, boundary, decay):
    segments = inputs.documents(T, [boundary], [boundary])
    first, second = slice(0, boundary), slice(boundary, T)
    given, cotangents = inputs.rule_inputs(2, T, 1, 2, 32, 32, decay=decay, seed=1)
    other, other_cotangents = inputs.rule_inputs(2, T, 1, 2, 32, 32, decay="mixed", seed=2)

    def run(changed):
        """Outputs and gradients with the tokens of `changed`, and what lies at its end of the row, replaced."""
        mine, ends = dict(given), dict(cotangents)
        for name in PER_TOKEN if changed else ():
            mine[name] = _replaced(given[name], other[name], changed)
        if changed:
            ends["dy"] = _replaced(cotangents["dy"], other_cotangents["dy"], changed)
        if changed is first:
            mine["state"] = other["state"]
        if changed is second:
            ends["dstate_out"] = other_cotangents["dstate_out"]
        return oracle.measure(gated_delta_rule, mine, **ends, segments=segments, backend=backend, chunk_size=CHUNK)

    plain = run(None)
    oracle.assert_same_bits(_of(run(first), second, "state_out"), _of(plain, second, "state_out"))
    oracle.assert_same_bits(_of(run(second), first, "dstate"), _of(plain, first, "dstate"))


def _replaced(x, y, tokens):
    x = x.copy()
    x[:, tokens] = y[:, tokens]
    return x


def _of(found, tokens, end):
    """What belongs to a document: its tokens' outputs and gradients, and the state at its end of the row."""
    names = ("y", *("d" + name for name in PER_TOKEN))
    return {name: found[name][:, tokens] for name in names} | {end: found[end]}
