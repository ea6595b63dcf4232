"""What a config becomes: every settings object of a run, and what its parts are started with, flattened; and the same
with one wire cut.

A wire is an expression in the `of` of a settings class, in a function of `launch/agents.py`, or a read of the config in
a function that starts a part: there a value of the config enters. A cut wire gives the value it gave the first time for
ever, as if a constant stood there. `wires.txt` lists them all:

    python -m tests.unit.config.wires > tests/unit/config/wires.txt
"""

import __future__

import ast
import asyncio
import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

from pytest import MonkeyPatch

from roll_async.algorithms.objective import LossSettings
from roll_async.buffer.states import QueueOptions
from roll_async.cluster.placement import place_roles
from roll_async.cluster.roles.engine_group import RayEngineClient
from roll_async.cluster.roles.reward_group import HostPlan, RayScorer
from roll_async.cluster.roles.rollout_process import RolloutProcess
from roll_async.cluster.roles.trainer_group import RayTrainerGroup
from roll_async.cluster.roles.training_role import TrainingRole
from roll_async.commands import run as commands_run
from roll_async.config.schema import AgenticConfig, PipelineConfig, RLVRConfig
from roll_async.config.schema_rollout import PromptPoolConfig
from roll_async.inference.endpoint import EndpointOptions
from roll_async.inference.settings import EngineSettings
from roll_async.launch import agents, restarts, rollout, run_start
from roll_async.launch import run as launch_run
from roll_async.launch.engines import ReplicaStarter
from roll_async.launch.roles import RoleStarter
from roll_async.observe import machine, progress, prometheus, recorder, trace, trackers
from roll_async.pipelines import checkpoint, validation
from roll_async.pipelines.protocol import RunPlan
from roll_async.pipelines.wire import UserHooks
from roll_async.prompts.load import DataOptions
from roll_async.rewards.serving import router
from roll_async.rollout.chat_scheduler import SchedulerOptions
from roll_async.rollout.dispatch.manager_options import ManagerOptions
from roll_async.rollout.filters.filter_budget import BudgetOptions
from roll_async.rollout.scoring import ScoringOptions
from roll_async.trainer.learner import LearnerOptions
from roll_async.trainer.megatron.settings import MegatronSettings, OptimizerSettings
from roll_async.weight_sync.canary import CanaryOptions
from roll_async.weight_sync.protocol import SyncOptions

BUILT = (
    EngineSettings, MegatronSettings, OptimizerSettings, LossSettings, LearnerOptions, QueueOptions, SchedulerOptions,
    ScoringOptions, ManagerOptions, BudgetOptions, SyncOptions, RunPlan, DataOptions, TrainingRole, EndpointOptions,
)  # fmt: skip

OF_AGENTS = (
    agents.agent_parts, agents._worlds, agents._tag_plan, agents.world_spec, agents.tool_specs, agents.session_options,
    agents.group_options, agents._manager, agents.training_tasks, agents.validation_tasks, agents.held_out_tasks,
)  # fmt: skip


OF_STARTS = (
    rollout.prompts_of, rollout.held_out_of, rollout._prompts_of_set, rollout.start_scorer, rollout._tools,
    rollout.start_teachers, rollout._ledger, rollout.start_engines, rollout.StartedRollout.build,
    router.create_scorer, RoleStarter._start_process, RoleStarter._start_training,
    ReplicaStarter.start, checkpoint.LoopCheckpoint.save, checkpoint.restore_loop, run_start._folder,
    run_start.checkpoints_of, restarts.can_restart, launch_run._sample_dump, commands_run._recorder,
)  # fmt: skip
"""Functions that give parts of a config to what they start."""


