"""What a config becomes: every settings object of a run, flattened; and the same with one wire cut.

A wire is an expression in the `of` of a settings class, or in a function of `launch/agents.py`: there a value of the
config enters. A cut wire gives the value it gave the first time for ever, as if a constant stood there.
"""

import ast
import asyncio
import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from types import FunctionType

from roll_async.algorithms.objective import LossSettings
from roll_async.buffer.states import QueueOptions
from roll_async.config.schema import AgenticConfig, PipelineConfig
from roll_async.inference.settings import EngineSettings
from roll_async.launch import agents
from roll_async.pipelines.protocol import RunPlan
from roll_async.pipelines.wire import EngineOptions, RolloutOptions
from roll_async.prompts.load import DataOptions
from roll_async.prompts.pool import PoolOptions
from roll_async.rollout.chat_scheduler import SchedulerOptions
from roll_async.rollout.conversations import ScoringOptions
from roll_async.rollout.filter_budget import BudgetOptions
from roll_async.rollout.manager_options import ManagerOptions
from roll_async.trainer.learner import LearnerOptions
from roll_async.trainer.megatron.settings import MegatronSettings, OptimizerSettings
from roll_async.weight_sync.synchronizer import SyncOptions

BUILT = (
    EngineSettings, MegatronSettings, OptimizerSettings, LossSettings, LearnerOptions, QueueOptions, SchedulerOptions,
    ScoringOptions, ManagerOptions, BudgetOptions, SyncOptions, RunPlan, EngineOptions, RolloutOptions, DataOptions,
    PoolOptions,
)  # fmt: skip

OF_AGENTS = (
    agents.agent_parts, agents._worlds, agents._tag_plan, agents.world_spec, agents.tool_specs, agents.session_options,
    agents.group_options, agents._manager, agents.training_tasks, agents.validation_tasks, agents.held_out_tasks,
)  # fmt: skip


def agentic_settings_of(config: AgenticConfig) -> dict[str, object]:
    """The same of an agentic config. Its tokenizer is named, not loaded. Raises ValueError for what a run refuses."""

    async def parts() -> dict[str, object]:
        async with AsyncExitStack() as stack:
            built = await agents.agent_parts(config, stack)
            alone = await agents.agent_parts(config, stack, trains=False)
            places = {
                "renderer": built.renderer, "silence_s": built.silence_s, "book": built.tell.__self__._folder,
                "worlds": _plain(built.worlds), "validation_worlds": _plain(built.validation_worlds),
                "rollout.worlds": _plain(alone.worlds),
            }  # fmt: skip
            for tag, plan in built.tags.items():
                tools = [_plain(call.func.__self__) for call in plan.toolbox._functions.values()]
                places[f"{tag}.toolbox"] = _plain(plan.toolbox), tools
                options = {"spec": plan.spec, "session": plan.session, "play": plan.play}
                places |= {f"{tag}.{k}": v for name, o in options.items() for k, v in _flat(o, f"{name}.")}
                places |= {f"{tag}.agent": type(plan.agent), f"{tag}.max_concurrent": plan.max_concurrent}
            return places

    class Named(str):
        """A tokenizer, and what renders with it."""

    real = agents.load_tokenizer, agents.TemplateRenderer, agents.at_time
    agents.load_tokenizer = agents.TemplateRenderer = Named  # type: ignore[misc, assignment]
    agents.at_time = lambda tokenizer, time: Named(f"{tokenizer} at {time}")  # type: ignore[assignment, return-value]
    try:
        found = asyncio.run(parts())
    finally:
        agents.load_tokenizer, agents.TemplateRenderer, agents.at_time = real  # type: ignore[misc]
    flat = {f"parts.{key}": repr(value) for key, value in found.items()}
    for number, options in enumerate((agents.group_options(config), agents.group_options(config, trains=False))):
        flat |= dict(_flat(options, f"{number}."))
    for name, stream in (("training", agents.training_tasks(config)), ("held out", agents.held_out_tasks(config))):
        flat[f"{name} tasks"] = repr([stream.at(i).row_id for i in range(8)])
    flat["held out"] = repr({k: [p.row_id for p in ps] for k, ps in agents.validation_tasks(config).items()})
    for options in (
        EngineSettings.of(config, replica=0, restart=0), RunPlan.of(config, first_step=1),
        RolloutOptions.of(config, "shm"), EngineOptions.of(config),
    ):  # fmt: skip
        flat |= dict(_flat(options, ""))
    return flat


def _plain(thing: object) -> list[str]:
    """What an object holds that prints its value."""
    shown = [f"{type(thing).__name__}.{name}={value!r}" for name, value in vars(thing).items()]
    return sorted(text for text in shown if " at 0x" not in text)


