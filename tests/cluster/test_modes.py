"""Every way to run asynchronously, five steps each, on real parts: one Ray session, one Megatron rank, one vLLM engine.

The roles are started once (`sweep.py`); each mode is a run of its own on them.
"""

import asyncio
import threading
import time

import pytest

pytest.importorskip("ray")
pytest.importorskip("megatron.core")
pytest.importorskip("vllm")
psutil = pytest.importorskip("psutil")

from roll_async.cluster.runtime import ray_runtime
from roll_async.config.api import load
from roll_async.pipelines.fully_async import FullyAsyncTrainer
from roll_async.pipelines.wire import UserHooks
from roll_async.prompts.row_tools import tools_of_row
from roll_async.prompts.tool_calls import ToolCall
from roll_async.rollout.tools import ToolCompletionCallback
from roll_async.schema import FinishReason
from tests.patience import patient
from tools.sweep import Sweep

STEPS = 5
SMALL = (
    "rollout_batch_size=8",
    "response_length=24",
    "num_return_sequences_in_group=4",
    "actor_train.training_args.per_device_train_batch_size=8",
    "actor_train.training_args.gradient_accumulation_steps=1",
    "async_training.max_concurrent_per_server=8",
    "rewards={length: {type: tests.cluster.length_reward.LengthReward}}",
    f"max_steps={STEPS}",
    "eval_steps=0",
    "save_steps=0",
)


class Watching(FullyAsyncTrainer):
    """Counts what only the samples tell."""

    def _compute_custom_metrics(self, batch):
        samples = [s for g in batch for s in g.samples]
        return {
            "test/resumed": float(sum(len(s.version_runs) > 1 for s in samples)),
            "test/turns": float(sum(s.num_turns for s in samples)),
            "test/masked": float(sum(s.loss_mask.count(0) for s in samples)),
            "test/prompts": float(len({g.group_id for g in batch})),
        }


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    return tmp_path_factory.mktemp("modes")


@pytest.fixture(scope="module")
def train(demo_assets, output):
    """Metrics of the steps of one mode."""

    def config(name, *overrides):
        places = (
            f"pretrain={demo_assets}/model",
            f"actor_train.data_args.file_name={demo_assets}/train.jsonl",
            f"validation.data_args.file_name={demo_assets}/validation.jsonl",
            f"output_dir={output}",
            f"exp_name={name}",
        )
        return load("configs/rlvr_config_async_cpu.yaml", (*places, *SMALL, *overrides), "rlvr")

    def go(name, *overrides, **classes):
        return sweep.run(config(name, *overrides), UserHooks(trainer=Watching, **classes), timeout_s=patient(300))

    with (
        ray_runtime(num_processes=4, env={"HF_HUB_OFFLINE": "1"}) as runtime,
        Sweep(config("roles"), runtime) as sweep,
    ):
        yield go


def asynchronous(ratio, every=1, interrupt="resume", *more):
    return (
        f"async_generation_ratio={ratio}",
        f"async_training.trigger_parameter_sync_step={every}",
        f"async_training.interrupt.mode={interrupt}",
        *more,
    )


STREAM = "async_training.require_batches=1"
MODES = {
    "one_step_off": (1, asynchronous(1, 1, "wait")),
    "roll_async_ratio_half": (1, asynchronous(0.5, 1, "resume")),
    "roll_async_ratio_2": (2, asynchronous(2, 1, "resume")),
    "stream_off_policy": (2, asynchronous(0, 3, "wait", STREAM)),
    "fully_async_stale": (2, asynchronous(0.5, 2, "wait")),
    "fully_async_partial_resume": (2, asynchronous(0.5, 2, "resume", STREAM)),
    "fully_async_partial_keep": (1, asynchronous(1, 1, "keep")),
    "abort": (1, asynchronous(1, 1, "abort")),
}


def test_synchronous(train):
    metrics = train("synchronous", "async_generation_ratio=0")
    assert len(metrics) == STEPS
    for m in metrics:
        assert m["staleness/max"] == 0 and m["test/resumed"] == 0 and m["test/prompts"] == 8
        assert abs(m["correction/rho_max"] - 1) < 1e-3, "engine and trainer hold the same weights"


def test_with_sparse_a_push_sends_what_changed_since_the_one_before(train):
    """At a learning rate that is lost in the rounding of most float32 weights."""
    few = "actor_train.training_args.learning_rate=1e-10"
    metrics = train("sparse", "async_generation_ratio=0", "weight_sync.sparse=on", few, "max_steps=3")
    shares = [m["weights/sent_share"] for m in metrics]
    assert all(0 < share < 0.5 for share in shares), shares
    assert all(abs(m["correction/rho_max"] - 1) < 1e-3 for m in metrics)


