"""What every test stands on: the logger that runs turn to their own files is anybody's again."""

import gc
import logging
from fnmatch import fnmatchcase

import pytest


@pytest.fixture(autouse=True)
def heard_by_caplog():
    """caplog listens at the root. `RunFolder.open_log` keeps a process's records to the files of its run, for good, and
    SGLang sets the level of the root logger.
    """
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("roll_async").propagate = True


def pytest_collection_finish():
    """Later collections leave out the hundreds of thousands of objects of imported libraries and collected tests."""
    gc.collect()
    gc.freeze()


LONG = {
    # Whole runs and engines beyond the one of each kind that `make test` runs.
    "runs": (
        "cluster/test_agentic_runs.py::test_rollout_without_training", "cluster/test_colocated.py::test_a_resident_run",
        "cluster/test_critic_export.py", "cluster/test_engine_protocol.py*?sglang",
        "cluster/test_engine_protocol.py*?vllm_core_process", "cluster/test_engine_protocol.py*?vllm_tp2",
        "cluster/test_layouts.py::test_experts", "cluster/test_megatron_lora_precision.py",
        "cluster/test_modes.py::test_a_bound_below*?drop", "cluster/test_modes.py::test_dynamic_sampling*?1-2",
        "cluster/test_modes.py::test_mode?abort", "cluster/test_modes.py::test_mode?fully_async_partial_resume",
        "cluster/test_modes.py::test_mode?roll_async_ratio_half", "cluster/test_rlvr_runs.py::test_a_reward_beside",
        "cluster/test_role_errors.py::test_a_bug_in_a_rank*?forgets", "cluster/test_sglang_ranks.py",
        "cluster/test_sharded_logprobs.py*?1", "cluster/test_sharded_logprobs.py*?4",
        "cluster/test_supervised_runs.py::test_pairs_with_adapters", "cluster/test_train.py::test_the_ten_lines",
        "cluster/test_trainer_shares.py",
    ),
    # Worlds by the hundred, every wire of every key, documents, tools.
    "tools": (
        "cluster/test_gpu_suite.py", "cluster/test_ray_runtime.py", "cluster/test_wheel.py::test_its_commands_work",
        "service/test_service_client.py", "simulator/test_invariants.py", "simulator/test_mutants.py",
        "simulator/test_tables.py", "unit/config/test_config_properties.py", "unit/config/test_no_inert_key.py",
        "unit/observe/test_many_samples.py", "unit/prompts/test_families_page.py", "unit/test_documented_commands.py",
        "unit/test_from_anywhere.py", "unit/test_minimal_grpo.py", "unit/test_vs_trl_card.py",
    ),
    # Every loss, estimator, family, layout and engine beyond the ones that `make test` runs.
    "models": (
        "cluster/test_adapter_push.py", "cluster/test_algorithms_wired.py", "cluster/test_apex.py",
        "cluster/test_family_runs.py", "cluster/test_image_runs.py", "cluster/test_kv_cache_load.py",
        "cluster/test_megatron_checkpoints.py", "cluster/test_megatron_engine_layers.py",
        "cluster/test_megatron_families.py", "cluster/test_megatron_images.py", "cluster/test_megatron_parity.py",
        "cluster/test_megatron_partial_training.py",
        "cluster/test_replica_samples.py", "cluster/test_router_replay.py", "cluster/test_sglang_over_nodes.py",
        "cluster/test_sglang_run.py", "cluster/test_vllm_experts.py",
    ),
    # Hosts, roles that are killed, services and folders: each starts several whole runs.
    "roles": (
        "cluster/test_elastic.py", "cluster/test_engine_processes.py", "cluster/test_first_command.py",
        "cluster/test_fully_async.py::test_a_run_whose_driver", "cluster/test_fully_async.py::test_the_program_typed",
        "cluster/test_hung_roles.py", "cluster/test_modes.py::test_an_engine_that_is_killed",
        "cluster/test_placement.py", "cluster/test_rlvr_runs.py::test_a_run_goes_on",
        "cluster/test_rlvr_runs.py::test_real_gsm8k", "cluster/test_run_lineage.py", "cluster/test_service_outage.py",
        "cluster/test_supervised_runs.py::test_a_rank_that_dies",
        "cluster/test_supervised_runs.py::test_a_run_that_is_interrupted",
        "cluster/test_train.py::test_a_script_trains_again", "cluster/test_train.py::test_the_notebook_runs",
        "cluster/test_two_hosts.py", "cluster/test_wheel.py::test_the_demo_runs_shortened",
        "service/test_math_verify_service.py",
    ),
}  # fmt: skip
"""The long series by its parts, each test by the beginning of its id with `*` and `?` for anything: `make test` leaves
them out, `make test-all` runs them, `make test-long PART=tools` one of them.
"""

SLOW = (
    "checkpoint/test_conversion_files.py", "config/test_config_files.py", "config/test_later_wins.py",
    "envs/test_pool.py", "inference/test_storages.py", "launch/test_shipped_configs.py",
    "prompts/test_call_forms.py::test_marks_by_the_ten_thousand", "rewards/test_ifeval.py",
    "rewards/test_math_forms.py", "rewards/test_math_properties.py", "rewards/test_reward_pool.py",
    "rewards/test_thoughts_scored.py", "rollout/test_teaching.py", "simulator/", "test_bench_tables.py",
    "test_eval_command.py", "test_gate.py", "test_layers.py", "test_mutate.py", "test_prepare_rows.py",
    "test_publish.py", "test_remedies.py", "test_seeds.py", "test_structure.py", "trainer/test_model_flops.py",
    "trainer/test_piece_passes.py",
)  # fmt: skip
"""Of tests/unit, what takes more than some seconds together: `make test-unit` leaves them out, and what is marked
where it stands.
"""


def pytest_collection_modifyitems(items):
    """Mark the long series and the slow files in one place, where their sum is seen."""
    for item in items:
        test = item.nodeid.removeprefix("tests/")
        if test.startswith(tuple(f"unit/{file}" for file in SLOW)):
            item.add_marker(pytest.mark.slow)
        for part, patterns in LONG.items():
            if any(fnmatchcase(test, f"{pattern}*") for pattern in patterns):
                item.add_marker(pytest.mark.long)
                item.add_marker(getattr(pytest.mark, part))
