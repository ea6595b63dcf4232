"""Code that a config names by dotted path, as its source tells without running it: losses, estimators, rewards,
worlds, agents, tools.

A check of a config must not run what it names, and worlds of this package may need an extra that is not installed.
What a source does not tell (a name from another module, a class that a call makes) is left to the start of the run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from roll_async.agents.tools.toolbox import TOOLS
from roll_async.config.api import Loaded
from roll_async.config.schema import AgenticConfig, RLVRConfig
from roll_async.config.schema_rollout import REWARDS
from roll_async.config.schema_rollout import WORLDS as NAMED_WORLDS
from roll_async.config.user_code import folders_beside
from roll_async.config.yaml.diagnostics import shown
from roll_async.config.yaml.suggest import closest
from roll_async.envs.registry import WORLDS

_TYPES: Mapping[str, type | tuple[type, ...]] = {"int": int, "float": (int, float), "bool": bool, "str": str}
"""Types of settings that are told apart here; others are checked when the class is there."""
_NO_CODE = (ast.Constant, ast.JoinedStr, ast.List, ast.Tuple, ast.Dict, ast.Set)
"""Values that can be neither called nor built."""


def named_code(loaded: Loaded) -> Iterator[tuple[str, str]]:
    """(key, message) of dotted paths that name nothing, and of settings that the named world or tool does not have."""
    config, root = loaded.generating, loaded.root
    folders = folders_beside(Path(root.file))
    for key, path, section, given in config.algorithm.own_code():
        if why := unusable(path, folders, is_class=False):
            yield key, f"{shown(path)}: {why}"
        else:
            yield from ((f"{section}.{setting}", why) for setting, why in unfit(path, given, folders))
    if isinstance(config, RLVRConfig):
        for name, reward in config.rewards.items():
            key = f"rewards.{name}.type"
            if reward.type not in REWARDS and (why := unusable(reward.type, folders, is_class=False)):
                yield key, f"{shown(reward.type)}: {why}"
        return
    for key, name, known, section, values in _classes(config):
        path = known.get(name, name)
        if "." not in path:
            among = f"is not one of {' | '.join(known)}, nor a dotted path"
            yield key, f"{shown(name)} {'is not there yet; give a dotted path' if name in NAMED_WORLDS else among}"
        elif why := unusable(path, folders, is_class=True):
            yield key, f"{shown(name)}: {why}"
        else:
            yield from ((f"{section}.{setting}", why) for setting, why in unfit(path, values, folders))


def _classes(config: AgenticConfig) -> Iterator[tuple[str, str, Mapping[str, str], str, Mapping[str, object]]]:
    """(key, name, paths of the known names, key of the settings, settings) of each world, agent and tool."""
    for tag, env in config.custom_envs.items():
        at = f"custom_envs.{tag}"
        yield f"{at}.env_type", env.env_type, WORLDS, f"{at}.env_config", env.env_config
        for i, tool in enumerate(env.tools):
            key = f"{at}.tools.{i}"
            yield f"{key}.tool_id", tool.tool_id, TOOLS, f"{key}.tool_args", tool.tool_args


def unusable(path: str, folders: Sequence[str], *, is_class: bool) -> str | None:
    """Why MODULE.NAME is no function or class, or no class; None for what is one, or may be. `folders`: where modules
    are looked for after those of the interpreter.
    """
    module, _, name = path.rpartition(".")
    spec = _spec(module, folders)
    what = "class" if is_class else "function or class"
    if spec is None:
        looked = ", ".join(dict.fromkeys(str(Path(folder).resolve()) for folder in folders))
        return f"there is no module {module} in {looked} or among the installed packages; write MODULE.NAME of a {what}"
    if (file := _source(spec)) is None:
        return None
    try:
        bound = _bound(file)
    except SyntaxError as error:
        return f"{file}:{error.lineno} cannot be read: {error.msg}"
    if bound.keys() & {"*", "__getattr__"} and name not in bound:  # it may come from there
        return None
    if name not in bound:
        near = closest(name, list(bound))
        return f"{file} has no {what} {name}" + (f"; did you mean '{module}.{near}'?" if near else "")
    node = bound[name]
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    if isinstance(value, _NO_CODE) or (is_class and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
        return f"{name} in {file}:{node.lineno} is no {what}"
    return None


def unfit(path: str, values: Mapping[str, object], folders: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(name, problem) of settings that the options of the class or function MODULE.NAME do not have, or ask for."""
    module, _, name = path.rpartition(".")
    spec = _spec(module, folders)
    file = None if spec is None else _source(spec)
    fields = None if file is None else _options(_bound(file), name)
    if fields is None:
        return
    for key, value in values.items():
        if key not in fields:
            near = closest(key, list(fields))
            hint = f"did you mean '{near}'?" if near else f"there are: {', '.join(fields) or 'none'}"
            yield key, f"unknown key; {hint}"
        elif (wanted := _TYPES.get(fields[key].type)) and not _is(value, wanted):
            yield key, f"expected {fields[key].type}, got {type(value).__name__} {shown(value)}"
    for key, field in fields.items():
        if field.is_required and key not in values:
            yield key, "required and not set"


