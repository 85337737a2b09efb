"""Packed documents: none reaches another, and each has what it has in a row of its own."""

import mini
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.rope_utils import initialize_rope

from gdtrain.arrays import flat, scalar
from gdtrain.errors import UserError
from gdtrain.model import layers
from gdtrain.model.documents import Documents
from gdtrain.model.hidden import hidden_states
from gdtrain.model.rope import rotate
from gdtrain.training.recompute import recomputed_blocks

KERNELS = ["auto", *mini.kernels(chunk_size=16)]
# A first document that ends within a chunk and a block of queries; documents over several; padding with its own number.
LENGTHS, PADDING = (11, 70, 43), 4

# A document in a packed row against the same in a row of its own, relative L2 of its hidden states. float32: chunks and
# blocks begin elsewhere, so sums are ordered otherwise, measured 6e-7. bfloat16: each of four blocks rounds what
# differs to 8 bits, and on a CPU MLX rounds the cosines of a row without documents, measured 5e-3.
ALONE = {"float32": 5e-6, "bfloat16": 2e-2}
if mx.default_device() == mx.gpu:  # TF32
    ALONE["float32"] = 1e-2


def segments_of(*lengths, padding=0):
    """(1, T) int32."""
    return mx.array(np.repeat(np.arange(len(lengths) + 1), [*lengths, padding])[None].astype(np.int32))


def row(first, *lengths):
    """Token ids (1, T): those of the first document drawn from `first`, the others always the same."""
    ids = np.random.default_rng(7).integers(1, 260, sum(lengths))
    ids[: lengths[0]] = np.random.default_rng(first).integers(1, 260, lengths[0])
    return mx.array(ids[None].astype(np.int32))


def run(model, ids, segments, *, skip, recompute=False):
    """Hidden states; and of a loss over all tokens but the first `skip` the gradients for the embeddings (B, T, hidden)
    and for what trains, by name."""
    rng = np.random.default_rng(1)
    weight = (
        mx.array(rng.standard_normal((*ids.shape, 64)).astype(np.float32)) * (mx.arange(ids.shape[1]) >= skip)[:, None]
    )
    embed = model.model.embed_tokens

    def loss(embedded, parameters):
        model.update(parameters)
        model.model.embed_tokens = lambda _: embedded
        try:
            hidden = hidden_states(model, ids, segments)
        finally:
            model.model.embed_tokens = embed
        return (hidden.astype(mx.float32) * weight).sum(), hidden

    parameters = model.trainable_parameters()
    with recomputed_blocks(model.layers, recompute):
        (_, hidden), (d_embedded, gradients) = mx.value_and_grad(loss, argnums=(0, 1))(embed(ids), parameters)
        mx.eval(hidden, d_embedded, gradients)
    model.update(parameters)
    return hidden, d_embedded, flat(gradients)


def leaks(model, lengths=LENGTHS, padding=PADDING, **options):
    """Where another first document changes a bit of what follows it."""
    segments, first = segments_of(*lengths, padding=padding), lengths[0]
    rows = [run(model, row(i, *lengths, padding), segments, skip=first, **options) for i in (1, 2)]
    (hidden, d_embedded, gradients), (other_hidden, other_d_embedded, other_gradients) = rows
    assert not mx.array_equal(hidden[:, :first], other_hidden[:, :first])
    assert all(mx.any(g != 0).item() for g in gradients.values())
    found = []
    for name, x, y in (("hidden", hidden, other_hidden), ("embeddings", d_embedded, other_d_embedded)):
        for where, tokens in (("first three", slice(first, first + 3)), ("later", slice(first + 3, None))):
            if not mx.array_equal(x[:, tokens], y[:, tokens]):
                found.append(f"{name}, {where} tokens")
    if mx.any(d_embedded[:, :first] != 0).item():
        found.append("embeddings of the first document have a gradient")
    return found + [name for name in gradients if not mx.array_equal(gradients[name], other_gradients[name])]


