"""What a config becomes: every settings object of a run, flattened; and the same with one wire cut.

A wire is an expression in the `of` of a settings class: where it is built, a value of the config enters it. A cut wire
gives the value it gave the first time for ever, as if a constant stood there.
"""

import ast
import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from roll_async.algorithms.objective import LossSettings
from roll_async.buffer.states import QueueOptions
from roll_async.config.schema import PipelineConfig
from roll_async.inference.settings import EngineSettings
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


def wires() -> Iterator[tuple[str, type, ast.FunctionDef, ast.expr]]:
    """(name, class, its `of`, the expression): arguments by name and values of dicts that are more than a constant."""
    for cls in BUILT:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls.of))).body
        assert isinstance(definition, ast.FunctionDef)
        for node in ast.walk(definition):
            values = []
            if isinstance(node, ast.Call):
                values = [(k.arg, k.value) for k in node.keywords]
            elif isinstance(node, ast.Dict):
                values = [(ast.unparse(k) if k else "**", v) for k, v in zip(node.keys, node.values, strict=True)]
            for name, value in values:
                calls = [n for n in ast.walk(value) if isinstance(n, ast.Call)]
                has_own_wires = isinstance(value, ast.Call | ast.Dict | ast.IfExp) and any(
                    n.keywords or ast.unparse(n.func).endswith(".of") for n in calls
                )
                if name and not isinstance(value, ast.Constant | ast.Name) and not has_own_wires:
                    yield f"{cls.__name__}.{name} = {ast.unparse(value)}", cls, definition, value


@contextmanager
def cut(cls: type, definition: ast.FunctionDef, wire: ast.expr) -> Iterator[None]:
    """Within: `cls.of` gives this expression the value it has the first time."""
    place = ast.unparse(wire), wire.lineno, wire.col_offset

    class Cutter(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            if isinstance(node, ast.expr) and (ast.unparse(node), node.lineno, node.col_offset) == place:
                thunk = ast.Lambda(args=ast.parse("lambda: 0", mode="eval").body.args, body=node)  # type: ignore[attr-defined]
                return ast.Call(func=ast.Name(id="_first", ctx=ast.Load()), args=[thunk], keywords=[])
            return self.generic_visit(node)

    source = ast.parse(ast.unparse(definition)).body[0]
    fresh = ast.parse(textwrap.dedent(inspect.getsource(cls.of))).body[0]
    assert isinstance(source, ast.FunctionDef) and isinstance(fresh, ast.FunctionDef)
    fresh.decorator_list = []
    module = ast.fix_missing_locations(ast.Module(body=[Cutter().visit(fresh)], type_ignores=[]))
    kept: list[object] = []

    def first(thunk: Callable[[], object]) -> object:
        if not kept:
            kept.append(thunk())
        return kept[0]

    names = {**vars(sys.modules[cls.__module__]), "_first": first}
    exec(compile(module, f"<{cls.__name__}.of with a cut wire>", "exec"), names)
    original = cls.__dict__["of"]
    cls.of = classmethod(names["of"])  # type: ignore[attr-defined]
    try:
        yield
    finally:
        cls.of = original  # type: ignore[attr-defined]
