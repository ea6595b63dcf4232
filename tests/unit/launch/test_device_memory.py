"""What a config will hold on its devices, from names and sizes alone."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from roll_async.checkpoint.known_models import known_config
from roll_async.cli import main
from roll_async.config.api import load_with_warnings
from roll_async.launch.checks.device_memory import RESIDENT_MARGIN, device_uses, require_fit
from roll_async.trainer.megatron.memory_estimate import num_parameters, rank_memory
from roll_async.trainer.megatron.settings import MegatronSettings, OptimizerSettings, ParallelSizes

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
PUBLISHED = {  # billions of parameters, from the models' own pages
    "Qwen/Qwen2.5-0.5B-Instruct": 0.49, "Qwen/Qwen2.5-7B": 7.61, "Qwen/Qwen2.5-32B": 32.5, "Qwen/Qwen2.5-72B": 72.7,
    "Qwen/Qwen3-0.6B": 0.6, "Qwen/Qwen3-8B": 8.2, "Qwen/Qwen3-30B-A3B": 30.5, "Qwen/Qwen3-235B-A22B": 235.0,
    "openai/gpt-oss-20b": 20.9, "openai/gpt-oss-120b": 116.8, "allenai/OLMo-2-1124-7B-Instruct": 7.3,
    "meta-llama/Llama-3.1-8B-Instruct": 8.03, "meta-llama/Llama-3.1-70B": 70.6,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_known_models_have_their_published_size(name):
    model = known_config(name)
    assert model is not None
    assert num_parameters(model) / 1e9 == pytest.approx(PUBLISHED[name], rel=0.02)


def test_a_folder_comes_before_the_table_and_an_unknown_name_is_none(tmp_path):
    (tmp_path / "Qwen2.5-7B").mkdir()
    (tmp_path / "Qwen2.5-7B" / "config.json").write_text('{"hidden_size": 5}')
    found = known_config(str(tmp_path / "Qwen2.5-7B"))
    assert found is not None and found.integer("hidden_size") == 5
    assert known_config("someone/Other-9B") is None


def test_a_rank_of_seven_billion_parameters_by_hand():
    """bf16, four tensor ranks, distributed over two: 2 + 4 bytes a parameter, and half of 12."""
    model = known_config("Qwen2.5-7B")
    settings = MegatronSettings(
        model_folder="",
        parallel=ParallelSizes(tensor=4),
        optimizer=OptimizerSettings(learning_rate=1e-6, distributed=True),
        longest_row=4096,
    )
    memory = rank_memory(model, settings, world_size=8)
    own = num_parameters(model) / 4
    assert memory.weights == pytest.approx(2 * own, rel=1e-3)
    assert memory.gradients == pytest.approx(4 * own, rel=1e-3)
    assert memory.optimizer == pytest.approx(6 * own, rel=1e-3)
    alone = replace(settings, optimizer=replace(settings.optimizer, distributed=False))
    assert rank_memory(model, alone, world_size=8).optimizer == pytest.approx(12 * own, rel=1e-3)
    full = replace(settings, recompute={"recompute_granularity": "full", "recompute_num_layers": 1}, scoring_rows=1)
    assert (
        rank_memory(model, full, 8).activations
        < rank_memory(model, replace(settings, scoring_rows=1), 8).activations / 3
    )


def test_an_engine_without_room_for_one_sequence_is_refused_with_the_remedy():
    overrides = [
        "actor_infer.strategy_args.strategy_config.tensor_parallel_size=1",
        "response_length=30000",
        "actor_train.micro_batching=fixed",
    ]
    config = load_with_warnings(str(CONFIGS / "dapo_qwen2.5_32b.yaml"), overrides, None).config
    with pytest.raises(ValueError, match="tokens of KV cache.* raise tensor_parallel_size"):
        require_fit(config, int(80e9))


def test_roles_that_share_devices_are_counted_phase_by_phase():
    config = load_with_warnings(str(CONFIGS / "dapo_qwen2.5_32b.yaml"), [], None).config
    (use,) = device_uses(config, int(80e9))
    assert use.engine is not None and [name for name, _ in use.trainers] == ["actor_train"]
    assert use.total == max(use.training, use.generating, use.pushing)
    assert use.generating > 0.8 * 80e9 and use.training < use.generating and not use.resident


RESIDENT = [
    "actor_train.device_mapping=range(0,8)", "actor_infer.device_mapping=range(0,8)", "colocation=resident",
    "async_generation_ratio=1",
]  # fmt: skip


def resident(share):
    engine = f"actor_infer.strategy_args.strategy_config.gpu_memory_utilization={share}"
    return load_with_warnings(str(CONFIGS / "async_dapo_7b.yaml"), [*RESIDENT, engine], None).config


def test_resident_roles_must_fit_together_and_what_does_not_is_one_line_with_key_need_and_remedy():
    (use,) = device_uses(resident(0.85), int(80e9))
    assert use.engine is not None and use.resident
    assert use.total == use.training + use.buckets + use.engine.reserved + int(RESIDENT_MARGIN * 80e9) > 80e9
    with pytest.raises(ValueError, match=r"devices 0-7: colocation=resident needs .* there are 80: ") as told:
        require_fit(resident(0.85), int(80e9))
    said = str(told.value)
    assert "\n" not in said and "colocation: turns with async_generation_ratio: 0" in said
    advised = re.search(r"of actor_infer at most (0\.[0-9]+),", said)
    assert advised is not None, said
    require_fit(resident(advised[1]), int(80e9))
    with pytest.raises(ValueError, match="there are 48: colocation: turns"):  # no share of it would do
        require_fit(resident(0.5), int(48e9))


def test_the_command_prints_the_table_and_says_what_does_not_fit(capsys):
    path = str(CONFIGS / "fully_async_7b.yaml")
    assert main(["show", path, "--memory"]) == 0
    said = capsys.readouterr().out
    assert "| 0-7 | actor_train | 7.6 | 15.2 |" in said and "of 80, fits" in said
    assert main(["show", path, "--memory", "--device-gb", "24"]) == 2
    assert "devices 0-7: training takes" in capsys.readouterr().out
    assert main(["show", path, "--memory", "--device-gb", "much"]) == 2
    assert main(["show", str(CONFIGS / "rlvr_config_async_cpu.yaml"), "--memory"]) == 0
    assert "everything runs on CPU" in capsys.readouterr().out
    assert main(["show", str(CONFIGS / "async_dapo_7b.yaml"), "--memory", *RESIDENT]) == 2
    assert "colocation=resident needs" in capsys.readouterr().out
    assert main(["show", path, "--memory", "pretrain=someone/Other-9B"]) == 2
    assert "the sizes of someone/Other-9B are not known here" in capsys.readouterr().err