def dtypes(family):
    """MLX 0.32.4 multiplies by gathered experts in float32 only, on a CPU."""
    on_cpu = mx.default_device() == mx.cpu
    return ["float32"] if on_cpu and family != "qwen3_5" else ["float32", "bfloat16"]


MODELS = [(family, dtype) for family in mini.FAMILIES for dtype in dtypes(family)]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("family", "dtype"), MODELS)
def test_another_document_changes_no_bit(family, dtype, kernel):
    assert leaks(mini.trainable(family, kernel=kernel, chunk_size=16, dtype=dtype)) == []


@pytest.mark.parametrize("family", mini.FAMILIES)
def test_nor_with_recomputed_blocks(family):
    model = mini.trainable(family, chunk_size=16)
    assert leaks(model, recompute=True) == []
    ids, segments = row(1, *LENGTHS), segments_of(*LENGTHS)
    (*want, gradients), (*got, recomputed) = (run(model, ids, segments, skip=0, recompute=r) for r in (False, True))
    pairs = [*zip(got, want, strict=True), *((recomputed[name], gradients[name]) for name in gradients)]
    assert max(mini.relative_l2(ours, theirs) for ours, theirs in pairs) <= 1e-6


@pytest.mark.parametrize("lengths", [(9, 13), (60, 90)])
@pytest.mark.parametrize("family", mini.FAMILIES[1:])
def test_nor_by_the_experts_that_its_tokens_take(family, lengths, monkeypatch):
    """With 64 choices of an expert and more, mlx-lm sorts the tokens by expert, so that the first document moves those
    of the second. On a CPU the gradients of the experts themselves keep their bits too; nothing is said of a GPU, where
    the sum over an expert's tokens may be split at other places."""
    chosen = []
    switch = class_of_the_experts(family)
    forward = switch.__call__
    monkeypatch.setattr(switch, "__call__", lambda self, x, i: chosen.append(i) or forward(self, x, i))
    ids, segments = [row(i, *lengths) for i in (1, 2)], segments_of(*lengths)
    model = mini.trainable(family, kernel="chunked", chunk_size=16)
    hidden_states(model, ids[0], segments)
    hidden_states(model, ids[1], segments)
    first, second = (np.bincount(np.array(i[:, : lengths[0]]).ravel(), minlength=4) for i in chosen[::4])
    assert (chosen[0].size >= 64) == (lengths == (60, 90))
    assert first.tolist() != second.tolist()
    monkeypatch.setattr(switch, "__call__", forward)
    assert leaks(model, lengths, padding=0) == []
    if mx.default_device() == mx.cpu:
        for kind in ({"keys": ["switch_mlp.up_proj", "switch_mlp.down_proj"]}, {"fine_tune_type": "full"}):
            assert leaks(mini.trainable(family, kernel="chunked", chunk_size=16, lora=kind), lengths, padding=0) == []


def class_of_the_experts(family):
    return type(mini.build(family)[0].layers[0].mlp.switch_mlp)


def without(name, argument, monkeypatch):
    """Call layers.`name` as if rows were one document."""
    function = getattr(layers, name)

    def ignorant(*arguments, **options):
        if argument in options:
            return function(*arguments, **{**options, argument: None})
        return function(*arguments[:-1], **options)

    monkeypatch.setattr(layers, name, ignorant)


@pytest.mark.parametrize(
    ("name", "argument", "leak"),
    [
        ("causal_convolution", "positions", "hidden, first three tokens"),
        ("gated_delta_update", "segments", "hidden, later tokens"),
        ("causal_attention", "segments", "hidden, later tokens"),
    ],
)
@pytest.mark.parametrize("family", mini.FAMILIES)
def test_a_layer_that_ignores_the_documents_is_found(family, name, argument, leak, monkeypatch):
    model = mini.trainable(family, kernel="chunked", chunk_size=16)
    without(name, argument, monkeypatch)
    found = leaks(model)
    assert leak in found
    assert "embeddings of the first document have a gradient" in found


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("family", "dtype"), MODELS)
def test_a_document_is_what_it_is_alone(family, dtype, kernel):
    model = mini.trainable(family, kernel=kernel, chunk_size=16, dtype=dtype)
    ids = row(1, *LENGTHS, PADDING)
    packed = hidden_states(model, ids, segments_of(*LENGTHS, padding=PADDING))
    ends = np.cumsum(LENGTHS)
    for first, last in zip(ends - LENGTHS, ends, strict=True):
        alone = hidden_states(model, ids[:, first:last])
        assert mini.relative_l2(packed[:, first:last], alone) <= ALONE[dtype]


