"""From a config to everything a run needs: data checked and tokenised before any weights are read, then the model on
the trainable path with its adapter."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from gdtrain.config import RunConfig
from gdtrain.data.conversation import Sample
from gdtrain.data.prepare import Counts, prepare
from gdtrain.data.progress import tokenising
from gdtrain.data.records import Records, check_records
from gdtrain.data.sources import columns_of
from gdtrain.data.token_cache import Key, tokenised
from gdtrain.errors import UserError
from gdtrain.model.adapter import check_same_adapter, load_adapter_weights
from gdtrain.model.describe import describe_checkpoint
from gdtrain.model.load import find_model, load_model, load_tokenizer, vocabulary_size
from gdtrain.model.lora import Adaptation, adapt
from gdtrain.model.swap import Swapped, swap_linear_attention

Say = Callable[[str], None]


@dataclass(frozen=True)
class Data:
    """The samples of the splits that were asked for, and what became of their rows."""

    samples: dict[str, list[Sample]]
    counts: dict[str, Counts]
    tokenizer: Any


@dataclass(frozen=True)
class Session:
    """A model ready to train or evaluate."""

    config: RunConfig
    data: Data
    model: nn.Module
    swapped: Swapped


def open_data(config: RunConfig, splits: Sequence[str], say: Say) -> Data:
    """Read, check and tokenise the records; the first of `splits` must have some. No weights are read.

    Raises:
        UserError: model, tokenizer or data are missing or faulty.
    """
    hf_dataset = None if config.hf_dataset is None else [source.model_dump() for source in config.hf_dataset]
    records = check_records(
        config.data,
        hf_dataset,
        mask_prompt=config.mask_prompt,
        require=splits[0],
        columns=columns_of(config.model_dump()),
    )
    for note in records.notes:
        say(note)
    files = find_model(config.model)
    tokenizer = load_tokenizer(files, trust_remote_code=config.trust_remote_code)
    if config.enable_thinking is not None and any("text" in getattr(records, split).kinds for split in splits):
        say("enable_thinking has no effect on text records")
    options: dict[str, Any] = {
        "max_seq_length": config.max_seq_length,
        "on_long": config.on_long,
        "mask_prompt": config.mask_prompt,
        "supervise": config.supervise,
        "enable_thinking": config.enable_thinking,
    }
    key = Key(files.folder, tokenizer, options, trust_remote_code=config.trust_remote_code)
    samples, counts = {}, {}
    for split in splits:
        rows = getattr(records, split)
        samples[split], counts[split] = tokenised(
            rows, split, key, partial(_tokenise, rows, split, tokenizer, options, say), say
        )
        if counts[split].rows_read:
            say(f"{split}: {counts[split].summary()}")
    _check_ids([sample for split in splits for sample in samples[split]], vocabulary_size(files))
    return Data(samples, counts, tokenizer)


def open_session(config: RunConfig, data: Data, say: Say) -> Session:
    """Load the model, say what became of its checkpoint, and put its linear attention onto the trainable rule. Nothing
    is trainable yet: see `adapt_as`.

    Raises:
        UserError: the model cannot be loaded or swapped as the config says.
    """
    files = find_model(config.model)
    model = load_model(files, dtype=config.dtype)
    for line in describe_checkpoint(files, model):
        say(line)
    swapped = swap_linear_attention(model, files.config, kernel=config.kernel, chunk_size=config.chunk_size)
    mx.reset_peak_memory()  # no weights are read yet; a self-test of the kernels is no part of the run's peak
    return Session(config, data, model, swapped)


def adapt_as(config: RunConfig, model: nn.Module, *, load_file: bool = True) -> Adaptation:
    """Make trainable what the config says, freshly initialised from its seed, and read the weights from disk.

    Args:
        load_file: whether to begin with the weights of resume_adapter_file, if the config names one.

    Raises:
        UserError: blocks or projections that the model does not have, or an adapter file that does not fit.
    """
    mx.random.seed(config.seed)
    lora = config.lora_parameters
    adaptation = adapt(
        model,
        fine_tune_type=config.fine_tune_type,
        num_layers=config.num_layers,
        rank=lora.rank,
        scale=lora.resolved_scale,
        dropout=lora.dropout,
        keys=lora.keys,
    )
    if load_file and config.resume_adapter_file is not None:
        file = Path(config.resume_adapter_file).expanduser()
        check_same_adapter(file.parent, adaptation)
        load_adapter_weights(model, file)
    mx.eval(model.parameters())
    return adaptation


def _tokenise(
    records: Records, split: str, tokenizer: Any, options: dict[str, Any], say: Say
) -> tuple[list[Sample], Counts]:
    with tokenising(records, split, say) as rows:
        return prepare(rows, tokenizer, **options)


def _check_ids(samples: list[Sample], vocabulary: int) -> None:
    for sample in samples:
        if (highest := int(sample.ids.max())) >= vocabulary:
            raise UserError(
                f"{sample.where}: the tokenizer gives the id {highest}, but the model has vocab_size {vocabulary}: "
                "they do not belong together"
            )
