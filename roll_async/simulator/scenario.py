"""Everything a simulated run depends on, and random ones by number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING

from roll_async.buffer.states import QueueOptions
from roll_async.config.staleness import StalenessPolicy, staleness_bound
from roll_async.pipelines.protocol import RunPlan
from roll_async.pipelines.validation import HeldOut
from roll_async.rollout.chat_scheduler import SchedulerOptions
from roll_async.rollout.dispatch.manager_options import ManagerOptions
from roll_async.rollout.filters.filter_budget import BudgetOptions
from roll_async.rollout.filters.group_filter import GroupFilter
from roll_async.rollout.scoring import ScoringOptions
from roll_async.schema import Prompt, SamplingParams
from roll_async.simulator.parts.models import (
    EngineFaults,
    LengthModel,
    ProcessModel,
    RewardModel,
    SpeedModel,
    ToolModel,
    TrainModel,
    WorldModel,
)
from roll_async.simulator.parts.text import STOP, Texts
from roll_async.weight_sync.protocol import SyncOptions

if TYPE_CHECKING:
    from roll_async.simulator.agents.texts import TraceTexts

_AGENTS_SHARE = 0.2
_ELASTIC_SHARE = 0.3
_KV_SHARE = 0.25
_VALIDATORS_SHARE = 0.3
_CALLS_AT_AN_END = 20
"""Ways, there and back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """One world. The options are those of the real parts; the models are those of the fakes."""

    seed: int
    queue: QueueOptions
    scheduler: SchedulerOptions
    manager: ManagerOptions
    sync: SyncOptions
    plan: RunPlan
    engines: tuple[EngineFaults, ...] = (EngineFaults(),)
    """One entry per replica."""
    num_prompts: int | None = None
    """None = endless."""
    lengths: LengthModel = field(default_factory=LengthModel)
    speed: SpeedModel = field(default_factory=SpeedModel)
    rewards: RewardModel = field(default_factory=RewardModel)
    train: TrainModel = field(default_factory=TrainModel)
    tools: ToolModel | None = None
    """None = answers of one turn."""
    worlds: WorldModel | None = None
    """Groups of trajectories in worlds (`agents/worlds.py: WorldRunner`); None = of answers to a prompt."""
    process: ProcessModel | None = None
    """The generating side is in a process of its own; None = in the driver's."""
    budget: BudgetOptions | None = None
    """How much may be generated for one batch; None = without a limit."""
    validation_prompts: int = 0
    validation_samples: int = 1
    validation_mode: str = "pause"
    validation_engines: tuple[EngineFaults, ...] = ()
    """One entry per replica of validation_mode replicas."""
    second_set: bool = False
    """A second held-out set with other sampling parameters."""
    by_value: bool = False
    """The trainer is the real learner over a fake actor, which compares every tensor."""
    stop_at_s: float | None = None
    """Time of a Ctrl-C; None = none."""
    max_restarts: int = 0
    """Per replica that crashes."""
    scales: tuple[tuple[float, int], ...] = ()
    """(time, number of replicas requested at that time), as by `roll-async scale`."""
    devices_after_s: float = 0.0
    """Longest time until a joining replica gets its devices; the time is drawn by its name."""
    kills: tuple[int, ...] = ()
    """Rounds of the event loop in which the first, second ... process is killed; then the run is started again."""
    starts: tuple[str, ...] = ()
    """How the second, third ... process begins, also where the one before ended by itself: `latest`, `back` (from a
    checkpoint in the middle), `fresh` (another run in the same folder). None = latest, and only after a kill.
    """
    keep: int = 0
    """`checkpoint.max_to_keep`."""

    def held_out(self, prompts: Sequence[Prompt]) -> list[HeldOut]:
        """The sets of a validation, all of these prompts."""
        if not self.validation_prompts:
            return []
        sampling = self.scheduler.sampling
        greedy = HeldOut("", prompts, replace(sampling, temperature=0.0), self.validation_samples)
        return [greedy, HeldOut("second", prompts, sampling)] if self.second_set else [greedy]

    @property
    def texts(self) -> Texts | TraceTexts:
        """What is sampled."""
        if self.worlds is not None:
            from roll_async.simulator.agents.texts import TraceTexts  # needs jinja2, which other worlds do without

            return TraceTexts(self.seed, self.lengths, self.tools)
        return Texts(self.seed, self.lengths, self.tools)

    @property
    def samples_per_batch(self) -> int:
        """N * G."""
        return self.queue.groups_per_batch * self.scheduler.samples_per_group

    @property
    def keeps_ledger(self) -> bool:
        """Whether it ends in a way after which finished groups must be read again."""
        dies_at_s = None if self.process is None else self.process.dies_at_s
        troubles = (self.stop_at_s, self.train.fails_at_step, self.train.hangs_at_step, dies_at_s)
        return bool(self.kills or self.starts) or any(trouble is not None for trouble in troubles)

    @property
    def all_engines(self) -> tuple[EngineFaults, ...]:
        """One entry per replica of training, then one per replica of validation."""
        return (*self.engines, *self.validation_engines)

    @property
    def slots(self) -> int:
        """Requests all replicas run at once."""
        return self.manager.max_concurrent_per_server * len(self.engines)

    @property
    def patience_s(self) -> float:
        """Seconds within which a run has ended after it was asked to: a save, the step under way, a push with all its
        attempts, then the end. Each of these waits has a deadline; how long a sample or a score takes is in none.
        """
        sync, train = self.sync, self.train
        tokens = self.samples_per_batch * self.lengths.max_tokens
        step_s = (train.step_s + train.token_s * tokens) * (1 + train.jitter)
        attempts = sync.max_retries + 1
        push_s = attempts * (2 * sync.timeout_s + sync.retry_delay_s + train.transfer_s) + train.swap_s
        pause_s = sync.interrupt_timeout_s + 2 * self.manager.interrupt_timeout_s
        return train.save_s + step_s + push_s + pause_s + self.ending_s + self.validation_s

    @property
    def step_patience_s(self) -> float:
        """Seconds between two steps, at most: more than anything that heals or is given up may take."""
        return 3000.0

    @property
    def validation_s(self) -> float:
        """Seconds a validation may take."""
        return 300.0 if self.validation_prompts else 0.0

    @property
    def ending_s(self) -> float:
        """Seconds from the end of training to the end of the run: what still runs is aborted or cut short, and the last
        step is saved.
        """
        return self.manager.interrupt_timeout_s + self.train.save_s + 0.1 + self._way_s

    @property
    def _way_s(self) -> float:
        """Of the calls to another process that follow one another at an end."""
        return 0.0 if self.process is None else _CALLS_AT_AN_END * self.process.way_s


