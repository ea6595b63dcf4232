"""Dotted paths and the settings of what they name, read from sources that are not run."""

import dataclasses
import importlib
from pathlib import Path

import pytest

from roll_async.agents.tools.toolbox import TOOLS
from roll_async.config.api import ConfigError
from roll_async.config.options.user_options import build_options
from roll_async.envs.registry import WORLDS, NoOptions
from roll_async.launch.checks.gate import check_supported
from roll_async.launch.checks.user_code import _bound, _options, _source, _spec

ROOT = Path(__file__).resolve().parents[3]
CPU, AGENTIC = ROOT / "configs/rlvr_config_async_cpu.yaml", ROOT / "configs/agentic_frozen_lake_async_cpu.yaml"
MINE = """
raise SystemExit("this file must not run")
from dataclasses import dataclass, field
from elsewhere import imported
NUMBER = 3
called = make(NUMBER)
if NUMBER:
    def inside(text, truth, extra): ...
def score(text, truth, extra): ...
@dataclass
class Base:
    first: int
@dataclass
class Settings(Base):
    size: int = 4
    names: list = field(default_factory=list)
    made: int = field(init=False)
class World:
    Options = Settings
class Plain: ...
class Elsewhere(imported): ...
"""


@pytest.fixture
def refused(tmp_path):
    """Errors of a shipped config that is copied beside the user's own code."""
    (tmp_path / "package").mkdir()
    (tmp_path / "mine_of_user.py").write_text(MINE)
    (tmp_path / "package" / "deep.py").write_text("from anywhere import *\n")
    (tmp_path / "broken_of_user.py").write_text("def f(:\n")

    def check(shipped, *overrides):
        copy = tmp_path / "run.yaml"
        copy.write_text(shipped.read_text())
        try:
            check_supported(copy, overrides)
        except ConfigError as error:
            return [f"{d.id}: {d.key}: {d.message}" for d in error.diagnostics if d.is_error]
        return []

    return check


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("mine_of_user.score", None), ("mine_of_user.inside", None), ("mine_of_user.imported", None),
        ("mine_of_user.called", None), ("mine_of_user.World", None), ("package.deep.anything", None),
        ("json.dumps", None), ("roll_async.rewards.math_rule.MathRule", None),
        ("mine_of_user.scor", "has no function or class scor; did you mean 'mine_of_user.score'?"),
        ("mine_of_user.NUMBER", "mine_of_user.py:5 is no function or class"),
        ("nothing_of_user.score", "there is no module nothing_of_user in "),
        ("package.none.score", "there is no module package.none in "),
        ("broken_of_user.f", "broken_of_user.py:1 cannot be read: invalid syntax"),
        ("__main__.score", "there is no module"),
    ],
)  # fmt: skip
def test_a_wrong_path_of_a_reward_is_refused_and_its_module_is_not_run(refused, path, problem):
    found = refused(CPU, f"rewards={{a: {{type: {path}}}}}")
    if problem is None:
        assert found == []
    else:
        (line,) = found
        assert line.startswith(f'C201: rewards.a.type: "{path}": ') and problem in line, line


def world(env_type, **settings):
    values = ", ".join(f"{key}: {value}" for key, value in settings.items())
    return f"custom_envs={{FrozenLake: {{env_type: {env_type}, env_config: {{{values}}}}}}}"


def test_wrong_worlds_and_unknown_settings_are_refused(refused):
    at = "C201: custom_envs.FrozenLake"
    assert refused(AGENTIC, world("frozen_lake", size=4)) == []
    assert refused(AGENTIC, world("frozen_lake", siez=4)) == [
        f"{at}.env_config.siez: unknown key; did you mean 'size'?"
    ]
    assert refused(AGENTIC, world("frozen_lake", size="four", frozen_share=1)) == [
        f'{at}.env_config.size: expected int, got str "four"'
    ]
    assert "expected int, got bool true" in refused(AGENTIC, world("frozen_lake", size="true"))[0]
    assert refused(AGENTIC, world("mine_of_user.World", first=1, size=2)) == []
    assert refused(AGENTIC, world("mine_of_user.World", made=1)) == [
        f"{at}.env_config.made: unknown key; there are: first, size, names",
        f"{at}.env_config.first: required and not set",
    ]
    assert "there are: none" in refused(AGENTIC, world("mine_of_user.Plain", x=1))[0]
    assert refused(AGENTIC, world("mine_of_user.Elsewhere", x=1)) == []  # only its own module tells
    assert "mine_of_user.py:9 is no class" in refused(AGENTIC, world("mine_of_user.score"))[0]
    assert refused(AGENTIC, world("webshop")) == [f'{at}.env_type: "webshop" is not there yet; give a dotted path']
    tools = "custom_envs.FrozenLake.tools=[{tool_id: calc}, {tool_id: search, tool_args: {file: a, k: 1}}]"
    first, second = refused(AGENTIC, tools)
    assert first == f'{at}.tools.0.tool_id: "calc" is not one of calculator | python | search | mcp, nor a dotted path'
    assert second.startswith(f"{at}.tools.1.tool_args.k: unknown key; there are: file, ")


@pytest.mark.parametrize("path", [*WORLDS.values(), *TOOLS.values()])
def test_the_source_of_every_world_and_tool_tells_the_settings_that_its_class_has(path):
    module, _, name = path.rpartition(".")
    told = _options(_bound(_source(_spec(module, []))), name)
    try:
        options = getattr(getattr(importlib.import_module(module), name), "Options", NoOptions)
    except ImportError:
        assert told, path  # an extra that is not installed: its settings are told all the same
        return
    needed = {f.name: f.default is f.default_factory is dataclasses.MISSING for f in dataclasses.fields(options)}
    assert {key: field.is_required for key, field in told.items()} == needed
    for key in ("nothing", *(k for k, is_needed in needed.items() if is_needed)):
        with pytest.raises(ValueError, match=f"at.{key}"):
            build_options(options, {"nothing": 1} if key == "nothing" else {}, "at")
            break
