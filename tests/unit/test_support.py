"""Settings that are checked and cannot be honoured are refused with key, value and remedy."""

from pathlib import Path

import pytest

from roll_async.config.api import load
from roll_async.support import refuse_unsupported

MOE = Path(__file__).resolve().parents[2] / "configs" / "qwen3_30b_a3b_moe.yaml"
VLLM = "actor_infer.strategy_args.strategy_config"


def refused(*overrides):
    try:
        refuse_unsupported(load(str(MOE), overrides))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("setting", ["enable_prefix_caching=false", "pipeline_parallel_size=2"])
def test_router_replay_is_refused_where_vllm_cannot_record(setting):
    assert not refused()
    found = refused(f"{VLLM}.{setting}")
    assert found.startswith(f"{VLLM}.{setting}: vLLM records experts")
    assert found.endswith("change it, or set actor_train.router_replay: false")
    assert not refused(f"{VLLM}.{setting}", "actor_train.router_replay=false")
