"""The catalogue of faults: every one applies to the source as it is, and changes one place."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import mutate
from named_mutants import NAMED

PACKAGE = Path(__file__).resolve().parents[2] / "roll_async"


@pytest.mark.parametrize("name", [name for name, *_ in NAMED])
def test_a_fault_with_a_name_still_applies_and_compiles(name):
    (fault,) = [fault for fault in NAMED if fault[0] == name]
    _, file, right, wrong = fault
    text = (PACKAGE / file).read_text()
    assert text.count(right) == 1 and right != wrong
    compile(text.replace(right, wrong), file, "exec")


@pytest.mark.slow
def test_the_catalogue_is_large_covers_the_core_and_is_the_same_for_a_seed():
    chosen = mutate.catalogue(60, seed=1)
    assert len(chosen) >= 120 and [m.name for m in chosen] == [m.name for m in mutate.catalogue(60, seed=1)]
    folders = {"rollout", "buffer", "weight_sync", "pipelines", "trainer", "inference", "agents", "algorithms"}
    assert {m.file.partition("/")[0] for m in mutate.generated()} == folders
    assert sum(m.kind.startswith("SQL") for m in chosen) >= 10


def test_every_module_of_agents_and_algorithms_has_its_faults():
    faulty = {m.file for m in mutate.generated()}
    for folder in ("agents", "algorithms"):
        modules = {str(path.relative_to(PACKAGE)) for path in (PACKAGE / folder).rglob("*.py") if path.stat().st_size}
        assert modules and modules <= faulty, modules - faulty
        assert {m.file.partition("/")[0] for m in mutate.catalogue(9, 0, f"{folder}/")} == {folder}


def test_every_file_of_the_catalogue_has_tests_that_exist():
    root = PACKAGE.parent
    for file in {m.file for m in (*mutate.named(), *mutate.generated())}:
        tests = mutate.tests_of(file)
        assert tests and all((root / test).exists() for test in tests), file


def test_tests_that_fail_without_a_fault_are_told_before_any_fault_is_written(tmp_path):
    (tmp_path / "test_red.py").write_text("def test_it():\n    assert False\n")
    with pytest.raises(RuntimeError, match="test_red.py::test_it fails without a fault"):
        mutate.check_green(["test_red.py"], tmp_path, quick=True)
    (tmp_path / "test_red.py").write_text("def test_it():\n    assert True\n")
    mutate.check_green(["test_red.py"], tmp_path, quick=True)


def test_a_log_becomes_a_table_with_what_saw_each_fault(tmp_path):
    log = tmp_path / "log"
    row = '{"name": "%s", "file": "buffer/book.py", "line": 3, "kind": "%s", '
    row += '"text": "a | b", "named": %s, "seen_by": "%s"}'
    lines = [row % ("one", "a fault", "true", "test_x"), row % ("two", "turned", "false", "")]
    log.write_text("\n".join(lines) + "\n")
    found = mutate.table([log])
    assert "| buffer | 2 | 1 | 1 |" in found and "| a fault | `buffer/book.py` | `test_x` |" in found
    assert "turned: `a \\| b`" in found and "nothing: TO DO" in found
