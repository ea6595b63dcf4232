"""A config of ROLL or verl in the keys of this project: what is converted by value, and why.

Names and the reasons against keys that have no counterpart are those of `loading/names.py`, with which the loader
answers the same keys. Here is what a rename cannot say: keys whose value changes, and defaults of ROLL that differ.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from roll_async.config.api import kind_of
from roll_async.config.loading.devices import parse_devices
from roll_async.config.loading.references import resolve_references
from roll_async.config.loading.rename import compose, rename
from roll_async.config.schema import ROLES
from roll_async.config.schema_rollout import REWARDS, WORLDS
from roll_async.config.schema_worker import TRAINED_ROLES
from roll_async.config.yaml.compose import Sources, read_sources
from roll_async.config.yaml.diagnostics import ConfigError
from roll_async.config.yaml.node import Node, Plain, drop, find, leaves, plain

Tree = dict[str, Plain]
_LISTED = re.compile(r"(?:list\()?\[([0-9, ]+)\]\)?")
_RESOLVER = re.compile(r"\$\{[a-z._]+:[^}]*\}")
"""A value that OmegaConf takes from the clock or the environment."""
_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_-]*)")

REWARD_TYPES = {
    "MathRuleRewardWorker": "math_rule",
    "CrossThinkQARuleRewardWorker": "qa",
    "GeneralRuleRewardWorker": "ifeval",
    "CodeSandboxRewardWorker": "code_sandbox",
    "LLMJudgeRewardWorker": "llm_judge",
}
"""Class of ROLL's reward workers to `rewards.NAME.type`."""
_IMAGES = ("DetectionRewardWorker", "VideoR1RewardWorker", "VLTrajEnvManager")
_TOWERS = ("vision_model", "audio_model")
STRATEGIES = {"fsdp2_train": "megatron_train", "deepspeed_train": "megatron_train"}
_SCORERS = ("hf_infer", "fsdp2_infer", "deepspeed_infer")
_NO_PIPELINE_KEYS = (
    ({"is_pure_opd", "use_opd", "student", "teachers", "student_train"}, "distillation from teachers"),
    ({"beta", "chosen_key", "rejected_key"}, "preference training (DPO)"),
    ({"sft_train"}, "supervised fine-tuning"),
)
_JUDGE_URL = "http://127.0.0.1:8000/v1"


class AnotherPipeline(Exception):
    """The file describes what this project does not do; the text is one line that says what."""


@dataclass(frozen=True, slots=True)
class Change:
    """One row of the table."""

    what: str
    """renamed, changed, dropped or refused."""
    key: str
    why: str


@dataclass(kw_only=True, slots=True)
class Port:
    """A tree under canonical names and what was done to it."""

    kind: str
    tree: Tree
    changes: list[Change] = field(default_factory=list)
    referenced: frozenset[str] = frozenset()
    """Top-level keys that `${}` names; their values are where they were used."""

    def note(self, what: str, key: str, why: str) -> None:
        """Add a row."""
        self.changes.append(Change(what, key, why))

    def get(self, *path: str) -> Plain:
        """The value at a path; None if it is not there."""
        node: Plain = self.tree
        for name in path:
            node = node.get(name) if isinstance(node, dict) else None
        return node

    def put(self, path: str, value: Plain, why: str) -> None:
        """Set a key and say so."""
        *above, last = path.split(".")
        section = self.tree
        for name in above:
            if not isinstance(section.get(name), dict):
                section[name] = {}
            section = cast(Tree, section[name])
        section[last] = value
        self.note("changed", path, f"now {value!r}: {why}" if not isinstance(value, dict | list) else why)

    def pop(self, *path: str) -> Plain:
        """Take a key out without a row; None if it is not there."""
        section = self.get(*path[:-1])
        return section.pop(path[-1], None) if isinstance(section, dict) else None


