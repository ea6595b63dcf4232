"""Every key acts: set to another value it changes what a run is started with, or it is refused, or told to be without
effect; and each wire is needed for it. A word somewhere in the package is no effect.
"""

import json
import re
import sys
from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
from named_mutants import NAMED

from roll_async.config.api import ConfigError, Loaded, load_with_warnings
from roll_async.config.loading.spec import CHOSEN_CLASSES, FieldSpec, spec_of
from roll_async.config.options.advantage_options import ADVANTAGE_OPTIONS, AGENTIC_ONLY
from roll_async.config.options.correction_options import RejectionRule
from roll_async.config.rules.every import check_rules
from roll_async.config.rules.warn import find_warnings
from roll_async.config.schema import PipelineConfig, RLVRConfig
from roll_async.config.schema_worker import STRATEGY_ROLES, TeacherServer
from roll_async.inference.settings import EngineSettings
from roll_async.launch.checks.gate import refusals
from tests.unit.config.wires import OF_AGENTS, OF_STARTS, cut, settings_of, started_with, wires

TRAIN, ENGINE = "actor_train.strategy_args", "actor_infer.strategy_args"
FULL = """
exp_name: run
pretrain: Qwen/Qwen2.5-7B
prompt_length: 64
response_length: 192
rollout_batch_size: 16
num_return_sequences_in_group: 4
async_generation_ratio: 1
eval_steps: 5
tracking: {prometheus_port: 9100, rollout_dump_dir: samples}
async_training: {trigger_parameter_sync_step: 2, staleness: {max_versions: 6}}
rewards:
  math_rule: {type: math_rule, tag_included: [a]}
  code_sandbox: {type: code_sandbox, tag_included: [b], sandbox: {memory_mb: 512}}
algorithm:
  adv_estimator: gae
  kl_loss_coef: 0.1
  token_kl_coef: 0.1
  distill_coef: 0.1
  target_kl: 0.1
  correction: {rejections: [{statistic: k1, aggregation: token, high: 3.0}]}
  filter_groups: {enable: true, gen_batch_size: 32, max_num_gen_batches: 3}
  overlong_buffer: {enable: true, len: 16}
actor_train:
  strategy_args:
    strategy_name: megatron_train
    strategy_config: {tensor_model_parallel_size: 2, sequence_parallel: true, recompute_granularity: full}
  model_args: {lora_rank: 8}
  data_args: {file_name: train.jsonl}
  training_args: {gradient_accumulation_steps: 4}
  device_mapping: range(0,8)
  micro_batching: dynamic
  max_tokens_per_microbatch: 512
actor_infer:
  strategy_args: {strategy_name: vllm, strategy_config: {tensor_parallel_size: 2}}
  device_mapping: range(8,16)
reference: &other {strategy_args: {strategy_name: megatron_infer}, device_mapping: 16-23}
teacher: *other
critic:
  strategy_args: {strategy_name: megatron_train, strategy_config: {recompute_granularity: full}}
  device_mapping: 16-23
validation:
  data_args: {file_name: valid.jsonl}
  generating_args: {temperature: 0.5}
  mode: replicas
  sets: {more: {data_args: {file_name: more.jsonl}, generating_args: {temperature: 0.7}}}
"""
SEVERAL = (ENGINE, "rewards.", "prompt_pool.", "seed", "pretrain")
"""Sections whose keys are tried on every base, and not up to the first on which they act."""
BASES = (
    (),
    (f"{ENGINE}={{strategy_name: sglang, strategy_config: {{tensor_parallel_size: 2}}}}",),
    (f"{ENGINE}={{strategy_name: hf_infer}}",),
    *((f"pg_variant={name}",) for name in CHOSEN_CLASSES["pg_variant"]),
    *((f"adv_estimator={name}",) for name in CHOSEN_CLASSES["adv_estimator"]),
    ("algorithm.overlong_buffer.enable=false",),
    ("async_training.staleness.policy=token_mask",),
    ("actor_train.model_args.lora_rank=0",),
    (f"{TRAIN}.strategy_config.pipeline_model_parallel_size=2",),
    (f"{TRAIN}.strategy_config.overlap_grad_reduce=true",),
    ("async_training.staleness={max_versions: 9, allow_above_8: true}",),
    ("rewards.code_sandbox=null", "rewards={other: {type: math_rule}}"),
    (
        "rewards={math_rule: {type: llm_judge, judge: {api_url: http://a, model: m}, tag_included: [a]}, "
        "code_sandbox: {type: math_service, service: {api_url: http://a}, tag_included: [b]}}",
    ),
    ("prompt_pool.enable=true",),
    ("prompt_pool.enable=true", "prompt_pool.refill_file_name=[more.jsonl]"),
    ("tracking.prometheus_port=null",),
    ("tracking.rollout_dump_dir=null",),
    ("eval_steps=0",),
    ("rewards.math_rule.answer_format=boxed",),
    (f"{ENGINE}.strategy_config.extra={{enable_expert_parallel: true}}",),
    ("rewards={math_rule: {type: distilled, tag_included: [a]}}",),
    ("rewards.code_sandbox=null", "rewards={other: {type: supervised}}"),
    ("critic=null", "adv_estimator=grpo"),
    ("teacher=null", "teachers={far: {address: http://a:1/v1, model: m}}"),
)
REFUSED_FOR_ITS_ROLE = {"C020"}
"""Rules that say a key has no effect there; that a value is out of range says nothing of the key."""
USED_BY_CLIENTS = {
    "judge.model": "a judge is asked for another model",
    "judge.api_key_env": "a judge gets no key",
    "judge.max_retries": "a judge is asked for ever the same number of times",
    "judge.max_concurrent": "a judge gets all requests at once",
    "service.token_env": "a verify service gets no token",
    "service.max_retries": "a verify service is asked for ever the same number of times",
    "service.max_concurrent": "a verify service gets all requests at once",
}
"""Keys that the client of a service reads itself, and the fault of `tools/named_mutants.py` that its tests see."""
AGENTIC = {f.name for n in AGENTIC_ONLY for f in fields(ADVANTAGE_OPTIONS[n])} - {"gamma", "epsilon", "normalise_std"}
FROM_THE_PLACE = {
    "EngineSettings.sleep_level = 2 if roles_in_turns(config) else 0",
    "MegatronSettings.with_value_head = samples is not None and role is samples.critic",
}
"""Wires that depend on where roles stand."""


