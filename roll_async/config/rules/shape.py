"""Rules about lengths, devices, batch shapes and worlds (C101 to C130)."""

import math
from collections.abc import Iterator
from datetime import datetime

from roll_async.config.options.advantage_options import GROUP_RELATIVE
from roll_async.config.prompt_templates import problem_of
from roll_async.config.schema import AgenticConfig, PipelineConfig, RLVRConfig, RunConfig
from roll_async.config.schema_rollout import EnvManagerConfig
from roll_async.config.schema_worker import (
    DataArguments,
    MegatronInferConfig,
    MegatronTrainConfig,
    WorkerConfig,
)
from roll_async.config.staleness import exact_ratio

Findings = Iterator[tuple[str, str, str]]
"""(id, key, message)."""

_GENERATING = "actor_infer.generating_args"


def number(value: float) -> str:
    """A number as a user writes it: 2 rather than 2.0."""
    return str(int(value)) if value == int(value) else repr(value)


def has_lengths(config: RunConfig) -> bool:
    """Whether prompt and response lengths are known; without them C102 is reported and nothing else about lengths."""
    # Lengths are None where neither of them was given.
    return not isinstance(config, RLVRConfig) or (config.response_length or 0) >= 1 <= (config.sequence_length or 0)


def lengths(config: PipelineConfig) -> Findings:
    """C101, C102, C103."""
    if isinstance(config, RLVRConfig):
        if not has_lengths(config):
            yield "C102", "response_length", "set response_length or sequence_length"
            return
        p, r, s = config.prompt_length, config.response_length, config.sequence_length
        if s != p + r:
            message = f"{s} is not prompt_length {p} + response_length {r} = {p + r}; drop one of the three"
            yield "C101", "sequence_length", message
        sections = [(_GENERATING, config.actor_infer.generating_args)]
        if config.validation is not None:
            sections += config.validation.sampling.values()
        for key, generating in sections:
            if generating.max_new_tokens > r:
                yield "C103", f"{key}.max_new_tokens", f"{generating.max_new_tokens} exceeds response_length {r}"
    else:
        n, s = config.actor_infer.generating_args.max_new_tokens, config.longest_sequence
        if n >= s:  # the first observation takes tokens, too
            yield "C103", f"{_GENERATING}.max_new_tokens", f"{n} leaves no room in sequence_length {s}"


def engine_length(config: PipelineConfig) -> Findings:
    """C104."""
    if not has_lengths(config):
        return
    n = config.actor_infer.engine.context_tokens
    if n is not None and n < config.longest_sequence:
        key = f"actor_infer.strategy_args.strategy_config.{config.actor_infer.engine.traits.context_key}"
        yield "C104", key, f"{n} is below sequence_length {config.longest_sequence}"


def micro_batches(config: RunConfig) -> Findings:
    """C106, C107."""
    if not has_lengths(config):
        return
    s = config.longest_sequence
    for role, worker in config.roles():
        n = worker.max_tokens_per_microbatch
        if worker.micro_batching != "fixed" and (n is None or n < s):
            shown = "null" if n is None else n
            key = f"{role}.max_tokens_per_microbatch"
            yield "C106", key, f"{shown} cannot hold one sequence of sequence_length {s}"
        parallel = worker.strategy_args.strategy_config
        if isinstance(parallel, MegatronTrainConfig | MegatronInferConfig):
            tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
            pieces = (
                [(tp, f"{role}: tensor parallel {tp} with sequence_parallel")] if parallel.sequence_parallel else []
            )
            # Megatron gives each context rank two chunks, from both ends: causal attention costs more at the end.
            pieces += [(2 * cp, f"{role}: 2 * context parallel {cp}")] if cp > 1 else []
            for n, why in pieces:
                if s % n:
                    message = f"{s} is not divisible by {n} ({why}); use {math.ceil(s / n) * n}"
                    yield "C107", "sequence_length", message


def world_sizes(config: RunConfig) -> Findings:
    """C110."""
    for role, worker in config.roles():
        ids = worker.device_mapping
        if ids is not None and worker.world_size != len(ids):
            message = f"{worker.world_size} contradicts {len(ids)} devices in device_mapping; drop world_size"
            yield "C110", f"{role}.world_size", message


