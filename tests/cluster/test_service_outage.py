"""The math verify service dies in the middle of a run: the run waits, says so, goes on when it is back, and records no
score of the time between.
"""

import json
import signal
import sqlite3
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytest.importorskip("megatron.core")
for module in ("fastapi", "uvicorn", "prometheus_client", "aiohttp"):
    pytest.importorskip(module)

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "service"))
from service_process import ServiceProcess

from roll_async.cluster.network import held_port
from tests.patience import patient

OUTAGE_S = 5.0


def start_service(port):
    service = ServiceProcess("--reward", "outage_reward.judge", port=port, env={"PYTHONPATH": str(HERE)})
    service.wait_until_healthy()
    return service


@pytest.fixture
def port():
    with held_port("127.0.0.1") as port:
        yield port


def test_a_run_waits_for_a_service_that_was_killed_and_no_score_is_invented(launcher, port):
    service = start_service(port)
    reward = f"{{type: math_service, service: {{api_url: '{service.url}', max_retries: 1}}}}"
    hf = "actor_infer.strategy_args={strategy_name: hf_infer}"
    process = launcher.start("max_steps=6", hf, f"rewards.addition={reward}")
    try:
        for line in process.stdout:
            if line.startswith("step 2/"):
                break
        service.stop(signal.SIGKILL)
        metrics = launcher.output / "run" / "metrics.jsonl"
        time.sleep(patient(OUTAGE_S - 2))  # what was scored before may still be trained
        before = len(metrics.read_text().splitlines())
        time.sleep(2)
        assert process.poll() is None and len(metrics.read_text().splitlines()) == before < 6
        service = start_service(port)
        rest = process.communicate(timeout=patient(120))[0]
    finally:
        service.stop(signal.SIGKILL)
        process.kill()
    assert process.returncode == 0, rest
    log = (launcher.output / "run" / "run.log").read_text()
    assert f"{service.url}: ClientConnectorError" in log and "asking again in" in log
    assert [m["step"] for m in launcher.metrics()] == [1, 2, 3, 4, 5, 6]
    assert all(1.0 <= m["reward/mean"] <= 2.0 and m["groups/failed"] == 0 for m in launcher.metrics())
    with sqlite3.connect(launcher.output / "run" / "ledger.sqlite") as ledger:
        groups = [json.loads(scores) for (scores,) in ledger.execute("SELECT rewards FROM groups WHERE rewards <> ''")]
    assert len(groups) >= 6 * 8 and {score for group in groups for score in group} <= {1.0, 2.0}
