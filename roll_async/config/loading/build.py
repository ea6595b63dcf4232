"""Checked values to dataclasses, and the defaults that depend on other keys.

`dataclasses-json` builds and serialises; it never checks: it drops unknown nested keys and turns "false" into True.
"""

import warnings
from collections.abc import Mapping
from functools import cache
from typing import TypeVar, cast

from dataclasses_json import dataclass_json

from roll_async.config import processor
from roll_async.config.options.advantage_options import advantage_options_class
from roll_async.config.options.correction_options import carries_behaviour_policy
from roll_async.config.options.policy_loss_options import loss_options_class
from roll_async.config.schema import ROLES, AgenticConfig, PipelineConfig, RLVRConfig, RunConfig, SupervisedConfig
from roll_async.config.schema_algorithm import AlgorithmConfig
from roll_async.config.schema_rollout import REWARDS, EnvManagerConfig
from roll_async.config.schema_worker import STRATEGIES, DataArguments, TeacherServer, WorkerConfig
from roll_async.config.yaml.node import Plain

T = TypeVar("T")
_AGENTIC_TURN_TOKENS = 512
_EAGER_STEPS = 10
"""Of a run that ends before CUDA graphs have paid for the half minute of their making."""


def build(cls: type[RunConfig], values: dict[str, Plain], stem: str) -> RunConfig:
    """The config of checked values; `stem`: name of the file without suffix. Cross-field rules come after this."""
    tree: dict[str, object] = dict(values)
    algorithm = dict(cast(dict, tree.get("algorithm", {})))
    if issubclass(cls, PipelineConfig):
        loss, estimator = algorithm.get("pg_variant", "ppo"), algorithm.get("adv_estimator", "grpo")
        algorithm["pg_options"] = _make(loss_options_class(loss), algorithm.get("pg_options"))
        algorithm["adv_options"] = _make(advantage_options_class(estimator), algorithm.get("adv_options"))
        tree["algorithm"] = algorithm
    for role in ROLES:
        if worker := cast("dict | None", tree.get(role)):
            tree[role] = _with_settings(worker)
    if teachers := cast("dict[str, dict]", tree.get("teachers")):
        tree["teachers"] = {
            name: _make(TeacherServer, given) if "address" in given else _make(WorkerConfig, _with_settings(given))
            for name, given in teachers.items()
        }
    config = _make(cls, tree)
    _fill(config, stem, weight_level_written="weight_level" in algorithm.get("correction", {}))
    return config


def _with_settings(worker: dict) -> dict:
    """With the settings of its library in their class."""
    args = worker["strategy_args"]
    settings = _make(STRATEGIES[args["strategy_name"]], args.get("strategy_config"))
    return {**worker, "strategy_args": {**args, "strategy_config": settings}}


def to_plain(config: RunConfig) -> dict[str, Plain]:
    """Every value as plain maps, lists and scalars."""
    tree = _serialisable(type(config)).to_dict(config)  # type: ignore[attr-defined]
    # Options of a user's own code are written beside ours.
    for name in ("pg_options", "adv_options") if "algorithm" in tree else ():
        options = tree["algorithm"][name]
        options |= options.pop("given", {})
    return tree


@cache
def _serialisable(cls: type) -> type:
    return dataclass_json(cls)


def _make(cls: type[T], values: object) -> T:
    with warnings.catch_warnings():
        # Derived values are None until `_fill`; dataclasses-json warns about each.
        warnings.simplefilter("ignore", RuntimeWarning)
        return _serialisable(cls).from_dict(values or {})  # type: ignore[attr-defined]


def _default(owner: object, name: str, value: object) -> None:
    """Set a derived value that the file does not give. The object is not published yet, so frozen may be bypassed."""
    if getattr(owner, name) is None:
        object.__setattr__(owner, name, value)


def _fill(config: RunConfig, stem: str, *, weight_level_written: bool) -> None:
    _default(config, "exp_name", stem)  # first: the paths below hold it
    root = f"{config.output_dir.rstrip('/') or '/'}/{config.exp_name}"
    _default(config.checkpoint, "output_dir", f"{root}/checkpoints")
    if isinstance(config, PipelineConfig):
        _default(config, "reward_pretrain", config.pretrain)
        _default(config.ledger, "path", f"{root}/ledger.sqlite")
    if isinstance(config, RLVRConfig):
        _fill_rlvr(config)
    on_devices = any(worker.device_mapping is not None for _, worker in config.roles())
    dtype = processor.default_dtype(on_devices=on_devices)
    for role, worker in config.roles():
        _default(worker.model_args, "dtype", dtype)
        of_critic = isinstance(config, PipelineConfig) and role == "critic"
        _fill_worker(worker, config.reward_pretrain if of_critic else config.pretrain)  # type: ignore[attr-defined]
    if isinstance(config, PipelineConfig):
        _fill_pipeline(config, weight_level_written=weight_level_written)
    else:
        assert isinstance(config, SupervisedConfig)
        _default(config, "train_batch_size", config.mini_batch_size)
        if config.validation is not None:
            _fill_held_out(config.validation.data_args, config.actor_train.data_args)


