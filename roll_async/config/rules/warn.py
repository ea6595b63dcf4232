"""Warnings W02 to W15: allowed, but probably not intended."""

from roll_async.config import processor
from roll_async.config.options.policy_loss_options import DecoupledPpoOptions, Kimi15Options, KlCovOptions
from roll_async.config.rules.every import placed
from roll_async.config.rules.shape import Findings
from roll_async.config.schema import (
    PipelineConfig,
    RLVRConfig,
    RunConfig,
    SupervisedConfig,
    WorkerConfig,
    roles_on_engine_devices,
)
from roll_async.config.schema_async import InterruptConfig
from roll_async.config.schema_worker import MegatronInferConfig, MegatronTrainConfig
from roll_async.config.yaml.diagnostics import Diagnostic
from roll_async.config.yaml.node import Node, find

_MANY_STEPS = 16
"""Optimizer steps on one batch; more are hardly meant."""
_AT_THE_START = ("auto", "recompute", "reuse")
"""Sources of proximal log-probs that are those of the weights before the step."""


def find_warnings(config: RunConfig, root: Node) -> list[Diagnostic]:
    """All warnings of a valid config, in the order of their ids."""
    if isinstance(config, SupervisedConfig):
        found = [*sequence_parallel(config), *emulated(config), *of_given_rows(config, root), *attention(config)]
        return [placed(*finding, root) for finding in found]
    assert isinstance(config, PipelineConfig)
    found = [finding for rule in _RULES for finding in rule(config)]
    found_in_text = (*written_without_effect(config, root), *attention(config), *many_small_steps(config, root))
    return [placed(*finding, root) for finding in (*found, *found_in_text)]


def of_given_rows(config: SupervisedConfig, root: Node) -> Findings:
    """W06, W12."""
    if config.validation is not None and not config.eval_steps:
        yield "W06", "validation", "validation is configured but nothing uses it"
    if config.num_train_epochs is not None and find(root, ["max_steps"]) is not None:
        yield "W12", "max_steps", f"no effect: num_train_epochs={config.num_train_epochs} ends the run"


def ratio_is_one(config: PipelineConfig) -> Findings:
    """W02. decoupled_ppo is left out: its weight carries the behaviour policy."""
    a = config.algorithm
    uncorrected = (
        config.is_async
        and config.optimizer_steps_per_part == 1
        and a.pg_options.ratio_base == "proximal"
        and a.proximal_logprobs in _AT_THE_START
        and a.correction.weight_level == "none"
        and not isinstance(a.pg_options, DecoupledPpoOptions)
    )
    if uncorrected:
        message = (
            f"the ratio is always 1: one optimizer step {_per(config)}, ratio_base proximal, proximal_logprobs"
            f" {a.proximal_logprobs} and correction.weight_level none; staleness is not corrected"
        )
        yield "W02", "algorithm.correction.weight_level", message


def penalty_is_zero(config: PipelineConfig) -> Findings:
    """W10: a penalty on the distance from the policy that a batch, or a part of it, starts from and never leaves."""
    a = config.algorithm
    has_penalty = isinstance(a.pg_options, Kimi15Options | KlCovOptions)
    at_the_start = a.pg_options.ratio_base == "proximal" and a.proximal_logprobs in _AT_THE_START
    if has_penalty and at_the_start and config.optimizer_steps_per_part == 1:
        message = (
            f"the penalty of {a.pg_variant} is zero: with one optimizer step {_per(config)} the weights are those of"
            " ratio_base proximal; set it to behaviour, or take several optimizer steps"
        )
        yield "W10", "algorithm.pg_options.ratio_base", message


def _per(config: PipelineConfig) -> str:
    """Rows whose proximal policy is that of the weights before them."""
    whole = config.async_training.require_batches == config.mini_batches_per_batch
    return "per batch" if whole else "per part of a batch (async_training.require_batches)"


def dtypes(config: PipelineConfig) -> Findings:
    """W03."""
    a, b = config.actor_infer.model_args.dtype, config.actor_train.model_args.dtype
    if a != b:
        message = f"actor_infer dtype {a} differs from actor_train dtype {b}: expect log-prob mismatch"
        yield "W03", "actor_infer.model_args.dtype", message


def truncation(config: PipelineConfig) -> Findings:
    """W04."""
    g = config.actor_infer.generating_args
    if g.top_p < 1 or g.top_k != -1:
        message = (
            f"top_p={g.top_p}, top_k={g.top_k} sample from a truncated distribution; log-probs are renormalised over"
            " the kept tokens on both sides"
        )
        yield (
            "W04",
            "actor_infer.generating_args.top_p" if g.top_p < 1 else "actor_infer.generating_args.top_k",
            message,
        )


def sequence_parallel(config: RunConfig) -> Findings:
    """W05."""
    for role, worker in config.roles():
        s = worker.strategy_args.strategy_config
        if (
            isinstance(s, MegatronTrainConfig | MegatronInferConfig)
            and s.sequence_parallel
            and s.tensor_model_parallel_size == 1
        ):
            message = "sequence_parallel has no effect with tensor_model_parallel_size 1"
            yield "W05", f"{role}.strategy_args.strategy_config.sequence_parallel", message


def unused(config: PipelineConfig) -> Findings:
    """W06."""
    a = config.algorithm
    used = {
        "reference": a.kl_loss_coef > 0 or a.token_kl_coef > 0,
        "critic": a.adv_estimator == "gae",
        "teacher": a.distill_coef > 0,
        "teachers": a.distill_coef > 0,
        "validation": config.eval_steps > 0,
    }
    configured = {role for role, _ in config.roles()} | ({"teachers"} if config.teachers else set())
    if isinstance(config, RLVRConfig) and config.validation is not None:
        configured.add("validation")
    for name, is_used in used.items():
        if name in configured and not is_used:
            yield "W06", name, f"{name} is configured but nothing uses it"


