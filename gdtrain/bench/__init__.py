"""Time, memory and error of the gated delta rule, shape by shape: what `gdtrain bench-shapes` shows."""
