"""The gated delta rule and its six gradients in float64, step by step, on numpy or torch arrays alike.

Section 1 of the notation of `gdkernels`, with the decayed state P_t = g_t S_(t-1) kept apart:

    P_t = g_t S_(t-1)      delta_t = beta_t (v_t - P_t k_t)      S_t = P_t + delta_t k_t^T      y_t = S_t q_t

All states are kept: 6.4 GB for (Hk, Hv, Dk, Dv) = (16, 64, 192, 128) and T = 512.
"""

from typing import Any

# q, k, v, log_decay, beta, state, and the cotangents of y and of the final state
INPUTS = ("q", "k", "v", "log_decay", "beta", "state")


def float64_rule(xp: Any, q: Any, k: Any, v: Any, log_decay: Any, beta: Any, state: Any, dy: Any, dstate: Any) -> Any:
    """y, state and d<input>, as a dictionary of float64 arrays.

    Args:
        xp: numpy or torch; the rest: float64 arrays of it, shaped as in the package docstring of gdkernels.
    """
    (B, T, Hk, Dk), (Hv, Dv) = q.shape, v.shape[2:]
    G = Hv // Hk
    v, dy = v.reshape(B, T, Hk, G, Dv), dy.reshape(B, T, Hk, G, Dv)
    g, beta = xp.exp(log_decay).reshape(B, T, Hk, G), beta.reshape(B, T, Hk, G)

    def read(S: Any, x: Any) -> Any:
        return xp.einsum("bhgvk,bhk->bhgv", S, x)

    def outer(x: Any, y: Any) -> Any:
        return xp.einsum("bhgv,bhk->bhgvk", x, y)

    def read_back(S: Any, x: Any) -> Any:
        return xp.einsum("bhgvk,bhgv->bhk", S, x)

    S = [state.reshape(B, Hk, G, Dv, Dk)]
    ys = []
    for t in range(T):
        P = g[:, t, :, :, None, None] * S[t]
        S.append(P + outer(beta[:, t, ..., None] * (v[:, t] - read(P, k[:, t])), k[:, t]))
        ys.append(read(S[-1], q[:, t]))

    dS = dstate.reshape(B, Hk, G, Dv, Dk)
    grads = []
    for t in reversed(range(T)):
        P = g[:, t, :, :, None, None] * S[t]
        error = v[:, t] - read(P, k[:, t])
        dS = dS + outer(dy[:, t], q[:, t])
        d_delta = read(dS, k[:, t])
        d_error = beta[:, t, ..., None] * d_delta
        dk = read_back(dS, beta[:, t, ..., None] * error) - read_back(P, d_error)
        dP = dS - outer(d_error, k[:, t])
        grads.append((read_back(S[t + 1], dy[:, t]), dk, d_error, (dP * P).sum((-1, -2)), (d_delta * error).sum(-1)))
        dS = g[:, t, :, :, None, None] * dP
    dq, dk, dv, dlog_decay, dbeta = (xp.stack(parts[::-1], 1) for parts in map(list, zip(*grads, strict=True)))
    return {
        "y": xp.stack(ys, 1).reshape(B, T, Hv, Dv),
        "state": S[-1].reshape(B, Hv, Dv, Dk),
        "dq": dq,
        "dk": dk,
        "dv": dv.reshape(B, T, Hv, Dv),
        "dlog_decay": dlog_decay.reshape(B, T, Hv),
        "dbeta": dbeta.reshape(B, T, Hv),
        "dstate": dS.reshape(B, Hv, Dv, Dk),
    }