def test_and_its_gradients_too():
    """Gradients of a row are the sums of those of its documents."""
    model = mini.trainable(chunk_size=16)
    ids = row(1, *LENGTHS)
    ends = np.cumsum(LENGTHS)

    def loss(parameters, rows):
        model.update(parameters)
        return sum((hidden_states(model, *arguments) ** 3).sum() for arguments in rows)

    parameters = model.trainable_parameters()
    packed = mx.grad(loss)(parameters, [(ids, segments_of(*LENGTHS))])
    alone = mx.grad(loss)(parameters, [(ids[:, a:b],) for a, b in zip(ends - LENGTHS, ends, strict=True)])
    model.update(parameters)
    packed, alone = flat(packed), flat(alone)
    for name, gradient in alone.items():
        assert mini.relative_l2(packed[name], gradient) <= 10 * ALONE["float32"], name


def test_rows_have_their_own_documents():
    model = mini.trainable(chunk_size=16)
    ids = mx.concatenate([row(1, 20, 30), row(2, 35, 15)])
    segments = mx.concatenate([segments_of(20, 30), segments_of(35, 15)])
    both = hidden_states(model, ids, segments)
    for i in range(2):
        assert (
            mini.relative_l2(both[i], hidden_states(model, ids[i : i + 1], segments[i : i + 1])[0]) <= ALONE["float32"]
        )


def test_one_document_is_a_row_without_documents():
    model = mini.trainable()
    ids = row(1, 50)
    want = hidden_states(model, ids)
    assert mini.relative_l2(hidden_states(model, ids, segments_of(50)), want) <= ALONE["float32"]
    assert mx.array_equal(want, model.model(ids))


def test_padding_is_nothing_to_the_documents():
    """Whether it has a number of its own or that of the last document."""
    model = mini.trainable(chunk_size=16)
    ids = row(1, 20, 30, 14)
    alone, with_last = segments_of(20, 30, padding=14), segments_of(20, 44)
    want = hidden_states(model, ids, alone)[:, :50]
    other = mx.concatenate([ids[:, :50], ids[:, 50:] + 1], axis=1)
    for segments in (alone, with_last):
        assert mx.array_equal(hidden_states(model, other, segments)[:, :50], want)


def test_compiled(request):
    """As uncompiled; the documents are inputs, not constants of the trace."""
    model = mini.trainable(kernel="chunked", chunk_size=16, num_hidden_layers=2, full_attention_interval=2)
    ids = row(1, 20, 30)
    mx.eval(model.parameters())
    cuts = [segments_of(20, 30), segments_of(35, 15)]
    parameters = model.trainable_parameters()

    def loss(parameters, ids, segments):
        model.update(parameters)
        return (hidden_states(model, ids, segments) ** 3).sum()

    want = [flat(mx.grad(loss)(parameters, ids, segments)) for segments in cuts]
    mx.eval(want)
    mx.enable_compile()
    request.addfinalizer(mx.disable_compile)
    with recomputed_blocks(model.layers):
        compiled = mx.compile(mx.grad(loss))
        got = [flat(compiled(parameters, ids, segments)) for segments in cuts]
        mx.eval(got)
    model.update(parameters)
    name = next(name for name in want[0] if "q_proj.lora_a" in name)
    assert mini.relative_l2(want[1][name], want[0][name]) > 0.1
    for ours, theirs in zip(got, want, strict=True):
        assert max(mini.relative_l2(ours[n], theirs[n]) for n in theirs) <= 10 * ALONE["float32"]


