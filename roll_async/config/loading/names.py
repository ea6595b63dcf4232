"""Other names of keys (accepted, warning W01) and the keys of ROLL and verl that are refused with the reason (C002)."""

from dataclasses import fields

from roll_async.config.loading.compose import type_name
from roll_async.config.loading.devices import MAX_DEVICES, parse_devices
from roll_async.config.loading.diagnostics import Diagnostic, shown
from roll_async.config.loading.node import Node, Plain, drop, find, plain, put
from roll_async.config.schema import ROLES, AlgorithmConfig, PipelineConfig

_GPUS_PER_NODE: int = next(f.default for f in fields(PipelineConfig) if f.name == "num_gpus_per_node")  # type: ignore[assignment]
_ASYNC = "async_training"
_PG = "algorithm.pg_options"
_ACTOR = "actor_rollout_ref.actor"

_ALIASES: dict[str, tuple[str, ...]] = {
    f"{_ASYNC}.staleness_threshold": (f"{_ASYNC}.staleness.soft_versions",),
    f"{_ASYNC}.max_staleness_allowed": (f"{_ASYNC}.staleness.max_versions",),
    f"{_ASYNC}.min_batch_count": (f"{_ASYNC}.require_batches",),
    f"{_ASYNC}.batch_generation_interval": (f"{_ASYNC}.batch_creation_interval",),
    "batch_generation_interval": (f"{_ASYNC}.batch_creation_interval",),
    "batch_creation_interval": (f"{_ASYNC}.batch_creation_interval",),
    "max_concurrent_per_server": (f"{_ASYNC}.max_concurrent_per_server",),
    "max_running_requests": (f"{_ASYNC}.max_concurrent_per_server",),
    f"{_ACTOR}.loss_agg_mode": ("algorithm.loss_agg_mode",),
    "data.train_batch_size": ("rollout_batch_size",),
    "data.gen_batch_size": ("algorithm.filter_groups.gen_batch_size",),
    "data.max_prompt_length": ("prompt_length",),
    "data.max_response_length": ("response_length",),
    "reward_model.overlong_buffer": ("algorithm.overlong_buffer",),
    "actor_train.pg_variant": ("algorithm.pg_variant",),
    "actor_train.model_update_frequency": (f"{_ASYNC}.trigger_parameter_sync_step",),
    "max_grad_norm": ("actor_train.training_args.max_grad_norm",),
    "track_with": ("tracking.track_with",),
    "tracker_kwargs": ("tracking.tracker_kwargs",),
    "rollout_dump_dir": ("tracking.rollout_dump_dir",),
    "resume_from_checkpoint": ("checkpoint.resume_from",),
    "max_ckpt_to_keep": ("checkpoint.max_to_keep",),
    "checkpoint_config.output_dir": ("checkpoint.output_dir",),
    "model_update_buffer_size_mb": ("weight_sync.bucket_size_mb",),
    "rpc_timeout": ("fault.rpc_timeout",),
}
for _place in ("", "algorithm.", f"{_ACTOR}."):
    for _prefix in ("clip_ratio", "pg_clip"):
        _ALIASES[f"{_place}{_prefix}_low"] = (f"{_PG}.clip_low",)
        _ALIASES[f"{_place}{_prefix}_high"] = (f"{_PG}.clip_high",)
    _ALIASES[f"{_place}pg_clip"] = (f"{_PG}.clip_low", f"{_PG}.clip_high")
for _place in ("", "algorithm."):
    _ALIASES[f"{_place}gamma"] = ("algorithm.adv_options.gamma",)
    _ALIASES[f"{_place}lambd"] = ("algorithm.adv_options.lam",)
for _role in ROLES:
    _ALIASES[f"{_role}.model_args.flash_attn"] = (f"{_role}.model_args.attn_implementation",)

_SGLANG = "actor_infer.strategy_args"
_SGLANG_ALIASES = {
    f"{_SGLANG}.strategy_config.tp_size": (f"{_SGLANG}.strategy_config.tensor_parallel_size",),
    f"{_SGLANG}.strategy_config.pp_size": (f"{_SGLANG}.strategy_config.pipeline_parallel_size",),
}
_LOSS_PREFIXES = ("tis_", "topr_", "cispo_", "kimi15_")
_ALGORITHM_FIELDS = frozenset(f.name for f in fields(AlgorithmConfig))

