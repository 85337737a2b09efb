"""Inputs of the kernel tests: numpy float32, of the kind that a Gated DeltaNet layer produces."""

import mlx.core as mx
import numpy as np

# Those that need a GPU; they have tests of their own as well, which run on any machine.
GPU_BACKENDS = ("fused", "recurrent", "native")
# Every backend under test here; a new one is added here and nowhere else (test_contract.py sees to that).
BACKENDS = ("reference", "replay", "chunked", *(GPU_BACKENDS[:2] if mx.default_device() != mx.cpu else ()))

DECAYS = {
    "mild": lambda rng, shape: -np.exp(rng.uniform(np.log(1e-3), np.log(0.5), shape)),
    "one": lambda rng, shape: np.zeros(shape),
    "zero": lambda rng, shape: np.full(shape, -np.inf),
    "some-zero": lambda rng, shape: np.where(rng.random(shape) < 0.2, -np.inf, -0.1 * rng.random(shape)),
    "1e-30": lambda rng, shape: np.full(shape, np.log(1e-30)),
    "strong": lambda rng, shape: -rng.uniform(5, 90, shape),
    "mixed": lambda rng, shape: -np.exp(rng.uniform(np.log(1e-4), np.log(1e5), shape)),
    # A mild stretch behind one huge decay: differences of one prefix sum have lost its digits.
    "one-huge": lambda rng, shape: np.where(np.arange(shape[1])[:, None] == 3, -1e5, -0.01 * rng.random(shape)),
}


def rule_inputs(B, T, Hk, Hv, Dk, Dv, *, decay="mild", beta=None, seed=0):
    """(inputs of gated_delta_rule, cotangents): q, k of unit length per head, q scaled; state and cotangents random."""
    rng = np.random.default_rng([seed, B, T, Hk, Hv, Dk, Dv])
    q, k = _unit(rng, B, T, Hk, Dk) * Dk**-0.5, _unit(rng, B, T, Hk, Dk)
    inputs = {
        "q": q,
        "k": k,
        "v": rng.standard_normal((B, T, Hv, Dv)),
        "log_decay": DECAYS[decay](rng, (B, T, Hv)),
        "beta": 1 / (1 + np.exp(-rng.standard_normal((B, T, Hv)))) if beta is None else np.full((B, T, Hv), beta),
        "state": 0.5 * rng.standard_normal((B, Hv, Dv, Dk)),
    }
    return _float32(inputs), _cotangents(rng, B, T, Hv, Dk, Dv)


def layer_inputs(B, T, Hk, Hv, Dk, Dv, *, seed=0, **fixed):
    """(inputs of gated_delta_update, cotangents); a keyword such as A_log=12.0 or a=array replaces a drawn input."""
    inputs, cotangents = rule_inputs(B, T, Hk, Hv, Dk, Dv, seed=seed)
    rng = np.random.default_rng([seed, 1])
    drawn = {
        "a": rng.standard_normal((B, T, Hv)),
        "b": rng.standard_normal((B, T, Hv)),
        "A_log": np.log(rng.uniform(0.01, 2, Hv)),
        "dt_bias": rng.standard_normal(Hv),
    }
    drawn = {name: np.broadcast_to(fixed.get(name, x), x.shape) for name, x in drawn.items()}
    state = {"state": fixed.get("state", inputs["state"])}
    return {name: inputs[name] for name in "qkv"} | _float32(drawn) | state, cotangents


def change(given, cotangents, name):
    """Turns inputs and cotangents into a corner case, in place; None changes nothing."""
    match name:
        case None:
            pass
        case "equal keys":
            given["k"][:] = given["k"][:, :1]
        case "equal keys, no state":
            given["k"][:] = given["k"][:, :1]
            given["state"] = None
        case "zero keys":
            given["k"][:] = 0
        case "every third key zero":
            given["k"][:, ::3] = 0
        case "zero state":
            given["state"][:] = 0
        case "no state":
            given["state"] = None
        case "zero dstate_out":
            cotangents["dstate_out"][:] = 0
        case "zero dy":
            cotangents["dy"][:] = 0
        case _:
            raise ValueError(name)


def documents(T, *rows):
    """(B, T) int32 segments: one list of document lengths a row, the last document takes what is left of T."""
    segments = np.zeros((len(rows), T), np.int32)
    for row, lengths in zip(segments, rows, strict=True):
        starts = np.cumsum(lengths, dtype=np.int32)
        row[starts[starts < T]] = 1
    return np.cumsum(segments, axis=1, dtype=np.int32)


def _unit(rng, *shape):
    x = rng.standard_normal(shape)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def _cotangents(rng, B, T, Hv, Dk, Dv):
    drawn = {"dy": rng.standard_normal((B, T, Hv, Dv)), "dstate_out": rng.standard_normal((B, Hv, Dv, Dk))}
    return _float32(drawn)


def _float32(arrays):
    return {name: np.ascontiguousarray(x, np.float32) for name, x in arrays.items()}