def port(path: Path, pipeline: str | None = None) -> Port:
    """The config at `path` with its includes, every reference resolved. Raises ConfigError for what cannot be read, and
    AnotherPipeline.
    """
    missing: list[str] = []
    sources = read_sources(path, (), missing)
    written = sources.as_written()
    _require_this_pipeline(written)
    kind, _ = kind_of(written, pipeline)
    found = Port(kind=kind, tree={}, referenced=frozenset(_references(written)))
    for name in missing:
        found.note("dropped", "defaults", f"{name} is not there, or empty")
    composed = compose(_one_clip(sources.files, written, found), kind)
    if composed.errors:
        raise ConfigError(tuple(composed.errors))
    root, _ = resolve_references(composed.root, composed.moved, composed.doubts)
    # Sections that came in by reference still hold the names they were written under.
    late = rename(root, kind, is_sglang=False)
    found.tree = cast(Tree, plain(late.root))
    for old, new in (composed.moved | late.moved).items():
        # A key that only moved into its section keeps its name.
        if new != (f"algorithm.{old}",):
            found.note("renamed", old, f"is {' and '.join(new)}")
    for convert in _CONVERSIONS:
        convert(found)
    return found


def _require_this_pipeline(root: Node) -> None:
    keys = set(root.value) if isinstance(root.value, dict) else set()
    for names, what in _NO_PIPELINE_KEYS:
        if found := names & keys:
            # min(): a set has no order, and the same file gets the same message.
            raise AnotherPipeline(f"{what} ({min(found)}) is not what this project does")
    texts = {leaf.value for _, leaf in leaves(root, "") if isinstance(leaf.value, str)}
    if any(text.endswith(_IMAGES) or text.startswith(_TOWERS) for text in texts):
        raise AnotherPipeline(
            "video, sound, and images in this form (docs_roll/data.md) are not what this project does"
        )
    if "actor_train" not in keys or ("actor_infer" in keys and find(root, ("actor_train", "strategy_args")) is None):
        what = (
            "a rollout without training" if "actor_infer" in keys else "a part of configs, or neither RLVR nor agentic"
        )
        raise AnotherPipeline(f"actor_train has no strategy: this is {what}")
    if "actor_infer" not in keys:
        raise AnotherPipeline("actor_infer is not there: this trains without sampling, which this project does not do")


def _references(root: Node) -> Iterator[str]:
    for _, leaf in leaves(root, ""):
        for value in leaf.value if isinstance(leaf.value, list) else [leaf]:
            if isinstance(value.value, str):
                yield from _REFERENCE.findall(value.value)


def _one_clip(files: tuple[Node, ...], root: Node, found: Port) -> Sources:
    """ROLL reads pg_clip, or with use_pg_clip_range the two others; its files may have all three."""
    by_range = find(root, ("use_pg_clip_range",))
    is_range = by_range is not None and by_range.value is True
    unread = ("pg_clip",) if is_range else ("pg_clip_low", "pg_clip_high")
    kept = []
    for file in files:
        for name in (*unread, "use_pg_clip_range"):
            if find(file, (name,)) is not None:
                file = drop(file, (name,))
                found.note("dropped", name, f"use_pg_clip_range is {str(is_range).lower()}: ROLL reads the other one")
        kept.append(_without_resolvers(file, file, "", found))
    return Sources(files=tuple(kept), overrides=())


def _without_resolvers(node: Node, file: Node, path: str, found: Port) -> Node:
    """A map without the keys whose value a resolver gives; the same word for all of them would be wrong."""
    assert isinstance(node.value, dict)
    kept: dict[str, Node] = {}
    for name, child in node.value.items():
        if isinstance(child.value, dict):
            child = _without_resolvers(child, file, f"{path}{name}.", found)
        if isinstance(child.value, str) and (match := _RESOLVER.search(child.value)):
            found.note("changed", f"{path}{name}", f"{match[0]} is not read here; left out of the text")
            # Without the separators that stood around what is left out.
            child = Node(_RESOLVER.sub("", child.value).strip("-_/") or None, child.file, child.line)
        kept[name] = child
    return Node(kept, node.file, node.line)


