"""What every test stands on: the logger that runs turn to their own files is anybody's again."""

import gc
import logging

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
    # Worlds by the hundred, every wire of every key, documents, tools.
    "tools": (
        "cluster/test_gpu_suite.py", "cluster/test_ray_runtime.py", "service/test_service_client.py",
        "simulator/test_invariants.py", "simulator/test_mutants.py", "simulator/test_tables.py",
        "unit/config/test_config_properties.py", "unit/config/test_no_inert_key.py",
        "unit/observe/test_many_samples.py", "unit/test_documented_commands.py", "unit/test_from_anywhere.py",
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
"""The long series by its parts, each test by the beginning of its id: `make test` leaves them out, `make test-all` runs
them, `make test-long PART=tools` one of them.
"""


def pytest_collection_modifyitems(items):
    """Mark the long series in one place, where their sum is seen."""
    for item in items:
        for part, tests in LONG.items():
            if item.nodeid.removeprefix("tests/").startswith(tests):
                item.add_marker(pytest.mark.long)
                item.add_marker(getattr(pytest.mark, part))
