"""Makes the embedded model `tiny` again: python scripts/make_tiny.py [FOLDER]

A Qwen3.5 hybrid small enough to be trained on two CPU cores in a minute, with random weights from a fixed seed, in
the layout of a converted MLX checkpoint, and a byte-level BPE tokenizer trained on the standard library of the Python
that runs this. The committed files are those of CPython 3.11.7: another version gives other merges.
chat_template.jinja is written by hand and left as it is.
"""

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # One thread: the same merges on every machine.

import mlx.core as mx
import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from gdtrain.data.stdlib import iter_stdlib_sources

SEED = 20
VOCABULARY = 4096

# As in Qwen: the last six are ordinary text to a decoder that skips special tokens.
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKER_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

# Qwen3.5's, and NFC below: transformers builds both into its class for this model type, whatever tokenizer.json says.
# Contractions, words with one leading sign, single digits, punctuation, line ends, spaces.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Sized by time: MLX 0.32.4 on two cores of a Xeon 2.8 GHz multiplies at 2 to 4 GFLOP/s (2026-11). Hidden and
# intermediate sizes of 256 train at 200 to 300 tokens a second there, these at 550 to 800.
BLOCKS = 4
ATTENTION_INTERVAL = 4
HIDDEN = 128
INTERMEDIATE = 128
HEADS, KV_HEADS, HEAD_DIM = 2, 1, 64
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 32, 32
CONV_KERNEL = 4

# What LoRA, with the embedding frozen, needs in order to learn anything in fifty steps: all embeddings share one
# direction, the constant input that layers without biases lack, and along another they stand in the order of log
# frequency, as those of trained models do. Validation loss after 30 steps of 8 records (rank 8, learning rate 1e-2,
# deviation 0.1; an earlier variant with one key head, one seed): 7.73 without that second direction, 7.10 with a share
# of 0.3. The deviation gives
# tied logits their range; at 0.15 tokens predict themselves so strongly that the loss starts at 10.5, far above
# ln 4096 = 8.3.
EMBEDDING_STD = 0.12
SHARED_SHARE = 0.5  # Of the norm of the random part.
FREQUENCY_SHARE = 0.45  # The same, at one standard deviation of log frequency.
RESIDUAL_GAIN = 1 / math.sqrt(2 * BLOCKS)  # As in GPT-2: the residual stream does not grow with the depth.


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1] / "gdtrain" / "model" / "tiny")
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = make_config(tokenizer)
    write_json(folder / "config.json", config)
    write_json(folder / "tokenizer_config.json", make_tokenizer_config())
    write_json(folder / "generation_config.json", make_generation_config(tokenizer))
    mx.save_safetensors(str(folder / "model.safetensors"), make_weights(tokenizer), metadata={"format": "mlx"})
    for file in sorted(folder.iterdir()):
        print(f"{file.stat().st_size:>10,} {file.name}")


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def make_tokenizer() -> Tokenizer:
    """VOCABULARY ids: bytes, merges, then the special and marker tokens at the end."""
    added = len(SPECIAL_TOKENS) + len(MARKER_TOKENS)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - added,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for _, text in iter_stdlib_sources()), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKER_TOKENS])
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise SystemExit(f"the tokenizer has {tokenizer.get_vocab_size()} ids, not {VOCABULARY}")
    return tokenizer


def make_tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "unk_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }


def make_generation_config(tokenizer: Tokenizer) -> dict[str, Any]:
    end, pad = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    return {"eos_token_id": [end, pad], "pad_token_id": pad, "do_sample": False}


def make_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """Nested as in the published checkpoints: the language model under text_config."""
    kinds = [("full" if is_attention(block) else "linear") + "_attention" for block in range(BLOCKS)]
    text_config = {
        "model_type": "qwen3_5_text",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": BLOCKS,
        "full_attention_interval": ATTENTION_INTERVAL,
        "layer_types": kinds,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "attention_bias": False,
        "attn_output_gate": True,
        "linear_num_key_heads": KEY_HEADS,
        "linear_num_value_heads": VALUE_HEADS,
        "linear_key_head_dim": KEY_DIM,
        "linear_value_head_dim": VALUE_DIM,
        "linear_conv_kernel_dim": CONV_KERNEL,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
        "max_position_embeddings": 4096,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
    }
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
        "text_config": text_config,
    }