def devices(config: PipelineConfig) -> Findings:
    """C111, C112."""
    infer = set(config.actor_infer.device_mapping or ())
    key = "actor_infer.device_mapping"
    in_turns = config.colocation == "turns"
    for role, worker in config.roles() if config.is_async and in_turns else ():
        shared = sorted(infer & set(worker.device_mapping or ()))
        if role != "actor_infer" and shared:
            r = number(config.async_generation_ratio)
            message = (
                f"devices {ids_text(shared)} are also in {role}.device_mapping; async_generation_ratio={r} needs"
                " separate devices: move one, or set async_generation_ratio: 0"
            )
            yield "C111", key, message
    train = set(config.actor_train.device_mapping or ())
    if not (config.is_async and in_turns) and infer & train and not (infer <= train or train <= infer):
        shared = ids_text(sorted(infer & train))
        message = f"overlaps actor_train.device_mapping in part ({shared}); make them equal, nested or disjoint"
        yield "C112", key, message


def ids_text(ids: list[int]) -> str:
    """Device ids as a list, cut at 80 characters."""
    text = str(ids)
    return text if len(text) <= 80 else text[:77] + "..."


def parallel_sizes(config: RunConfig) -> Findings:
    """C113 to C117."""
    for role, worker in config.roles():
        parallel = worker.strategy_args.strategy_config
        settings = f"{role}.strategy_args.strategy_config"
        if isinstance(parallel, MegatronTrainConfig | MegatronInferConfig):
            yield from _megatron_sizes(role, worker, parallel)
            tp, tp_key = parallel.tensor_model_parallel_size, f"{settings}.tensor_model_parallel_size"
        else:
            tp, tp_key = parallel.tensor_parallel_size, f"{settings}.tensor_parallel_size"
            n, m = len(worker.device_mapping or ()), worker.model_parallel_size
            if n % m:
                message = (
                    f"{n} devices are not divisible by tensor {tp} * pipeline {parallel.pipeline_parallel_size} = {m}"
                )
                yield "C115", f"{role}.device_mapping", message
        if worker.device_mapping is not None and tp > config.num_gpus_per_node:
            yield "C117", tp_key, f"{tp} exceeds num_gpus_per_node {config.num_gpus_per_node}"


def _megatron_sizes(role: str, worker: WorkerConfig, parallel: MegatronTrainConfig | MegatronInferConfig) -> Findings:
    n, tp, pp = worker.num_ranks, parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    cp, ep, etp = (
        parallel.context_parallel_size,
        parallel.expert_model_parallel_size,
        parallel.expert_tensor_parallel_size,
    )
    key = f"{role}.device_mapping"
    if n % (tp * pp * cp):
        message = f"{n} ranks are not divisible by tensor {tp} * pipeline {pp} * context {cp} = {tp * pp * cp}"
        yield "C113", key, message
    # Megatron divides the ranks anew for experts: context parallel has no part in that.
    if n % (etp * ep * pp):
        message = f"{n} ranks are not divisible by expert tensor {etp} * expert {ep} * pipeline {pp} = {etp * ep * pp}"
        yield "C114", key, message
    if (
        isinstance(parallel, MegatronTrainConfig)
        and parallel.virtual_pipeline_model_parallel_size is not None
        and pp == 1
    ):
        name = "virtual_pipeline_model_parallel_size"
        message = f"{parallel.virtual_pipeline_model_parallel_size} needs pipeline_model_parallel_size > 1"
        yield "C116", f"{role}.strategy_args.strategy_config.{name}", message


