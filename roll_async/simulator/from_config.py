"""A config and a few speeds to a scenario: what `roll-async simulate CONFIG` runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from roll_async.buffer.states import QueueOptions
from roll_async.config.schema import RLVRConfig
from roll_async.pipelines.protocol import RunPlan
from roll_async.rollout.chat_scheduler import SchedulerOptions
from roll_async.rollout.dispatch.manager_options import ManagerOptions
from roll_async.simulator.figures import Workload
from roll_async.simulator.parts.models import EngineFaults, LengthModel, RewardModel, SpeedModel, TrainModel
from roll_async.simulator.scenario import Scenario
from roll_async.weight_sync.protocol import SyncOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class Speeds:
    """What a config does not say. Tokens per second are of the hardware, lengths of the model and the data."""

    mean_length: float
    """Tokens of an answer on average, before the cut at response_length."""
    sigma: float = 1.0
    """Standard deviation of the logarithm of the length."""
    prompt_share: float = 0.0
    """Of the variance of that logarithm, what belongs to the prompt: all samples of a group are longer, 0..1."""
    decode_tokens_per_s: float = 50.0
    """Of one request that runs alone on a replica."""
    decode_slowdown: float = 0.0
    """Each further request on the replica makes a token take this share longer; 0.01: half speed beside 100 others."""
    train_tokens_per_s: float = 20000.0
    """Of all training devices together, forward, backward and scoring included."""
    sync_s: float = 0.0
    """A weight push, while engines generate."""
    swap_s: float = 0.0
    """Its part in which they stand still."""
    reward_s: float = 0.0
    """Scoring one sample."""
    filtered_share: float | None = None
    """Groups that filter_groups drops for want of spread, 0..1; None = `filtered_share_of` the config."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Devices of each side; processes on CPU."""

    train: int
    infer: int


def split_of(config: RLVRConfig) -> Split:
    """As the device mappings say."""
    infer = config.actor_infer.device_mapping
    return Split(train=config.actor_train.num_ranks, infer=len(infer) if infer is not None else config.num_servers)


def filtered_share_of(config: RLVRConfig) -> float:
    """What the config's over-sampling makes up for: 1 - groups of a batch / gen_batch_size; 0 without a filter.

    Worked example: gen_batch_size 96 for batches of 32 groups expects two groups in three to be dropped.
    """
    groups = config.algorithm.filter_groups
    return max(0.0, 1 - config.groups_per_batch / groups.gen_batch_size) if groups.enable else 0.0


def scenario_of(config: RLVRConfig, speeds: Speeds, *, split: Split, steps: int, seed: int) -> Scenario:
    """The schedule of a run with these devices. Another split than the config's scales both sides with their devices.

    Raises ValueError for a split that leaves a side without a whole replica or rank, and for a share of filtered groups
    without a filter.
    """
    own = split_of(config)
    # Replicas of validations generate nothing that is trained.
    servers = config.num_servers * split.infer // own.infer - config.num_validation_replicas
    if servers < 1 or split.train < 1:
        per_server = own.infer // config.num_servers
        raise ValueError(f"a split of {split.train}:{split.infer} devices: a replica needs {per_server}, training 1")
    scheduler = SchedulerOptions.of(config)
    filtered = filtered_share_of(config) if speeds.filtered_share is None else speeds.filtered_share
    if filtered and scheduler.filter is None:
        raise ValueError(f"a filtered share of {filtered:g}: the config has no algorithm.filter_groups.enable")
    token_s = 1 / speeds.decode_tokens_per_s
    return Scenario(
        seed=seed,
        queue=QueueOptions.of(config),
        # The only number that simulated rewards report is the score.
        scheduler=replace(scheduler, filter=scheduler.filter and replace(scheduler.filter, metric="score")),
        manager=ManagerOptions.of(config),
        sync=SyncOptions.of(config, "shm"),
        plan=replace(RunPlan.of(config, first_step=1), max_steps=steps, save_every=0, eval_every=0),
        engines=(EngineFaults(),) * servers,
        lengths=LengthModel(
            mean_tokens=speeds.mean_length,
            sigma=speeds.sigma,
            max_tokens=scheduler.sampling.max_new_tokens,
            prompt_share=speeds.prompt_share,
        ),
        speed=SpeedModel(token_s=token_s, token_s_per_request=token_s * speeds.decode_slowdown),
        rewards=RewardModel(seconds=speeds.reward_s, flat_share=filtered),
        train=TrainModel(
            step_s=0.0,
            # The speed that is given is of the config's own devices.
            token_s=own.train / (split.train * speeds.train_tokens_per_s),
            transfer_s=speeds.sync_s,
            swap_s=speeds.swap_s,
        ),
    )


def synchronous(scenario: Scenario) -> Scenario:
    """The same world with ratio 0 and a push after every step; it over-samples as much, and stops early."""
    queue = replace(
        scenario.queue,
        async_generation_ratio=0.0,
        trigger_parameter_sync_step=1,
        max_versions=None,
        max_queue_size=None,
        soft_versions=None,
    )
    plan = replace(scenario.plan, sync_every=1, groups_per_part=queue.groups_per_batch)
    return replace(scenario, queue=queue, plan=plan)


def workload_of(scenario: Scenario, *, split: Split) -> Workload:
    """The same world as theory sees it: slots at the speed they have when a replica is full. Groups that the filter
    drops make the generation of each trained sample longer.
    """
    lengths, samples, train = scenario.lengths, scenario.samples_per_batch, scenario.train
    token_s = scenario.speed.seconds_per_token(
        min(scenario.manager.max_concurrent_per_server, -(-samples // len(scenario.engines)))
    )
    mean = lengths.mean_of_cut()
    train_slots = scenario.slots * split.train / split.infer
    step_s = train.step_s + train.token_s * mean * samples
    return Workload(
        num_slots=round(scenario.slots + train_slots),
        num_samples=samples,
        longest_s=lengths.max_tokens * token_s,
        generation_s=mean * token_s / (1 - scenario.rewards.flat_share),
        training_s=step_s * train_slots / samples,
    )
