"""One framework in a process of its own, for fla_side_by_side.py: a JSON request a line in, a JSON reply a line out.

    python benchmarks/fla_worker.py mlx|torch

A request is {"do": NAME, ...}; the reply holds what the function of that name returns, or {"failed": why}. After a
failure the process ends, because a fault on a GPU can spoil all that comes after it.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from float64_rule import INPUTS, float64_rule

# What is bfloat16 among the inputs and cotangents.
ACTIVATIONS = ("q", "k", "v", "dy")


class Mlx:
    """Our backends. Shapes are [Hk, Hv, Dk, Dv], B is 1, activations are bfloat16, gates and states float32."""

    def hello(self) -> dict[str, Any]:
        import mlx.core as mx
        from gdkernels import BACKENDS

        versions = {"mlx_enable_tf32": os.environ.get("MLX_ENABLE_TF32", "1, the default")}
        return {"device": str(mx.device_info().get("device_name")), "backends": list(BACKENDS)} | versions

    def draw(self, shape: list[int], T: int, inputs: str) -> dict[str, Any]:
        """Inputs for everyone to compute the same thing from, into the file `inputs`."""
        import mlx.core as mx

        primals, cotangents = _draw_rule_inputs(shape, T)
        named = zip([*INPUTS, "dy", "dstate_out"], [*primals, *cotangents], strict=True)
        np.savez(inputs, **{name: np.array(x.astype(mx.float32)) for name, x in named})
        return {}

    def time(self, backend: str, inputs: str, repeats: int) -> dict[str, Any]:
        import mlx.core as mx

        from gdtrain.bench.measure import measure, pipelined_ms

        rule = _mlx_rule(backend)
        primals, cotangents = self._read(inputs)
        timing = measure(rule, primals, cotangents, repeats)
        pipelined = pipelined_ms(lambda: mx.vjp(lambda *x: list(rule(*x)), primals, cotangents))
        mx.clear_cache()  # the other framework is on the same card
        times = {"forward_ms": timing.forward_ms, "both_ms": timing.both_ms, "pipelined_ms": [pipelined]}
        return times | {"peak": timing.peak}

    def results(self, backend: str, inputs: str, results: str) -> dict[str, Any]:
        from gdtrain.bench import measure

        np.savez(results, **measure.results(_mlx_rule(backend), *self._read(inputs), INPUTS))
        return {}

    def _read(self, inputs: str) -> tuple[list[Any], list[Any]]:
        """Primals and cotangents from a file, evaluated, so that the peak has no second copy in it."""
        import mlx.core as mx

        *primals, dy, dstate = (
            mx.array(x).astype(mx.bfloat16 if name in ACTIVATIONS else mx.float32) for name, x in _arrays(inputs)
        )
        mx.eval(primals, dy, dstate)
        return primals, [dy, dstate]


def _arrays(inputs: str) -> Iterator[tuple[str, np.ndarray]]:
    """Names and arrays of a file, all float32, one in memory at a time."""
    with np.load(inputs) as file:
        yield from file.items()


def _draw_rule_inputs(shape: list[int], T: int) -> tuple[list[Any], list[Any]]:
    import mlx.core as mx
    from gdkernels import gates

    from gdtrain.bench.measure import draw_inputs
    from gdtrain.bench.shapes import Case, Shape

    drawn = draw_inputs(Case("", Shape(*shape), 1, T, "bfloat16"))
    q, k, v, a, b, state = drawn.primals
    primals = [q, k, v, *gates(a, b, drawn.A_log, drawn.dt_bias), state]
    mx.eval(primals)
    return primals, drawn.cotangents


def _mlx_rule(backend: str) -> Any:
    from gdkernels import BACKENDS
    from gdkernels.dispatch import default_chunk

    # Without the self-test, which compiles kernels of its own: the errors are measured here.
    return lambda *primals: BACKENDS[backend].rule(*primals, default_chunk())


class Torch:
    """flash-linear-attention, and the float64 recurrence on the same card. As `Mlx`, times by the same clock."""

    def hello(self) -> dict[str, Any]:
        import torch
        import triton

        return {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}

    def exact(self, inputs: str, results: str) -> dict[str, Any]:
        """The float64 result of the inputs of a file; on the CPU by numpy where torch is not installed."""
        arrays = [x.astype(np.float64) for _, x in _arrays(inputs)]
        try:
            import torch
        except ImportError:
            made = float64_rule(np, *arrays)
        else:
            made = float64_rule(torch, *(torch.from_numpy(x).cuda() for x in arrays))
            made = {name: x.cpu().numpy() for name, x in made.items()}
            torch.cuda.empty_cache()
        np.savez(results, **made)
        return {}

    def time(self, backend: str, inputs: str, repeats: int) -> dict[str, Any]:
        import torch

        rule, note = _chunk_gated_delta_rule()
        primals, cotangents = self._read(inputs)

        def both() -> Any:
            return torch.autograd.grad(rule(*primals), primals, cotangents)

        def forward() -> Any:
            with torch.no_grad():
                return rule(*primals)

        def run(function: Any) -> float:
            start = time.perf_counter()
            function()
            torch.cuda.synchronize()
            return 1e3 * (time.perf_counter() - start)

        for _ in range(3):  # compiles and tunes; the tuning is remembered
            run(both)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        both_ms = [run(both) for _ in range(repeats)]
        peak = torch.cuda.max_memory_allocated()
        start = time.perf_counter()
        for _ in range(10):
            both()
        torch.cuda.synchronize()
        pipelined = 100 * (time.perf_counter() - start)  # of 10, in ms
        run(forward)
        forward_ms = [run(forward) for _ in range(repeats)]
        torch.cuda.empty_cache()
        times = {"forward_ms": forward_ms, "both_ms": both_ms, "pipelined_ms": [pipelined]}
        return times | {"peak": peak, "note": note}

    def results(self, backend: str, inputs: str, results: str) -> dict[str, Any]:
        import torch

        rule, note = _chunk_gated_delta_rule()
        primals, cotangents = self._read(inputs)
        y, state = rule(*primals)
        gradients = torch.autograd.grad((y, state), primals, cotangents)
        named = zip(["y", "state", *("d" + name for name in INPUTS)], [y, state, *gradients], strict=True)
        np.savez(results, **{name: x.detach().float().cpu().numpy() for name, x in named})
        return {"note": note}

    def _read(self, inputs: str) -> tuple[list[Any], list[Any]]:
        """Primals, of which gradients will be asked, and cotangents from a file."""
        import torch

        *primals, dy, dstate = (
            torch.from_numpy(x).cuda().to(torch.bfloat16 if name in ACTIVATIONS else torch.float32)
            for name, x in _arrays(inputs)
        )
        return [x.requires_grad_() for x in primals], [dy, dstate]


def _chunk_gated_delta_rule() -> tuple[Any, str]:
    """The rule of fla with our arguments, and what to know about its figures.

    In fla 0.6.0 q and k have Hk heads and value head h reads h // (Hv // Hk), as here; g is the logarithm of the decay;
    the state is (B, Hv, Dv, Dk) with state_v_first. q is scaled already.
    """
    import fla.ops.common.chunk_o as chunk_o
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def rule(q: Any, k: Any, v: Any, log_decay: Any, beta: Any, state: Any) -> Any:
        options = {"scale": 1.0, "initial_state": state, "output_final_state": True, "state_v_first": True}
        return chunk_gated_delta_rule(q, k, v, log_decay, beta, **options)

    refuses = chunk_o.IS_NVIDIA_HOPPER and not chunk_o.TRITON_ABOVE_3_7_1
    # `lifted` remembers what the first call here has changed.
    if refuses and (chunk_o.TRITON_ABOVE_3_4_0 or getattr(chunk_o, "lifted", False)):
        chunk_o.TRITON_ABOVE_3_4_0, chunk_o.lifted = False, True
        return rule, (
            "fla refuses its gated backward on Hopper with triton < 3.7.1, as giving wrong results; the refusal was "
            "lifted for the time (fla.ops.common.chunk_o.TRITON_ABOVE_3_4_0 = False), its errors may be affected"
        )
    return rule, ""


def serve(framework: str) -> None:
    """Answer requests until the input ends or one fails."""
    # Libraries print to stdout; the replies have it for themselves.
    replies, sys.stdout = sys.stdout, sys.stderr
    worker = {"mlx": Mlx, "torch": Torch}[framework]()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = getattr(worker, request.pop("do"))(**request)
        # Anything may go wrong in another library on an unknown machine: it becomes a row.
        except Exception as error:
            reply = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        print(json.dumps(reply), file=replies, flush=True)
        if "failed" in reply:
            sys.exit(1)


if __name__ == "__main__":
    serve(sys.argv[1])
