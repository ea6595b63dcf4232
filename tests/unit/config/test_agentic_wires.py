"""Every key of worlds and their managers acts: another value changes what trajectories are given, or it is refused; and
each wire of `launch/agents.py` is needed for it. A warning, or a word somewhere in the package, is no effect.
"""

import re
from dataclasses import replace

import pytest

from roll_async.config.api import load_with_warnings
from roll_async.config.loading.spec import spec_of
from roll_async.config.rules.every import check_rules
from roll_async.config.schema import AgenticConfig
from roll_async.config.schema_rollout import ToolConfig
from roll_async.config.schema_worker import DataArguments
from roll_async.launch.checks.gate import refusals
from tests.unit.config.test_no_inert_key import candidates, changed
from tests.unit.config.wires import OF_AGENTS, agentic_settings_of, cut, wires

FULL = """
exp_name: run
pretrain: Qwen/Qwen2.5-0.5B
sequence_length: 4096
rollout_batch_size: 32
val_batch_size: 24
eval_steps: 5
async_generation_ratio: 1
custom_envs:
  A:
    env_type: frozen_lake
    manager: step
    history_length: 2
    agent_system_template: "Play. {instructions}"
    agent_template: "{observation}"
    tools: [{tool_id: search, tool_args: {file: DOCUMENTS}}]
  B: {env_type: sokoban, max_tokens_per_step: 32}
train_env_manager: {group_size: 4, num_env_groups: 8, tags: [A, B], num_groups_partition: [5, 3]}
val_env_manager: {group_size: 2, mode: replicas, generating_args: {temperature: 0.5}}
actor_train:
  strategy_args: {strategy_name: megatron_train}
  training_args: {gradient_accumulation_steps: 4}
  data_args: {template_kwargs: {enable_thinking: true}}
  device_mapping: range(0,2)
actor_infer:
  strategy_args: {strategy_name: vllm}
  generating_args: {max_new_tokens: 64}
  device_mapping: range(2,6)
"""
MORE = {
    "env_config": ({"size": 5}, {"num_boxes": 2}),
    "env_type": ("countdown", "command"),
    "tools": ((), (ToolConfig(tool_id="calculator"),)),
    "tags": (("A",), ("B", "A")),
    "num_groups_partition": ((3, 5), (6, 6)),
    "agent_template": ("say {observation}", None),
    "stop_strings": (("x",),),
    "template_time": ("2026-11-26T05:01:12",),
    "template_kwargs": ({"enable_thinking": False},),
}
TOP = (
    "sequence_length", "seed", "pretrain", "exp_name", "output_dir", "rollout_batch_size", "val_batch_size",
    "eval_steps", "template_time",
)  # fmt: skip
SHARED = (*(f"fault.{name}" for name in ("env_timeout", "sample_retries")), "async_training.max_concurrent_per_server")
ELSEWHERE = {
    "agent_parts.model = config.exp_name",
    "agent_parts.0 = env.env_type",
    "_tag_plan.0 = env.env_type",
    "_tag_plan.agent = build(spec) if is_agent(env.env_type) else None",
    "world_spec.key = f'custom_envs.{tag}.env_config'",
    "tool_specs.key = f'custom_envs.{tag}.tools.{i}'",
}
"""Wires of agents with processes of their own (tests/unit/agents), and places for messages."""


def keys():
    """Every key of worlds, managers and sampling, with its spec."""
    found = {}

    def walk(cls, path):
        for name, spec in spec_of(cls).items():
            below = spec.section or (spec.item.section if spec.item is not None and spec.kind == "map" else None)
            if spec.traits.range == "1":
                continue  # without a second value
            if below is not None and name != "tool_args":
                walk(below, f"{path}{name}.")
            else:
                found[f"{path}{name}"] = spec

    specs = spec_of(AgenticConfig)
    for tag in ("A", "B"):
        walk(specs["custom_envs"].item.section, f"custom_envs.{tag}.")
    for name in ("train_env_manager", "val_env_manager"):
        walk(specs[name].section, f"{name}.")
    walk(spec_of(specs["actor_infer"].section)["generating_args"].section, "actor_infer.generating_args.")
    found["actor_train.data_args.template_kwargs"] = spec_of(DataArguments)["template_kwargs"]
    for key in (*TOP, *SHARED):
        section, _, name = key.rpartition(".")
        found[key] = spec_of(specs[section].section)[name] if section else specs[name]
    return found


def values_of(key, spec):
    return MORE.get(key.rpartition(".")[2], ()) + candidates(spec)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agentic")
    (folder / "documents.jsonl").write_text('{"text": "one"}\n')
    (folder / "full.yaml").write_text(FULL.replace("DOCUMENTS", str(folder / "documents.jsonl")))
    return load_with_warnings(folder / "full.yaml", (f"output_dir={folder}",))


def refused(loaded):
    """What keeps a run from starting."""
    return {f"{d.id} {d.key}" for d in check_rules(loaded.config, loaded.root)} | {k for _, k, _ in refusals(loaded)}


@pytest.fixture(scope="module")
def effects(loaded):
    """Key to (changed config, the settings that change) of the first value that acts; None for them where every value
    that does not act is refused.
    """
    settings, found = agentic_settings_of(loaded.config), {}
    assert not refused(loaded)
    for key, spec in keys().items():
        for value in values_of(key, spec):
            try:
                config = changed(loaded.config, key.split("."), value)
                after = agentic_settings_of(config)
            except (ValueError, TypeError, AttributeError, AssertionError, ZeroDivisionError):
                continue  # not a value of this key
            where = frozenset(w for w in settings.keys() | after.keys() if settings.get(w) != after.get(w))
            if where:
                found[key] = config, where
                break
            if key not in found and refused(replace(loaded, config=config)):
                found[key] = config, None
    return found


@pytest.mark.slow
def test_every_key_of_worlds_and_their_managers_changes_what_a_run_is_given_or_is_refused(effects):
    inert = keys().keys() - effects.keys()
    assert not inert, inert


@pytest.mark.slow
def test_no_wire_of_the_agentic_launcher_can_be_cut_unnoticed(effects, loaded):
    unproven = []
    for name, function, definition, expression in wires(OF_AGENTS):
        with cut(function, definition, expression):
            before, shrunk = agentic_settings_of(loaded.config), False
            words = set(re.findall(r"\w+", name))
            # The keys that most likely go this way come first; any that does not go it any more is proof enough.
            for _, (config, where) in sorted(effects.items(), key=lambda e: e[0].rpartition(".")[2] not in words):
                if where is None:
                    continue
                try:
                    after = agentic_settings_of(config)
                except (ValueError, TypeError, AssertionError):
                    shrunk = True  # it does not fit to what is cut
                    break
                if shrunk := not where <= {w for w in where if before.get(w) != after.get(w)}:
                    break
        if not shrunk:
            unproven.append(name)
    assert set(unproven) <= ELSEWHERE, set(unproven) - ELSEWHERE