def _patient(calm: Scenario) -> Scenario:
    """Where no reply is lost, half of the worlds have time-outs in the relation of the defaults: a request may take
    longer than the trainer waits for a batch, so only the other ways to find a dead engine are there.
    """
    loses = any(faults.silent_from_s is not None for faults in calm.engines)
    if loses or Random(f"patience/{calm.seed}").random() < 0.5:
        return calm
    return replace(calm, manager=replace(calm.manager, generation_timeout_s=2 * calm.queue.stall_timeout_s))


def random_scenario(seed: int, *, agents: bool | None = None) -> Scenario:
    """A small world with random options and faults in which every batch must come: replica 0 is healthy, and what fails
    fails for good reasons only. `agents`: groups are trajectories in worlds; None = in a fifth of the seeds.
    """
    chat = _with_validation(_random_chat(seed))
    rng = Random(f"agents/{seed}")
    drawn = rng.random() < _AGENTS_SHARE  # also where `agents` decides: later draws stay the same
    return _with_validators(_with_kv(_with_agents(chat, rng) if (drawn if agents is None else agents) else chat))


def _with_kv(calm: Scenario) -> Scenario:
    """KV caches of a few requests up to a few dozen, and admission by them, or by a number that may be too high."""
    rng = Random(f"kv/{calm.seed}")
    if rng.random() >= _KV_SHARE:
        return calm
    token_s = calm.speed.token_s
    speed = replace(
        calm.speed, kv_tokens=rng.choice((40, 150, 600)), prefill_token_s=rng.choice((0.0, 0.01, 0.1)) * token_s
    )
    admission = "kv" if rng.random() < 0.7 else "fixed"
    return replace(calm, speed=speed, manager=replace(calm.manager, admission=admission))