def discarding(config: PipelineConfig) -> Findings:
    """W07."""
    s = config.async_training.staleness
    if s.policy != "wait" and s.max_versions < config.staleness_bound:
        message = (
            f"policy {s.policy} will discard work by design: max_versions {s.max_versions} is below the"
            f" {config.staleness_bound} versions admitted"
        )
        yield "W07", "async_training.staleness.policy", message


def without_effect(config: PipelineConfig) -> Findings:
    """W08."""
    s, interrupt = config.async_training.staleness, config.async_training.interrupt
    if config.is_async or config.async_training.trigger_parameter_sync_step > 1:
        return
    message = "no effect with async_generation_ratio 0 and trigger_parameter_sync_step 1"
    if (s.max_versions, s.policy, s.soft_versions, s.allow_above_8) != (config.staleness_bound, "wait", None, False):
        yield "W08", "async_training.staleness", message
    if interrupt != InterruptConfig():
        yield "W08", "async_training.interrupt", message


def written_without_effect(config: PipelineConfig, root: Node) -> Findings:
    """W12: keys that a file or an override names and this run does not read; configs of other systems have them."""
    bound, engine = config.queue_bound_groups, config.actor_infer.strategy_args.strategy_name
    staleness = config.async_training.staleness
    cases = (
        ("reward_pretrain", config.critic is None, "it is the critic's model, and there is no critic"),
        (
            "actor_infer.infer_batch_size",
            config.actor_infer.engine.traits.forms_batches,
            f"{engine} forms its batches itself",
        ),
        (
            "async_training.max_queue_size",
            config.async_training.max_queue_size > bound,
            f"admission never lets more than ceil((1 + r) * W) = {bound} groups wait; a lower value would bound them",
        ),
        (
            "async_training.staleness.soft_versions",
            (staleness.soft_versions or 0) > staleness.max_versions,
            f"no sample is older than max_versions {staleness.max_versions}",
        ),
        (
            "colocation",
            config.colocation == "resident" and not roles_on_engine_devices(config),
            "no role shares a device with actor_infer",
        ),
        (
            "actor_infer.strategy_args.strategy_config.extra.enable_sleep_mode",
            config.colocation == "resident",
            "engines never sleep with colocation: resident",
        ),
        (
            "tracking.samples_every",
            config.tracking.samples_per_step == 0 and config.tracking.rollout_dump_dir is None,
            "no samples are kept to show: samples_per_step is 0",
        ),
        ("validation.num_replicas", config.validation_mode != "replicas", "it is for mode replicas"),
        ("val_env_manager.num_replicas", config.validation_mode != "replicas", "it is for mode replicas"),
    )
    for key, ignored, why in cases:
        if ignored and find(root, key.split(".")) is not None:
            yield "W12", key, f"no effect: {why}"


def attention(config: RunConfig) -> Findings:
    """W12: kernels that cannot be chosen, and activations of roles that keep none."""
    for role, worker in config.roles():
        attention, strategy = worker.model_args.attn_implementation, worker.strategy_args.strategy_name
        chooses = not worker.is_megatron and worker.engine.traits.takes_attention
        if attention != "auto" and not chooses and not (attention == "fa2" and _has_flash_attention(worker)):
            key = f"{role}.model_args.attn_implementation"
            yield "W12", key, f"no effect: {attention} cannot be chosen, {strategy} takes its own; use auto"
        if worker.model_args.disable_gradient_checkpointing and not strategy.endswith("_train"):
            yield "W12", f"{role}.model_args.disable_gradient_checkpointing", f"no effect: {role} trains nothing"


def many_small_steps(config: PipelineConfig, root: Node) -> Findings:
    """W15: what the default of 1 makes of a batch of the usual size."""
    key, steps = "actor_train.training_args.gradient_accumulation_steps", config.mini_batches_per_batch
    if steps > _MANY_STEPS and find(root, key.split(".")) is None:
        size, ranks = config.mini_batch_size, config.actor_train.training_args.per_device_train_batch_size
        whole = config.samples_per_batch // (ranks * config.data_parallel_size)
        message = f"not set, so each batch is {steps} optimizer steps of {size} samples; {whole} makes it one"
        yield "W15", key, message


def _has_flash_attention(role: WorkerConfig) -> bool:
    """Whether fa2 chooses something, or names what is there: Transformer Engine's layers, and vLLM, on devices."""
    strategy = role.strategy_args.strategy_config
    megatron = isinstance(strategy, MegatronTrainConfig | MegatronInferConfig)
    has_choice = strategy.transformer_impl != "local" if megatron else strategy.traits.fa2_on_devices
    return has_choice and role.device_mapping is not None


def on_cpu(config: PipelineConfig) -> Findings:
    """W09."""
    workers = list(config.roles())
    with_devices = [role for role, worker in workers if worker.device_mapping is not None]
    for role, worker in workers:
        if worker.device_mapping is None and with_devices:
            message = f"{role} runs on CPU (device_mapping is null) while {with_devices[0]} uses devices"
            yield "W09", f"{role}.device_mapping", message


def emulated(config: RunConfig) -> Findings:
    """W13."""
    workers = list(config.roles())
    if processor.multiplies_bf16() or any(worker.device_mapping is not None for _, worker in workers):
        return
    for role, worker in workers:
        if worker.model_args.dtype == "bf16":
            yield "W13", f"{role}.model_args.dtype", "bf16 is emulated by this CPU and slower than fp32; set it to fp32"


_RULES = (
    ratio_is_one, dtypes, truncation, sequence_parallel, unused, discarding, without_effect, on_cpu, penalty_is_zero,
    emulated,
)  # fmt: skip
