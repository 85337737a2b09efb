"""Float64 gated delta rule with gradients derived by hand: what every backend is measured against.

One step for each token, as in section 1 of kernel-math.md, with the decayed state kept apart:

    P_t = g_t S_{t-1}      delta_t = beta_t (v_t - P_t k_t)      S_t = P_t + delta_t k_t^T      y_t = S_t q_t

A new document starts from S_{t-1} = 0. The gradients are the same lines read backwards. Nothing here is shared with the
package under test. Results are dictionaries: `y`, `state_out`, and `d<input>` for each differentiable input.
"""

import mlx.core as mx
import numpy as np

RULE_INPUTS = ("q", "k", "v", "log_decay", "beta", "state")
LAYER_INPUTS = ("q", "k", "v", "a", "b", "A_log", "dt_bias", "state")

# Relative L2, float32 inputs, against float64. An equal-key or strongly decaying row loses about two of float32's seven
# digits to cancellation. A log_decay gradient sums every pair of tokens around its own, hence five times more; a, A_log
# and dt_bias inherit it.
BOUND = 2e-5
DECAY_BOUND = 1e-4
DECAY_TENSORS = ("dlog_decay", "da", "dA_log", "ddt_bias")

# A reference below float32's smallest normal number cannot be represented by a backend: it counts as zero.
ZERO = float(np.finfo(np.float32).tiny)