def _with_validation(calm: Scenario) -> Scenario:
    """What waits for a validation, and how many sets it has; then more worlds validate."""
    rng = Random(f"validation/{calm.seed}")
    mode, prompts, every = rng.choice(("pause", "share")), calm.validation_prompts, calm.plan.eval_every
    if not prompts and mode != "pause" and rng.random() < 0.3:
        prompts, every = rng.randint(1, 12), rng.randint(1, 2)
    plan = replace(calm.plan, validation_mode=mode, eval_every=every)
    second = bool(prompts) and rng.random() < 0.3
    return replace(calm, plan=plan, validation_prompts=prompts, validation_mode=mode, second_set=second)


def _with_validators(calm: Scenario) -> Scenario:
    """Some of the worlds that validate have replicas for it, the first of them healthy."""
    rng = Random(f"validators/{calm.seed}")
    if not calm.validation_prompts or rng.random() >= _VALIDATORS_SHARE:
        return calm
    engines = (EngineFaults(), *(_faulty_engine(rng) for _ in range(rng.randint(0, 2))))
    plan = replace(calm.plan, validation_mode="replicas")
    return replace(calm, plan=plan, validation_mode="replicas", validation_engines=engines)


def _random_chat(seed: int) -> Scenario:
    # Two generators: what one draws does not change what the other does.
    rng, trouble = Random(f"scenario/{seed}"), Random(f"hang/{seed}")
    queue, samples = _queue(rng), rng.randint(1, 3)
    steps = rng.randint(2, 6)
    filtering = samples > 1 and rng.random() < 0.3
    scenario = Scenario(
        seed=seed,
        queue=queue,
        scheduler=SchedulerOptions(
            samples_per_group=samples,
            sampling=SamplingParams(max_new_tokens=rng.choice((12, 25, 60))),
            filter=GroupFilter() if filtering else None,
            scoring=ScoringOptions(
                reward_retries=rng.randint(0, 2), reward_timeout_s=20.0, outage_patience_s=rng.choice((10.0, 60.0))
            ),
            spread_samples=rng.random() < 0.7,
        ),
        manager=ManagerOptions(
            max_concurrent_per_server=rng.choice((1, 3, 30)),
            generation_timeout_s=rng.choice((40.0, 200.0)),
            request_retries=6,
            interrupt_timeout_s=rng.choice((2.0, 30.0)),
            batch_creation_interval_s=rng.choice((0.0, 0.1, 10.0)),
        ),
        sync=SyncOptions(
            transport=rng.choice(("shm", "nccl")),
            interrupt_mode=rng.choice(("wait", "abort", "resume", "keep")),
            interrupt_timeout_s=rng.choice((2.0, 30.0)),
            max_retries=3,
            timeout_s=60.0,
            retry_delay_s=1.0,
        ),
        plan=RunPlan(
            first_step=1,
            max_steps=steps,
            sync_every=queue.trigger_parameter_sync_step,
            save_every=rng.choice((0, 1, 2)),
            eval_every=0,
            groups_per_batch=queue.groups_per_batch,
            samples_per_group=samples,
            groups_per_part=rng.choice([n for n in range(1, 5) if queue.groups_per_batch % n == 0]),
        ),
        engines=(EngineFaults(), *(_faulty_engine(rng) for _ in range(rng.randint(0, 3)))),
        num_prompts=None if rng.random() < 0.7 else rng.randint(0, (steps + 2) * queue.groups_per_batch),
        lengths=LengthModel(mean_tokens=rng.choice((5.0, 15.0)), sigma=rng.choice((0.0, 0.6, 1.3)), max_tokens=60),
        speed=SpeedModel(token_s=rng.choice((0.02, 0.1, 0.5)), token_s_per_request=rng.choice((0.0, 0.02))),
        rewards=_rewards(rng, filtering),
        train=TrainModel(
            step_s=rng.choice((0.05, 0.5, 5.0)),
            jitter=rng.choice((0.0, 1.0)),
            transfer_s=rng.choice((0.0, 1.0)),
            swap_s=rng.choice((0.0, 0.3)),
            save_s=rng.choice((0.0, 0.4)),
            fails_at_step=rng.randint(1, steps) if rng.random() < 0.05 else None,
            hangs_at_step=trouble.randint(1, steps) if trouble.random() < 0.05 else None,
            rpc_timeout_s=50.0,
        ),
        max_restarts=rng.randint(0, 2),
        stop_at_s=rng.uniform(0.0, 30.0) if rng.random() < 0.1 else None,
    )
    return _patient(_with_more(scenario))


