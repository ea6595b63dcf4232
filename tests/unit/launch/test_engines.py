"""Which names the replicas of a run have."""

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

pytest.importorskip("ray")

from roll_async.cluster.node_pool import NodePool
from roll_async.cluster.placement import place_roles
from roll_async.cluster.roles.engine_group import replica_name
from roll_async.config.api import load
from roll_async.launch.engines import ReplicaStarter

CONFIG = Path(__file__).resolve().parents[3] / "configs" / "rlvr_config_async_cpu.yaml"


@pytest.mark.parametrize(("mode", "numbers"), [("replicas", [0, 1, 3, 4]), ("pause", [0, 1, 2, 3])])
def test_a_replica_that_joins_the_training_has_no_name_of_the_validation(mode, numbers):
    """Of three replicas the last one is the validation's own."""
    config = load(CONFIG, ["actor_infer.world_size=3", f"validation.mode={mode}", "validation.num_replicas=1"])
    placements = place_roles(config)["actor_infer"]
    starter = ReplicaStarter(config, placements, NodePool(placements), AsyncExitStack())
    assert [p.index for p in placements] == [0, 1, 2]
    assert [starter.name(index) for index in range(4)] == [replica_name(number) for number in numbers]
