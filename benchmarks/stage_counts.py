"""What a stage of the fused backend computes and moves, from its sizes alone.

Operations are those of matrix products, two for each multiply-add, with triangular matrices as the kernels multiply
them: in whole blocks of 16 x 16. Element-wise work (decays, scales, sums of gates) is not counted, so `gates` has none.
Bytes are the least that device memory must move: every input read once and every output written once.
"""

from dataclasses import dataclass

from gdkernels.fused.plan import Plan
from gdkernels.fused.stages import PROGRAMS

STAGES = ("intra", "intra_with_pairs", "forward", "delta", "reverse", "pairs", "keys", "gates")
# Those of one forward, and of one backward after it.
FORWARD = ("intra", "forward")
BACKWARD = ("intra_with_pairs", "reverse", "delta", "pairs", "keys", "gates")
_BLOCK = 16


@dataclass(frozen=True)
class Count:
    """Of one launch.

    Attributes:
        operations: on floats. partial_operations: the same as the machine does them, a float in parts (CUDA).
        bytes: inputs and outputs.
    """

    operations: int
    partial_operations: int
    bytes: int


def count(stage: str, plan: Plan, T: int) -> Count:
    """One launch of a stage over all chunks of rows of T tokens; the last chunk counts as a full one."""
    sizes = array_bytes(plan, T)
    program = dict(zip(STAGES, PROGRAMS, strict=True))[stage]
    moved = sum(sizes[name] for name in (*program.inputs, *program.outputs) if name != "span")
    products = _products(plan)[stage]
    cells = plan.B * plan.Hv * -(-T // plan.C)
    operations = 2 * cells * sum(number for number, _ in products)
    partial = 2 * cells * sum(number * parts for number, parts in products)
    return Count(round(operations), round(partial), moved)


def partial_products(left: int, right: int) -> int:
    """Products of parts in the product of two floats (`mma` in tiles.cuda.h)."""
    return sum(i + j < max(left, right) for i in range(left) for j in range(right))


def _products(plan: Plan) -> dict[str, list[tuple[float, int]]]:
    """Multiply-adds for a chunk of a value head and the partial products of each; what heads share is divided."""
    C, Dk, Dv, G = plan.C, plan.Dk, plan.Dv, plan.Hv // plan.Hk
    constants = plan.sweep.constants
    floats, activations, exact = constants["PARTS"], constants["ACTIVATION_PARTS"], constants["EXACT_PARTS"]
    by_activation, by_float = partial_products(floats, activations), partial_products(floats, floats)

    triangle = C * (C + _BLOCK) // 2  # elements of the blocks on and below the diagonal
    state = (C * Dk * Dv, by_activation)  # a product of activations with the state
    keys = (2 * triangle * Dk / plan.intra.constants["HEADS"], partial_products(activations, activations))
    # Blocks of 16 by substitution, in plain floats; then lower left blocks of 16, 32 ... by two products each.
    substitution = (C * _BLOCK * (_BLOCK - 1) // 2, 1)
    sizes = [_BLOCK << level for level in range((C // _BLOCK).bit_length() - 1)]
    inverse = (sum(C * size**2 for size in sizes), partial_products(exact, exact))
    triangular, by_dy = (triangle * Dv, by_float), (triangle * Dv, by_activation)
    intra = [keys, substitution, inverse]
    return {
        "intra": intra,
        "intra_with_pairs": intra,
        "forward": [state, state, triangular, triangular, state],
        "delta": [state, triangular],
        "reverse": [state, by_dy, state, triangular, state],
        "pairs": [by_dy, triangular],
        "keys": [state, (2 * C * Dk * Dv, by_float), (4 * C * C * Dk / G, by_activation)],
        "gates": [],
    }


def array_bytes(plan: Plan, T: int) -> dict[str, int]:
    """Bytes of every array of the stages by its name in the kernel texts."""
    B, Hk, Hv, Dk, Dv, C = plan.B, plan.Hk, plan.Hv, plan.Dk, plan.Dv, plan.C
    chunks = -(-T // C)
    item, part, real = plan.dtype.size, plan.parts * plan.factor.size, 4
    key_cells, cells, blocks = B * Hk * chunks, B * Hv * chunks, Dk // plan.block
    groups = (
        ("q k dq dk", B * T * Hk * Dk * item),
        ("v y dy dv", B * T * Hv * Dv * item),
        ("log_decay beta d_log_decay d_beta", B * T * Hv * real),
        ("state final_state d_final d_state", B * Hv * Dv * Dk * real),
        ("scales", cells * 3 * C * real),
        ("M P", cells * C * C * part),
        ("delta x", cells * C * Dv * part),
        ("starts d_ends", cells * Dv * Dk * part),
        ("d_beta_pairs d_decay_pairs", cells * C * real),
        ("row_sums", cells * blocks * 3 * C * real),
        ("state_sums", cells * blocks * plan.keys.groups * real),
        ("QK KK", key_cells * C * C * real),
        ("d_pairs", key_cells * 4 * C * C * part),
    )
    return {name: size for names, size in groups for name in names.split()}