def rule(q, k, v, log_decay, beta, state=None, segments=None, *, dy, dstate_out):
    """Outputs and six gradients of sum(y * dy) + sum(state_out * dstate_out)."""
    q, k, v, beta, dy = (np.asarray(x, np.float64) for x in (q, k, v, beta, dy))
    g = np.exp(np.asarray(log_decay, np.float64))
    (B, T, Hk, Dk), (Hv, Dv) = q.shape, v.shape[2:]
    q, k = (np.repeat(x, Hv // Hk, axis=2) for x in (q, k))
    S = np.zeros((B, Hv, Dv, Dk)) if state is None else np.asarray(state, np.float64)
    keep = np.ones((B, T))
    if segments is not None:
        keep[:, 1:] = np.asarray(segments)[:, 1:] == np.asarray(segments)[:, :-1]

    before, after, y = [], [], np.zeros(v.shape)
    for t in range(T):
        S = keep[:, t, None, None, None] * S
        before.append(S)
        P = g[:, t, :, None, None] * S
        delta = beta[:, t, :, None] * (v[:, t] - _read(P, k[:, t]))
        S = P + _outer(delta, k[:, t])
        after.append(S)
        y[:, t] = _read(S, q[:, t])
    out = {"y": y, "state_out": S}

    dq, dk, dv, dld, dbeta = (np.zeros(x.shape) for x in (q, k, v, g, beta))
    dS = np.asarray(dstate_out, np.float64)
    for t in reversed(range(T)):
        P = g[:, t, :, None, None] * before[t]
        error = v[:, t] - _read(P, k[:, t])
        dq[:, t] = _read_t(after[t], dy[:, t])
        dS = dS + _outer(dy[:, t], q[:, t])
        ddelta = _read(dS, k[:, t])
        derror = beta[:, t, :, None] * ddelta
        dbeta[:, t] = (ddelta * error).sum(-1)
        dv[:, t] = derror
        dk[:, t] = _read_t(dS, beta[:, t, :, None] * error) - _read_t(P, derror)
        dP = dS - _outer(derror, k[:, t])
        dld[:, t] = (dP * P).sum((-1, -2))
        dS = (keep[:, t, None] * g[:, t])[..., None, None] * dP
    dq, dk = (x.reshape(B, T, Hk, Hv // Hk, Dk).sum(3) for x in (dq, dk))
    return out | {"dq": dq, "dk": dk, "dv": dv, "dlog_decay": dld, "dbeta": dbeta, "dstate": dS}


def layer(q, k, v, a, b, A_log, dt_bias, state=None, mask=None, segments=None, *, dy, dstate_out):
    """The same through log_decay = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b), eight gradients.

    Where mask is False the token has g = 1 and beta = 0, reads nothing, and receives no gradient.
    """
    a, b, A_log, dt_bias = (np.asarray(x, np.float64) for x in (a, b, A_log, dt_bias))
    m = np.ones(a.shape[:2]) if mask is None else np.asarray(mask, np.float64)
    m3, m4 = m[..., None], m[..., None, None]
    log_decay, beta = -np.exp(A_log) * np.logaddexp(0, a + dt_bias), _sigmoid(b)
    out = rule(q, k, v, m3 * log_decay, m3 * beta, state, segments, dy=m4 * dy, dstate_out=dstate_out)
    out["y"] = m4 * out["y"]
    dld, dbeta = m3 * out.pop("dlog_decay"), m3 * out.pop("dbeta")
    da = -dld * np.exp(A_log) * _sigmoid(a + dt_bias)
    db = dbeta * beta * _sigmoid(-b)
    return out | {"da": da, "db": db, "dA_log": (dld * log_decay).sum((0, 1)), "ddt_bias": da.sum((0, 1))}


def measure(function, inputs, *, dy, dstate_out, **options):
    """Outputs and all gradients of an MLX function of the named inputs, as the same dictionary of numpy arrays.

    `inputs` maps names to numpy or MLX arrays, None for an absent state; `options` go through undifferentiated.
    """
    names = [name for name, x in inputs.items() if x is not None]
    options = {name: mx.array(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}

    def call(*arrays):
        y, state = function(**dict(zip(names, arrays, strict=True)), **options)
        return y, state

    primals = [mx.array(inputs[name]) for name in names]
    cotangents = [mx.array(dy).astype(primals[names.index("v")].dtype), mx.array(dstate_out)]
    outputs, gradients = mx.vjp(call, primals, cotangents)
    found = dict(zip(["y", "state_out", *("d" + name for name in names)], [*outputs, *gradients], strict=True))
    mx.eval(found)
    return {name: _numpy(x) for name, x in found.items()}


def rel_l2(x, reference) -> float:
    """Norm of the difference over the norm of the reference; infinite when x is not finite or has another shape.

    A reference of zero has no scale: then the norm of x itself, which the inputs of order one make comparable.
    """
    x, reference = np.asarray(x, np.float64), np.asarray(reference, np.float64)
    if x.shape != reference.shape or not np.isfinite(x).all():
        return float("inf")
    scale = np.linalg.norm(reference)
    return float(np.linalg.norm(x - reference) / scale) if scale >= ZERO else float(np.linalg.norm(x))


def differences(got, want, bound=None) -> dict[str, str]:
    """The tensors of `want` that `got` lacks or misses by more than their bound, with the numbers; never pooled."""
    found = {}
    for name, reference in want.items():
        limit = bound or (DECAY_BOUND if name in DECAY_TENSORS else BOUND)
        error = rel_l2(got[name], reference) if name in got else float("inf")
        if not error <= limit:
            found[name] = f"{error:.2e} > {limit:.0e}"
    return found


def assert_matches(got, want, bound=None):
    """The one comparison of the suite; test_negative.py shows that it rejects broken rules."""
    found = differences(got, want, bound)
    assert not found, found


def assert_same_bits(got, want):
    assert got.keys() == want.keys()
    different = [name for name in want if not np.array_equal(got[name], want[name])]
    assert not different, different


def _read(S, x):
    return np.einsum("bhvk,bhk->bhv", S, x)


def _read_t(S, x):
    return np.einsum("bhvk,bhv->bhk", S, x)


def _outer(x, k):
    return x[..., :, None] * k[..., None, :]


def _sigmoid(x):
    return np.exp(-np.logaddexp(0, -x))  # keeps its relative precision at -30, unlike 1 / (1 + exp(-x)) rounded from 1


def _numpy(x):
    return np.array(x.astype(mx.float32))
