"""The shipped configs for GPUs: what the documents say of them, batches without padding, and that they fit."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("ray")

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))
import shipped_configs

from roll_async.config.schema import PipelineConfig
from roll_async.launch.checks.device_memory import device_uses, require_fit
from roll_async.launch.checks.gate import check_supported

SHIPPED = shipped_configs.shipped()


def test_everything_that_names_devices_is_among_them():
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        config = check_supported(path).config
        on_devices = any(role.device_mapping for _, role in config.roles())
        assert (on_devices and isinstance(config, PipelineConfig)) == (path in SHIPPED), path.name
    assert len(SHIPPED) == 20


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_it_fits_devices_of_80_gb_and_none_of_half_of_what_it_takes(path):
    config = check_supported(path).config
    uses = device_uses(config, int(80e9))
    assert uses and all(use.problem is None for use in uses)
    require_fit(config, int(80e9))
    less = max(use.training for use in uses) // 2
    with pytest.raises(ValueError, match=r"devices [\d-]+: (training takes .* of \d+ GB|the engine's share)"):
        require_fit(config, less)


@pytest.mark.parametrize("name", shipped_configs.FIRST)
def test_a_first_config_is_what_new_writes_valid_without_a_warning_and_short(name):
    path = ROOT / "configs" / f"{name}.yaml"
    assert path.read_text() == shipped_configs.first_text(name), "tools/shipped_configs.py --write"
    loaded = check_supported(path)
    assert loaded.warnings == () and loaded.config.optimizer_steps_per_batch == 1
    lines = path.read_text().splitlines()
    assert len(lines) <= 30 and max(map(len, lines)) <= 120


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_its_ranks_spend_no_time_on_padding_where_the_trainer_can_do_without(path):
    for name, role in check_supported(path).config.roles():
        if role.is_megatron:
            assert role.micro_batching == ("dynamic" if role.router_replay else "packed"), name


@pytest.mark.parametrize(
    ("document", "table"),
    [(shipped_configs.CLUSTER, shipped_configs.cluster_table), (shipped_configs.MEMORY, shipped_configs.memory_table)],
    ids=["cluster.md", "memory.md"],
)
def test_the_documents_have_the_table_that_the_configs_give(document, table):
    rows = table()
    assert shipped_configs.in_document(document.read_text(), rows) == rows, "tools/shipped_configs.py --write"


def test_every_script_of_the_table_is_there_and_names_its_config():
    for path, row in zip(SHIPPED, shipped_configs.cluster_table()[2:], strict=True):
        script = ROOT / "examples" / row.split("|")[-2].strip().strip("`")
        assert script.is_file() and (script.suffix == ".py" or path.name in script.read_text())