@pytest.mark.parametrize("name", MODES)
def test_mode(train, name):
    bound, overrides = MODES[name]
    metrics = train(name, *overrides)
    assert [m["step"] for m in metrics] == [1, 2, 3, 4, 5]
    assert max(m["staleness/max"] for m in metrics) <= bound and metrics[0]["staleness/max"] == 0
    for m in metrics:
        accounted = sum(m[f"groups/{k}"] for k in ("trained", "filtered", "dropped", "failed", "buffered", "in_flight"))
        assert m["groups/admitted"] == accounted and m["test/prompts"] == 8
        assert m["groups/trained"] == 8 * m["step"] and m["groups/failed"] == 0
        assert m["weights/version"] >= m["step"] - 1 - bound
    if name == "stream_off_policy":
        assert [m["staleness/max"] for m in metrics] == [0, 1, 2, 0, 1]
    if name.startswith("fully_async_partial") or name == "roll_async_ratio_2":
        assert sum(m["test/resumed"] for m in metrics) > 0, "no sample lived through a weight push"
    if name in ("one_step_off", "fully_async_stale", "abort"):
        assert sum(m["test/resumed"] for m in metrics) == 0
    if name == "abort":
        assert metrics[-1]["groups/dropped"] > 0, "nothing was in flight at a push"


@pytest.mark.parametrize("policy", ["drop", "token_mask"])
def test_a_bound_below_what_is_admitted_is_kept_by_dropping_or_masking(train, policy):
    staleness = f"async_training.staleness={{policy: {policy}, max_versions: 1}}"
    metrics = train(policy, *asynchronous(1, 2, "resume", staleness))  # admits up to 3 versions
    assert len(metrics) == STEPS
    if policy == "drop":
        assert max(m["staleness/max"] for m in metrics) <= 1 and metrics[-1]["groups/dropped"] > 0
    else:
        assert max(m["staleness/masked_fraction"] for m in metrics) > 0
        assert all(m["staleness/masked_fraction"] > 0 for m in metrics if m["staleness/max"] > 1)


@pytest.mark.parametrize(("ratio", "bound"), [(0, 0), (1, 2)])  # 1 and, for the batch begun beyond it, 1 more
def test_dynamic_sampling_trains_only_groups_with_spread(train, ratio, bound):
    filters = "algorithm.filter_groups={enable: true, metric: acc, gen_batch_size: 16}"
    metrics = train(f"dapo_{ratio}", f"async_generation_ratio={ratio}", filters)
    assert len(metrics) == STEPS and max(m["staleness/max"] for m in metrics) <= bound
    assert metrics[-1]["groups/filtered"] > 0 and metrics[-1]["groups/trained"] == 8 * STEPS
    assert all(0 < m["reward/accuracy"] < 1 for m in metrics)


class SecondOpinion(ToolCompletionCallback):
    """The model knows no tools: its first answer counts as two calls, whatever it says."""

    async def __call__(self, prompt, tree, completion):
        if len(tree.turns) > 1 or completion.finish_reason is not FinishReason.STOP:
            return None
        calls = [ToolCall(name="digits", arguments={"n": n}) for n in (1, 2)]
        results = await self.toolbox.run(calls, tools_of_row(prompt.extra))
        return self._codec.between(completion.token_ids[-1], results)


async def digits(arguments):
    await asyncio.sleep(0.01)
    return str(arguments["n"] * 11)


def test_tool_results_reach_engine_and_trainer_as_the_same_tokens(train):
    longer = "response_length=32"  # no multiple of three: answers that are cut off, and call nothing, earn nothing
    metrics = train("tools", "async_generation_ratio=0", longer, tools={"digits": digits}, tool_callback=SecondOpinion)
    assert len(metrics) == STEPS and metrics[-1]["rollout/tool_failures"] == 0
    for m in metrics:
        assert m["test/turns"] > 32 and m["test/masked"] > 0
        # The trainer scores the second turn after the same tool tokens the engine saw, or these would differ.
        assert abs(m["correction/rho_max"] - 1) < 1e-3
    assert metrics[-1]["rollout/tool_calls"] >= 2 * sum(m["test/turns"] - 32 for m in metrics)


def test_an_engine_that_is_killed_comes_back_and_the_run_goes_on(train, output):
    def kill_after_the_first_step():
        metrics = output / "killed" / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text()):
            time.sleep(0.05)
        alive = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
        (replica,) = [p for p in alive if "EngineReplica" in " ".join(p.cmdline())]
        replica.kill()

    killer = threading.Thread(target=kill_after_the_first_step, daemon=True)
    killer.start()
    metrics = train("killed", *asynchronous(1))
    assert len(metrics) == STEPS and max(m["staleness/max"] for m in metrics) <= 1
    last = metrics[-1]
    assert (last["rollout/lost_engines"], last["rollout/returned_engines"], last["rollout/engines"]) == (1, 1, 1)
    assert last["groups/failed"] == 0 and last["groups/trained"] == 8 * STEPS


def test_a_reward_that_the_roles_were_not_started_with_is_refused(train):
    """The workers of the first configuration would score by their own."""
    with pytest.raises(ValueError, match="rewards.addition: exact_match is not there in the first configuration"):
        train("other_reward", "rewards={addition: {type: exact_match}}")
    with pytest.raises(ValueError, match="rewards.length: exact_match is .*LengthReward in the first configuration"):
        train("other_type", "rewards={length: {type: exact_match}}")