@cache
def base(number: int, folder: Path) -> tuple[Loaded, dict[str, object], list[str]] | None:
    """A config, its settings, and what is said of it; None where the choice is not for rlvr configs."""
    path = folder / "full.yaml"
    path.write_text(FULL)
    try:
        loaded = load_with_warnings(path, BASES[number])
    except ConfigError:
        return None
    return loaded, all_of(loaded.config), said_of(loaded)


def all_of(config: PipelineConfig) -> dict[str, object]:
    """Settings objects, and what is started with them."""
    return settings_of(config) | started_with(config)


def said_of(loaded: Loaded) -> list[str]:
    """Rules, refusals of the gate and warnings."""
    rules = [*check_rules(loaded.config, loaded.root), *find_warnings(loaded.config, loaded.root)]
    return sorted([*(f"{d.id} {d.key}" for d in rules), *(f"{id} {key}" for id, key, _ in refusals(loaded))])


def changed(thing: object, path: list[str], value: object) -> object:
    """A copy with one key set."""
    name, *rest = path
    if isinstance(thing, dict):
        return {**thing, name: changed(thing[name], rest, value) if rest else value}
    return replace(thing, **{name: changed(getattr(thing, name), rest, value) if rest else value})  # type: ignore[type-var]


def has(thing: object, path: list[str]) -> bool:
    for name in path:
        found = thing.get(name) if isinstance(thing, dict) else getattr(thing, name, None)
        if isinstance(thing, dict) and name not in thing or not isinstance(thing, dict) and not hasattr(thing, name):
            return False
        thing = found
    return True


