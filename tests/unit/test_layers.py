"""The layer contract: a folder imports only from lower layers, and third-party libraries only where they belong."""

import ast
import sys
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "roll_async"

LAYER = {
    "schema": 0, "config": 0, "observe": 0, "processes": 0,
    "algorithms": 1, "prompts": 1, "envs": 1, "rewards": 1, "checkpoint": 1,
    "buffer": 2, "weight_sync": 2,
    "trainer": 3, "inference": 3,
    "rollout": 4,
    "pipelines": 5, "cluster": 5, "agents": 5,
    "simulator": 6,
    "launch": 7,
    "commands": 8,
    "cli": 9, "__main__": 10, "__init__": 10,
    "__version__": 0,  # of the package itself
}  # fmt: skip

ALLOWED = {
    "schema": {"torch"},  # annotations only
    "config": {"yaml", "dataclasses_json"},
    "algorithms": {"torch"},
    "agents": {"aiohttp", "jinja2", "matplotlib", "mcp", "tokenizers", "transformers"},
    "envs": {"gymnasium", "minigrid", "pyarrow", "textarena", "reasoning_gym"},
    "buffer": set(),
    "rollout": set(),
    "pipelines": set(),
    "simulator": {"torch"},  # learner.py, which is imported where a world wants it
    "weight_sync": {"torch", "numpy", "xxhash"},
    "cluster": {"ray", "torch", "psutil", "transformers"},  # transformers: annotations only
}


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> list[tuple[str, int]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(a.name, node.lineno) for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found.append((node.module, node.lineno))
            if node.module == "roll_async":
                found += [(f"roll_async.{a.name}", node.lineno) for a in node.names]
    return found


def test_package_initialisers_are_empty():
    found = [path for path in files() if path.name == "__init__.py" and path.read_text()]
    assert found == [PACKAGE / "__init__.py"], "what `from roll_async import` gives"


def test_a_folder_imports_only_from_lower_layers():
    wrong = []
    for path in files():
        mine = part(path)
        for name, line in imports(path):
            top, *rest = name.split(".")
            if top == "roll_async" and rest and rest[0] != mine and LAYER[rest[0]] >= LAYER[mine]:
                wrong.append(f"{path}:{line}: {mine} (layer {LAYER[mine]}) imports {name}")
    assert wrong == []


def test_third_party_imports_stay_where_they_belong():
    wrong = []
    for path in files():
        for name, line in imports(path) if part(path) in ALLOWED else ():
            top = name.split(".")[0]
            if top != "roll_async" and top not in sys.stdlib_module_names | ALLOWED[part(path)]:
                wrong.append(f"{path}:{line}: {part(path)} imports {name}")
    assert wrong == []


def test_at_the_top_are_only_the_nouns_the_entry_and_folders():
    assert {p.name for p in PACKAGE.iterdir() if p.suffix == ".py"} == {
        "__init__.py", "__main__.py", "schema.py", "cli.py"
    }  # fmt: skip


@cache
def names(module: Path) -> set[str]:
    """What can be imported from a module or a folder: modules, and all that is bound at the top of the file."""
    file = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
    found = {p.stem for p in module.glob("*")} if module.is_dir() else set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def test_every_import_of_our_own_exists():
    """Also where no test starts the script. pyright does not look for modules: to it a missing one is an optional
    package (see pyproject.toml).
    """
    root = PACKAGE.parent
    scripts = [*root.glob("tools/**/*.py"), *root.glob("examples/**/*.py"), *root.glob("tests/**/*.py")]
    for path in (*files(), *scripts):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != "roll_async":
                continue
            module = root.joinpath(*node.module.split("."))
            known = module.is_dir() or module.with_suffix(".py").is_file()
            assert known, f"{path}:{node.lineno}: there is no {node.module}"
            missing = {alias.name for alias in node.names} - names(module)
            assert not missing, f"{path}:{node.lineno}: {node.module} has no {missing}"


def test_only_the_cluster_imports_ray():
    users = {part(p) for p in files() for name, _ in imports(p) if name.split(".")[0] == "ray"}
    assert users <= {"cluster"}


def test_the_loops_take_time_from_the_event_loop_only():
    wrong = []
    for folder in ("rollout", "buffer", "pipelines"):
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            for name, line in imports(path):
                if name.split(".")[0] in {"time", "threading", "random", "concurrent"}:
                    wrong.append(f"{path}:{line}: {name}")
    assert wrong == []


def test_readme_and_contributing_name_every_folder():
    readme, contributing = ((PACKAGE.parent / name).read_text() for name in ("README.md", "CONTRIBUTING.md"))
    folders = {path.parent.relative_to(PACKAGE).parts[0] for path in PACKAGE.glob("*/*.py")}
    assert folders == {name for name in LAYER if (PACKAGE / name).is_dir()}
    missing = [name for name in folders if f"  {name}/" not in readme]
    missing += [name for name in folders if f"`{name}/`" not in contributing]
    assert missing == []
