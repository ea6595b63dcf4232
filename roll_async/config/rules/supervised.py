"""Rules of configs without engines (C106, C121, C145), and what they do not read (W06, W12)."""

from roll_async.config.rules.shape import Findings
from roll_async.config.schema import DpoConfig, SupervisedConfig


def batch(config: SupervisedConfig) -> Findings:
    """C121."""
    given, args = config.train_batch_size, config.actor_train.training_args
    if args.gradient_accumulation_steps > 1 and given != config.mini_batch_size:
        message = (
            f"{given} is not per_device_train_batch_size {args.per_device_train_batch_size} *"
            f" gradient_accumulation_steps {args.gradient_accumulation_steps} * data parallel"
            f" {config.data_parallel_size} = {config.mini_batch_size}; drop one of the two"
        )
        yield "C121", "train_batch_size", message


def pairs_fit(config: SupervisedConfig) -> Findings:
    """C106: the two rows of a pair are in one micro-batch, because the loss compares them."""
    worker, needed = config.actor_train, 2 * config.sequence_length
    tokens = worker.max_tokens_per_microbatch
    if (
        isinstance(config, DpoConfig)
        and worker.micro_batching != "fixed"
        and config.sequence_length <= (tokens or 0) < needed
    ):
        message = (
            f"{tokens} cannot hold the two rows of a pair, of sequence_length {config.sequence_length}; use {needed}"
        )
        yield "C106", "actor_train.max_tokens_per_microbatch", message


def held_out(config: SupervisedConfig) -> Findings:
    """C145."""
    if config.eval_steps > 0 and config.validation is None:
        yield "C145", "validation", f"required by eval_steps={config.eval_steps}"


RULES = (batch, pairs_fit, held_out)