def _with_more(calm: Scenario) -> Scenario:
    """What is drawn apart, so that a world stays what it is when something is added here."""
    rng, plan = Random(f"more/{calm.seed}"), calm.plan
    tools = None
    if rng.random() < 0.2:
        tools = ToolModel(
            share=rng.choice((0.3, 0.9)),
            max_turns=rng.randint(2, 4),
            seconds=rng.choice((0.0, 1.0)),
            hangs_share=rng.choice((0.0, 0.2)),
        )
    stops = (STOP,) if tools is None and rng.random() < 0.3 else ()
    scheduler = replace(
        calm.scheduler,
        sampling=replace(calm.scheduler.sampling, stop_strings=stops),
        greedy_baseline=rng.random() < 0.2,
    )
    prompts = rng.randint(1, 3) if rng.random() < 0.25 else 0
    if prompts:
        plan = replace(plan, eval_every=rng.randint(1, 2))
    process = None
    if rng.random() < 0.2:
        dies_at_s = rng.uniform(0.0, 40.0) if rng.random() < 0.3 else None
        process = ProcessModel(way_s=rng.choice((0.0, 0.2)), dies_at_s=dies_at_s)
    budget = None
    if calm.scheduler.filter is not None and rng.random() < 0.5:
        groups = calm.queue.groups_per_batch
        budget = BudgetOptions(
            groups_per_batch=groups, gen_batch_size=groups * rng.randint(1, 2), max_num_gen_batches=rng.randint(2, 6)
        )
    engines = calm.engines
    if rng.random() < 0.1:
        engines = (*engines, EngineFaults(half_open_from_s=rng.uniform(0.0, 20.0)))
    elastic, scales = Random(f"elastic/{calm.seed}"), ()
    if elastic.random() < _ELASTIC_SHARE:
        scales = tuple((elastic.uniform(0.0, 30.0), elastic.randint(1, 4)) for _ in range(elastic.randint(1, 4)))
    return replace(
        calm,
        engines=engines,
        scales=scales,
        devices_after_s=elastic.choice((0.0, 5.0, 1e5)),
        scheduler=scheduler,
        plan=plan,
        tools=tools,
        process=process,
        budget=budget,
        validation_prompts=prompts,
        validation_samples=rng.randint(1, 2),
        by_value=rng.random() < 0.15,
        lengths=replace(calm.lengths, prompt_share=0.5 if rng.random() < 0.2 else 0.0),
    )


def _with_agents(chat: Scenario, rng: Random) -> Scenario:
    samples = chat.scheduler.samples_per_group
    redundancy = rng.choice((0, 0, 1))
    worlds = WorldModel(
        moves=rng.randint(1, 4),
        seconds=rng.choice((0.0, 0.3, 2.0)),
        sigma=rng.choice((0.0, 1.0)),
        hang_share=rng.choice((0.0, 0.0, 0.1)),
        crash_share=rng.choice((0.0, 0.0, 0.1)),
        ungraded_share=rng.choice((0.0, 0.0, 0.1)),
        timeout_s=rng.choice((10.0, 40.0)),
        blocking=rng.random() < 0.4,
        per_worker=rng.randint(1, 4),
        broken_share=rng.choice((0.0, 0.2)),
        redundancy=redundancy,
        retries=rng.randint(1, 3),
        max_worlds=rng.choice((0, rng.randint(1, 3) * (samples + redundancy))),
        max_concurrent=rng.choice((0, 0, rng.randint(1, 6))),
        max_turns=rng.randint(2, 6),
        max_context=rng.choice((40, 1000, 1000)),
        max_seconds=rng.choice((float("inf"), float("inf"), 120.0)),
        windowed=rng.random() < 0.15,
        strips=rng.random() < 0.15,
    )
    scheduler = replace(
        chat.scheduler, greedy_baseline=False, sampling=replace(chat.scheduler.sampling, stop_strings=())
    )
    return replace(chat, worlds=worlds, scheduler=scheduler)


