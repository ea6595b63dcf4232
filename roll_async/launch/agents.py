"""Builds worlds, tools, gateway and tasks from agentic configs. Checks that need no model are made first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from roll_async.agents.book import TrajectoryLog
from roll_async.agents.episode import EpisodeOptions
from roll_async.agents.gateway.server import PolicyGateway
from roll_async.agents.protocol import is_agent
from roll_async.agents.rendering import TemplateRenderer
from roll_async.agents.session import RENDERING_THREADS, SessionOptions
from roll_async.agents.tasks import Tasks
from roll_async.agents.tools.toolbox import ToolSpec, check_tool, open_tools, toolbox_of
from roll_async.agents.worlds import AgentParts, TagPlan
from roll_async.config.schema import AgenticConfig, EnvConfig, EnvManagerConfig
from roll_async.envs.pool import WorldPool
from roll_async.envs.registry import WorldSpec, build, check
from roll_async.prompts.tokenizer import load_tokenizer, told
from roll_async.rollout.chat_scheduler import sampling_of
from roll_async.rollout.filters.group_filter import GroupFilter
from roll_async.rollout.groups import GroupOptions
from roll_async.schema import Prompt


def check_agents(config: AgenticConfig) -> None:
    """Check that worlds and tools exist and accept their settings, and that each setting of a tag has an effect. Raises
    ValueError naming key, value and remedy.
    """
    for tag, env in config.custom_envs.items():
        check(world_spec(tag, env))
        for spec in tool_specs(tag, env):
            check_tool(spec)
        written = {name: getattr(env, name) for name in ("agent_system_template", "agent_template", "tools")}
        for name in (name for name, value in written.items() if value and is_agent(env.env_type)):
            why = f"{env.env_type} makes its own requests"
            raise ValueError(f"custom_envs.{tag}.{name}: has no effect, {why}; remove it")


def world_spec(tag: str, env: EnvConfig) -> WorldSpec:
    """The world of an environment section."""
    return WorldSpec(env_type=env.env_type, values=dict(env.env_config), key=f"custom_envs.{tag}.env_config")


def tool_specs(tag: str, env: EnvConfig) -> list[ToolSpec]:
    """The tools of an environment section."""
    return [
        ToolSpec(tool_id=tool.tool_id, values=dict(tool.tool_args), key=f"custom_envs.{tag}.tools.{i}")
        for i, tool in enumerate(env.tools)
    ]


async def agent_parts(config: AgenticConfig, stack: AsyncExitStack, *, trains: bool = True) -> AgentParts:
    """All parts that trajectories need; they close with the stack. `trains`: as in `group_options`. Raises ValueError
    for what the user can fix.
    """
    check_agents(config)
    manager, val = _manager(config, trains), config.val_env_manager
    executor = stack.enter_context(ThreadPoolExecutor(RENDERING_THREADS, thread_name_prefix="rendering"))
    worlds, validation_worlds = _worlds(config, manager, stack), _worlds(config, val, stack)
    gateway = None
    if any(is_agent(env.env_type) for env in config.custom_envs.values()):
        gateway = PolicyGateway(model=config.exp_name)
        await gateway.start()
        stack.push_async_callback(gateway.close)
    book = TrajectoryLog(Path(config.output_dir) / config.exp_name / "trajectories")
    stack.callback(book.close)
    renderer = TemplateRenderer(
        told(load_tokenizer(config.pretrain), "native", config.template_time, config.template_kwargs)
    )
    if any(env.tools for env in config.custom_envs.values()):
        renderer.between(0, ["x"])  # a template that drops results is refused now, not at the first call of the run
    return AgentParts(
        tags={tag: await _tag_plan(config, tag, env, stack) for tag, env in config.custom_envs.items()},
        renderer=renderer,
        worlds=worlds,
        validation_worlds=validation_worlds,
        gateway=gateway,
        silence_s=config.fault.env_timeout,
        executor=executor,
        tell=book.add,
        max_worlds=manager.num_env_groups * (manager.group_size + manager.group_size_redundancy),
        max_validation_worlds=val.num_env_groups * val.group_size,
        trains=trains,
    )


def _worlds(config: AgenticConfig, manager: EnvManagerConfig, stack: AsyncExitStack) -> WorldPool:
    worlds = WorldPool(max_per_worker=manager.max_env_num_per_worker, step_timeout_s=config.fault.env_timeout)
    stack.push_async_callback(worlds.close)
    return worlds


async def _tag_plan(config: AgenticConfig, tag: str, env: EnvConfig, stack: AsyncExitStack) -> TagPlan:
    spec, windowed = world_spec(tag, env), env.manager == "step"
    tools = await open_tools(tool_specs(tag, env), stack)
    return TagPlan(
        spec=spec,
        session=session_options(config, env),
        play=EpisodeOptions(
            max_turns=env.max_steps,
            max_response_tokens=env.max_tokens_per_step,
            windowed=windowed,
            history_length=env.history_length,
            system_template=env.agent_system_template,
            turn_template=env.agent_template,
        ),
        toolbox=toolbox_of(tools, timeout_s=config.fault.env_timeout),
        agent=build(spec) if is_agent(env.env_type) else None,
        max_concurrent=env.max_concurrent,
    )


def session_options(config: AgenticConfig, env: EnvConfig) -> SessionOptions:
    """Limits and sampling of one trajectory."""
    sampling = sampling_of(config.actor_infer.generating_args)
    return SessionOptions(
        sampling=replace(sampling, max_new_tokens=min(sampling.max_new_tokens, env.max_tokens_per_step)),
        max_turns=env.max_steps,
        max_context=config.sequence_length,
        max_seconds=env.max_seconds or float("inf"),
        windowed=env.manager == "step",
    )


def group_options(config: AgenticConfig, *, trains: bool = True) -> GroupOptions:
    """Size of groups, and retries. Without training they are those of validation, and no group is filtered."""
    manager = _manager(config, trains)
    return GroupOptions(
        samples_per_group=manager.group_size,
        sampling=None,
        redundancy=manager.group_size_redundancy,
        retries=config.fault.sample_retries,
        filter=GroupFilter.of(config) if trains else None,
    )


def _manager(config: AgenticConfig, trains: bool) -> EnvManagerConfig:
    return config.train_env_manager if trains else config.val_env_manager


def training_tasks(config: AgenticConfig) -> Tasks:
    """The tasks of training, an endless stream."""
    manager = config.train_env_manager
    return Tasks(manager.tags, manager.num_groups_partition, seed=config.seed)


def validation_tasks(config: AgenticConfig) -> Mapping[str, Sequence[Prompt]]:
    """val_batch_size trajectories on worlds of their own; none without eval_steps."""
    if not config.eval_steps:
        return {}
    tasks = held_out_tasks(config)
    return {"": [tasks.at(i // config.val_env_manager.group_size) for i in range(config.val_batch_size)]}


def held_out_tasks(config: AgenticConfig) -> Tasks:
    """The tasks of validation, an endless stream, too."""
    manager = config.val_env_manager
    return Tasks(manager.tags, manager.num_groups_partition, seed=config.seed, validation=True)
