"""Every way to run asynchronously, five steps each, on real parts: one Ray session, one Megatron rank, one vLLM engine.

The roles are started once; each mode couples them anew, with a queue, a ledger and a pipeline of its own.
"""

import asyncio
from contextlib import AsyncExitStack
from math import ceil

import pytest

pytest.importorskip("ray")
pytest.importorskip("megatron.core")
pytest.importorskip("vllm")
psutil = pytest.importorskip("psutil")

from roll_async.assemble import RunClasses, couple  # noqa: E402
from roll_async.assemble_roles import RoleStarter, place_roles  # noqa: E402
from roll_async.cluster.runtime import ray_runtime  # noqa: E402
from roll_async.config.api import load  # noqa: E402
from roll_async.observe.progress import ProgressLine  # noqa: E402
from roll_async.observe.recorder import Recorder  # noqa: E402
from roll_async.observe.run_folder import RunFolder  # noqa: E402
from roll_async.pipelines.fully_async import FullyAsyncTrainer  # noqa: E402
from roll_async.pipelines.protocol import RunEnd  # noqa: E402
from roll_async.rollout.tools import ToolCall, ToolCompletionCallback  # noqa: E402
from roll_async.schema import FinishReason  # noqa: E402

STEPS = 5
SMALL = (
    "rollout_batch_size=8",
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


class Session:
    """Roles that stay while modes come and go."""

    def __init__(self, assets, output):
        self.assets, self.output = assets, output
        self.runner, self.stack = asyncio.Runner(), AsyncExitStack()

    def config(self, name, *overrides):
        places = (
            f"pretrain={self.assets}/model",
            f"actor_train.data_args.file_name={self.assets}/train.jsonl",
            f"validation.data_args.file_name={self.assets}/validation.jsonl",
            f"output_dir={self.output}",
            f"exp_name={name}",
        )
        return load("configs/rlvr_config_async_cpu.yaml", (*places, *SMALL, *overrides), "rlvr")

    def start(self, runtime):
        config = self.config("roles")
        starter = RoleStarter(config, runtime, place_roles(config), self.stack)
        self.roles = self.runner.run(starter.start())

    def stop(self):
        self.runner.run(self.stack.aclose())
        self.runner.close()

    def train(self, name, *overrides, meanwhile=None, **classes):
        """Metrics of the steps of one mode."""
        config = self.config(name, *overrides)
        folder = RunFolder(config.output_dir, config.exp_name)

        async def go():
            recorder = Recorder(folder, [], ProgressLine(STEPS), logging_steps=1)
            run = await couple(config, self.roles, recorder, folder, RunClasses(trainer=Watching, **classes))
            async with asyncio.timeout(300), asyncio.TaskGroup() as tasks:
                if meanwhile is not None:
                    tasks.create_task(meanwhile(folder))
                assert await run.pipeline.run() is RunEnd.FINISHED

        self.runner.run(go())
        return folder.read_metrics()


@pytest.fixture(scope="module")
def session(demo_assets, tmp_path_factory):
    one = Session(demo_assets, tmp_path_factory.mktemp("modes"))
    with ray_runtime(num_processes=4, env={"HF_HUB_OFFLINE": "1"}) as runtime:
        try:
            one.start(runtime)
            yield one
        finally:
            one.stop()


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
    "roll_async_ratio_2": (2, asynchronous(2, 1, "resume")),
    "stream_off_policy": (2, asynchronous(0, 3, "wait", STREAM)),
    "fully_async_stale": (2, asynchronous(0.5, 2, "wait")),
    "fully_async_partial_resume": (2, asynchronous(0.5, 2, "resume", STREAM)),
    "fully_async_partial_keep": (1, asynchronous(1, 1, "keep")),
    "abort": (1, asynchronous(1, 1, "abort")),
}


def test_synchronous(session):
    metrics = session.train("synchronous", "async_generation_ratio=0")
    assert len(metrics) == STEPS
    for m in metrics:
        assert m["staleness/max"] == 0 and m["test/resumed"] == 0 and m["test/prompts"] == 8
        assert abs(m["correction/rho_max"] - 1) < 1e-3, "engine and trainer hold the same weights"


@pytest.mark.parametrize("name", MODES)
def test_mode(session, name):
    bound, overrides = MODES[name]
    metrics = session.train(name, *overrides)
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
def test_a_bound_below_what_is_admitted_is_kept_by_dropping_or_masking(session, policy):
    staleness = f"async_training.staleness={{policy: {policy}, max_versions: 1}}"
    metrics = session.train(policy, *asynchronous(1, 2, "resume", staleness))  # admits up to 3 versions
    assert len(metrics) == STEPS
    if policy == "drop":
        assert max(m["staleness/max"] for m in metrics) <= 1 and metrics[-1]["groups/dropped"] > 0
    else:
        assert max(m["staleness/masked_fraction"] for m in metrics) > 0
        assert all(m["staleness/masked_fraction"] > 0 for m in metrics if m["staleness/max"] > 1)


@pytest.mark.parametrize("ratio", [0, 1])
def test_dynamic_sampling_trains_only_groups_with_spread(session, ratio):
    filters = "algorithm.filter_groups={enable: true, metric: acc, gen_batch_size: 16}"
    metrics = session.train(f"dapo_{ratio}", f"async_generation_ratio={ratio}", filters)
    assert len(metrics) == STEPS and max(m["staleness/max"] for m in metrics) <= ceil(ratio)
    assert metrics[-1]["groups/filtered"] > 0 and metrics[-1]["groups/trained"] == 8 * STEPS
    assert all(0 < m["reward/accuracy"] < 1 for m in metrics)


class SecondOpinion(ToolCompletionCallback):
    """The model knows no tools: its first answer counts as two calls, whatever it says."""

    async def __call__(self, transcript, completion):
        if transcript.num_turns > 1 or completion.finish_reason is not FinishReason.STOP:
            return None
        results = await asyncio.gather(*(self._run(ToolCall(name="digits", arguments={"n": n})) for n in (1, 2)))
        return self._codec.tool_turn(completion.token_ids[-1], results)


async def digits(arguments):
    await asyncio.sleep(0.01)
    return str(arguments["n"] * 11)


def test_tool_results_reach_engine_and_trainer_as_the_same_tokens(session):
    metrics = session.train("tools", "async_generation_ratio=0", tools={"digits": digits}, tool_callback=SecondOpinion)
    assert len(metrics) == STEPS and metrics[-1]["rollout/tool_failures"] == 0
    for m in metrics:
        assert m["test/turns"] > 32 and m["test/masked"] > 0
        # The trainer scores the second turn after the same tool tokens the engine saw, or these would differ.
        assert abs(m["correction/rho_max"] - 1) < 1e-3
    assert metrics[-1]["rollout/tool_calls"] >= 2 * sum(m["test/turns"] - 32 for m in metrics)


def test_an_engine_that_is_killed_comes_back_and_the_run_goes_on(session):
    async def kill_after_the_first_step(folder):
        while not folder.read_metrics():
            await asyncio.sleep(0.05)
        alive = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
        replicas = [p for p in alive if "EngineReplica" in " ".join(p.cmdline())]
        assert len(replicas) == 1
        replicas[0].kill()

    metrics = session.train("killed", *asynchronous(1), meanwhile=kill_after_the_first_step)
    assert len(metrics) == STEPS and max(m["staleness/max"] for m in metrics) <= 1
    last = metrics[-1]
    assert (last["rollout/lost_engines"], last["rollout/returned_engines"], last["rollout/engines"]) == (1, 1, 1)
    assert last["groups/failed"] == 0 and last["groups/trained"] == 8 * STEPS