def _losses(found: Port) -> None:
    """What ROLL and this project name alike with other values, and other defaults."""
    if found.get("algorithm", "adv_estimator") in (None, "gae") and found.get("critic", "strategy_args") is None:
        found.put("algorithm.adv_estimator", "reinforce", "gae, which is ROLL's default, needs a critic: there is none")
    elif found.get("algorithm", "adv_estimator") is None:
        found.put("algorithm.adv_estimator", "gae", "ROLL's default, grpo is that of this project")
    variant = found.get("algorithm", "pg_variant") or "ppo"
    dual = found.pop("dual_clip_loss")
    if variant == "ppo":
        clip = found.get("algorithm", "pg_options", "clip_low")
        clip = clip if isinstance(clip, int | float) else 0.2  # the default of clip_low
        why = "dual_clip_loss is false, or not set, which is ROLL's default"
        found.put("algorithm.pg_options.dual_clip", *((1 + 2 * clip, "1 + 2 * pg_clip") if dual else (None, why)))
    if variant == "cispo" and found.get("algorithm", "pg_options", "cispo_epsilon_low") is None:
        found.put(
            "algorithm.pg_options.cispo_epsilon_low", 0.1, "ROLL's default; that of this project is 1, as the paper"
        )
    ratio = found.pop("importance_sampling") or found.pop("ratio_type")
    if ratio in ("seq", "sequence", "segment"):
        found.put("algorithm.pg_options.ratio_level", "segment" if ratio == "segment" else "sequence", f"was {ratio}")
    if found.pop("difficulty_mask"):
        low, high = found.pop("difficulty_low_threshold"), found.pop("difficulty_high_threshold")
        found.put("algorithm.difficulty_low", 0.0 if low is None else low, "difficulty_mask is true")
        found.put("algorithm.difficulty_high", 1.0 if high is None else high, "difficulty_mask is true")
    for name in ("norm_mean_type", "norm_std_type", "reward_shift", "reward_scale", "reward_clip", "advantage_clip"):
        if found.get("algorithm", name) in (None, False) and name in cast(Tree, found.get("algorithm") or {}):
            found.pop("algorithm", name)
            found.note("dropped", name, "null or false is off, which is the default")
    if found.pop("whiten_rewards"):
        found.put("algorithm.norm_mean_type", "batch", "whiten_rewards is true")
        found.put("algorithm.norm_std_type", "batch", "whiten_rewards is true")
    options = ("step_reward_gamma", "episode_reward_weight", "step_reward_weight")
    for name in options:
        value = found.pop(name)
        if value is not None and found.get("algorithm", "adv_estimator") in ("gigpo", "step_reinforce"):
            found.put(f"algorithm.adv_options.{name}", value, "it is an option of the estimator")


def _kl(found: Port) -> None:
    """Two switches and their coefficients are coefficients of which 0 is off."""
    estimators = {"kl": "k1", "abs": "abs", "mse": "k2", "k3": "k3"}
    in_loss, in_reward = found.pop("use_kl_loss"), found.pop("add_token_level_kl")
    start, estimator = found.pop("init_kl_coef"), found.pop("kl_penalty")
    if not in_loss and found.pop("algorithm", "kl_loss_coef"):
        found.note("dropped", "kl_loss_coef", "use_kl_loss is false")
    if in_reward:
        found.put(
            "algorithm.token_kl_coef", 0.2 if start is None else start, "add_token_level_kl is true: init_kl_coef"
        )
        if not in_loss:
            found.put("algorithm.kl_estimator", estimators.get(str(estimator or "kl"), "k1"), "it is kl_penalty")
    elif start is not None:
        found.note("dropped", "init_kl_coef", "add_token_level_kl is false")
    for name in ("target_kl", "kl_horizon"):
        if not in_reward and found.pop("algorithm", name) is not None:
            found.note("dropped", name, "add_token_level_kl is false")


