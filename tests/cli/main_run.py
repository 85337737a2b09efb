"""The data and config of the run that `finished` and `trained` hold."""

# Short rows with one completion, which a mini model learns in a few steps.
ROWS = {
    split: [{"prompt": f"{split[0]}{i}", "completion": "yes yes"} for i in range(count)]
    for split, count in {"train": 12, "valid": 5, "test": 3}.items()
}
# Report, validation and checkpoint at different steps, and none of them at the last.
MAIN_RUN = {
    "data": "data",
    "adapter_path": "run",
    "mask_prompt": True,
    "batch_size": 2,
    "iters": 1000,
    "learning_rate": 5e-3,
    "steps_per_report": 4,
    "steps_per_eval": 5,
    "save_every": 5,
    "keep_checkpoints": 2,
}
ITERATIONS = 22
