"""Proves that an exported adapter and a fused model give in Hugging Face transformers the logits that they give here.

    python scripts/prove_peft.py RUN [--base DIR] [--gdtrain PYTHON]

Runs where torch, transformers and peft are installed (none of them is needed by gdtrain), and calls gdtrain in the
environment that --gdtrain names by its Python. RUN: a run directory or the folder of an adapter; its base must be an
unconverted checkpoint of the Hub, which transformers can read. Both sides compute in float32 on the CPU. Exit code 1 if
logits differ by more than 1e-4 (relative L2).
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

BOUND = 1e-4  # the same float32 sums in another order; measured 4e-6 to 2e-5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--base", help="the base, if not the one that the run names")
    parser.add_argument("--gdtrain", default=sys.executable, help="Python of the environment with gdtrain")
    parser.add_argument("--tokens", type=int, default=150)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return prove(arguments, Path(folder))


def prove(arguments: argparse.Namespace, work: Path) -> int:
    from transformers import AutoModelForCausalLM

    base = ["--model", arguments.base] if arguments.base else []
    command = [arguments.gdtrain, __file__, "logits", str(arguments.run), arguments.base or "", str(arguments.tokens)]
    subprocess.run([*command, str(work / "logits.npz")], check=True)
    ours = np.load(work / "logits.npz")
    model = str(ours["base"])
    rows = {"base": (logits(AutoModelForCausalLM, model, ours["ids"]), ours["base_logits"])}
    run = [arguments.gdtrain, "-m", "gdtrain"]
    if ours["kind"] != "full":
        adapter = str(work / "peft")
        export = [*run, "export", str(arguments.run), "--format", "peft", "--output", adapter, *base]
        done = subprocess.run(export, check=False)
        if done.returncode != 2:  # 2: it has said what peft cannot hold
            done.check_returncode()
            rows["peft adapter"] = logits(AutoModelForCausalLM, model, ours["ids"], adapter), ours["logits"]
    subprocess.run([*run, "fuse", str(arguments.run), "--output", str(work / "fused"), *base], check=True)
    rows["fused model"] = logits(AutoModelForCausalLM, str(work / "fused"), ours["ids"]), ours["logits"]
    moved = relative_l2(ours["base_logits"], ours["logits"])
    print(f"the adapter ({ours['kind']}) moves the logits by {moved:.2g}")
    errors = {name: relative_l2(*pair) for name, pair in rows.items()}
    for name, error in errors.items():
        print(f"{name:>14}: transformers and gdtrain differ by {error:.1e}")
    good = max(errors.values()) <= BOUND < moved / 10
    print("proved" if good else f"NOT proved: the bound is {BOUND:g}")
    return 0 if good else 1


def logits(kind: type, model: str, ids: np.ndarray, adapter: str | None = None) -> np.ndarray:
    """Of transformers, in float32, with every weight of the checkpoint and of the adapter in its place."""
    import torch

    network, loaded = kind.from_pretrained(model, dtype=torch.float32, output_loading_info=True)  # type: ignore[attr-defined]
    if wrong := {key: loaded[key] for key in ("missing_keys", "mismatched_keys") if loaded.get(key)}:
        raise SystemExit(f"{model}: transformers could not place every weight: {wrong}")
    if adapter is not None:
        network = with_adapter(network, adapter)
    with torch.no_grad():
        return network.eval()(input_ids=torch.from_numpy(ids.astype(np.int64)), use_cache=False).logits.numpy()


def with_adapter(network, adapter: str):
    """peft warns of names that it does not know and goes on: compare them."""
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors.numpy import load_file

    adapted = PeftModel.from_pretrained(network, adapter)
    placed = {name: x.numpy() for name, x in get_peft_model_state_dict(adapted).items()}
    stored = load_file(f"{adapter}/adapter_model.safetensors")
    if placed.keys() != stored.keys() or any(not np.array_equal(placed[name], stored[name]) for name in stored):
        raise SystemExit(f"{adapter}: peft placed {len(placed)} tensors, {len(stored)} are stored, and they differ")
    print(f"peft placed all {len(placed)} tensors of the adapter")
    return adapted


def relative_l2(got: np.ndarray, want: np.ndarray) -> float:
    got, want = got.astype(np.float64), want.astype(np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def save_logits(run: str, base: str, tokens: str, file: str) -> None:
    """gdtrain's side, in a process of its own."""
    import mlx.core as mx

    from gdtrain.commands.adapter_source import find_source
    from gdtrain.model.adapter import load_adapter
    from gdtrain.model.load import find_model, load_model, vocabulary_size

    mx.set_default_device(mx.cpu)
    source = find_source(Path(run), "last", base or None)
    files = find_model(source.base)
    model = load_model(files, dtype="float32").eval()
    ids = np.random.default_rng(0).integers(1, vocabulary_size(files), (2, int(tokens))).astype(np.int32)
    base_logits = np.array(model(mx.array(ids), cache=model.make_cache()))
    kind = load_adapter(model, source.folder).fine_tune_type
    model.eval()
    adapted = np.array(model(mx.array(ids), cache=model.make_cache()))
    np.savez(file, ids=ids, base_logits=base_logits, logits=adapted, base=str(files.folder), kind=kind)


if __name__ == "__main__":
    if sys.argv[1:2] == ["logits"]:
        save_logits(*sys.argv[2:])
    else:
        sys.exit(main())
