"""The page of the seeds' items: nothing on it may be wrong, and what is wrong is noticed."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.seeds import DOCUMENTS, PAGE, counts, counts_on, faults, rows_of

ROOT = Path(__file__).resolve().parents[2]
GOOD = "| S0.3 | stop | acts | `rollout_batch_size`, `Makefile:test` | `tests/unit/test_seeds.py::test_it` |"

PAGE_TEXT = PAGE.read_text()
FIRST = next(line for line in PAGE_TEXT.splitlines() if line.startswith("| S1.12 "))


def checked(*arguments):
    return subprocess.run([sys.executable, ROOT / "tools" / "seeds.py", *arguments], capture_output=True, text=True)


def test_the_page_has_every_item_once_and_all_that_it_names_exists():
    assert faults(PAGE_TEXT) == []
    assert len(list(rows_of(PAGE_TEXT))) == sum(count for _, count in DOCUMENTS.values())


def with_cell(number, text):
    """The page with other text in one cell of S1.12."""
    cells = FIRST.split(" | ")
    cells[number] = text
    return PAGE_TEXT.replace(FIRST, " | ".join(cells))


@pytest.mark.parametrize(
    ("page", "fault"),
    [
        (PAGE_TEXT.replace(f"{FIRST}\n", ""), "S1.12: no row"),
        (PAGE_TEXT.replace(FIRST, f"{FIRST}\n{FIRST}"), "S1.12: 2 rows"),
        (PAGE_TEXT.replace("| S1.12 ", "| S1.1200 "), "S1.1200: no such item"),
        (PAGE_TEXT.replace(FIRST, FIRST.removesuffix(" |")), "S1.12: '' is none of acts, partly, unseen, no"),
        (with_cell(2, "works"), "S1.12: 'works' is none of acts, partly, unseen, no"),
        (with_cell(2, "unseen"), "S1.12: unseen, and a test is named"),
        (with_cell(2, "partly"), "S1.12: partly, and no reason is given"),
        (with_cell(3, ""), "S1.12: acts, and no place is named"),
        (with_cell(3, "`roll_async/weight_sync/synchroniser.py`"), "S1.12: no file roll_async/weight_sync/synchro"),
        (with_cell(3, "`roll_async/schema.py:Grup`"), "S1.12: roll_async/schema.py does not have Grup"),
        (with_cell(3, "`roll_async/schema.py:Group.put`"), "S1.12: roll_async/schema.py defines no Group.put"),
        (with_cell(3, "`README.md:no such words`"), "S1.12: README.md does not have no such words"),
        (with_cell(3, "`async_training.sync_retry`"), "S1.12: no key async_training.sync_retry"),
        (with_cell(4, "seen by nobody |"), "S1.12: acts, and no test is named that sees it"),
        (with_cell(4, "`tests/unit/test_sed.py::test_it` |"), "S1.12: no file tests/unit/test_sed.py"),
        (with_cell(4, "`tests/unit/test_seeds.py::test_it` |"), "S1.12: tests/unit/test_seeds.py has no test_it"),
        (with_cell(4, "[page](no_page.md) `tests/unit/test_seeds.py::test_it` |"), "no page no_page.md"),
        (PAGE_TEXT.replace("| all | 540 |", "| all | 541 |"), "the counts are not those of the rows"),
    ],
)  # fmt: skip
def test_each_fault_of_the_page_is_found_and_named_by_its_item(page, fault):
    assert page != PAGE_TEXT
    assert any(found.startswith(fault) for found in faults(page)), faults(page)


@pytest.mark.slow
def test_a_fault_is_a_line_and_exit_code_1_and_counts_can_be_written(tmp_path):
    page = tmp_path / "seeds.md"
    page.write_text(with_cell(3, "`roll_async/schema.py:Grup`").replace("| all | 540 |", "| all | 541 |"))
    done = checked(page)
    assert done.returncode == 1 and done.stderr.splitlines() == [
        "S1.12: roll_async/schema.py does not have Grup",
        "the counts are not those of the rows: python tools/seeds.py --write",
    ]
    page.write_text(page.read_text().replace("schema.py:Grup", "schema.py:Group"))
    assert checked(page).returncode == 1
    assert checked("--write", page).returncode == checked(page).returncode == 0
    assert counts_on(page.read_text()) == counts_on(PAGE_TEXT)


def test_a_name_that_its_file_loses_is_a_fault(tmp_path):
    """As when a function is renamed and the page is forgotten."""
    for folder in ("roll_async", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "roll_async" / "a.py").write_text("class A:\n    size: int\n    def go(self):\n        pass\n")
    (tmp_path / "tests" / "test_a.py").write_text("async def test_it():\n    pass\n")
    row = "| S0.1 | x | acts | `roll_async/a.py:A.go`, `roll_async/a.py:A.size` | `tests/test_a.py::test_it` |"
    of_the_row = [found for found in faults(row, tmp_path) if found.startswith("S0.1: ")]
    assert of_the_row == []
    (tmp_path / "roll_async" / "a.py").write_text("class A:\n    def went(self):\n        pass\n")
    (tmp_path / "tests" / "test_a.py").write_text("def test_that():\n    pass\n")
    assert [found for found in faults(row, tmp_path) if found.startswith("S0.1: ")] == [
        "S0.1: roll_async/a.py defines no A.go", "S0.1: roll_async/a.py defines no A.size",
        "S0.1: tests/test_a.py has no test_it",
    ]  # fmt: skip


def test_the_counts_of_the_page_are_counted_by_document_and_state():
    rows = list(rows_of(GOOD + "\n" + GOOD.replace("S0.3", "S3.4").replace("acts", "no")))
    table = counts(rows)
    assert table[2].endswith("| 1 | 1 | 0 | 0 | 0 |") and table[5].endswith("| 1 | 0 | 0 | 0 | 1 |")
    assert table[6] == "| all | 2 | 1 | 0 | 0 | 1 |" and counts_on("# Title\n\n" + "\n".join(table) + "\n") == table