_DERIVED = "derived; use algorithm.proximal_logprobs: recompute or behaviour"
_KL = "set kl_loss_coef > 0 or token_kl_coef > 0; kl_estimator (kl = k1, mse = k2)"
_RATIO = "use algorithm.pg_options.ratio_level (seq = sequence)"
_DIFFICULTY = "use algorithm.difficulty_low and difficulty_high"
_PACKING = "use micro_batching and max_tokens_per_microbatch"
_NO_CHOICE = "no choice to make here; remove it"
_OFFLOAD = "weights stay on their devices; remove it, or use optimizer_cpu_offload for the optimizer's state"
_NEVER_READ = "was never read; remove it"
_FOLLOWS = "follows from the role, pg_variant and strategy; remove it"

_REASONS: dict[str, tuple[str, ...]] = {
    _FOLLOWS: ("worker_cls", "env_manager_cls", "num_gpus_per_worker"),
    "use async_training.interrupt.mode: resume (true) or wait (false)": ("partial_rollout",),
    "set algorithm.pg_options.clip_low and clip_high": ("use_pg_clip_range",),
    "set algorithm.pg_options.dual_clip to a number (ROLL's is 1 + 2*pg_clip) or null": ("dual_clip_loss",),
    _KL: ("use_kl_loss", "add_token_level_kl", "init_kl_coef", "kl_penalty"),
    _RATIO: ("importance_sampling", "ratio_type"),
    _DERIVED: (
        "enable_reference", "enable_old_logprobs_recompute", "force_disable_old_logprobs_recompute",
        "use_rollout_log_probs", "compute_prox_log_prob",
    ),
    "use algorithm.correction": ("train_infer_correction", "rollout_correction"),
    "use algorithm.filter_groups": ("query_filter_config", "response_filter_config"),
    _DIFFICULTY: ("difficulty_mask", "difficulty_low_threshold", "difficulty_high_threshold"),
    "use norm_mean_type and norm_std_type: batch": ("whiten_rewards",),
    "use algorithm.filter_groups.gen_batch_size": (
        "is_use_additional_prompts", "use_additional_prompts", "max_additional_running_prompts",
    ),
    _PACKING: (
        "use_dynamic_batching_in_train", "use_dynamic_batching_in_infer", "use_sequence_packing",
        "max_tokens_per_microbatch_in_train", "max_tokens_per_microbatch_in_infer",
    ),
    _NO_CHOICE: (
        "generate_opt_level", "user_defined_rollout_loop_cls", "router_args", "transfer_backend", "rollout_mock",
        "partial_gpu_mode", "batch_adjust_mode", "num_nodes", "local_rank", "checkpoint_config.type", "logging_dir",
        "base_dir", "hydra",
    ),
    _OFFLOAD: ("is_offload_states", "is_offload_optimizer_states_in_train_step", "offload_nccl"),
    _NEVER_READ: (
        "l2", "use_reward_scaling", "add_len_reward", "use_reward_norm", "report_length_and_rewards", "val_greedy",
        "val_n_sample", "mask_type", "balance_length", "postive_loss_coef", "use_topr_loss", "dataset_filter",
        "render_save_dir", "dirty_data_mask", "use_token_reward",
    ),
    "was never read; put it in env_config": ("train_env_manager.format_penalty", "val_env_manager.format_penalty"),
    "write paths in file_name": ("data_args.dataset_dir",),
    "use domain_interleave_probs": ("data_args.interleave_probs",),
    "temperature 0 is greedy": ("do_sample",),
    "max_new_tokens is the limit": ("generating_args.max_length",),
    "no beam search": ("length_penalty",),
    "max_steps ends the run": ("num_train_epochs",),
    "use model_args.dtype": ("training_args.bf16", "training_args.fp16"),
}  # fmt: skip
REFUSED = {key: reason for reason, keys in _REASONS.items() for key in keys}
"""Key, or last two parts of its path, to the reason. Known keys are looked up in the schema first."""

