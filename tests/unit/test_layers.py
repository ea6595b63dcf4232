"""The layer contract: a folder imports only from lower layers, and third-party libraries only where they belong."""

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "roll_async"

LAYER = {
    "schema": 0, "config": 0, "observe": 0,
    "algorithms": 1, "prompts": 1, "envs": 1, "rewards": 1, "checkpoint": 1,
    "buffer": 2, "weight_sync": 2,
    "trainer": 3, "inference": 3,
    "rollout": 4,
    "pipelines": 5, "cluster": 5,
    "simulator": 7, "support": 7,
    "assemble_checkpoint": 8, "assemble_rollout": 8,
    "assemble_roles": 9,
    "assemble": 10,
    "launch": 11, "bench": 11, "convert": 11, "sweep": 11,
    "fully_async": 12, "cli": 12,
}  # fmt: skip

ALLOWED = {
    "schema": {"torch"},  # annotations only
    "config": {"yaml", "dataclasses_json"},
    "algorithms": {"torch"},
    "envs": {"gymnasium", "minigrid", "textarena", "reasoning_gym"},
    "buffer": set(),
    "rollout": set(),
    "pipelines": set(),
    "simulator": set(),
    "weight_sync": {"torch", "numpy"},
    "cluster": {"ray", "torch", "psutil"},
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


@pytest.mark.parametrize(
    "path", [p for p in files() if p.name == "__init__.py"], ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_package_initialisers_are_empty(path):
    assert path.read_text() == ""


@pytest.mark.parametrize(
    "path", [p for p in files() if p.name != "__init__.py"], ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_a_folder_imports_only_from_lower_layers(path):
    mine = part(path)
    for name, line in imports(path):
        top, *rest = name.split(".")
        if top == "roll_async" and rest and rest[0] != mine:
            assert LAYER[rest[0]] < LAYER[mine], f"{path}:{line}: {mine} (layer {LAYER[mine]}) imports {name}"


@pytest.mark.parametrize("path", [p for p in files() if part(p) in ALLOWED], ids=lambda p: str(p.relative_to(PACKAGE)))
def test_third_party_imports_stay_where_they_belong(path):
    for name, line in imports(path):
        top = name.split(".")[0]
        if top != "roll_async" and top not in sys.stdlib_module_names:
            assert top in ALLOWED[part(path)], f"{path}:{line}: {part(path)} imports {name}"


def test_every_import_of_our_own_exists():
    """pyright does not look: to it a missing module is an optional package (see pyproject.toml)."""
    for path in files():
        for name, line in imports(path):
            top, *rest = name.split(".")
            if top == "roll_async":
                module = PACKAGE.joinpath(*rest)
                # The last name of `from roll_async import name` is a module, too.
                assert module.is_dir() or module.with_suffix(".py").is_file(), f"{path}:{line}: there is no {name}"


def test_only_the_cluster_imports_ray():
    users = {part(p) for p in files() for name, _ in imports(p) if name.split(".")[0] == "ray"}
    assert users <= {"cluster"}


@pytest.mark.parametrize("folder", ["rollout", "buffer", "pipelines"])
def test_the_loops_take_time_from_the_event_loop_only(folder):
    for path in sorted((PACKAGE / folder).rglob("*.py")):
        for name, line in imports(path):
            assert name.split(".")[0] not in {"time", "threading", "random", "concurrent"}, f"{path}:{line}: {name}"