def _fill_pipeline(config: PipelineConfig, *, weight_level_written: bool) -> None:
    _fill_generation(config)
    if isinstance(config, AgenticConfig):
        _fill_agentic(config)  # worlds take max_new_tokens, which is filled by now
    _fill_async(config)
    # A level that was written stays, for C146 and C150 to judge.
    if not weight_level_written:
        _fill_weight_level(config.algorithm)


def _fill_rlvr(config: RLVRConfig) -> None:
    """Lengths may remain None; C102 reports that."""
    if config.sequence_length is not None:
        _default(config, "response_length", config.sequence_length - config.prompt_length)
    elif config.response_length is not None:
        _default(config, "sequence_length", config.prompt_length + config.response_length)
    for domain, reward in config.rewards.items():
        _default(reward, "type", domain if domain in REWARDS else None)


def _fill_worker(worker: WorkerConfig, model: str) -> None:
    _default(worker, "world_size", len(worker.device_mapping) if worker.device_mapping is not None else 1)
    _default(worker.model_args, "model_name_or_path", model)
    if worker.model_args.lora_rank > 0:
        _default(worker.model_args, "lora_alpha", 2.0 * worker.model_args.lora_rank)
    if worker.data_args is not None:
        _fill_data(worker.data_args, {})


def _fill_data(data: DataArguments, template_kwargs: Mapping[str, object]) -> None:
    _default(data, "template_kwargs", template_kwargs)
    if data.prompt is None:
        _default(data, "messages", "messages")


def _fill_held_out(data: DataArguments, train: DataArguments | None) -> None:
    same = train is not None and data.template == train.template  # another one reads other variables
    _fill_data(data, train.template_kwargs if train is not None and same else {})


def _fill_generation(config: PipelineConfig) -> None:
    sequence_length = config.sequence_length if isinstance(config, RLVRConfig | AgenticConfig) else None
    tokens = config.response_length if isinstance(config, RLVRConfig) else _AGENTIC_TURN_TOKENS
    generating = config.actor_infer.generating_args
    _default(generating, "max_new_tokens", tokens)
    _default(generating, "num_return_sequences", config.samples_per_group if isinstance(config, RLVRConfig) else 1)
    if (key := config.actor_infer.engine.traits.context_key) is not None:
        _default(config.actor_infer.engine, key, sequence_length)
    if (key := config.actor_infer.engine.traits.eager_key) is not None:
        _default(config.actor_infer.engine, key, config.max_steps <= _EAGER_STEPS)
    if isinstance(config, RLVRConfig) and config.validation is not None:
        for _, data in config.validation.data.values():
            _fill_held_out(data, config.actor_train.data_args)
        for _, sampling in config.validation.sampling.values():
            _default(sampling, "max_new_tokens", tokens)
            _default(sampling, "num_return_sequences", 1)


def _fill_agentic(config: AgenticConfig) -> None:
    sampling = config.val_env_manager.generating_args
    if sampling is not None:
        _default(sampling, "max_new_tokens", config.actor_infer.generating_args.max_new_tokens)
        _default(sampling, "num_return_sequences", 1)
    for env in config.custom_envs.values():
        _default(env, "max_tokens_per_step", config.actor_infer.generating_args.max_new_tokens)
    for manager, batch in (
        (config.train_env_manager, config.rollout_batch_size),
        (config.val_env_manager, config.val_batch_size),
    ):
        _default(manager, "num_env_groups", max(1, batch // manager.group_size))
        if not manager.tags:
            object.__setattr__(manager, "tags", tuple(config.custom_envs))
        _default(manager, "num_groups_partition", _even(manager))


def _even(manager: EnvManagerConfig) -> tuple[int, ...]:
    """Groups per tag as equal as can be, the first tags get the rest."""
    each, rest = divmod(manager.num_env_groups, max(1, len(manager.tags)))
    return tuple(each + (i < rest) for i in range(len(manager.tags)))


def _fill_async(config: PipelineConfig) -> None:
    # Before max_versions, which counts the groups that are over-sampled.
    _default(config.algorithm.filter_groups, "gen_batch_size", config.groups_per_batch)
    _default(config.async_training.staleness, "max_versions", config.default_max_versions)
    _default(config.async_training, "max_queue_size", config.queue_bound_groups)
    _default(config.async_training, "require_batches", config.mini_batches_per_batch)


def _fill_weight_level(algorithm: AlgorithmConfig) -> None:
    """token, except where it would correct twice or where every weight would be 1."""
    carried = carries_behaviour_policy(algorithm.pg_variant, algorithm.pg_options.ratio_base)
    if carried or algorithm.proximal_logprobs == "behaviour":
        object.__setattr__(algorithm.correction, "weight_level", "none")