def specs() -> dict[str, FieldSpec]:
    """Every key of an rlvr config that holds a value, with its spec; sections by choice under each choice."""
    found: dict[str, FieldSpec] = {}

    def walk(cls: type, path: str, role: str) -> None:
        for name, spec in spec_of(cls).items():
            here = f"{path}{name}"
            if spec.traits.roles and role not in spec.traits.roles or spec.traits.range == "1" or here == "pipeline":
                continue  # refused there (C020), without a second value, or what decides which keys there are
            if spec.traits.megatron and role == "actor_infer" or path == "algorithm.adv_options." and name in AGENTIC:
                continue
            inner = role or (name if not path else "")
            if name == "strategy_name" and sum(inner in roles for roles in STRATEGY_ROLES.values()) == 1:
                continue
            if spec.section is not None:
                walk(spec.section, f"{here}.", inner)
            elif spec.kind == "chosen":
                for choice, below in CHOSEN_CLASSES[spec.traits.chosen_by].items():
                    if spec.traits.chosen_by != "strategy_name" or inner in STRATEGY_ROLES[choice]:
                        walk(below, f"{here}.", inner)
            elif here == "rewards":
                for domain in ("math_rule", "code_sandbox"):
                    walk(spec.item.section, f"rewards.{domain}.", "")
            elif here == "teachers":
                walk(TeacherServer, "teachers.far.", "")
            elif here == "validation.sets":
                walk(spec.item.section, "validation.sets.more.", "")
            else:
                found.setdefault(here, spec)

    walk(RLVRConfig, "", "")
    found = {key: spec for key, spec in found.items() if not key.startswith("teacher.")}  # as `reference`
    return found


def with_key(
    loaded: Loaded, number: int, key: str, value: object, folder: Path, *, reads: bool
) -> tuple[PipelineConfig | None, list[str]]:
    """A base's config with a key set, and what is said of it; None where it is refused, or is no value of the key.
    `reads`: the file is read again with the key in it, for what is derived from it then.
    """
    if not reads:
        if not has(loaded.config, key.split(".")):
            return None, []
        config = changed(loaded.config, key.split("."), value)
        return config, said_of(replace(loaded, config=config))
    present = any(base(n, folder) and has(base(n, folder)[0].config, key.split(".")) for n in range(len(BASES)))
    try:
        again = load_with_warnings(folder / "full.yaml", (*BASES[number], f"{key}={json.dumps(plain(value))}"))
    except ConfigError as error:
        if present:  # that it is refused elsewhere does not say that it acts here
            return None, []
        return None, [d.id for d in error.diagnostics if d.id in REFUSED_FOR_ITS_ROLE and key.startswith(d.key)]
    return again.config, said_of(again)


def plain(value: object) -> object:
    """As JSON."""
    match value:
        case tuple() | list():
            return [plain(item) for item in value]
        case dict():
            return {name: plain(item) for name, item in value.items()}
        case RejectionRule():
            return {"statistic": value.statistic, "aggregation": value.aggregation, "high": value.high}
    return value


def candidates(spec: FieldSpec) -> tuple[object, ...]:
    """Values to try, most of them not the default."""
    match spec.kind:
        case "bool":
            return True, False
        case "choice":
            return spec.choices[::-1] if "boxed" in spec.choices else spec.choices
        case "int":
            return 3, 2, 5, 640, 1, 0, None
        case "float":
            return 0.25, 3.5, 0.7, 64.5, 0.0, None
        case "str":
            return "other", "supervised", "distilled"
        case "list":
            return ("other",), ("k_proj",), (RejectionRule(statistic="k3", aggregation="token", high=9.0),)
        case "files":
            return (("other.jsonl",),)
        case "devices":
            return None, tuple(range(24, 32))
        case "map":
            return ({"a": 0.5, "b": 0.5},)
        case _:
            return ({"a": 1},)


