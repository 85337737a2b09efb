"""What trains, from a config.json, against what `adapt` makes trainable."""

import mini
import mlx.optimizers as optim
import pytest

from gdtrain.arrays import flat
from gdtrain.errors import UserError
from gdtrain.model.lora import adapt
from gdtrain.plan.adapter import trained_blocks

KEYS = {
    "all": None,
    "some": ["q_proj", "in_proj_qkv", "self_attn.o_proj", "linear_attn.out_proj"],
    "attention": ["v_proj"],
    "dense or shared": ["up_proj"],
    "experts": ["switch_mlp.down_proj", "mlp.switch_mlp.up_proj"],
    "router": ["mlp.gate"],
}
WITHOUT = {"qwen3_5": {"experts", "router"}, "qwen3_5_moe": set(), "qwen3_next": {"some"}}
CASES = [
    (family, keys, kind)
    for family in mini.FAMILIES
    for keys in KEYS.keys() - WITHOUT[family]
    for kind in ("lora", "dora", "full")
    if keys == "all" or kind == "lora" or (kind == "dora" and keys != "experts")
]


@pytest.mark.parametrize(("family", "keys", "kind"), sorted(CASES))
def test_parameters(family, keys, kind, planner):
    model, _ = mini.build(family)
    adapt(model, fine_tune_type=kind, num_layers=3, rank=5, keys=KEYS[keys])
    plan = planner(family, fine_tune_type=kind, num_layers=3, lora_parameters={"rank": 5, "keys": KEYS[keys]})
    real = flat(model.trainable_parameters())
    assert plan.trainable == sum(x.size for x in real.values())
    assert sum(block.bytes for block in plan.trained) == sum(x.nbytes for x in real.values())
    first = min(int(name.split("layers.")[1].split(".")[0]) for name in real)
    assert [block.parameters > 0 for block in plan.trained].index(True) == first


OPTIMIZERS = {"adam": optim.Adam, "sgd": optim.SGD, "adafactor": optim.Adafactor, "muon": optim.Muon}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_of_the_optimizer(name, planner):
    """All but the step and the learning rate, which are one number each."""
    model, _ = mini.build()
    adapt(model, keys=None, rank=6)
    optimizer = OPTIMIZERS[name](learning_rate=0.1)
    optimizer.init(model.trainable_parameters())
    real = sum(x.nbytes for x in flat(optimizer.state).values() if x.size > 1)
    assert sum(block.state for block in planner(optimizer=name, lora_parameters={"rank": 6}).trained) == real


def test_adafactor_with_a_first_moment(planner):
    state = {"adafactor": {"beta_1": 0.9}}
    with_moment, without = (planner(optimizer="adafactor", optimizer_config=c) for c in (state, {}))
    more = sum(b.state - a.state for a, b in zip(without.trained, with_moment.trained, strict=True))
    assert more == 4 * without.trainable


FAULTS = {
    "key": ({"lora_parameters": {"keys": ["nothing"]}}, "'nothing' names no projection\n  this model has: linear_attn"),
    "blocks": ({"num_layers": 9}, r"num_layers: 9; accepted: -1 \(all\) or 1 to 4"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_fit_the_model(fault, planner):
    keys, message = FAULTS[fault]
    with pytest.raises(UserError, match=message):
        planner(**keys)


def test_full_with_quantised_weights(planner, monkeypatch):
    plan = planner()
    monkeypatch.setattr(plan.storage, "of", lambda name, columns: "4 bits")
    config = plan.config.model_copy(update={"fine_tune_type": "full"})
    with pytest.raises(UserError, match="full needs unquantised weights"):
        trained_blocks(config, plan.sizes, plan.storage)
