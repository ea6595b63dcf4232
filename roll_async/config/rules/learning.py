"""Rules about what is learned (C105, C141 to C150)."""

from roll_async.config.loading.build import carries_behaviour_policy
from roll_async.config.rules.shape import Findings, has_lengths, number
from roll_async.config.schema import AgenticConfig, PipelineConfig, RLVRConfig
from roll_async.config.schema_options import AGENTIC_ONLY, RejectionRule, option_values
from roll_async.config.schema_worker import MegatronTrainConfig

_PAIRS = (
    ("weight_low", "weight_high"), ("tis_lower_bound", "tis_upper_bound"), ("cov_low", "cov_high"),
    ("weight_lower", "weight_upper"), ("band_low", "band_high"), ("low", "high"),
)  # fmt: skip
"""Lower and upper bound of one quantity."""


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
    if a.distill_coef > 0 and config.teacher is None:
        yield "C142", "teacher", f"required by algorithm.distill_coef={number(a.distill_coef)}"
    if isinstance(config, RLVRConfig) and config.eval_steps > 0 and config.validation is None:
        yield "C145", "validation", f"required by eval_steps={config.eval_steps}"


def agentic_only(config: PipelineConfig) -> Findings:
    """C144."""
    a = config.algorithm
    if isinstance(config, AgenticConfig):
        return
    if a.adv_estimator in AGENTIC_ONLY:
        yield "C144", "algorithm.adv_estimator", f"{a.adv_estimator} is for agentic configs"
    if option_values(a.pg_options).get("ratio_level") == "segment":
        yield "C144", "algorithm.pg_options.ratio_level", "segment is for agentic configs"


def double_correction(config: PipelineConfig) -> Findings:
    """C146. The default was already set to none where this would hold."""
    a = config.algorithm
    level = a.correction.weight_level
    if level != "none" and carries_behaviour_policy(a.pg_options):
        message = (
            f"{level} would correct twice: {a.pg_variant} with ratio_base {a.pg_options.ratio_base} already carries the"
            " behaviour policy; set it to none"
        )
        yield "C146", "algorithm.correction.weight_level", message


def roles(config: PipelineConfig) -> Findings:
    """C147, C148, C149."""
    for role, worker in config.roles():
        if worker.micro_batching == "packed" and worker.router_replay:
            yield "C147", f"{role}.micro_batching", "packed cannot be combined with router_replay"
        settings = worker.strategy_args.strategy_config
        if isinstance(settings, MegatronTrainConfig) and settings.recompute_granularity is not None:
            if worker.model_args.disable_gradient_checkpointing:
                key = f"{role}.model_args.disable_gradient_checkpointing"
                yield "C148", key, f"true contradicts recompute_granularity={settings.recompute_granularity}"
    if config.actor_infer.generating_args.temperature == 0:
        message = "0 is greedy: every sample of a group would be equal; use > 0"
        yield "C149", "actor_infer.generating_args.temperature", message


def bounds(config: PipelineConfig) -> Findings:
    """C150, and C005 and C006 where a bound depends on its neighbours."""
    a, key = config.algorithm, "algorithm.correction"
    yield from _pairs("algorithm.pg_options", option_values(a.pg_options))
    values = {name: getattr(a.correction, name) for name in ("weight_lower", "weight_upper", "band_low", "band_high")}
    yield from _pairs(key, values)
    for index, rule in enumerate(a.correction.rejections):
        yield from _rejection(f"{key}.rejections.{index}", rule)
    if a.proximal_logprobs == "behaviour" and a.correction.is_on:
        yield "C150", key, "all weights would be 1"


def _pairs(key: str, values: dict[str, object]) -> Findings:
    for low_name, high_name in _PAIRS:
        low, high = values.get(low_name), values.get(high_name)
        if not isinstance(low, float) or not isinstance(high, float):
            continue
        if low > high:
            yield "C150", key, f"{number(low)} exceeds {number(high)}"
        elif low == high and low_name == "cov_low":
            yield "C005", f"{key}.{low_name}", f"{number(low)} must be < {high_name} {number(high)}"


def _rejection(key: str, rule: RejectionRule) -> Findings:
    yield from _pairs(key, {"low": rule.low, "high": rule.high})
    if rule.statistic != "k1" and rule.low is not None:
        yield "C005", f"{key}.low", f"{number(rule.low)} must be null with statistic {rule.statistic}"
    elif rule.high is None and (rule.low is None or rule.statistic != "k1"):
        yield "C006", f"{key}.high", "required and not set; a rule needs a bound"


RULES = (overlong, needed_roles, agentic_only, double_correction, roles, bounds)