def random_killed_scenario(seed: int, *, agents: bool | None = None) -> Scenario:
    """As `random_scenario`, and the process is killed one to three times."""
    rng, calm = Random(f"kills/{seed}"), random_scenario(seed, agents=agents)
    kills = tuple(rng.randint(1, 400) for _ in range(rng.randint(1, 3)))
    train = replace(calm.train, fails_at_step=None, hangs_at_step=None)
    process = None if calm.process is None else replace(calm.process, dies_at_s=None)
    return replace(calm, kills=kills, train=train, stop_at_s=None, process=process)


def random_branched_scenario(seed: int, *, agents: bool | None = None) -> Scenario:
    """As `random_killed_scenario`, and some of its processes go back to an earlier checkpoint or are another run."""
    rng, calm = Random(f"branches/{seed}"), random_killed_scenario(seed, agents=agents)
    starts = tuple(rng.choice(("latest", "back", "back", "fresh")) for _ in range(rng.randint(1, 5)))
    kills = tuple(rng.randint(1, 600) for _ in range(rng.randint(0, len(starts))))
    plan = replace(calm.plan, save_every=rng.choice((1, 1, 2)))
    return replace(calm, starts=starts, kills=kills, plan=plan, keep=rng.choice((0, 1, 2, 3)))


def _queue(rng: Random) -> QueueOptions:
    ratio, every = rng.choice((0.0, 0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0)), rng.choice((1, 1, 1, 2, 3))
    policy = rng.choice((*StalenessPolicy, StalenessPolicy.WAIT, StalenessPolicy.WAIT))
    bound, groups = staleness_bound(ratio=ratio, sync_every=every), rng.randint(1, 4)
    # QueueOptions refuses a lower one under policy wait.
    lowest = bound if policy is StalenessPolicy.WAIT else every - 1
    limit = None if rng.random() < 0.7 else rng.randint(groups, 4 * groups)
    return QueueOptions(
        groups_per_batch=groups,
        async_generation_ratio=ratio,
        trigger_parameter_sync_step=every,
        max_versions=None if rng.random() < 0.4 else rng.randint(lowest, bound + 3),
        policy=policy,
        soft_versions=None if rng.random() < 0.8 else rng.randint(0, bound),
        max_queue_size=limit,
        oversample_groups=rng.randint(1, groups) if rng.random() < 0.25 else 0,
        max_failed_groups=10**6,  # groups fail by design here, and must not end the run
        stall_timeout_s=3000.0,
        batch_timeout_s=1000.0,
    )


_ENGINE_KINDS = (
    "healthy", "slow", "silent", "deaf", "frozen", "crash", "double", "reorder", "refuse", "loses buckets", "all",
    "hung", "errors", "distant",
)  # fmt: skip


def _faulty_engine(rng: Random) -> EngineFaults:
    kind = rng.choice(_ENGINE_KINDS)
    at = rng.uniform(0.0, 20.0)
    faults: dict[str, dict[str, float]] = {
        "healthy": {},
        "slow": {"slow_factor": rng.choice((3.0, 20.0))},
        "silent": {"silent_from_s": at, "silent_for_s": rng.choice((5.0, 1e9))},
        "deaf": {"deaf_from_s": at},
        "frozen": {"frozen_from_s": at},
        "crash": {"crash_at_s": at},
        "hung": {"hung_from_s": at},
        "errors": {"errors_from_s": at},
        "distant": {"way_s": rng.choice((0.1, 1.5))},
        "double": {"duplicate_share": 0.5},
        "reorder": {"delay_s": 3.0},
        "refuse": {"refuse_share": 0.3},
        "loses buckets": {"lost_bucket_share": rng.choice((0.2, 1.0))},
    }
    if kind == "all":
        chosen = faults["double"] | faults["reorder"] | faults["refuse"]
        return EngineFaults(**chosen)  # type: ignore[arg-type]
    return EngineFaults(**faults[kind])  # type: ignore[arg-type]


def _rewards(rng: Random, filtering: bool) -> RewardModel:
    outage = rng.random() < 0.1
    return RewardModel(
        seconds=rng.choice((0.0, 0.2, 2.0)),
        flat_share=0.3 if filtering else 0.0,
        outage_from_s=rng.uniform(0.0, 20.0) if outage else None,
        outage_for_s=rng.uniform(0.0, 20.0),
        hang_share=rng.choice((0.0, 0.0, 0.1)),
        broken_share=rng.choice((0.0, 0.0, 0.05)),
        slow_share=rng.choice((0.0, 0.1)),
        slow_factor=5.0,
    )
