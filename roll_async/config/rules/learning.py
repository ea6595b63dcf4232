"""Rules about what is learned and measured (C105, C141 to C150, C152 to C156)."""

from dataclasses import asdict
from urllib.parse import urlsplit

from roll_async.config.options.advantage_options import AGENTIC_ONLY
from roll_async.config.options.correction_options import carries_behaviour_policy
from roll_async.config.rules.shape import Findings, has_lengths, number
from roll_async.config.schema import AgenticConfig, PipelineConfig, RLVRConfig, RunConfig, roles_in_turns
from roll_async.config.schema_rollout import MAIN_SET
from roll_async.config.schema_worker import MegatronTrainConfig


def overlong(config: PipelineConfig) -> Findings:
    """C105, C143."""
    a, key = config.algorithm, "algorithm.overlong_buffer.len"
    if a.overlong_buffer.enable and isinstance(config, RLVRConfig) and has_lengths(config):
        n, r = a.overlong_buffer.len, config.response_length
        if not 0 < n < r:
            yield "C105", key, f"{n} must lie between 1 and response_length {r} - 1"
    elif a.overlong_buffer.enable and isinstance(config, AgenticConfig):
        yield "C105", key, f"{a.overlong_buffer.len} has no effect: overlong_buffer is for rlvr configs"
    if a.max_len_mask and a.overlong_buffer.enable:
        message = "true cannot be combined with overlong_buffer.enable; keep one"
        yield "C143", "algorithm.max_len_mask", message


def needed_roles(config: PipelineConfig) -> Findings:
    """C141, C142, C145."""
    a = config.algorithm
    if a.adv_estimator == "gae" and config.critic is None:
        yield "C141", "critic", "required by adv_estimator gae"
    for name, value in (("kl_loss_coef", a.kl_loss_coef), ("token_kl_coef", a.token_kl_coef)):
        if value > 0 and config.reference is None:
            yield "C142", "reference", f"required by algorithm.{name}={number(value)}"
    distilled = [name for name, part in config.loss_parts.items() if part == "reference_kl"]
    if distilled and not a.kl_loss_coef > 0:
        yield (
            "C142",
            "algorithm.kl_loss_coef",
            f"0 leaves rewards.{distilled[0]} (distilled) without a loss; use > 0",
        )
    if a.distill_coef > 0 and not config.teacher_names:
        yield "C142", "teacher", f"required by algorithm.distill_coef={number(a.distill_coef)}"
    if isinstance(config, RLVRConfig) and config.eval_steps > 0 and config.validation is None:
        yield "C145", "validation", f"required by eval_steps={config.eval_steps}"


def teachers(config: PipelineConfig) -> Findings:
    """C156."""
    names, sampling = config.teacher_names, config.actor_infer.generating_args
    of_all = {"temperature": 1, "top_p": 1, "top_k": -1}  # what samples the whole distribution
    if config.teacher is not None and config.teachers:
        yield "C156", "teacher", f"cannot be combined with teachers.{next(iter(config.teachers))}; keep one"
    for name, server in config.teacher_servers.items():
        key, url = f"teachers.{name}.address", urlsplit(server.address)
        if url.scheme not in ("http", "https") or not url.hostname:
            yield "C156", key, f"'{server.address}' is no address; write http://HOST:PORT/v1"
        if other := next((n for n, value in of_all.items() if getattr(sampling, n) != value), None):
            message = f"a server gives log-probs of the whole distribution; set actor_infer.generating_args.{other}"
            yield "C156", key, f"{message}: {of_all[other]}, or give a folder in place of the address"
    untaught = [d for d in config.domains if d not in names and d not in config.loss_parts]
    if isinstance(config, AgenticConfig) and len(names) > 1 and untaught:  # rows of files have a column
        yield "C156", "teachers", f"none has the name of the tag {untaught[0]}; name one like each tag, or use a single"