def started_with(config: RLVRConfig) -> dict[str, object]:
    """What the parts of an rlvr run are started with. Nothing starts: each part notes what it was given."""
    said: dict[str, Any] = {}

    def part(name: str, answer: object = None) -> Callable[..., object]:
        def given(*args: object, **kwargs: object) -> object:
            said.setdefault(name, []).append((list(map(_told, args)), {k: _told(v) for k, v in kwargs.items()}))
            return answer

        return given

    def later(name: str, answer: object = None) -> Callable[..., object]:
        async def given(*args: object, **kwargs: object) -> object:
            return part(name, answer)(*args, **kwargs)

        return given

    class Named(str):
        """A tokenizer, which is its folder."""

        def encode(self, text: str, **_: object) -> list[str]:
            return [str(self)]

        def decode(self, ids: object) -> str:
            return ""

    teacher = SimpleNamespace(start=later("teacher"), echo=later("echo", ("", ())), close=later("close"))
    started = {"close": later("close"), "load_model": later("load_model")}
    process = SimpleNamespace(**started, hosts=frozenset({"here"}), processes=())
    saved = SimpleNamespace(
        begin=lambda step: Path("step"), commit=part("commit"), prune=part("prune"), find=part("find")
    )
    role = SimpleNamespace(save=later("save"), export_hf=later("export_hf"), finish_save=later("finish_save"))
    queue = SimpleNamespace(checkpoint_state=later("checkpoint_state", {}), checkpointed=later("checkpointed"))

    def observer(folder: object, *_: object, create: Mapping[str, Callable[[], object]], **options: object) -> None:
        part("recorder")(**options)
        for make in create.values():
            make()

    async def start() -> None:
        async with AsyncExitStack() as stack:
            await rollout.start_scorer(config, stack)
            await rollout.start_teachers(config, stack)
            roles = RoleStarter.__new__(RoleStarter)
            roles._config, roles._stack, roles._pool = config, stack, None  # type: ignore[assignment]
            names = [name for name, _ in config.roles()]
            roles._placements = dict.fromkeys([*names, "actor_infer"])  # type: ignore[assignment]
            roles._runtime = SimpleNamespace(embedded=True)  # type: ignore[assignment]
            await roles._start_process(["log"])
            no_engines = asyncio.Event()
            no_engines.set()
            for name, worker in config.roles():
                if worker.is_megatron:
                    await roles._start_training(name, worker, None, no_engines)  # type: ignore[arg-type]
            replicas = ReplicaStarter(config, [], None, stack)  # type: ignore[arg-type]
            replicas._places["one"] = SimpleNamespace(index=0), None  # type: ignore[assignment]
            await replicas.start("one", 0)
            learner = SimpleNamespace(export_state=dict)
            loop = checkpoint.LoopCheckpoint(config, {"actor_train": role}, learner, queue, saved)  # type: ignore[arg-type]
            await loop.save(1)
            said["save waits for the files"] = loop._pending is None
            await loop.finish()
            await checkpoint.restore_loop(config, {}, learner, saved)  # type: ignore[arg-type]
            observers = SimpleNamespace(samples=part("samples")), SimpleNamespace(path=Path("run"))
            launch_run._sample_dump(config, stack, observers)  # type: ignore[arg-type]
            clients = SimpleNamespace(start_all=later("start", ["one", "two", "three"]))
            await rollout.start_engines(config, clients, later("beside")(), stack)  # type: ignore[arg-type]
            await started_rollout(config, stack).build(config, process, UserHooks(), "run", 0, None)  # type: ignore[arg-type]

    with MonkeyPatch.context() as patch:
        for cls in (RayScorer, RolloutProcess, RayEngineClient):
            patch.setattr(cls, "start", later(cls.__name__, process))
        patch.setattr(
            RayTrainerGroup, "start", lambda role, *given, **named: later(role.name, process)(role, *given, **named)
        )
        row = SimpleNamespace(at=lambda index: index)
        for name, stub in {
            "load_prompts": part("load_prompts", {}), "judged": part("judged", {}),
            "ShuffledPrompts": part("ShuffledPrompts", row), "PooledPrompts": part("PooledPrompts"),
            "SqliteLedger": part("ledger"), "MemoryLedger": part("no ledger"),
            "move_to_previous": part("move_to_previous"),
            "TemplateRenderer": part("TemplateRenderer", SimpleNamespace(between=lambda *given: ())),
            "told": lambda *given: given, "load_tokenizer": Named, "ChatEndpoint": part("ChatEndpoint", teacher),
            "EndMarks": SimpleNamespace(of=lambda *given: SimpleNamespace(ids=(f"ends of {given}",), difference="")),
            "build_engines": part("build_engines", SimpleNamespace(start=later("engines"))),
            "build_rollout": part("build_rollout", SimpleNamespace(queue=None)),
            "follow_requests": later("follow_requests"),
        }.items():  # fmt: skip
            patch.setattr(rollout, name, stub)
        for name, stub in {
            "load_tokenizer": lambda name: SimpleNamespace(batch_decode=name),
            "SampleDump": part("SampleDump", SimpleNamespace(close=lambda: None)),
        }.items():  # fmt: skip
            patch.setattr(launch_run, name, stub)
        patch.setattr(trackers, "create_tracker", part("tracker"))
        patch.setattr(prometheus, "PrometheusTracker", part("prometheus"))
        patch.setattr(trace, "Trace", part("trace"))
        patch.setattr(progress, "Screen", part("progress"))
        patch.setattr(recorder, "Recorder", observer)
        patch.setattr(machine, "gpus_of_machine", lambda: None)
        asyncio.run(start())
        folder = SimpleNamespace(path=Path("run"), record=SimpleNamespace(tracker_run=1))
        commands_run._recorder(config, folder)  # type: ignore[arg-type]
        said["held out"] = {name: len(rows) for name, rows in rollout.prompts_of(config)[2].items()}
        rollout._ledger(config, can_rebuild=False)
        rollout._tools(config, SimpleNamespace(tools={"t": 1}, tool_callback=part("tools")))  # type: ignore[arg-type]
    said["placements"], said["transport"] = place_roles(config), rollout._transport(config, {"a", "b"})
    said["folder"], said["checkpoints"] = run_start._folder(config), run_start.checkpoints_of(config, None)
    said["restarts"] = [restarts.can_restart(config, n, ConnectionError()) for n in range(9)]
    for domain, reward in config.rewards.items():
        scorer = router.create_scorer(reward)
        said[f"rewards.{domain}"] = type(scorer).__name__, vars(scorer)
    return dict(_leaves(said, "start"))