def relevant(key: str) -> list[int]:
    """Bases in which the key may act: options of a loss only where the loss is chosen."""
    for section, chooser in (("algorithm.pg_options.", "pg_variant="), ("algorithm.adv_options.", "adv_estimator=")):
        if key.startswith(section):
            return [i for i, b in enumerate(BASES) if b and b[0].startswith(chooser)]
    return [i for i, b in enumerate(BASES) if not b or not b[0].startswith(("pg_variant=", "adv_estimator="))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("wires")


def look(found: dict, key: str, spec: FieldSpec, number: int, folder: Path, *, reads: bool) -> None:
    """Adds the first value that acts on this base; one that something is said of counts when none acts."""
    if base(number, folder) is None:
        return
    loaded, settings, said = base(number, folder)
    for value in candidates(spec):
        try:
            config, told = with_key(loaded, number, key, value, folder, reads=reads)
            after = settings if config is None else all_of(config)
        except (ValueError, TypeError, AttributeError, AssertionError, ZeroDivisionError, KeyError):
            continue  # not a value of this key
        where = frozenset(w for w in settings.keys() | after.keys() if settings.get(w) != after.get(w))
        if where or (told != (said if config else []) and (key, 0) not in found):
            found[key, number if where else 0] = (number, config or loaded.config, where)
        if where:
            break


@pytest.fixture(scope="module")
def effects(folder):
    """Key to (base, changed config, settings that change, whether something is said) of the first change that acts; a
    change that is only refused counts when nothing acts.
    """
    found: dict[tuple[str, int], tuple[int, PipelineConfig, frozenset[str]]] = {}
    for reads in (False, True):
        for key, spec in specs().items():
            if (key, 0) not in found and not any(k == key for k, _ in found):
                for number in relevant(key):
                    look(found, key, spec, number, folder, reads=reads)
                    # In another engine or kind of reward a key acts by other wires.
                    if any(k == key and f[2] for (k, _), f in found.items()) and not key.startswith(SEVERAL):
                        break
    for number in range(1, len(BASES)):  # what a choice itself changes
        if base(number, folder) is not None:
            settings, other = base(0, folder)[1], base(number, folder)[1]
            started = {w for w in settings.keys() | other.keys() if w.startswith("start.")}
            both = started | settings.keys() & other.keys()
            where = frozenset(w for w in both if settings.get(w) != other.get(w))
            found[f"base {number}", 0] = (0, base(number, folder)[0].config, where)
    return found


@pytest.mark.slow
def test_every_key_changes_what_a_run_is_started_with_or_is_refused(effects):
    inert = {
        k for k in specs().keys() - {key for key, _ in effects} if ".".join(k.split(".")[-2:]) not in USED_BY_CLIENTS
    }
    assert not inert, sorted(inert)


def test_a_key_that_a_client_reads_itself_has_a_fault_that_takes_it_away():
    for key, name in USED_BY_CLIENTS.items():
        (fault,) = [fault for fault in NAMED if fault[0] == name]
        field = key.rpartition(".")[2]
        assert f"onfig.{field}" in fault[2] and field not in fault[3].partition("=")[2], fault


def test_every_wire_is_listed():
    """One that goes is a line less in a diff; `python -m tests.unit.config.wires` writes the list."""
    listed = (Path(__file__).parent / "wires.txt").read_text().splitlines()
    found = [name for name, *_ in (*wires(), *wires(OF_AGENTS), *wires(OF_STARTS))]
    assert listed == found


@pytest.mark.slow
def test_cutting_any_wire_makes_a_key_inert_or_a_known_pair_vanish(effects, folder):
    unproven = []
    for name, cls, definition, expression in (*wires(), *wires(OF_STARTS)):
        starts = cls in OF_STARTS
        found, shrunk = started_with if starts else settings_of, False
        mark, words = "start." if starts else f"{cls.__name__}.", set(re.findall(r"\w+", name))
        with cut(cls, definition, expression):
            before: dict[int, dict[str, object]] = {}
            # The keys that most likely go this way come first; any that does not go it any more is proof enough.
            for key, (number, config, where) in sorted(
                effects.items(), key=lambda e: not words & set(e[0][0].split("."))
            ):
                if not any(mark in w for w in where):
                    continue
                if number not in before:
                    before[number] = found(base(number, folder)[0].config)
                after = found(config)
                mine = {w for w in where if w.startswith("start.") == starts}
                shrunk = not mine <= {w for w in mine if before[number].get(w) != after.get(w)}
                if shrunk:
                    break
        if not shrunk:
            unproven.append(name)
    assert set(unproven) <= FROM_THE_PLACE, set(unproven) - FROM_THE_PLACE


def test_an_engine_without_a_context_of_its_own_takes_the_longest_sequence():
    def context(*overrides):
        path = Path(__file__).resolve().parents[3] / "configs" / "rlvr_config_async_cpu.yaml"
        config = load_with_warnings(path, overrides).config
        return EngineSettings.of(config, replica=0, restart=0).max_model_len

    assert (context(), context("response_length=101")) == (120, 125)
