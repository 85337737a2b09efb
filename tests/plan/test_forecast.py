"""Forecasts: in order, in step with the code that they are about, and near what a real step takes."""

import json
from pathlib import Path

import mini
import mlx.core as mx
import pytest

from gdtrain.plan.devices import DEVICES, backend_of, device_of
from gdtrain.plan.forecast import Forecast, Part


def total(planner, *args):
    return planner.forecast(*args).total


@pytest.mark.parametrize("family", mini.FAMILIES)
def test_grows(family, planner):
    """With T, B and rank, on each device."""
    for device in DEVICES.values():
        plan = planner(family)
        plan.device, plan.backend = device, "fused" if device.gpu else "chunked"
        first = total(plan, 1, 129)
        for rows, tokens in ((1, 257), (1, 1025), (2, 129), (4, 129)):
            assert total(plan, rows, tokens) > first
    assert total(planner(family, lora_parameters={"rank": 32})) > total(planner(family))
    assert total(planner(family, grad_accumulation_steps=2)) > total(planner(family))
    assert total(planner(family, grad_checkpoint=False)) > total(planner(family))
    assert total(planner(family, model={"num_hidden_layers": 8})) > total(planner(family))


def test_parts_are_the_total(planner):
    forecast = planner("qwen3_5_moe").forecast()
    sizes = {part.name: part.size for part in forecast.parts}
    assert forecast.total == sum(sizes.values())
    always = ["weights", "adapter", "optimizer"]
    assert list(sizes) == [*always, "gradients", "block inputs", "activations", "GDN states", "loss"]
    assert all(part.most >= part.size for part in forecast.parts)
    assert sizes["adapter"] == sizes["optimizer"] > 0  # twice, and two moments
    assert forecast.moment == "step"


def test_what_does_not_train_keeps_nothing(planner):
    """Of 8 blocks, those before the last two."""
    few, every = planner(model={"num_hidden_layers": 8}, num_layers=2), planner(model={"num_hidden_layers": 8})
    kept = [{p.name: p.most for p in plan.forecast().parts}["block inputs"] for plan in (few, every)]
    assert kept[1] >= kept[0] + 5 * 256 * 64 * 4


def test_update_of_a_full_fine_tuning_with_short_rows(planner):
    """A step of two positions makes next to nothing; an update makes parameters and moments anew."""
    model = {"hidden_size": 512, "intermediate_size": 2048}
    short, long = (planner(model=model, fine_tune_type="full").forecast(1, tokens) for tokens in (3, 2049))
    assert (short.moment, long.moment) == ("update", "step")
    assert "adapter" not in {part.name for part in long.parts}


def test_memory_limit(planner):
    """It holds MLX back: less is alive at once."""
    free = planner(max_seq_length=2049).forecast()
    held = planner(max_seq_length=2049, memory_limit_gb=0.7 * free.total / 1e9).forecast()
    assert held.total < free.total


def test_label():
    forecast = Forecast((Part("weights", 100, 100),), "step")
    assert [forecast.label(budget) for budget in (200, 105, 100, 99)] == ["fits", "tight", "tight", "will not fit"]


KINDS = [{"fine_tune_type": "dora"}, {"fine_tune_type": "full"}, {"lora_parameters": {"dropout": 0.1}}]
BACKENDS = ["reference", "replay", "chunked", "recurrent", "native"]


@pytest.mark.parametrize("keys", [*KINDS, *({"kernel": name} for name in BACKENDS)], ids=str)
@pytest.mark.parametrize("family", mini.FAMILIES)
def test_everything_has_a_forecast(family, keys, planner):
    """Not far below the usual; on a GPU the lead is another."""
    plan = planner(family, **keys)
    assert total(plan) > (0.25 if plan.device.gpu else 0.8) * total(planner(family))


def test_device_and_backend(planner, monkeypatch):
    monkeypatch.setattr(mx, "default_device", lambda: mx.cpu)
    assert [device_of(kernel).name for kernel in ("auto", "replay", "fused")] == ["cpu", "cpu", "metal"]
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    assert device_of("auto").name == "cuda"
    sizes, gpu = planner().sizes, DEVICES["cuda"]
    assert backend_of("auto", sizes, DEVICES["cpu"], 32) == "chunked"
    assert backend_of("auto", sizes, gpu, 64) == "fused"
    assert backend_of("auto", sizes, gpu, 48) == "recurrent"
    assert backend_of("replay", sizes, gpu, 64) == "replay"
    assert backend_of("auto", planner(model={"linear_key_head_dim": 288}).sizes, gpu, 64) == "chunked"


# Rows of benchmarks/plan-cpu.json whose forecasts are known to be off, and by how much; the command says so. 11 and 58:
# gradients are added to those of the batch before, few projections train, and MLX runs the blocks in another order. 70:
# full fine-tuning of experts with recomputed blocks. 37: few positions and large states, without.
KNOWN = {"random 11": -0.13, "random 58": -0.16, "random 70": -0.10, "random 37": 0.17}


def test_committed_measurements():
    """Not more than 4 % below the highest of three measured peaks and 12 % above their median. The bound below would be
    3 % if peaks of one config did not differ by up to 7 % from step to step."""
    import plan

    report = json.loads((Path(plan.__file__).parent / "plan-cpu.json").read_text(encoding="utf-8"))
    names = [row["name"] for row in report["rows"]]
    assert sum(name.startswith("random") for name in names) >= 60
    assert KNOWN.keys() < set(names)
    for case, row in plan.measured_cases(report):
        errors = plan.errors(case, row["measured_gb"], report["cores"])
        assert errors["forecast_gb"] == pytest.approx(row["forecast_gb"]), "python benchmarks/plan.py --again"
        if case.name in KNOWN:
            assert errors["under"] == pytest.approx(KNOWN[case.name], abs=0.01)
        else:
            assert -0.041 < errors["under"] <= errors["over"] < 0.12, case.name


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="measured on a CPU")
@pytest.mark.parametrize("name", ["dense", "experts, batch"])
def test_measured(name):
    """As above, and 3 % more: peaks differ from run to run, and with how far MLX gets ahead of a machine's cores."""
    import plan

    case = next(case for case in plan.cpu_cases() if case.name == name)._replace(B=1, T=128)
    row = plan.compare(case)
    assert row["under"] > -0.07
    assert row["over"] < 0.15


def test_without_the_lead_that_mlx_has():
    """A negative control: the forecast would be far below what is measured."""
    import plan

    case = next(case for case in plan.cpu_cases() if case.name == "dense")
    assert plan.foresee(case, 0).total < 0.8 * plan.make_planner(case).forecast().total


# Whole steps of Qwen3.5-9B cut to 8 blocks, bfloat16, LoRA of rank 8, NVIDIA H200, MLX 0.32.4: GB, with an older text
# (the convolution in operations, small blocks of attention), the last under a memory limit of 12 GB.
H200 = [(2048, None, 18.1), (4096, None, 20.0), (1024, 12, 10.6)]


@pytest.mark.parametrize(("T", "limit", "peak_gb"), H200)
def test_near_what_an_h200_took(T, limit, peak_gb):
    """Within 15 %: 5, 3 and 14 % above. With a limit the forecast is the limit, MLX stayed below."""
    import plan

    case = next(case for case in plan.gpu_cases() if case.T == T)
    planner = plan.make_planner(case._replace(run={**case.run, "kernel": "fused", "memory_limit_gb": limit}))
    planner.device = DEVICES["cuda"]
    assert total(planner) / 1e9 == pytest.approx(peak_gb, rel=0.15)