def started_rollout(config: RLVRConfig, stack: AsyncExitStack) -> rollout.StartedRollout:
    """Without any replica."""
    return rollout.StartedRollout(
        engines=SimpleNamespace(manager=SimpleNamespace(clients=())), validators=None, scorers=SimpleNamespace(),
        prompts=SimpleNamespace(), held_out=dict.fromkeys(config.validation_sampling, ()), pool=None,
        starter=SimpleNamespace(), stack=stack,
    )  # type: ignore[arg-type]  # fmt: skip


def _told(thing: object) -> object:
    if isinstance(thing, PromptPoolConfig):
        return dataclasses.asdict(thing)
    if isinstance(thing, HostPlan):
        return replace(thing, rewards=dict.fromkeys(thing.rewards))
    return "a function" if callable(thing) else thing


def _leaves(thing: object, path: str) -> Iterator[tuple[str, object]]:
    """Values by their place; not of a part of the config that is handed on as it is: who has it need not use it."""
    if type(thing).__module__.startswith("roll_async.config."):
        return
    if dataclasses.is_dataclass(thing):
        thing = {field.name: getattr(thing, field.name) for field in dataclasses.fields(thing)}
    if isinstance(thing, list | tuple):
        thing = dict(enumerate(thing))
    if isinstance(thing, Mapping):
        for name, value in thing.items():
            yield from _leaves(value, f"{path}.{name}")
    elif " at 0x" not in repr(thing):
        yield path, repr(thing)


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
                "limits": [(p.max_worlds, p.trains) for p in (built, alone)],
                "validation_limits": [p.max_validation_worlds for p in (built, alone)],
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

        def between(self, last_token: int, results: object) -> None:
            """As every template that shows results."""

    real = agents.load_tokenizer, agents.TemplateRenderer, agents.told
    agents.load_tokenizer = agents.TemplateRenderer = Named  # type: ignore[misc, assignment]
    agents.told = lambda tokenizer, *given: Named(f"{tokenizer} told {given}")  # type: ignore[assignment, return-value]
    try:
        found = asyncio.run(parts())
    finally:
        agents.load_tokenizer, agents.TemplateRenderer, agents.told = real  # type: ignore[misc]
    flat = {f"parts.{key}": repr(value) for key, value in found.items()}
    for number, options in enumerate((agents.group_options(config), agents.group_options(config, trains=False))):
        flat |= dict(_flat(options, f"{number}."))
    for name, stream in (("training", agents.training_tasks(config)), ("held out", agents.held_out_tasks(config))):
        flat[f"{name} tasks"] = repr([stream.at(i).row_id for i in range(8)])
    flat["held out"] = repr({k: [p.row_id for p in ps] for k, ps in agents.validation_tasks(config).items()})
    sets = validation.held_out_sets(config.validation_sampling, dict.fromkeys(config.validation_sampling, ()))
    flat |= {"restarts": config.restarts_per_engine, "mode": config.validation_mode}
    for options in (EngineSettings.of(config, replica=0, restart=0), *_of_rollout(config), *sets):
        flat |= dict(_flat(options, ""))
    return flat