FOREIGN_SECTIONS = ("actor_rollout_ref", "data", "trainer", "rollout", "reward_model")


def refusal(path: str) -> str | None:
    """Why a key of ROLL or verl is not one of ours; None if it is neither's."""
    parts = path.split(".")
    if parts[-1].startswith("profiler_"):
        return _NO_CHOICE
    return REFUSED.get(".".join(parts[-2:])) or REFUSED.get(parts[-1])


def alias_table(kind: str) -> dict[str, tuple[str, ...]]:
    """Accepted names by dotted path, to the canonical ones."""
    group = "num_return_sequences_in_group" if kind == "rlvr" else "train_env_manager.group_size"
    return {**_ALIASES, "n_resp_per_prompt": (group,), "actor_rollout_ref.rollout.n": (group,)}


class Renamer:
    """Moves other names to the canonical ones. `root` is the new tree; errors and warnings are collected."""

    def __init__(self, root: Node, kind: str) -> None:
        self.root = root
        self.errors: list[Diagnostic] = []
        self.warnings: list[Diagnostic] = []
        self._kind = kind

    def run(self) -> None:
        """All renames of the file."""
        for source, targets in self._table().items():
            if (node := find(self.root, source.split("."))) is not None:
                self._move(source, targets, node, warn=True)
        assert isinstance(self.root.value, dict)
        for name in list(self.root.value):
            if name in _ALGORITHM_FIELDS:
                self._move(name, (f"algorithm.{name}",), self.root.value[name], warn=False)
        per_node = self._gpus_per_node()
        nodes = self._devices("trainer", "actor_train", 0, per_node)
        self._devices("rollout", "actor_infer", nodes, per_node)

    def _table(self) -> dict[str, tuple[str, ...]]:
        table = alias_table(self._kind)
        strategy = find(self.root, (*_SGLANG.split("."), "strategy_name"))
        if strategy is not None and strategy.value == "sglang":
            table |= _SGLANG_ALIASES
        for place in ("", "actor_train"):
            section = find(self.root, (place,)) if place else self.root
            for name in section.value if section is not None and isinstance(section.value, dict) else ():
                if name.startswith(_LOSS_PREFIXES):
                    table[f"{place}.{name}" if place else name] = (f"{_PG}.{name}",)
        return table

    def _move(self, source: str, targets: tuple[str, ...], node: Node, *, warn: bool) -> None:
        self.root = drop(self.root, source.split("."))
        for target in targets:
            if warn:
                message = f"'{source}' is another name of '{target}'"
                self.warnings.append(_diagnostic("W01", target, node, message))
            self._place(source, target.split("."), node)

    def _place(self, source: str, target: list[str], node: Node) -> None:
        """Put `node` at its canonical place; maps that are already there are joined key by key."""
        for depth in range(1, len(target)):
            above = find(self.root, target[:depth])
            is_cleared = above is not None and above.value is None and above.from_override
            if above is not None and not isinstance(above.value, dict) and not is_cleared:
                return  # the section itself has the wrong type, which the check reports
        present = find(self.root, target)
        if present is None:
            self.root = put(self.root, target, node)
        elif isinstance(present.value, dict) and isinstance(node.value, dict):
            for key, child in node.value.items():
                self._place(f"{source}.{key}", [*target, key], child)
        elif not _equal(plain(present), plain(node)):
            canonical = ".".join(target)
            message = f"also given as '{source}' ({node.where}) with another value; keep '{canonical}'"
            self.errors.append(_diagnostic("C016", canonical, present, message))

    def _gpus_per_node(self) -> int:
        """num_gpus_per_node; where it is not written, nodes are as large as the largest that a block asks for."""
        written = find(self.root, ("num_gpus_per_node",))
        if written is not None:
            value = written.value
            return value if isinstance(value, int) and value > 0 else _GPUS_PER_NODE  # reported as C003 or C005 later
        wanted = [find(self.root, (block, "n_gpus_per_node")) for block in ("trainer", "rollout")]
        sizes = [(node.value, node) for node in wanted if node is not None and isinstance(node.value, int)]
        size, largest = max(sizes, key=lambda pair: pair[0], default=(0, self.root))
        if not _GPUS_PER_NODE < size <= MAX_DEVICES:
            return _GPUS_PER_NODE
        self.root = put(self.root, ("num_gpus_per_node",), largest)
        return size

    def _devices(self, block: str, role: str, first: int, per_node: int) -> int:
        """`trainer` or `rollout`: n_gpus_per_node devices of each of nnodes nodes, from node `first` on. Returns the
        next free node. Example: 2 nodes with 4 of 8 GPUs from node 0: devices 0..3 and 8..11, and 2.
        """
        node = find(self.root, (block,))
        mapping = find(self.root, (role, "device_mapping"))
        named = {"nnodes", "n_gpus_per_node", "device"}
        if node is None or not isinstance(node.value, dict) or not named & set(node.value):
            return _next_free(mapping, per_node)
        given = {key: child for key, child in node.value.items() if key in named}
        for key, child in given.items():
            self.root = drop(self.root, (block, key))
            message = f"'{block}.{key}' is another name of '{role}.device_mapping'"
            self.warnings.append(_diagnostic("W01", f"{role}.device_mapping", child, message))
        if mapping is not None:
            message = f"also given as '{block}' ({node.where}) with another value; keep '{role}.device_mapping'"
            self.errors.append(_diagnostic("C016", f"{role}.device_mapping", mapping, message))
            return first
        sizes = self._device_counts(block, given, node)
        device = given.get("device")
        if device is not None and device.value not in ("cpu", "cuda"):
            message = f"{shown(plain(device))} is not one of cpu | cuda; did you mean 'cuda'?"
            self.errors.append(_diagnostic("C004", f"{block}.device", device, message))
        if sizes is None:
            return first
        num_nodes, used = sizes
        if device is not None and device.value == "cpu":
            self._place(block, [role, "world_size"], Node(num_nodes * used, node.file, node.line))
            return first
        if used > per_node:
            message = f"{used} must be <= num_gpus_per_node {per_node}"
            self.errors.append(_diagnostic("C005", f"{block}.n_gpus_per_node", given["n_gpus_per_node"], message))
            return first
        ids = [n * per_node + gpu for n in range(first, first + num_nodes) for gpu in range(used)]
        listed = Node([Node(i, node.file, node.line) for i in ids], node.file, node.line)
        self.root = put(self.root, (role, "device_mapping"), listed)
        return first + num_nodes

    def _device_counts(self, block: str, given: dict[str, Node], node: Node) -> tuple[int, int] | None:
        """(nnodes, n_gpus_per_node); None after an error."""
        if "n_gpus_per_node" not in given:
            message = "required and not set; give the devices of a node"
            self.errors.append(_diagnostic("C006", f"{block}.n_gpus_per_node", node, message))
            return None
        sizes = []
        for key in ("nnodes", "n_gpus_per_node"):
            child = given.get(key, Node(1, node.file, node.line))
            if not isinstance(child.value, int) or isinstance(child.value, bool):
                message = f"expected int, got {type_name(child)} {shown(plain(child))}"
                self.errors.append(_diagnostic("C003", f"{block}.{key}", child, message))
                return None
            if child.value < 1:
                self.errors.append(_diagnostic("C005", f"{block}.{key}", child, f"{child.value} must be >= 1"))
                return None
            sizes.append(child.value)
        count = sizes[0] * sizes[1]
        if count > MAX_DEVICES:
            self.errors.append(_diagnostic("C018", block, node, f"{shown(count)}: more than {MAX_DEVICES} devices"))
            return None
        return sizes[0], sizes[1]


def _next_free(mapping: Node | None, per_node: int) -> int:
    """The node after the last of a mapping that was written out; 0 if there is none or it can not be read."""
    ids = parse_devices(plain(mapping))[0] if mapping is not None and mapping.value is not None else None
    return max(ids) // per_node + 1 if ids else 0


def _equal(a: Plain, b: Plain) -> bool:
    """Equal and of the same type: 1 is not true."""
    return type(a) is type(b) and a == b


def _diagnostic(id: str, key: str, node: Node, message: str) -> Diagnostic:
    return Diagnostic(id=id, key=key, file=node.file, line=node.line, message=message)
