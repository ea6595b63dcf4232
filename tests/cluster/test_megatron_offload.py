"""A rank that gives its memory to the engines between phases: it comes back bit by bit, in every layout."""

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

import megatron_cases as cases
import torch

DISTRIBUTED = {"optimizer": {"distributed": True}}
OVERLAP = {"optimizer": {"distributed": True, "overlap_grad_reduce": True, "overlap_param_gather": True}}
T2P2 = {"parallel": {"tensor": 2, "pipeline": 2, "sequence_parallel": True}}
ROWS = [
    ("dense", 1, {"dtype": "bf16"}),
    ("dense, tied", 1, {"dtype": "bf16", "lora_rank": 4, "lora_alpha": 8.0}),
    ("dense, tied", 2, {"dtype": "bf16", **DISTRIBUTED}),
    ("dense, tied", 4, {"dtype": "fp32", **T2P2}),
    ("MoE", 2, {"dtype": "fp32", "parallel": {"expert": 2}, **OVERLAP}),
]


def equal(left, right):
    return left.keys() == right.keys() and all(bool((left[key] == right[key]).all()) for key in left)


@pytest.mark.parametrize(("kind", "world_size", "settings"), ROWS, ids=[f"{r[0]} {r[1]} {r[2]}" for r in ROWS])
def test_steps_are_bitwise_the_same_when_everything_is_moved_away_between_them(
    rank_pool, tmp_path, kind, world_size, settings
):
    folder = cases.model_folder(tmp_path, kind)
    ranks = rank_pool.run(cases.steps_between_phases, world_size, settings=cases.settings_of(folder, **settings))
    for rank, found in enumerate(ranks):
        for mine, theirs in zip(found["moved"], found["plain"], strict=True):
            same = mine == theirs if isinstance(mine, dict) or mine is None else bool((mine == theirs).all())
            assert same, rank
        assert equal(found["moved state"], found["plain state"])
        assert equal(found["moved weights"], found["plain weights"])
        assert equal(found["pushed"], found["expected push"]), "weights are pushed while the rest is away"


def test_the_report_counts_every_byte_and_work_is_refused_meanwhile(rank_pool, tmp_path):
    folder = cases.model_folder(tmp_path, "dense")
    settings = cases.settings_of(folder, dtype="bf16")
    found = rank_pool.run(cases.steps_between_phases, 1, settings=settings)[0]
    count = sum(tensor.numel() for tensor in found["plain weights"].values())
    # bf16 weights; two moments and a float32 copy; float32 gradients. Each buffer ends at a multiple of its own.
    expected = {"weights": 2 * count, "optimizer": 12 * count, "gradients": 4 * count}
    for kind, size in expected.items():
        assert found["back"].device_bytes[kind] == pytest.approx(size, rel=0.01, abs=4096), kind
        assert found["away"].host_bytes[kind] == pytest.approx(size, rel=0.01, abs=4096), kind
        assert found["away"].device_bytes[kind] == 0 == found["back"].host_bytes[kind]
    assert found["partly"].device_bytes["weights"] == pytest.approx(2 * count, abs=4096)
    assert found["left"] == 0
    assert found["refused"].startswith("weights and optimizer and gradients of this rank are in host memory")
    assert found["refused with weights"].startswith("optimizer and gradients of this rank are in host memory")


def test_an_unknown_kind_is_refused_by_name():
    from roll_async.trainer.megatron.state.device_state import DeviceState

    module = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"state .moments. is not one of weights \| optimizer \| gradients"):
        DeviceState([module], [], None, torch.device("cpu")).offload(("moments",))
