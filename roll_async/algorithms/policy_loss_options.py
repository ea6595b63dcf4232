"""The options classes of the policy losses, for code on tensors only; `config/` defines them, once."""

from roll_async.config.policy_loss_options import *  # noqa: F403
