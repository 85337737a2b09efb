"""gdtrain fuse: a run's adapter into its base, as a model of its own."""

from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from gdtrain.commands.adapter_source import find_source
from gdtrain.model.adapter import load_adapter
from gdtrain.model.fuse import Fusion, plan_fusion
from gdtrain.model.load import find_model, load_model
from gdtrain.output_folder import check_new_folder, new_folder


def run_fuse(run: Path, output: Path, *, checkpoint: str, base: str | None, dequantize: bool) -> None:
    """Write the fused model and say what it cost; raises UserError, which is for cli.py."""
    console = Console(highlight=False)
    check_new_folder("--output", output)
    source = find_source(run, checkpoint, base)
    files = find_model(source.base)
    model = load_model(files, dtype=source.dtype)
    adaptation = load_adapter(model, source.folder)
    fusion = plan_fusion(files, model, adaptation, dequantize=dequantize)
    if fusion.left_out:
        _say(console, f"not copied from the base: {', '.join(fusion.left_out)}")
    with (
        Progress(console=console, disable=not console.is_terminal, transient=True) as bar,
        new_folder("--output", output, fusion.size) as folder,
    ):
        task = bar.add_task("writing", total=fusion.size)
        fusion.write(folder, lambda size: bar.advance(task, size))
    for line in _report(fusion, dequantize):
        _say(console, line)
    _say(console, f"saved: {output}")


def _report(fusion: Fusion, dequantized: bool) -> list[str]:
    rounding, change = fusion.losses.total()
    worst = max(fusion.losses.rounding, key=fusion.losses.rounding.__getitem__)
    how = "merged in float32, stored as before"
    if fusion.packings:
        how = f"quantised again ({'; '.join(fusion.packings)})"
    elif dequantized:
        how = "merged and stored unquantised"
    lines = [
        f"{fusion.merged} tensors {how}; {fusion.kept} copied byte for byte",
        f"the adapter changes these weights by {change:.2%} (relative L2); storing them costs {rounding:.2%}, "
        f"at most {fusion.losses.rounding[worst]:.2%} ({worst})",
    ]
    if fusion.packings and rounding > change / 10:
        lines.append("note: that is not small beside the change; --dequantize keeps it, in a larger model")
    return lines


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, soft_wrap=True)
