"""The trainable gated delta rule on MLX: exact gradients, float32 gates, bounded memory, any head size.

Importable alone: no model, no command line, nothing of gdtrain.

Notation, used in every file of this package (Yang, Kautz and Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464):

    B, T            batch rows, tokens of a row
    Hk, Hv, G       key heads, value heads, G = Hv // Hk; value head h reads key head h // G
    Dk, Dv          head dimensions of keys and values
    C, N            tokens of a chunk, chunks of a row
    q, k            (B, T, Hk, Dk)     L2-normalised, the readout scale folded into q; float32, bfloat16 or float16
    v               (B, T, Hv, Dv)     same dtype as q
    log_decay       (B, T, Hv)         float32, never positive; g = exp(log_decay); -inf empties the state
    beta            (B, T, Hv)         float32, in [0, 1]
    state           (B, Hv, Dv, Dk)    float32; None means zeros
    segments        (B, T)             int32, document of each token; a change empties the state before it
    y               (B, T, Hv, Dv)     dtype of q

    S_t = g_t S_(t-1) + beta_t (v_t - g_t S_(t-1) k_t) k_t^T        y_t = S_t q_t
"""

from gdkernels.backends import BACKENDS, Backend
from gdkernels.choice import Choice
from gdkernels.convolution import causal_convolution, explain_convolution
from gdkernels.dispatch import explain, gated_delta_rule, gated_delta_update
from gdkernels.gates import gates

__all__ = [
    "BACKENDS",
    "Backend",
    "Choice",
    "causal_convolution",
    "explain",
    "explain_convolution",
    "gated_delta_rule",
    "gated_delta_update",
    "gates",
]