def settings_of(config: PipelineConfig) -> dict[str, object]:
    """`CLASS.FIELD` (of a role, with its name in front) to its value, for everything a run builds from its config."""
    built: dict[str, object] = {
        "": [
            EngineSettings.of(config, replica=0, restart=0), LearnerOptions.of(config), SchedulerOptions.of(config),
            EngineOptions.of(config), PoolOptions.of(config),
            RolloutOptions.of(config, "shm"), RunPlan.of(config, first_step=1),
            DataOptions.of(config, config.actor_train.data_args, checks={}, references=()),
            *(DataOptions.of(config, d, checks={}, references=()) for _, d in config.validation.data.values()),
        ]
    }  # fmt: skip
    for name, worker in config.roles():
        if worker.is_megatron:
            built[f"{name}:"] = [MegatronSettings.of(config, worker)]
    flat: dict[str, object] = {}
    for role, objects in built.items():
        for number, thing in enumerate(objects):
            flat |= dict(_flat(thing, f"{role}{number}."))
    return flat


def _flat(thing: object, path: str) -> Iterator[tuple[str, object]]:
    for field in dataclasses.fields(thing):  # type: ignore[arg-type]
        value = getattr(thing, field.name)
        where = f"{path}{type(thing).__name__}.{field.name}"
        if dataclasses.is_dataclass(value):
            yield from _flat(value, f"{where}/")
            value = type(value).__name__
        yield where, repr(value)


def wires(built: Sequence[type | FunctionType] = BUILT) -> Iterator[tuple[str, type | FunctionType, ast.AST, ast.expr]]:
    """(name, class or function, its definition, the expression): arguments by name and values of dicts that are more
    than a constant; of functions also arguments by place that read the config.
    """
    for cls in built:
        by_place = isinstance(cls, FunctionType)
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls if by_place else cls.of))).body
        for node in ast.walk(definition):
            values = []
            if isinstance(node, ast.Call):
                values = [(k.arg, k.value) for k in node.keywords]
                values += [(str(i), a) for i, a in enumerate(node.args) if by_place and _reads_config(a)]
            elif isinstance(node, ast.Dict):
                values = [(ast.unparse(k) if k else "**", v) for k, v in zip(node.keys, node.values, strict=True)]
            for name, value in values:
                calls = [n for n in ast.walk(value) if isinstance(n, ast.Call)]
                has_own_wires = isinstance(value, ast.Call | ast.Dict | ast.IfExp) and any(
                    n.keywords or ast.unparse(n.func).endswith(".of") for n in calls
                )
                waits = any(isinstance(n, ast.Await) for n in ast.walk(value))
                if name and not isinstance(value, ast.Constant | ast.Name) and not has_own_wires and not waits:
                    yield f"{cls.__name__}.{name} = {ast.unparse(value)}", cls, definition, value


def _reads_config(value: ast.expr) -> bool:
    names = {n.id for n in ast.walk(value) if isinstance(n, ast.Name)}
    return isinstance(value, ast.Attribute | ast.BinOp | ast.Call) and bool(
        names & {"config", "manager", "env", "tool"}
    )


@contextmanager
def cut(cls: type | FunctionType, definition: ast.AST, wire: ast.expr) -> Iterator[None]:
    """Within: `cls.of`, or the function, gives this expression the value it has the first time."""
    place = ast.unparse(wire), wire.lineno, wire.col_offset

    class Cutter(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            if isinstance(node, ast.expr) and (ast.unparse(node), node.lineno, node.col_offset) == place:
                thunk = ast.Lambda(args=ast.parse("lambda: 0", mode="eval").body.args, body=node)  # type: ignore[attr-defined]
                return ast.Call(func=ast.Name(id="_first", ctx=ast.Load()), args=[thunk], keywords=[])
            return self.generic_visit(node)

    fresh = ast.parse(textwrap.dedent(inspect.getsource(cls if isinstance(cls, FunctionType) else cls.of))).body[0]
    fresh.decorator_list = []  # type: ignore[attr-defined]
    module = ast.fix_missing_locations(ast.Module(body=[Cutter().visit(fresh)], type_ignores=[]))
    kept: list[object] = []

    def first(thunk: Callable[[], object]) -> object:
        if not kept:
            kept.append(thunk())
        return kept[0]

    code = compile(module, f"<{cls.__name__} with a cut wire>", "exec")
    space = vars(sys.modules[cls.__module__])
    if isinstance(cls, FunctionType):
        space["_first"] = first
        exec(code, space)
        try:
            yield
        finally:
            space[cls.__name__] = cls
            del space["_first"]
        return
    names = {**space, "_first": first}
    exec(code, names)
    original = cls.__dict__["of"]
    cls.of = classmethod(names["of"])  # type: ignore[attr-defined]
    try:
        yield
    finally:
        cls.of = original  # type: ignore[attr-defined]