def test_documents_are_read_off_the_changes():
    documents = Documents.of(mx.array([[4, 4, 4, 7, 8, 8], [0, 0, 0, 0, 0, 0], [1, 2, 2, 1, 1, 2]], mx.int32))
    assert documents.positions.tolist() == [[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5], [0, 0, 1, 0, 1, 0]]
    assert documents.segments.tolist() == [[0, 0, 0, 3, 4, 4], [0] * 6, [0, 1, 1, 3, 3, 5]]
    assert {x.dtype for x in documents} == {mx.int32}


def test_segments_that_are_none():
    model = mini.trainable()
    ids = row(1, 10)
    with pytest.raises(ValueError, match=r"segments have shape \(1, 9\); accepted: .*\(1, 10\)"):
        hidden_states(model, ids, segments_of(9))
    with pytest.raises(ValueError, match=r"segments are .*float32 \(1, 10\); accepted: .*int32 \(B, T\)"):
        hidden_states(model, ids, segments_of(10).astype(mx.float32))
    with pytest.raises(RuntimeError, match="call swap_linear_attention first"):
        hidden_states(mini.build()[0], ids, segments_of(10))


ROPES = {
    "plain": None,
    "linear": {"type": "linear", "factor": 3.0},
    "dynamic": {"type": "dynamic", "factor": 3.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32},
    "yarn": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "longrope": {
        "type": "longrope",
        "original_max_position_embeddings": 32,
        "short_factor": [1.0] * 4,
        "long_factor": [1.0, 2.0, 3.0, 4.0],
    },
    "proportional": {"type": "proportional", "partial_rotary_factor": 0.5},
    "mrope": {"type": "mrope", "mrope_section": [2, 1, 1]},
}


def make_rope(name, dims=8):
    return initialize_rope(dims, 100.0, False, ROPES[name], 64)


@pytest.mark.parametrize("dims", [8, 20])
@pytest.mark.parametrize("name", ROPES)
def test_rotation_at_given_positions(name, dims):
    """That of MLX for each document by itself: the same products in float32, the angles' cosines from a table."""
    rope = make_rope(name if dims == 8 or name != "longrope" else "plain", dims)
    lengths = [7, 33, 1, 9]
    x = mx.array(np.random.default_rng(0).standard_normal((2, 3, 50, 20)).astype(np.float32))
    positions = mx.broadcast_to(Documents.of(segments_of(*lengths)).positions, (2, 50))
    y, first = rotate(rope, x, positions), 0
    for length in lengths:
        here = slice(first, first + length)
        assert mini.relative_l2(y[:, :, here], rope(x[:, :, here])) <= 1e-6
        first += length
    assert mx.array_equal(y[..., dims:], x[..., dims:])
    assert not mx.array_equal(y[..., :dims], rope(x)[..., :dims])
    rounded = rotate(rope, x.astype(mx.bfloat16), positions)
    assert rounded.dtype == mx.bfloat16
    assert mini.relative_l2(rounded, y) <= 4e-3  # half a unit in the last place of 8 bits, twice


def test_rotation_gradient():
    """The inverse rotation."""
    rope, positions = make_rope("plain"), Documents.of(segments_of(4, 6)).positions
    x, dy = (mx.array(np.random.default_rng(i).standard_normal((1, 2, 10, 8)).astype(np.float32)) for i in range(2))
    _, (dx,) = mx.vjp(lambda x: rotate(rope, x, positions), [x], [dy])
    assert mini.relative_l2(rotate(rope, dx, positions), dy) <= 1e-6
    assert scalar((rotate(rope, x, positions) * dy).sum()) == pytest.approx(scalar((x * dx).sum()), rel=1e-5)


def test_a_rotation_that_depends_on_the_length_of_the_row():
    x, positions = mx.zeros((1, 1, 65, 8)), mx.zeros((1, 65), mx.int32)
    rotate(make_rope("dynamic"), x[:, :, :64], positions[:, :64])
    with pytest.raises(UserError, match=r"dynamic RoPE rescales rows of more than 64 tokens.*these have 65"):
        rotate(make_rope("dynamic"), x, positions)