def is_attention(block: int) -> bool:
    return (block + 1) % ATTENTION_INTERVAL == 0


def make_weights(tokenizer: Tokenizer) -> dict[str, mx.array]:
    """bfloat16 except A_log; norm weights and conv1d axes as mlx-lm stores them after conversion."""
    draw = np.random.default_rng(SEED)
    weights: dict[str, np.ndarray] = {}

    def linear(name: str, outputs: int, inputs: int, gain: float = 1.0) -> None:
        weights[f"{name}.weight"] = draw.normal(0, gain / math.sqrt(inputs), (outputs, inputs))

    def ones(name: str, size: int) -> None:
        weights[f"{name}.weight"] = np.ones(size)

    root = "language_model.model"
    weights[f"{root}.embed_tokens.weight"] = make_embedding(tokenizer)
    for block in range(BLOCKS):
        layer = f"{root}.layers.{block}"
        if is_attention(block):
            attention = f"{layer}.self_attn"
            linear(f"{attention}.q_proj", HEADS * HEAD_DIM * 2, HIDDEN)  # Query and gate.
            linear(f"{attention}.k_proj", KV_HEADS * HEAD_DIM, HIDDEN)
            linear(f"{attention}.v_proj", KV_HEADS * HEAD_DIM, HIDDEN)
            linear(f"{attention}.o_proj", HIDDEN, HEADS * HEAD_DIM, RESIDUAL_GAIN)
            ones(f"{attention}.q_norm", HEAD_DIM)
            ones(f"{attention}.k_norm", HEAD_DIM)
        else:
            delta = f"{layer}.linear_attn"
            channels = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
            linear(f"{delta}.in_proj_qkv", channels, HIDDEN)
            linear(f"{delta}.in_proj_z", VALUE_HEADS * VALUE_DIM, HIDDEN)
            linear(f"{delta}.in_proj_b", VALUE_HEADS, HIDDEN)
            linear(f"{delta}.in_proj_a", VALUE_HEADS, HIDDEN)
            linear(f"{delta}.out_proj", HIDDEN, VALUE_HEADS * VALUE_DIM, RESIDUAL_GAIN)
            bound = 1 / math.sqrt(CONV_KERNEL)
            weights[f"{delta}.conv1d.weight"] = draw.uniform(-bound, bound, (channels, CONV_KERNEL, 1))
            weights[f"{delta}.A_log"] = draw.uniform(0, math.log(16), VALUE_HEADS)
            step = np.exp(draw.uniform(math.log(1e-3), math.log(0.1), VALUE_HEADS))
            weights[f"{delta}.dt_bias"] = step + np.log(-np.expm1(-step))  # The inverse of softplus.
            ones(f"{delta}.norm", VALUE_DIM)
        linear(f"{layer}.mlp.gate_proj", INTERMEDIATE, HIDDEN)
        linear(f"{layer}.mlp.up_proj", INTERMEDIATE, HIDDEN)
        linear(f"{layer}.mlp.down_proj", HIDDEN, INTERMEDIATE, RESIDUAL_GAIN)
        ones(f"{layer}.input_layernorm", HIDDEN)
        ones(f"{layer}.post_attention_layernorm", HIDDEN)
    ones(f"{root}.norm", HIDDEN)
    return {
        name: mx.array(value.astype(np.float32)).astype(mx.float32 if name.endswith("A_log") else mx.bfloat16)
        for name, value in sorted(weights.items())
    }


def make_embedding(tokenizer: Tokenizer) -> np.ndarray:
    """(VOCABULARY, HIDDEN) float64: noise, plus the two directions described at EMBEDDING_STD."""
    draw = np.random.default_rng([SEED, 1])
    counts = np.ones(VOCABULARY)
    for _, text in iter_stdlib_sources():
        np.add.at(counts, tokenizer.encode(text).ids, 1)
    frequency = np.log(counts)
    frequency = (frequency - frequency.mean()) / frequency.std()
    shared, frequent = np.linalg.qr(draw.normal(size=(HIDDEN, 2)))[0].T
    directions = SHARED_SHARE * shared + FREQUENCY_SHARE * np.outer(frequency, frequent)
    return EMBEDDING_STD * (draw.normal(size=(VOCABULARY, HIDDEN)) + math.sqrt(HIDDEN) * directions)


if __name__ == "__main__":
    main()