def batch(config: PipelineConfig) -> Findings:
    """C121, C122."""
    if isinstance(config, AgenticConfig):
        managers = (
            ("rollout_batch_size", config.rollout_batch_size, config.train_env_manager.group_size),
            ("val_batch_size", config.val_batch_size, config.val_env_manager.group_size),
        )
        broken = [(key, b, g) for key, b, g in managers if b % g]
        for key, b, g in broken:
            yield "C122", key, f"{b} is not divisible by group_size {g}"
        if broken:
            return
        if any(env.manager == "step" for env in config.custom_envs.values()):
            yield from _batch_of_turns(config)
            return
    b, m, n = config.samples_per_batch, config.mini_batch_size, config.samples_per_group
    if b % m:
        per_group = n if isinstance(config, AgenticConfig) else 1  # the key counts trajectories there, prompts here
        groups = math.lcm(n, m) // n  # the fewest that are whole mini-batches
        near = max(groups, round(config.groups_per_batch / groups) * groups) * per_group
        message = (
            f"{config.groups_per_batch} groups * {n} samples = {b} samples per step, not divisible by the mini-batch"
            f" {_mini_batch(config)}; use {near}"
        )
        yield "C121", "rollout_batch_size", message


def _mini_batch(config: PipelineConfig) -> str:
    t = config.actor_train.training_args
    return (
        f"{config.mini_batch_size} = per_device_train_batch_size {t.per_device_train_batch_size} *"
        f" gradient_accumulation_steps {t.gradient_accumulation_steps} * data parallel {config.data_parallel_size}"
    )


def _batch_of_turns(config: AgenticConfig) -> Findings:
    """C121 where a row is a turn: a batch has any number of rows, and its mini-batches are made of equal size
    (`trainer/protocol.py: mini_batch_ranges`), so that only one that no batch can fill is wrong.
    """
    b, m = config.samples_per_batch, config.mini_batch_size
    longest = max(env.max_steps if env.manager == "step" else 1 for env in config.custom_envs.values())
    if m > b * longest:
        n = config.samples_per_group
        message = (
            f"{config.groups_per_batch} groups * {n} trajectories of at most {longest} turns = {b * longest} samples"
            f" per step at most, never as many as the mini-batch {_mini_batch(config)}; use"
            f" {math.ceil(m / longest / n) * n}"
        )
        yield "C121", "rollout_batch_size", message


def group_size(config: PipelineConfig) -> Findings:
    """C123, C124."""
    a, n = config.algorithm, config.samples_per_group
    is_rlvr = isinstance(config, RLVRConfig)
    key = "num_return_sequences_in_group" if is_rlvr else "train_env_manager.group_size"
    needs = [(a.adv_estimator in GROUP_RELATIVE, f"adv_estimator {a.adv_estimator}")]
    needs.append((a.norm_mean_type == "group", "norm_mean_type group"))
    needs.append((a.norm_std_type == "group", "norm_std_type group"))
    needs.append((a.filter_groups.enable, "filter_groups"))
    what = ", ".join(name for needed, name in needs if needed)
    if n < 2 and what:
        yield "C123", key, f"{n} is too small for {what}; at least 2 samples per group"
    given, wanted = config.actor_infer.generating_args.num_return_sequences, n if is_rlvr else 1
    if given != wanted:
        name = key if is_rlvr else "the agentic value"
        yield "C124", f"{_GENERATING}.num_return_sequences", f"{given} differs from {name} {wanted}; drop it"


def env_managers(config: PipelineConfig) -> Findings:
    """C125."""
    if not isinstance(config, AgenticConfig):
        return
    for key, manager in (("train_env_manager", config.train_env_manager), ("val_env_manager", config.val_env_manager)):
        for index, tag in enumerate(manager.tags):
            if tag not in config.custom_envs:
                yield "C125", f"{key}.tags.{index}", f"'{tag}' is not in custom_envs"
        yield from _partition(key, manager)
    val = config.val_env_manager
    if config.val_batch_size < (size := sum(val.num_groups_partition) * val.group_size):
        message = f"{config.val_batch_size} is below the {size} trajectories of val_env_manager.num_groups_partition"
        yield "C125", "val_batch_size", f"{message}, of which some would never be measured; use {size}"


def _partition(key: str, manager: EnvManagerConfig) -> Findings:
    parts = manager.num_groups_partition
    if len(parts) != len(manager.tags) or sum(parts) != manager.num_env_groups:
        message = f"{list(parts)} must have {len(manager.tags)} entries with sum {manager.num_env_groups}"
        yield "C125", f"{key}.num_groups_partition", message
        return
    for index, (tag, share) in enumerate(zip(manager.tags, parts, strict=True)):
        if not share:
            message = f"'{tag}' gets none of the {manager.num_env_groups} groups; raise num_env_groups, or leave it out"
            yield "C125", f"{key}.tags.{index}", message