def _of_rollout(config: PipelineConfig) -> list[object]:
    """The settings of loop and rollout side that every config has."""
    of_all = (RunPlan.of(config, first_step=1), ManagerOptions.of(config), QueueOptions.of(config))
    by_choice = (BudgetOptions.of(config), CanaryOptions.of(config))
    return [*of_all, SyncOptions.of(config, "shm"), *(options for options in by_choice if options is not None)]


def _plain(thing: object) -> list[str]:
    """What an object holds that prints its value."""
    shown = [f"{type(thing).__name__}.{name}={value!r}" for name, value in vars(thing).items()]
    return sorted(text for text in shown if " at 0x" not in text)


def settings_of(config: PipelineConfig) -> dict[str, object]:
    """`CLASS.FIELD` (of a role, with its name in front) to its value, for everything a run builds from its config."""
    built: dict[str, object] = {
        "": [
            EngineSettings.of(config, replica=0, restart=0), LearnerOptions.of(config), SchedulerOptions.of(config),
            config.prompt_pool, *_of_rollout(config),
            DataOptions.of(config, config.actor_train.data_args, checks={}, references=()),
            *(DataOptions.of(config, d, checks={}, references=()) for _, d in config.validation.data.values()),
            *map(EndpointOptions.of, config.teacher_servers.values()),
        ]
    }  # fmt: skip
    for name, worker in config.roles():
        if worker.is_megatron:
            built[f"{name}:"] = [TrainingRole.of(config, name, worker)]
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
    than a constant; of functions also arguments by place that read the config, and of those that start a part every
    read of the config.
    """
    for cls in built:
        by_place = isinstance(cls, FunctionType)
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls if by_place else cls.of))).body
        if cls in OF_STARTS:
            yield from (
                (f"{cls.__qualname__}: {ast.unparse(read)}", cls, definition, read) for read in _reads(definition)
            )
            continue
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


def _reads(definition: ast.AST) -> list[ast.Attribute]:
    """The longest chains of attributes of `config`, `self._config`, or a name for a part of it."""
    names = {"config", "self._config"}
    for node in ast.walk(definition):
        if isinstance(node, ast.Assign):
            pairs = [(node.targets[0], node.value)]
            if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(node.targets[0].elts, node.value.elts, strict=True))
            names |= {ast.unparse(to) for to, value in pairs if _root(value) in names and isinstance(to, ast.Name)}
    inner = {id(node.value) for node in ast.walk(definition) if isinstance(node, ast.Attribute)}
    chains = [node for node in ast.walk(definition) if isinstance(node, ast.Attribute) and id(node) not in inner]
    known = {id(n) for node in ast.walk(definition) if isinstance(node, ast.Assert) for n in ast.walk(node)}
    called = {id(node.func) for node in ast.walk(definition) if isinstance(node, ast.Call)}
    return [c for c in chains if id(c) not in called | known and _root(c) in names and isinstance(c.ctx, ast.Load)
            and ast.unparse(c) not in names]  # fmt: skip


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute) and ast.unparse(node) != "self._config":
        node = node.value
    return ast.unparse(node)


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

    owner, _, name = cls.__qualname__.rpartition(".") if isinstance(cls, FunctionType) else (cls.__name__, "", "of")
    space = vars(sys.modules[cls.__module__])
    before = space.get(name)
    space["_first"] = first
    lazily = __future__.annotations.compiler_flag  # names that only a type checker knows
    exec(compile(module, f"<{cls.__name__} with a cut wire>", "exec", flags=lazily), space)
    holder, original = None, None
    if owner:  # the module has the cut method only until its class has it
        made, holder = space.pop(name), space[owner]
        if before is not None:
            space[name] = before
        original = holder.__dict__[name]
        setattr(holder, name, classmethod(made) if name == "of" else made)
    try:
        yield
    finally:
        if holder is not None:
            setattr(holder, name, original)
        else:
            space[name] = cls
        del space["_first"]


if __name__ == "__main__":
    print("\n".join(name for name, *_ in (*wires(BUILT), *wires(OF_AGENTS), *wires(OF_STARTS))))
