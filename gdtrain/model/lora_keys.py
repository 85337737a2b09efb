"""From the names in `lora_parameters.keys` to projections of the model; for a name that is none, why."""

import difflib
import re
from collections.abc import Collection

_VISION = {"visual", "vision", "vision_tower", "vision_model", "patch_embed", "merger"}
_FULL = "; fine_tune_type: full trains it"
# Qwen3.5 and Qwen3-Next call the inputs of a GDN layer differently.
_OTHER_FAMILY = {
    "in_proj_qkvz": "Qwen3-Next's name for in_proj_qkv and in_proj_z",
    "in_proj_ba": "Qwen3-Next's name for in_proj_b and in_proj_a",
    "in_proj_qkv": "Qwen3.5's name for a part of in_proj_qkvz",
    "in_proj_z": "Qwen3.5's name for a part of in_proj_qkvz",
    "in_proj_b": "Qwen3.5's name for a part of in_proj_ba",
    "in_proj_a": "Qwen3.5's name for a part of in_proj_ba",
}


def matches(key: str, name: str) -> bool:
    """Whether a key names this projection. A short key such as "up_proj" means the shared expert, not the hundreds of
    routed ones."""
    return name == key or (name.endswith(f".{key}") and ("switch_mlp" not in name or "switch_mlp" in key))


def why_none(key: str, names: Collection[str], elsewhere: Collection[str], *, tied: bool) -> str:
    """What to say of a key that names no projection.

    Args:
        names: the projections of the blocks that are adapted. elsewhere: those of all other blocks.
        tied: the model has no head beside its embedding.
    """
    said = f"{key!r} names no projection"
    places = key.split(".")
    if any(matches(key, name) for name in elsewhere):
        return f"{said} of the blocks that num_layers leaves; others have it"
    if set(places) & _VISION:
        return f"{said}: the vision tower is not loaded, gdtrain trains the language model alone"
    if "mtp" in places:
        return f"{said}: multi-token prediction is not loaded"
    if "lm_head" in places:
        where = "is the embedding in this model, which is tied" if tied else "lies behind the blocks"
        return f"{said}: the head {where}, and only projections within blocks are adapted"
    if "embed_tokens" in places:
        return f"{said}: the embedding lies before the blocks, and only projections within blocks are adapted"
    if "conv1d" in places:
        return f"{said}: it is a convolution along the tokens, for which there is no LoRA{_FULL}"
    if any(place.endswith("norm") for place in places):
        return f"{said}: it is a norm, whose weight is a vector, and LoRA adapts matrices{_FULL}"
    if places[-1] in ("A_log", "dt_bias"):
        return f"{said}: it is a number for each head, and LoRA adapts matrices{_FULL}"
    return said + _hint(key, names)


def _hint(key: str, names: Collection[str]) -> str:
    """The name that was meant, where that can be told."""
    places = key.split(".")
    leaf = places[-1]
    if "experts" in places or "switch_mlp" in places:
        if experts := [n for n in names if n.endswith(f"switch_mlp.{leaf}")]:
            return f"; the experts are one tensor here, {experts[0]!r}"
        if not any("switch_mlp" in n for n in names):
            return ": this model has no experts, its MLPs are dense"
    if re.fullmatch(r"(.*mlp\.)?(gate|shared_expert_gate|router)", key):
        routers = [n for n in names if n.endswith("mlp.gate")]
        return f"; the router is {routers[0]!r}" if routers else ": it is a router, and this model has none"
    near = difflib.get_close_matches(key, [*names, *(n.rsplit(".", 1)[-1] for n in names)], n=1, cutoff=0.5)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    return f"{meant} It is {_OTHER_FAMILY[leaf]}" if leaf in _OTHER_FAMILY else meant