def validation_place(config: PipelineConfig) -> Findings:
    """C153, C154."""
    mode, shared = config.validation_mode, roles_in_turns(config)
    if mode != "pause" and shared:
        message = f"{mode} needs engines that run all the time, and {', '.join(shared)} shares their devices; use pause"
        yield "C153", "validation.mode" if isinstance(config, RLVRConfig) else "val_env_manager.mode", message
    if (own := config.num_validation_replicas) and own >= config.num_servers:
        there = config.num_servers
        key = "validation" if isinstance(config, RLVRConfig) else "val_env_manager"
        remedy = f"use {there - 1}" if there > 1 else f"set {key}.mode: share"
        message = f"{own} leaves none of actor_infer's {there} replicas for training; {remedy}"
        yield "C154", f"{key}.num_replicas", message


def validation_sets(config: PipelineConfig) -> Findings:
    """C155."""
    if isinstance(config, RLVRConfig) and config.validation is not None and MAIN_SET in config.validation.sets:
        message = f"'{MAIN_SET}' is the name of the main set in the results of roll-async eval; choose another name"
        yield "C155", f"validation.sets.{MAIN_SET}", message


def agentic_only(config: PipelineConfig) -> Findings:
    """C144."""
    a = config.algorithm
    if isinstance(config, AgenticConfig):
        return
    if a.adv_estimator in AGENTIC_ONLY:
        yield "C144", "algorithm.adv_estimator", f"{a.adv_estimator} is for agentic configs"
    if asdict(a.pg_options).get("ratio_level") == "segment":
        yield "C144", "algorithm.pg_options.ratio_level", "segment is for agentic configs"


def double_correction(config: PipelineConfig) -> Findings:
    """C146. The default was already set to none where this would hold."""
    a = config.algorithm
    level = a.correction.weight_level
    if level != "none" and carries_behaviour_policy(a.pg_variant, a.pg_options.ratio_base):
        message = (
            f"{level} would correct twice: {a.pg_variant} with ratio_base {a.pg_options.ratio_base} already carries the"
            " behaviour policy; set it to none"
        )
        yield "C146", "algorithm.correction.weight_level", message


def roles(config: RunConfig) -> Findings:
    """C147, C148."""
    for role, worker in config.roles():
        if worker.micro_batching == "packed" and worker.router_replay:
            yield "C147", f"{role}.micro_batching", "packed cannot be combined with router_replay"
        settings = worker.strategy_args.strategy_config
        if isinstance(settings, MegatronTrainConfig) and settings.recompute_granularity is not None:
            if worker.model_args.disable_gradient_checkpointing:
                key = f"{role}.model_args.disable_gradient_checkpointing"
                yield "C148", key, f"true contradicts recompute_granularity={settings.recompute_granularity}"


def greedy(config: PipelineConfig) -> Findings:
    """C149."""
    if config.actor_infer.generating_args.temperature == 0:
        message = "0 is greedy: every sample of a group would be equal; use > 0"
        yield "C149", "actor_infer.generating_args.temperature", message


def weights_of_one(config: PipelineConfig) -> Findings:
    """C150. The pairs of bounds are checked before the config is built (`rules/contradictions.py`)."""
    a = config.algorithm
    if a.proximal_logprobs == "behaviour" and a.correction.is_on:
        yield "C150", "algorithm.correction", "all weights would be 1"


def proximal_before_the_step(config: PipelineConfig) -> Findings:
    """C152."""
    mode, normalise = config.algorithm.proximal_logprobs, config.algorithm.correction.normalise
    reason = config.proximal_needed_early if mode == "reuse" else None
    if mode == "interpolate" and normalise != "none":
        reason = f"correction.normalise {normalise}, which needs them before the step"
    if reason is not None:
        message = f"{mode} is not possible with {reason}; use auto"
        yield "C152", "algorithm.proximal_logprobs", message


OF_ALL_KINDS = (roles,)
RULES = (
    overlong,
    needed_roles,
    teachers,
    validation_place,
    validation_sets,
    agentic_only,
    double_correction,
    greedy,
    weights_of_one,
    proximal_before_the_step,
)
