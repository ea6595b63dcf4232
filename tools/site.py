"""The hook of mkdocs.yml: pages of the site that follow from other files, so that they cannot drift from them.

README.md is the home page, CONTRIBUTING.md and examples/my_project are pages; the keys of ROLL and verl come from the
tables with which `roll-async port` and the loader answer them, and the models from the shipped configs.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

    from roll_async.config.schema import PipelineConfig

DOCS = "docs_roll/"
PROJECT = "examples/my_project/README.md"
SHOWN = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", PROJECT: "my_project.md"}
"""Documents outside of docs_roll to their pages."""
_LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s]+)\)")
_KINDS = {".py": "python", ".yaml": "yaml"}


def linked(text: str, source: str) -> str:
    """The text of a document, named by its path in the repository, with the links of the site. A link to a file that
    is no page becomes its words.
    """
    page = SHOWN.get(source, source.removeprefix(DOCS))

    def moved(match: re.Match[str]) -> str:
        words, target = match.groups()
        path, mark, part = target.partition("#")
        if "://" in target or not path:
            return match[0]
        to = _page_of(posixpath.normpath(posixpath.join(posixpath.dirname(source), path)))
        way = to and posixpath.relpath(to, posixpath.dirname(page) or ".")
        return f"{words}({way}{mark}{part})" if way else words[1:-1]

    return _LINK.sub(moved, text)


def _page_of(path: str) -> str | None:
    """The page of a file of the repository; that of a folder is its first document."""
    if path in SHOWN:
        return SHOWN[path]
    if not path.startswith(DOCS):
        return None
    documents = sorted((ROOT / path).glob("*.md"))
    return (f"{path}/{documents[0].name}" if documents else path).removeprefix(DOCS)


def _document(source: str) -> str:
    return linked((ROOT / source).read_text(encoding="utf-8"), source)


def project() -> str:
    """The README of examples/my_project and the files it speaks of."""
    parts = [_document(PROJECT)]
    for path in sorted((ROOT / PROJECT).parent.iterdir()):
        if path.suffix in _KINDS:
            text = path.read_text(encoding="utf-8")
            parts.append(f"## {path.name}\n\n```{_KINDS[path.suffix]}\n{text}```\n")
    return "\n".join(parts)


def keys_of(peer: str) -> str:
    """The keys of "ROLL" or "verl", and what they are here."""
    from roll_async.config.loading.names import FOREIGN_SECTIONS, REFUSED, alias_table
    from roll_async.config.loading.porting import REWARD_TYPES, STRATEGIES

    names: dict[str, dict[str, None]] = defaultdict(dict)  # a dict keeps the order of the table
    for kind in ("rlvr", "agentic"):
        for old, new in alias_table(kind).items():
            if (old.split(".")[0] in FOREIGN_SECTIONS) == (peer == "verl"):
                names[f"`{old}`"][" and ".join(f"`{name}`" for name in new)] = None
    parts = [
        f"# Keys of {peer}\n\nFrom the tables of `roll-async port`, which rewrites a whole file and says what became of"
        " each key ([porting](porting.md)).\n",
        _table(("the same value under another name", "here"), ((old, " or ".join(new)) for old, new in names.items())),
    ]
    if peer == "ROLL":
        reasons: dict[str, list[str]] = defaultdict(list)
        for key, reason in REFUSED.items():
            reasons[reason].append(f"`{key}`")
        parts += [
            _table(("reward worker", "`rewards.NAME.type`"), _coded(REWARD_TYPES)),
            _table(("`strategy_name`", "here"), _coded(STRATEGIES)),
            _table(("keys without a counterpart", "why"), ((", ".join(keys), why) for why, keys in reasons.items())),
        ]
    return "\n".join(parts)


def models() -> str:
    """Layout and memory of the shipped configs, by model."""
    from roll_async.config.api import load
    from tools.shipped_configs import DEVICE_BYTES, MEMORY_HEAD, memory_rows, shipped

    by_model: dict[str, list[Path]] = defaultdict(list)
    for path in shipped():
        by_model[load(path).pretrain].append(path)
    parts = [
        "# Layouts and memory by model\n\nWhat the shipped configs choose for a model, and what that holds on a device"
        f" of {DEVICE_BYTES // 10**9} GB, in GB by the estimate of [memory.md](memory.md). For a config of your own:"
        " `roll-async show CONFIG --memory`. The families that are there: [families.md](families.md).\n"
    ]
    for model, paths in sorted(by_model.items()):
        layouts: dict[str, list[str]] = defaultdict(list)
        for path in paths:
            layouts[_layout(load(path))].append(f"`{path.stem}`")
        rows = ((layout, ", ".join(names)) for layout, names in layouts.items())
        memory = [*MEMORY_HEAD, *(row for path in paths for row in memory_rows(path))]
        parts += [f"## {model}\n", _table(("layout", "configs"), rows), "\n".join(memory) + "\n"]
    return "\n".join(parts)


def _layout(config: PipelineConfig) -> str:
    from roll_async.commands.configs.plan import placement

    return "; ".join(f"{name}: {where}" for name, where in placement(config) if name not in ("rewards", "nodes"))


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ("---",) * len(head), *rows))


def _coded(names: dict[str, str]) -> list[tuple[str, str]]:
    return [(f"`{old}`", f"`{new}`") for old, new in names.items()]


PAGES: dict[str, Callable[[], str]] = {
    "index.md": lambda: _document("README.md"),
    "contributing.md": lambda: _document("CONTRIBUTING.md"),
    "my_project.md": project,
    "from_roll_keys.md": lambda: keys_of("ROLL"),
    "from_verl_keys.md": lambda: keys_of("verl"),
    "models.md": models,
}


def on_config(config: MkDocsConfig) -> None:
    """A page for each certificate, under Models."""
    (models,) = [entry["Models"] for entry in config.nav or () if "Models" in entry]
    pages = sorted((ROOT / DOCS / "models").glob("*.md"))
    models.append({"Certificates": [{page.stem: f"models/{page.name}"} for page in pages]})


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Of mkdocs: add the pages."""
    from mkdocs.structure.files import File

    for name, made in PAGES.items():
        files.append(File.generated(config, name, content=made()))
    return files


def on_page_markdown(markdown: str, *, page: object, config: MkDocsConfig, files: Files) -> str:
    """Of mkdocs: links that leave docs_roll lead to the page of what they name."""
    name = page.file.src_uri  # type: ignore[attr-defined]
    return markdown if name in PAGES else linked(markdown, DOCS + name)
