"""Rules about running ahead: the queue, the staleness bound, interruption (C126, C129, C131 to C137, C151)."""

from roll_async.config.rules.shape import Findings, number
from roll_async.config.schema import PipelineConfig, RLVRConfig
from roll_async.config.schema_async import AsyncTrainingConfig, FaultPolicy, InterruptConfig

_STALENESS = "async_training.staleness"


def streaming(config: PipelineConfig) -> Findings:
    """C126."""
    n, m, per_group = (
        config.async_training.require_batches,
        config.mini_batches_per_batch,
        config.samples_per_group,
    )
    key = "async_training.require_batches"
    if m % n:
        yield "C126", key, f"{n} does not divide the {m} mini-batches of a step"
    elif n < m and config.mini_batch_size % per_group:
        size = config.mini_batch_size
        yield "C126", key, f"{n} needs whole groups in a mini-batch of {size} samples; {per_group} per group"


def staleness(config: PipelineConfig) -> Findings:
    """C131, C132, C133."""
    s, k, r = (
        config.async_training.staleness,
        config.async_training.trigger_parameter_sync_step,
        config.async_generation_ratio,
    )
    n, bound = s.max_versions, config.staleness_bound
    key = f"{_STALENESS}.max_versions"
    if n < k - 1:
        yield "C131", key, f"{n} is below {k - 1}, which trigger_parameter_sync_step={k} alone produces"
    elif s.policy == "wait" and n < bound:
        message = (
            f"{n} is below the {bound} versions that async_generation_ratio={number(r)} admits; with policy wait lower"
            " async_generation_ratio or raise it"
        )
        yield "C132", key, message
    if n > 8 and not s.allow_above_8:
        message = (
            f"{n} versions (async_generation_ratio={number(r)}, trigger_parameter_sync_step={k}) is more than 8, where"
            f" training is known to degrade; set {_STALENESS}.allow_above_8: true to accept it"
        )
        yield "C133", key, message


def behaviour_logprobs(config: PipelineConfig) -> Findings:
    """C134."""
    if config.actor_infer.generating_args.logprobs:
        return
    a = config.algorithm
    reasons = []
    if config.is_async:
        reasons.append(f"async_generation_ratio={number(config.async_generation_ratio)}")
    if a.pg_options.ratio_base == "behaviour":
        reasons.append("ratio_base behaviour")
    if a.proximal_logprobs in ("interpolate", "behaviour"):
        reasons.append(f"proximal_logprobs {a.proximal_logprobs}")
    if a.correction.is_on:
        reasons.append("algorithm.correction")
    if reasons:
        message = f"false, but {reasons[0]} needs behaviour log-probs; set it to true"
        yield "C134", "actor_infer.generating_args.logprobs", message


def queue(config: PipelineConfig) -> Findings:
    """C129, C135."""
    n, groups = config.async_training.max_queue_size, config.groups_per_batch
    if n < groups:
        message = f"{n} cannot hold the {groups} groups of one batch; the trainer would wait forever"
        yield "C135", "async_training.max_queue_size", message
    size = config.algorithm.filter_groups.gen_batch_size
    if size < groups:
        yield "C129", "algorithm.filter_groups.gen_batch_size", f"{size} is below the {groups} groups of a batch"


def interruption(config: PipelineConfig) -> Findings:
    """C136, C137."""
    mode, engine = config.async_training.interrupt.mode, config.actor_infer.strategy_args.strategy_name
    if mode == "keep" and not config.actor_infer.engine.traits.keep_in_place:
        yield "C136", "async_training.interrupt.mode", f"keep is not possible with {engine}; use resume"
    is_batched = isinstance(config, RLVRConfig) and not config.is_num_return_sequences_expand
    if is_batched and config.is_async and mode == "resume" and config.samples_per_group > 1:
        message = "false cannot be resumed with async_training.interrupt.mode=resume; set it to true or use wait"
        yield "C137", "is_num_return_sequences_expand", message


def time_outs(config: PipelineConfig) -> Findings:
    """C151: what ends a request, a step of a world or a pause has to come before what ends the run or the push.

    Defaults are exempt: replicas that report no token are found within a minute whatever the time-outs, and the
    default `generation_timeout` relies on that.
    """
    wait, fault, interrupt = config.async_training, config.fault, config.async_training.interrupt
    stall, sync = ("fault.stall_timeout", fault.stall_timeout), ("async_training.sync_timeout", wait.sync_timeout)
    pairs = (
        ("async_training.generation_timeout", wait.generation_timeout, AsyncTrainingConfig().generation_timeout, stall),
        ("fault.env_timeout", fault.env_timeout, FaultPolicy().env_timeout, stall),
        ("async_training.interrupt.timeout", interrupt.timeout, InterruptConfig().timeout, sync),
    )
    for key, value, default, (end, limit) in pairs:
        if value >= limit and value != default:
            message = (
                f"{number(value)} is never reached: {end} ends the wait after {number(limit)};"
                f" use < {number(limit)}, or raise {end}"
            )
            yield "C151", key, message


RULES = (streaming, staleness, behaviour_logprobs, queue, interruption, time_outs)
