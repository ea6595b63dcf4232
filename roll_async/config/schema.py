"""The config of one run: what the rest of the package receives.

    from roll_async.config.api import load
    config = load("configs/rlvr_config_async.yaml")
    config.actor_train.mini_batch_size

Every value is final: defaults that depend on other keys are filled in while loading. What follows from keys is a
property.

Worked example: rollout_batch_size 64, num_return_sequences_in_group 8, async_generation_ratio 1, one weight push per
step: groups_per_batch 64, samples_per_batch 512, sync_window_groups 64, staleness_bound 1.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Self

from roll_async.config import staleness
from roll_async.config.fields import bounded, derived, option, required, section
from roll_async.config.options.policy_loss_options import SELECTS_TOKENS
from roll_async.config.schema_algorithm import AlgorithmConfig, FilterGroupsConfig, OverlongBufferConfig
from roll_async.config.schema_async import (
    AsyncTrainingConfig,
    CheckpointConfig,
    FaultPolicy,
    InterruptConfig,
    LedgerConfig,
    StalenessConfig,
    TrackingConfig,
    WeightSyncConfig,
)
from roll_async.config.schema_rollout import (
    EnvConfig,
    EnvManagerConfig,
    JudgeConfig,
    PromptPoolConfig,
    RewardConfig,
    SandboxConfig,
    ServiceConfig,
    ToolConfig,
    TrainEnvManagerConfig,
    ValEnvManagerConfig,
    ValidationConfig,
    ValidationSetConfig,
)
from roll_async.config.schema_worker import (
    DataArguments,
    GeneratingArguments,
    HfInferConfig,
    MegatronInferConfig,
    MegatronTrainConfig,
    ModelArguments,
    SglangConfig,
    StrategyArguments,
    TeacherServer,
    TrainingArguments,
    VllmConfig,
    WorkerConfig,
)

__all__ = [
    "AgenticConfig", "AlgorithmConfig", "AsyncTrainingConfig", "CheckpointConfig", "DataArguments",
    "DpoConfig", "EnvConfig", "EnvManagerConfig", "FaultPolicy", "FilterGroupsConfig", "GeneratingArguments",
    "HeldOutConfig", "HfInferConfig", "InterruptConfig", "JudgeConfig", "LedgerConfig", "MegatronInferConfig",
    "MegatronTrainConfig", "ModelArguments", "OverlongBufferConfig", "PipelineConfig", "RLVRConfig",
    "RewardConfig", "RunConfig", "SandboxConfig", "ServiceConfig", "SftConfig", "SglangConfig",
    "StalenessConfig", "StrategyArguments", "SupervisedConfig", "TeacherServer", "ToolConfig", "TrackingConfig",
    "TrainEnvManagerConfig", "TrainingArguments", "ValEnvManagerConfig", "ValidationConfig",
    "ValidationSetConfig", "VllmConfig", "WeightSyncConfig", "WorkerConfig",
]  # fmt: skip

ROLES = ("actor_train", "actor_infer", "reference", "critic", "teacher")
OF_TEACHERS = "teachers."
"""What the names of the roles of several teachers begin with; the rest is the teacher's name."""
MEGATRON_DROPOUTS = ("hidden_dropout", "attention_dropout")
"""Keys of `extra` with which Megatron leaves out activations at random."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Keys of every kind of run."""

    pipeline: Literal["rlvr", "agentic", "sft", "dpo"] = derived()
    """Kind of run; default: agentic with custom_envs or train_env_manager; without actor_infer dpo with a key that only
    dpo configs have, sft with one that only these two have; rlvr with actor_train.data_args; else agentic."""
    exp_name: str = derived()
    """Names folders and tracker runs; default: the file's name without suffix."""
    seed: int = bounded(42, ">= 0")
    """Every generator derives from it."""
    output_dir: str = "./output"
    """Root of checkpoints, ledger and logs; no time stamp is added."""
    pretrain: str = required()
    """HF name or folder of the policy."""
    max_steps: int = bounded(500, ">= 1")
    """Training steps."""
    save_steps: int = bounded(50, ">= 0")
    """Steps between checkpoints; 0 = only at the end, where one is always written."""
    logging_steps: int = bounded(1, ">= 1")
    """Steps between tracker writes; the result of a validation is written at any step."""
    eval_steps: int = bounded(0, ">= 0")
    """Steps between validations; 0 = never."""
    num_gpus_per_node: int = bounded(8, ">= 1")
    """Device id // this = node."""
    template_time: str | None = None
    """Date and time that chat templates are told, as `2026-11-26T05:01:12`; null = that of the first start of the run,
    which every later start takes from run.json."""
    system_envs: Mapping[str, str] = section(dict, form="names")
    """Environment of every worker process, not of the loader."""
    actor_train: WorkerConfig = required()
    """The policy that is trained."""
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    """Where checkpoints go and come from."""
    tracking: TrackingConfig = section(TrackingConfig)
    """Where metrics go."""
    fault: FaultPolicy = section(FaultPolicy)
    """Limits on the failures that a run tolerates."""

    @property
    def template_kwargs(self) -> Mapping[str, object]:
        """Variables of the chat template that prompts and turns of training are rendered with."""
        return {} if self.actor_train.data_args is None else self.actor_train.data_args.template_kwargs

    def roles(self) -> Iterator[tuple[str, WorkerConfig]]:
        """Configured roles, in a fixed order."""
        yield "actor_train", self.actor_train

    def with_roles(self, workers: Mapping[str, WorkerConfig]) -> Self:
        """A copy with these workers, by the names of `roles`."""
        return replace(self, **workers)

    @property
    def longest_sequence(self) -> int:
        """Tokens of a row at most."""
        raise NotImplementedError

    @property
    def data_parallel_size(self) -> int:
        """Of actor_train."""
        return self.actor_train.data_parallel_size

    @property
    def mini_batch_size(self) -> int:
        """Samples of one optimizer step of actor_train."""
        return self.actor_train.mini_batch_size

    @property
    def num_nodes(self) -> int:
        """Nodes that the device ids of all roles name; 1 on CPU."""
        ids = {i for _, worker in self.roles() for i in worker.device_mapping or ()}
        return len({i // self.num_gpus_per_node for i in ids}) or 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig(RunConfig):
    """Keys of both kinds of run that generate what they learn from."""

    reward_pretrain: str = derived()
    """Initial weights of `critic`; default: pretrain."""
    rollout_batch_size: int = bounded(128, ">= 1")
    """Per training step: prompts (rlvr) or trajectories (agentic)."""
    val_batch_size: int = bounded(128, ">= 1")
    """Per validation: prompts of each set, or trajectories."""
    async_generation_ratio: float = bounded(0.0, ">= 0")
    """Batches generated ahead; 0 = synchronous; fractions allowed."""
    colocation: Literal["turns", "resident"] = "turns"
    """Roles that share devices with the engines: turns = one side has them at a time, and async_generation_ratio is 0;
    resident = both keep their memory there and work at the same time, whatever the ratio."""
    actor_infer: WorkerConfig = required()
    """The engines that generate."""
    reference: WorkerConfig | None = None
    """KL anchor; null = none."""
    critic: WorkerConfig | None = None
    """Value model; null = none."""
    teacher: WorkerConfig | None = None
    """Distillation teacher; null = none. Short for `teachers` with one of the name teacher."""
    teachers: Mapping[str, WorkerConfig | TeacherServer] = section(dict, form="names")
    """Distillation teachers by name: a section as `teacher`, or the `address` and `model` of a server. The column
    `teacher` of a row names the one that scores it; without it, the one of its domain's name, or the only one."""
    async_training: AsyncTrainingConfig = section(AsyncTrainingConfig)
    """How far generation runs ahead."""
    algorithm: AlgorithmConfig = section(AlgorithmConfig)
    """What is learned from a batch."""
    weight_sync: WeightSyncConfig = section(WeightSyncConfig)
    """How weights travel."""
    ledger: LedgerConfig = section(LedgerConfig)
    """Durable log of finished groups."""

    def roles(self) -> Iterator[tuple[str, WorkerConfig]]:
        """Configured roles, in a fixed order."""
        workers = (self.actor_train, self.actor_infer, self.reference, self.critic, self.teacher)
        yield from ((name, worker) for name, worker in zip(ROLES, workers, strict=True) if worker is not None)
        for name, teacher in self.teachers.items():
            if isinstance(teacher, WorkerConfig):
                yield OF_TEACHERS + name, teacher

    def with_roles(self, workers: Mapping[str, WorkerConfig]) -> Self:
        """A copy with these workers, by the names of `roles`."""
        teachers = {
            name: workers[role] if (role := OF_TEACHERS + name) in workers else teacher
            for name, teacher in self.teachers.items()
        }
        own = {role: worker for role, worker in workers.items() if not role.startswith(OF_TEACHERS)}
        return replace(self, **own, teachers=teachers)

    @property
    def teacher_names(self) -> tuple[str, ...]:
        """What the column `teacher` of a row may say."""
        return tuple(self.teachers) if self.teacher is None else ("teacher", *self.teachers)

    @property
    def teacher_servers(self) -> Mapping[str, TeacherServer]:
        """Teachers behind an address, by name."""
        return {name: teacher for name, teacher in self.teachers.items() if isinstance(teacher, TeacherServer)}

    @property
    def samples_per_group(self) -> int:
        """N: samples of one prompt."""
        raise NotImplementedError

    @property
    def groups_per_batch(self) -> int:
        """G: groups one training step consumes."""
        raise NotImplementedError

    @property
    def domains(self) -> tuple[str, ...]:
        """What a task may be of: a reward, or the tag of a world."""
        raise NotImplementedError

    @property
    def loss_parts(self) -> Mapping[str, str]:
        """Part of the loss by domain, where it is not the policy's: cross_entropy or reference_kl."""
        return {}

    @property
    def longest_response(self) -> int:
        """Tokens of a row after its prompt at most."""
        raise NotImplementedError

    @property
    def validation_sampling(self) -> Mapping[str, GeneratingArguments]:
        """How each set of a validation is sampled, by name; none = no validation."""
        raise NotImplementedError

    @property
    def validation_mode(self) -> str:
        """What waits for a validation."""
        return "pause"

    @property
    def num_validation_replicas(self) -> int:
        """Replicas of actor_infer that run validations and nothing else: the last ones."""
        return 0

    @property
    def restarts_per_engine(self) -> int:
        """`fault.max_engine_restarts`; 0 where training roles take turns with the engines on shared devices: a replica
        that starts takes its KV cache from the free memory, and in phase TRAIN there is none.
        """
        return 0 if roles_in_turns(self) else self.fault.max_engine_restarts

    @property
    def samples_per_batch(self) -> int:
        """G * N."""
        return self.groups_per_batch * self.samples_per_group

    @property
    def mini_batches_per_batch(self) -> int:
        """Optimizer mini-batches of one pass over a batch, at least 1."""
        return max(1, self.samples_per_batch // self.mini_batch_size)

    @property
    def optimizer_steps_per_batch(self) -> int:
        """Optimizer steps of one training step."""
        return self.mini_batches_per_batch * self.algorithm.ppo_epochs

    @property
    def optimizer_steps_per_part(self) -> int:
        """Optimizer steps on what the learner is given at a time: a batch, or a part of it (require_batches)."""
        return self.async_training.require_batches * self.algorithm.ppo_epochs

    @property
    def proximal_needed_early(self) -> str | None:
        """What needs the proximal log-probs before the forward pass of the step; None = that pass may give them."""
        a, early, steps = self.algorithm, "which needs them before the step", self.optimizer_steps_per_part
        reasons = (
            (steps > 1, f"{steps} optimizer steps on the rows of a forward pass"),
            (a.token_kl_coef > 0, f"token_kl_coef, {early}"),
            (a.distill_coef > 0, f"distill_coef, {early}"),
            (a.adv_estimator == "optimal_token_baseline", f"adv_estimator {a.adv_estimator}, {early}"),
            (a.pg_variant in SELECTS_TOKENS, f"pg_variant {a.pg_variant}, {early}"),
            (a.correction.normalise != "none", f"correction.normalise {a.correction.normalise}, {early}"),
            *(
                (share > 0, f"{name}, whose training forward pass is not the policy")
                for name, share in self._dropouts()
            ),
        )
        return next((reason for holds, reason in reasons if holds), None)

    def _dropouts(self) -> Iterator[tuple[str, float]]:
        """Of the actor: (key, share dropped in training)."""
        yield "lora_dropout", self.actor_train.model_args.lora_dropout
        for name in MEGATRON_DROPOUTS:
            share = self.actor_train.strategy_args.strategy_config.extra.get(name)
            yield name, share if isinstance(share, int | float) else 0.0

    @property
    def source_of_proximal(self) -> str:
        """algorithm.proximal_logprobs with auto resolved."""
        if self.algorithm.proximal_logprobs != "auto":
            return self.algorithm.proximal_logprobs
        return "reuse" if self.proximal_needed_early is None else "recompute"

    @property
    def num_servers(self) -> int:
        """Engine replicas of actor_infer."""
        return self.actor_infer.num_servers

    @property
    def sync_window_groups(self) -> int:
        """W: groups consumed between two weight pushes."""
        return self.async_training.trigger_parameter_sync_step * self.groups_per_batch

    @property
    def staleness_bound(self) -> int:
        """Versions that the admission rule produces at most: ceil((1 + r) * k) - 1."""
        sync_every = self.async_training.trigger_parameter_sync_step
        return staleness.staleness_bound(ratio=self.async_generation_ratio, sync_every=sync_every)

    @property
    def default_max_versions(self) -> int:
        """The bound where none is set: staleness_bound, and above it what over-sampling begins ahead, up to 8:
        ceil((1 + r) * k + over-sampled groups / G) - 1.
        """
        filters = self.algorithm.filter_groups
        return staleness.default_max_versions(
            ratio=self.async_generation_ratio,
            sync_every=self.async_training.trigger_parameter_sync_step,
            groups_per_batch=self.groups_per_batch,
            oversample_groups=filters.gen_batch_size - self.groups_per_batch if filters.enable else 0,
        )

    @property
    def queue_bound_groups(self) -> int:
        """ceil((1 + r) * W): groups admitted beyond the weight pushes that the engines hold."""
        return staleness.admission_limit(
            version=0,
            ratio=self.async_generation_ratio,
            sync_every=self.async_training.trigger_parameter_sync_step,
            groups_per_batch=self.groups_per_batch,
        )

    @property
    def is_async(self) -> bool:
        """Whether generation runs ahead of training."""
        return self.async_generation_ratio > 0

    @property
    def colocated(self) -> bool:
        """Whether actor_train and actor_infer share a device."""
        return bool(set(self.actor_train.device_mapping or ()) & set(self.actor_infer.device_mapping or ()))


@dataclass(frozen=True, kw_only=True, slots=True)
class RLVRConfig(PipelineConfig):
    """Single-turn prompts with verifiable rewards."""

    prompt_length: int = bounded(1024, ">= 1")
    """Tokens; longer prompts are skipped and counted."""
    response_length: int = derived(">= 1")
    """Tokens generated at most; give this or sequence_length."""
    sequence_length: int = derived(">= 1")
    """prompt_length + response_length."""
    num_return_sequences_in_group: int = bounded(8, ">= 1")
    """N, responses per prompt."""
    is_num_return_sequences_expand: bool = option(True)
    """true: N requests of one response; false: one request of N."""
    rewards: Mapping[str, RewardConfig] = section(lambda: {"math_rule": RewardConfig(type="math_rule")}, form="names")
    """Scorer of each domain."""
    prompt_pool: PromptPoolConfig = section(PromptPoolConfig)
    """Prompts by past pass rate instead of once an epoch."""
    validation: ValidationConfig | None = None
    """Held-out prompts and how they are sampled; null = none."""

    @property
    def samples_per_group(self) -> int:
        """N: responses per prompt."""
        return self.num_return_sequences_in_group

    @property
    def groups_per_batch(self) -> int:
        """G: prompts per training step."""
        return self.rollout_batch_size

    @property
    def domains(self) -> tuple[str, ...]:
        """Keys of `rewards`."""
        return tuple(self.rewards)

    @property
    def loss_parts(self) -> Mapping[str, str]:
        """Domains whose rewards score nothing."""
        return {name: reward.loss_part for name, reward in self.rewards.items() if reward.loss_part != "policy"}

    @property
    def longest_sequence(self) -> int:
        """sequence_length."""
        return self.sequence_length

    @property
    def longest_response(self) -> int:
        """response_length."""
        return self.response_length

    @property
    def validation_sampling(self) -> Mapping[str, GeneratingArguments]:
        """`validation.generating_args`, as the set without a name, and those of `validation.sets`."""
        return {} if self.validation is None else {name: args for name, (_, args) in self.validation.sampling.items()}

    @property
    def validation_mode(self) -> str:
        """`validation.mode`."""
        return "pause" if self.validation is None else self.validation.mode

    @property
    def num_validation_replicas(self) -> int:
        """`validation.num_replicas` with mode replicas, if there are validations."""
        used = self.validation is not None and self.validation.mode == "replicas" and self.eval_steps > 0
        return self.validation.num_replicas if self.validation is not None and used else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class AgenticConfig(PipelineConfig):
    """Trajectories of many turns in environments."""

    sequence_length: int = required(">= 1")
    """Tokens of a whole trajectory."""
    custom_envs: Mapping[str, EnvConfig] = section(
        lambda: {"FrozenLake": EnvConfig(env_type="frozen_lake")}, form="names"
    )
    """Worlds by tag."""
    train_env_manager: TrainEnvManagerConfig = section(TrainEnvManagerConfig)
    """Groups for training."""
    val_env_manager: ValEnvManagerConfig = section(ValEnvManagerConfig)
    """Groups for validation."""

    @property
    def samples_per_group(self) -> int:
        """N: trajectories that share a start."""
        return self.train_env_manager.group_size

    @property
    def groups_per_batch(self) -> int:
        """G: rollout_batch_size / group_size, at least 1."""
        return max(1, self.rollout_batch_size // self.train_env_manager.group_size)

    @property
    def domains(self) -> tuple[str, ...]:
        """Tags of `custom_envs`."""
        return tuple(self.custom_envs)

    @property
    def longest_sequence(self) -> int:
        """sequence_length."""
        return self.sequence_length

    @property
    def longest_response(self) -> int:
        """The policy's turns and what comes between them share sequence_length."""
        return self.sequence_length

    @property
    def validation_sampling(self) -> Mapping[str, GeneratingArguments]:
        """`val_env_manager.generating_args`; default: as in training."""
        return {"": self.val_env_manager.generating_args or self.actor_infer.generating_args}

    @property
    def validation_mode(self) -> str:
        """`val_env_manager.mode`."""
        return self.val_env_manager.mode

    @property
    def num_validation_replicas(self) -> int:
        """`val_env_manager.num_replicas` with mode replicas, if there are validations."""
        used = self.val_env_manager.mode == "replicas" and self.eval_steps > 0
        return self.val_env_manager.num_replicas if used else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutConfig:
    """Rows that are measured and not trained on."""

    data_args: DataArguments = required()
    """Files of held-out rows."""

    @property
    def data(self) -> Mapping[str, tuple[str, DataArguments]]:
        """As of a `ValidationConfig`, with one set."""
        return {"": ("validation.data_args", self.data_args)}

    def with_files(self, place: Callable[[str], str]) -> "HeldOutConfig":
        """A copy in which every file is the one that `place` gives for it."""
        return replace(self, data_args=replace(self.data_args, file_name=tuple(map(place, self.data_args.file_name))))


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisedConfig(RunConfig):
    """Keys of both kinds of run that learn from given rows, without engines."""

    sequence_length: int = required(">= 1")
    """Tokens of a row, prompt and answer together; with dpo of each of the two rows of a pair."""
    train_batch_size: int = derived(">= 1")
    """Rows (dpo: pairs) of a training step, which is one optimizer step; it is cut into as many micro-batches as it
    needs. Default: per_device_train_batch_size * gradient_accumulation_steps * data parallel."""
    num_train_epochs: int | None = bounded(None, ">= 1")
    """Passes over the rows, each in an order of its own; ends the run in place of max_steps. null = max_steps."""
    long_rows: Literal["refuse", "cut", "skip"] = "refuse"
    """Rows over sequence_length: the run does not start, they lose their end, or they are left out and counted."""
    validation: HeldOutConfig | None = None
    """Held-out rows; null = none."""

    @property
    def longest_sequence(self) -> int:
        """sequence_length."""
        return self.sequence_length


@dataclass(frozen=True, kw_only=True, slots=True)
class SftConfig(SupervisedConfig):
    """Chats whose answers are trained on by cross-entropy."""

    trained_turns: Literal["all", "last"] = "all"
    """Turns of the assistant that are trained on."""
    min_score: float | None = None
    """Of rows with a `score`, as dumps of runs and `roll-async rollout` have it: those below are left out and counted;
    null = none is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DpoConfig(SupervisedConfig):
    """Pairs of a chosen and a rejected answer (Rafailov et al., "Direct Preference Optimization", 2023)."""

    beta: float = bounded(0.1, "> 0")
    """Strength of the tie to the reference, which is the model that the run starts from."""
    label_smoothing: float = bounded(0.0, "in [0, 0.5)")
    """Share of pairs whose labels are taken to be swapped; 0 = none, the loss of the paper."""


def roles_on_engine_devices(config: PipelineConfig) -> tuple[str, ...]:
    """Training roles that share a device with the engines."""
    engines = set(config.actor_infer.device_mapping or ())
    return tuple(
        name for name, role in config.roles() if name != "actor_infer" and engines & set(role.device_mapping or ())
    )


def roles_in_turns(config: PipelineConfig) -> tuple[str, ...]:
    """Training roles that take turns with the engines on the devices that they share."""
    return roles_on_engine_devices(config) if config.colocation == "turns" else ()


def reference_is_actor(config: PipelineConfig) -> bool:
    """Whether the actor without its adapters is the reference: the same model on the same devices."""
    actor, reference = config.actor_train, config.reference
    if reference is None or not actor.model_args.lora_rank:
        return False
    same_model = actor.model_args.model_name_or_path == reference.model_args.model_name_or_path
    return same_model and actor.device_mapping == reference.device_mapping


def roles_on_same_devices(config: PipelineConfig) -> tuple[frozenset[str], ...]:
    """Training roles in sets: those of one set have devices in common, perhaps by way of a third role, or are the same
    ranks. Every CPU process is a device of its own.
    """
    sets: list[tuple[frozenset[str], frozenset[int]]] = []
    for name, role in config.roles():
        if name == "actor_infer":
            continue
        names, devices = frozenset({name}), frozenset(role.device_mapping or ())
        is_actor = name == "reference" and reference_is_actor(config)
        # A list, since `sets` changes; a role may join several of them into one.
        for found in [s for s in sets if s[1] & devices or (is_actor and "actor_train" in s[0])]:
            sets.remove(found)
            names, devices = names | found[0], devices | found[1]
        sets.append((names, devices))
    return tuple(names for names, _ in sets)
