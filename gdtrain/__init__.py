"""gdtrain: LoRA fine-tuning of Qwen3.5 and Qwen3-Next (Gated DeltaNet hybrids) on MLX."""

__version__ = "0.1.0"
