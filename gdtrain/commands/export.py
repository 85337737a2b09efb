"""gdtrain export: a run's adapter for another library, without the files of the run."""

from pathlib import Path

from rich.console import Console

from gdtrain.commands.adapter_source import find_source
from gdtrain.errors import UserError
from gdtrain.hub import check_push, push
from gdtrain.model.adapter import ADAPTER_CONFIG, ADAPTER_FILE, read_adapter, save_adapter
from gdtrain.model.lora import Adaptation
from gdtrain.model.peft_export import PEFT_CONFIG, PEFT_FILE, to_peft, write_peft
from gdtrain.output_folder import check_new_folder, new_folder

FORMATS = ("peft", "mlx-lm")


def run_export(run: Path, output: Path, *, form: str, checkpoint: str, base: str | None, push_to: str | None) -> None:
    """Write the adapter; raises UserError, which is for cli.py."""
    console = Console(highlight=False)
    if form not in FORMATS:
        raise UserError(f"--format: {form!r}; accepted: {', '.join(FORMATS)}")
    check_new_folder("--output", output)
    if push_to is not None:
        check_push("--push-to", push_to)
    source = find_source(run, checkpoint, base)
    adapter = read_adapter(source.folder)
    if form == "peft":
        tensors, config = to_peft(adapter, source.base)
        names = (PEFT_FILE, PEFT_CONFIG)
    else:
        tensors, names = adapter.weights, (ADAPTER_FILE, ADAPTER_CONFIG)
    with new_folder("--output", output, sum(x.nbytes for x in tensors.values())) as folder:
        if form == "peft":
            write_peft(folder, tensors, config)
        else:
            adaptation = Adaptation(adapter.fine_tune_type, adapter.num_layers, adapter.lora, [])
            save_adapter(folder, tensors, adaptation, source.base)
    console.print(
        f"{len(tensors)} tensors; base {source.base}\nsaved: {output} ({', '.join(names)})",
        markup=False,
        soft_wrap=True,
    )
    if push_to is not None:
        address = push("--push-to", output, push_to, f"Adapter of {source.base}, for {form}")
        console.print(f"uploaded: {address} (private, if it is new)", markup=False, soft_wrap=True)