def _is(value: object, wanted: type | tuple[type, ...]) -> bool:
    """As `isinstance`, but true and false are no numbers."""
    return isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool))


def _spec(module: str, folders: Sequence[str]) -> ModuleSpec | None:
    """Found without importing the packages that the module is in."""
    first, *rest = module.split(".")
    if not module.replace(".", "_").isidentifier() or first == "__main__":  # find_spec raises for it
        return None
    # In this order, as `config/user_code.py: find` imports: a user's json.py replaces no library.
    spec = find_spec(first) or PathFinder.find_spec(first, [*folders])
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))
    return spec


def _source(spec: ModuleSpec) -> Path | None:
    return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None


def _bound(file: Path) -> Mapping[str, ast.stmt]:
    """Statement by the name that it binds at the top of a module, `if` and `try` included; `*` of a star import."""
    found: dict[str, ast.stmt] = {}
    left: list[ast.AST] = [ast.parse(file.read_bytes())]  # bytes: the parser finds the encoding
    while left:
        for node in ast.iter_child_nodes(left.pop(0)):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    found[name] = node
                case ast.Import(names=names) | ast.ImportFrom(names=names):
                    found |= {alias.asname or alias.name.split(".")[0]: node for alias in names}
                case ast.Assign(targets=targets):
                    found |= {n.id: node for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
                case ast.AnnAssign(target=ast.Name(id=name)):
                    found[name] = node
                # What is bound inside of these is bound in the module, too.
                case ast.stmt() | ast.ExceptHandler() | ast.match_case():
                    left.append(node)
    return found


class Setting(NamedTuple):
    """One setting of a world or tool."""

    type: str
    """As the source writes it."""
    is_required: bool


def _options(bound: Mapping[str, ast.stmt], name: str) -> dict[str, Setting] | None:
    """Fields of the `Options` of a class, or of the parameter `options` of a function; None where the source does not
    tell.
    """
    world = bound.get(name)
    if isinstance(world, ast.FunctionDef):
        parameters = (*world.args.posonlyargs, *world.args.args, *world.args.kwonlyargs)
        options = [parameter.annotation for parameter in parameters if parameter.arg == "options"]
        if not options:
            return {}
        return _fields(bound, options[0].id) if isinstance(options[0], ast.Name) else None
    if not isinstance(world, ast.ClassDef):
        return None
    for node in world.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="Options")], value=ast.Name(id=options)):
                return _fields(bound, options)
            case ast.ClassDef(name="Options"):
                return _fields({**bound, "Options": node}, "Options")
            case ast.Assign(targets=[ast.Name(id="Options")]) | ast.AnnAssign(target=ast.Name(id="Options")):
                return None
    return None if world.bases or world.keywords else {}


def _fields(bound: Mapping[str, ast.stmt], name: str) -> dict[str, Setting] | None:
    node = bound.get(name)
    if not isinstance(node, ast.ClassDef) or node.keywords:  # a metaclass may give it other fields
        return None
    found: dict[str, Setting] = {}
    for base in node.bases:
        inherited = _fields(bound, base.id) if isinstance(base, ast.Name) else None
        if inherited is None:
            return None
        found |= inherited
    for field in node.body:
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if not any(mark in ast.unparse(field.annotation) for mark in ("ClassVar", "KW_ONLY")):
            given = ast.unparse(field.value) if field.value is not None else ""
            if "init=False" not in given:  # such a field is no setting
                has_default = field.value is not None and ("field(" not in given or "default" in given)
                found[field.target.id] = Setting(ast.unparse(field.annotation), not has_default)
    return found