def _agentic_norm(found: Port) -> None:
    """reward_normalization says what is subtracted and divided by, and grpo of ROLL is that and no more."""
    given = found.pop("reward_normalization")
    if not isinstance(given, dict):
        return
    place = "group" if given.get("grouping") in ("traj_group_id", None) else "batch"
    method = given.get("method") or "identity"
    mean = given.get("norm_mean_type") or (place if method in ("mean", "mean_std", "asym_clip") else "none")
    std = given.get("norm_std_type") or (place if method in ("mean_std", "asym_clip") else "none")
    why = f"reward_normalization {method} by {given.get('grouping')}"
    estimator = found.get("algorithm", "adv_estimator")
    if given.get("grouping") == "tags" and method != "identity":
        found.note("refused", "reward_normalization.grouping", "normalisation by tag is not there; batch is used")
    if method == "asym_clip":
        found.note("refused", "reward_normalization.method", "asym_clip is not there; mean_std is used")
    if estimator == "grpo" and mean == "group" and std in ("group", "none"):
        found.put("algorithm.adv_options.normalise_std", std == "group", f"{why}, which grpo does")
    elif estimator == "step_reinforce":
        found.put("algorithm.adv_options.mean", mean, why)
        found.put("algorithm.adv_options.std", std, why)
    elif estimator == "gigpo":
        found.put("algorithm.adv_options.normalise_std", std != "none", why)
    else:
        if estimator == "grpo":
            found.put("algorithm.adv_estimator", "reinforce", f"{why}, and grpo of ROLL adds nothing to it")
        found.put("algorithm.norm_mean_type", mean, why)
        found.put("algorithm.norm_std_type", std, why)


def _roles(found: Port) -> None:
    """Strategies, batching and settings of the workers."""
    for role in ROLES:
        worker = found.get(role)
        if not isinstance(worker, dict):
            continue
        if not isinstance(found.get(role, "strategy_args", "strategy_config"), dict):
            found.pop(role, "strategy_args", "strategy_config")
        if found.get(role, "strategy_args") is None:
            if role in ("reference", "critic"):
                found.pop(role)
                found.note("dropped", role, "it has no strategy")
            continue
        for key in ("lora_rank", "lora_alpha", "lora_target") if role not in TRAINED_ROLES else ():
            if found.pop(role, "model_args", key) is not None:
                found.note("dropped", f"{role}.model_args.{key}", "the adapters are those of actor_train")
        for key in ("lora_target", "freeze_module_prefix"):
            if isinstance(text := found.get(role, "model_args", key), str):
                names: list[Plain] = [part.strip() for part in text.split(",")]
                found.put(f"{role}.model_args.{key}", names, "a list instead of one text")
        devices = found.get(role, "device_mapping")
        if isinstance(devices, str) and (ids := _LISTED.fullmatch(devices)):
            found.put(f"{role}.device_mapping", [int(n) for n in ids[1].split(",")], "the list itself")
        name = found.get(role, "strategy_args", "strategy_name")
        wanted = STRATEGIES.get(str(name))
        if role in ("reference", "teacher") and name in _SCORERS:
            wanted = "megatron_infer"
        if wanted is not None:
            found.pop(role, "strategy_args", "strategy_config")
            found.put(
                f"{role}.strategy_args.strategy_name", wanted, f"was {name}, which is not there; set its parallel sizes"
            )
        _batching(found, role)


def _batching(found: Port, role: str) -> None:
    part = "train" if role in ("actor_train", "critic") else "infer"
    packed, dynamic = found.pop(role, "use_sequence_packing"), found.pop(role, f"use_dynamic_batching_in_{part}")
    tokens = found.pop(role, f"max_tokens_per_microbatch_in_{part}")
    if packed or dynamic:
        found.put(f"{role}.micro_batching", "packed" if packed else "dynamic", "it was a switch")
        found.put(f"{role}.max_tokens_per_microbatch", tokens or _longest(found), "tokens of a micro-batch")


def _longest(found: Port) -> int:
    """Tokens of a row at most."""
    total = found.get("sequence_length")
    parts = (found.get("prompt_length"), found.get("response_length"))
    return total if isinstance(total, int) else sum(p for p in parts if isinstance(p, int))


def _lengths(found: Port) -> None:
    """An engine's limit below the longest row, which ROLL passes on and this project refuses."""
    for key in ("max_model_len", "context_length"):
        limit = found.get("actor_infer", "strategy_args", "strategy_config", key)
        if isinstance(limit, int) and limit < _longest(found):
            found.pop("actor_infer", "strategy_args", "strategy_config", key)
            found.note(
                "dropped", f"actor_infer.strategy_args.strategy_config.{key}", f"{limit} is below the longest row"
            )