def world_keys(config: PipelineConfig) -> Findings:
    """C125."""
    if not isinstance(config, AgenticConfig):
        return
    used = {*config.train_env_manager.tags, *config.val_env_manager.tags}
    for tag, env in config.custom_envs.items():
        if tag == "run":
            yield "C125", "custom_envs.run", "agent/run/ are the metrics of the whole run; choose another tag"
        if tag not in used:
            message = "the tags of neither train_env_manager nor val_env_manager name it; name it, or set it to null"
            yield "C125", f"custom_envs.{tag}", message
        if env.manager == "traj" and env.history_length:
            message = f"{env.history_length} is for manager: step; with traj all turns are shown, set it to 0"
            yield "C125", f"custom_envs.{tag}.history_length", message
    sampling, of_training = config.val_env_manager.generating_args, config.actor_infer.generating_args
    if sampling is not None and sampling.max_new_tokens != of_training.max_new_tokens:
        message = f"{sampling.max_new_tokens} has no effect: max_tokens_per_step of a world limits its turns; remove it"
        yield "C125", "val_env_manager.generating_args.max_new_tokens", message
    if extra := config.val_env_manager.group_size_redundancy:
        message = f"{extra} would leave out the slowest trajectories, and a validation counts them all; set it to 0"
        yield "C125", "val_env_manager.group_size_redundancy", message


def templates(config: PipelineConfig) -> Findings:
    """C125."""
    for tag, env in config.custom_envs.items() if isinstance(config, AgenticConfig) else ():
        texts = (("agent_system_template", env.agent_system_template), ("agent_template", env.agent_template))
        for name, text in texts:
            problem = None if text is None else problem_of(text, system=name == "agent_system_template")
            if problem is not None:
                yield "C125", f"custom_envs.{tag}.{name}", problem


def domains(config: PipelineConfig) -> Findings:
    """C128, C130."""
    if not isinstance(config, RLVRConfig):
        return
    yield from _shares("actor_train.data_args", config.actor_train.data_args, config)
    for key, data in {} if config.validation is None else dict(config.validation.data.values()).items():
        yield from _shares(key, data, config)
    owners: dict[str, list[str]] = {}
    for domain, reward in config.rewards.items():
        if not reward.tag_included and not reward.style_included and len(config.rewards) > 1:  # a single one takes all
            yield "C130", "rewards", f"domain {domain} has no tag_included"
        for tag in reward.tag_included:
            for other in owners.setdefault(tag, []):
                styles = (set(config.rewards[other].style_included), set(reward.style_included))
                # A domain without styles takes all of them.
                if not all(styles) or styles[0] & styles[1]:
                    yield "C130", "rewards", f"tag '{tag}' is in domains {other} and {domain}"
            owners[tag].append(domain)


def _shares(section: str, data: DataArguments | None, config: RLVRConfig) -> Findings:
    probs = data.domain_interleave_probs if data is not None else None
    if probs is None:
        return
    key = f"{section}.domain_interleave_probs"
    for domain in probs:
        if domain not in config.rewards:
            yield "C128", key, f"domain '{domain}' is not in rewards"
    # As written: ten times 0.1 is 1, which it is not as floats.
    total = sum(exact_ratio(p) for p in probs.values())
    if abs(total - 1) > exact_ratio(1e-6):
        yield "C128", key, f"sum is {number(float(total))}, not 1"


def template_time(config: RunConfig) -> Findings:
    """C005: what `datetime.fromisoformat` reads."""
    if config.template_time is not None:
        try:
            datetime.fromisoformat(config.template_time)
        except ValueError:
            yield (
                "C005",
                "template_time",
                f'"{config.template_time}" is no date and time; write 2026-11-26T05:01:12 or null',
            )


OF_ALL_KINDS = (template_time, micro_batches, world_sizes, parallel_sizes)
RULES = (lengths, engine_length, devices, batch, group_size, env_managers, world_keys, templates, domains)
