"""The player on graphs small enough to count by hand, and on the kernels that were measured on an H200."""

import pytest

from gdtrain.plan.chunked import ChunkedRule
from gdtrain.plan.devices import DEVICES
from gdtrain.plan.loss import loss_backward
from gdtrain.plan.pieces import Pieces, Run
from gdtrain.plan.rules import FusedRule, RecurrentRule
from gdtrain.plan.sizes import DeltaNet
from gdtrain.plan.tape import Lead, Tape

# A device that finishes an operation before it gets the next.
STEPWISE = Lead(0, 1, float("inf"), False)


def chain(length, *, over=False):
    tape = Tape()
    x = tape.given(100, "x")
    for _ in range(length):
        x = (tape.over if over else tape.make)(100, x)
    tape.output(x)
    return tape


def test_what_was_read_is_freed():
    assert chain(5).play(STEPWISE).size == 200


def test_elementwise_is_written_over_its_input():
    assert chain(5, over=True).play(STEPWISE).size == 100


def test_what_is_read_again_is_not_written_over():
    tape = Tape()
    x = tape.given(100, "x")
    tape.output(tape.over(100, tape.over(100, x), x))
    assert tape.play(STEPWISE).size == 200


def test_what_is_in_flight_is_not_written_over():
    """y is read for the last time, but an operation before may not have read it yet."""
    tape = Tape()
    y = tape.given(100, "y")
    other = tape.make(30, y)
    tape.output(tape.over(100, y, other))
    assert tape.play(STEPWISE).size == 130
    assert tape.play(Lead(5, 1, float("inf"), False)).size == 230


def test_ahead_of_the_device():
    """Two tasks of one operation in flight: what they read lives, beside what is made."""
    assert chain(9).play(Lead(2, 1, float("inf"), False)).size == 400
    assert chain(9).play(Lead(0, 3, float("inf"), False)).size == 400
    # A task ends with the operation that has read more than 24 elements of 4 bytes.
    assert chain(9).play(Lead(2, 99, 24, False)).size == 400


def test_a_stream_has_tasks_of_its_own():
    """Two streams, each with a task that is not full: twice as much is in flight as on one."""
    sizes = []
    for streams in (1, 2):
        tape = Tape()
        for number in range(2):
            tape.stream = number % streams
            x = tape.given(100, "x")
            for _ in range(3):
                x = tape.make(100, x)
            tape.output(x)
        sizes.append(tape.play(Lead(0, 3, float("inf"), False)).size)
    assert sizes[1] > sizes[0]


def test_a_memory_limit_holds_the_program_back():
    assert chain(9).play(Lead(5, 1, float("inf"), False), 150).size == 200


def test_views_share_memory():
    tape = Tape()
    x = tape.make(100, tape.given(50, "x"))
    tape.output(tape.make(10, tape.view(tape.view(x))))
    assert tape.play(STEPWISE).size == 150


def test_parts_and_kernels():
    tape = Tape()
    x = tape.given(100, "x")
    a, _ = tape.kernel([30, 40], x, part="kernel")
    tape.output(tape.make(20, a, part="end"))
    peak = tape.play(STEPWISE)
    assert (peak.size, peak.parts) == (170, {"x": 100, "kernel": 70})
    assert peak.most == {"x": 100, "kernel": 70, "end": 20}


def test_as_late_as_can_be():
    """The second product is made when it is needed, not before."""
    tape = Tape()
    x, w = tape.given(10, "x"), tape.given(10, "w")
    long = x
    for _ in range(6):
        long = tape.make(10, long)
    tape.output(tape.make(10, long, tape.make(1000, w)))
    assert [buffer.size for buffer in tape.order()].index(1000) >= 4


def run_of(T, backend):
    return Run(1, T, 2, 8, False, "lora", False, backend, 64, gpu=True, cores=1)


FIRST, SECOND = (16, 64, 192, 128), (16, 32, 128, 128)
# GB of forward + backward, bfloat16, B = 1, NVIDIA H200, MLX 0.32.4, 2026-11-30: those of tests/bench/test_estimate.py.
H200 = [
    (FusedRule, "fused", FIRST, 2048, 1.009),
    (FusedRule, "fused", FIRST, 16384, 7.8),
    (FusedRule, "fused", SECOND, 512, 0.115),
    (FusedRule, "fused", SECOND, 2048, 0.434),
    (FusedRule, "fused", SECOND, 4096, 0.93),
    (RecurrentRule, "recurrent", FIRST, 2048, 5.75),
    (RecurrentRule, "recurrent", SECOND, 512, 0.364),
    (RecurrentRule, "recurrent", SECOND, 2048, 1.47),
]


@pytest.mark.parametrize(("rule", "backend", "heads", "T", "peak_gb"), H200)
def test_kernels_of_the_rule_as_measured(rule, backend, heads, T, peak_gb):
    """Within 9 %: what was measured had the gates' inputs and gradients in it as well."""
    tape = Tape(2)
    net = DeltaNet(*heads, 4)
    made = rule(Pieces(tape, run_of(T, backend)), net)
    widths = (net.keys, net.keys, net.values, 4 * net.Hv, net.values)
    *inputs, dy = (tape.given(2 * T * width, "inputs") for width in widths)
    tape.output(made.forward(*inputs), *made.backward(dy))
    assert tape.play(DEVICES["cuda"].lead).size / 1e9 == pytest.approx(peak_gb, rel=0.09)


def test_loss_as_measured(monkeypatch):
    """benchmarks/loss-h200.json: 4,096 rows, hidden 4096, 248,320 logits, blocks of 256 and 512 MB. Within 5 %."""
    monkeypatch.setattr("gdtrain.plan.loss._BLOCKS", 1000)
    for block, peak_gb in ((0.256e9, 1.652), (0.512e9, 3.152)):
        monkeypatch.setattr("gdtrain.plan.loss.BLOCK_BYTES", block)
        tape = Tape(2)
        x = tape.given(2 * 4096 * 4096, "x")
        tape.output(*loss_backward(Pieces(tape, run_of(4096, "fused")), x, 4096, 248320, 4096 * 248320))
        assert tape.play(DEVICES["cuda"].lead).size / 1e9 == pytest.approx(peak_gb, rel=0.05)


def test_chunked_in_fewer_steps_than_chunks():
    """Of more chunks than are laid out one by one, the total stays in proportion."""
    sizes = []
    for T in (48 * 64, 96 * 64):
        tape = Tape(2)
        made = ChunkedRule(Pieces(tape, run_of(T, "chunked")), DeltaNet(2, 2, 32, 32, 4))
        *inputs, dy = (tape.given(2 * T * 64, "inputs") for _ in range(5))
        tape.output(made.forward(*inputs), *made.backward(dy))
        sizes.append(tape.play(STEPWISE).size)
    assert sizes[1] == pytest.approx(2 * sizes[0], rel=0.03)