def _rewards(found: Port) -> None:
    """Worker classes are types; processes have another name; a judge is a server."""
    rewards = found.get("rewards")
    if found.kind != "rlvr" or not isinstance(rewards, dict):
        return
    for name, reward in list(rewards.items()):  # a copy: entries are taken out
        if not isinstance(reward, dict):
            continue
        worker = str(reward.pop("worker_cls", "")).rpartition(".")[2]
        kind = REWARD_TYPES.get(worker) or (name if name in REWARDS else None)
        if kind is None:
            del rewards[name]
            found.note(
                "refused", f"rewards.{name}", f"{worker or 'no class'}: write a function and give its dotted path"
            )
            continue
        if kind != name:
            found.put(f"rewards.{name}.type", kind, f"was worker_cls {worker}")
        num = reward.pop("world_size", None)
        if isinstance(num, int) and kind != "llm_judge":
            found.put(f"rewards.{name}.num_workers", num, "was world_size")
        if kind == "llm_judge" and "judge" not in reward:
            model = found.get("rewards", name, "model_args", "model_name_or_path")
            found.put(
                f"rewards.{name}.judge",
                {"api_url": _JUDGE_URL, "model": model or found.get("pretrain")},
                "start a server of the judge's model, on devices that no role has, and give its address here",
            )
        filters = reward.pop("query_filter_config", None)
        if isinstance(filters, dict) and filters.get("type") not in (None, "no_filter"):
            found.put("algorithm.filter_groups.enable", True, f"rewards.{name}.query_filter_config, for all domains")


def _worlds(found: Port) -> None:
    """Types of worlds, their managers and sizes."""
    worlds = found.get("custom_envs")
    if found.kind != "agentic" or not isinstance(worlds, dict):
        return
    used = set()
    for name in ("train_env_manager", "val_env_manager"):
        tags = found.get(name, "tags")
        used |= set(map(str, tags)) if isinstance(tags, list) else set(worlds)
    there = {tag for tag in used & set(worlds) if _is_there(worlds[tag])}
    for tag, world in list(worlds.items()):  # a copy: entries are taken out
        if tag not in used:
            del worlds[tag]
            found.note("dropped", f"custom_envs.{tag}", "no tags name it")
        elif not _is_there(world):
            kind = world.get("env_type") if isinstance(world, dict) else None
            found.note(
                "refused",
                f"custom_envs.{tag}",
                f"world {kind} is not there; write a class, env_type is its dotted path",
            )
            if there:  # else it stays: a file without worlds would get the default one
                del worlds[tag]
        elif isinstance(world, dict):
            _world(found, tag, world)
    for name in ("train_env_manager", "val_env_manager"):
        manager = found.get(name)
        tags = manager.get("tags") if isinstance(manager, dict) else None
        if isinstance(manager, dict) and isinstance(tags, list) and not set(map(str, tags)) <= set(worlds):
            manager["tags"] = [tag for tag in tags if tag in worlds]
            manager.pop("num_groups_partition", None)
            found.note("dropped", f"{name}.tags", f"left: {manager['tags']}; num_groups_partition is even")
    sampling = found.pop("train_env_manager", "generating_args")
    if isinstance(sampling, dict) and found.get("actor_infer", "generating_args") is None:
        found.put("actor_infer.generating_args", sampling, "was train_env_manager.generating_args")


def _is_there(world: Plain) -> bool:
    """Whether this project has the world, under its own name or that of ROLL."""
    kind = str(world.get("env_type")) if isinstance(world, dict) else ""
    known = (*(name for name, path in WORLDS.items() if path), "roll_math", "roll_qa")
    return kind in known or kind.startswith(("rg:", "game:"))


def _world(found: Port, tag: str, world: Tree) -> None:
    key, manager = f"custom_envs.{tag}", str(world.pop("env_manager_cls", ""))
    kind = str(world.get("env_type"))
    given = world.get("env_config")
    settings: Tree = given if isinstance(given, dict) else {}
    family, _, name = kind.partition(":")
    if family == "rg" and name:
        world["env_type"], settings = "reasoning_gym", {"dataset": name}
        found.note("changed", f"{key}.env_type", f"{kind} is reasoning_gym with dataset {name}")
    elif family == "game" and name:
        world["env_type"], settings = "textarena", {"id": name}
        found.note(
            "changed", f"{key}.env_type", f"{kind} is textarena with id {name}, whose rewards are TextArena's own"
        )
    elif kind.startswith("roll_") and kind[5:] in ("math", "qa"):
        world["env_type"], settings = kind[5:], {}
        found.note(
            "changed", f"{key}.env_type", f"{kind} is {kind[5:]}; give env_config.file, JSON lines with its rows"
        )
    if kind == "sokoban" and isinstance(room := settings.pop("dim_room", None), list) and room:
        settings["size"] = max(n for n in room if isinstance(n, int))
        found.note("changed", f"{key}.env_config.dim_room", f"size {settings['size']}, rooms are square")
    if "StepEnvManager" in manager:
        world["manager"] = "step"
        found.note("changed", f"{key}.env_manager_cls", "manager: step")
    elif world.pop("history_length", None) is not None:
        found.note("dropped", f"{key}.history_length", "manager traj shows all turns")
    world["env_config"] = settings
    most = found.get("actor_infer", "generating_args", "max_new_tokens") or 512  # the agentic default
    if isinstance(limit := world.get("max_tokens_per_step"), int) and isinstance(most, int) and limit > most:
        found.put("actor_infer.generating_args.max_new_tokens", limit, f"{key}.max_tokens_per_step is above it")


def _validation(found: Port) -> None:
    """Steps between validations are at the top."""
    steps = found.pop("validation", "eval_steps")
    if isinstance(steps, int) and found.get("eval_steps") is None:
        found.put("eval_steps", steps, "was validation.eval_steps")
    if found.kind == "rlvr" and found.get("eval_steps") and found.get("validation") is None:
        found.put("eval_steps", 0, "there is no validation section")


def _shares(found: Port) -> None:
    """Shares of domains, which ROLL does not ask to sum to 1."""
    shares, rewards = found.get("actor_train", "data_args", "domain_interleave_probs"), found.get("rewards")
    if not isinstance(shares, dict) or not isinstance(rewards, dict):
        return
    left = {name: share for name, share in shares.items() if name in rewards and isinstance(share, int | float)}
    total = sum(left.values())
    if total > 0 and (left != shares or abs(total - 1) > 1e-6):
        even = {name: round(share / total, 6) for name, share in left.items()}
        even[next(iter(even))] += 1 - sum(even.values())  # what rounding leaves: C128 wants a sum of 1
        found.put(
            "actor_train.data_args.domain_interleave_probs", cast(Tree, even), f"{even}: of sum 1, over the rewards"
        )


def _mini_batch(found: Port) -> None:
    """ROLL drops or repeats samples until a batch is whole optimizer steps; here the steps must divide it."""
    ids, _ = parse_devices(found.get("actor_train", "device_mapping"))
    layout = ("actor_train", "strategy_args", "strategy_config")
    sizes = [found.get(*layout, f"{part}_parallel_size") for part in ("tensor_model", "pipeline_model", "context")]
    copies = len(ids or (0,)) // math.prod(size for size in sizes if isinstance(size, int))
    samples = found.get("rollout_batch_size")
    if found.kind == "rlvr":
        each = found.get("num_return_sequences_in_group")
        # 8 is the default of num_return_sequences_in_group.
        samples = samples * (each if isinstance(each, int) else 8) if isinstance(samples, int) else None
    rows = found.get("actor_train", "training_args", "per_device_train_batch_size")
    steps = found.get("actor_train", "training_args", "gradient_accumulation_steps")
    if not isinstance(samples, int) or not isinstance(steps, int) or not copies:
        return
    least = (rows if isinstance(rows, int) else 1) * copies
    fitting = [n for n in range(1, steps + 1) if samples % (n * least) == 0]
    if fitting and fitting[-1] != steps:
        key = "actor_train.training_args.gradient_accumulation_steps"
        found.put(key, fitting[-1], f"{steps} micro-batches of {least} rows do not divide {samples} samples")


# The order counts: `_shares` is over the rewards that are left, `_mini_batch` takes the sizes that `_roles` leaves.
_CONVERSIONS = (
    _losses, _kl, _agentic_norm, _validation, _rewards, _shares, _worlds, _roles, _lengths, _mini_batch,
)  # fmt: skip
