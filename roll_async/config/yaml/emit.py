"""Canonical YAML: every value, block style, scalars written so that `yaml_text` reads them back unchanged."""

import re
from dataclasses import is_dataclass
from functools import reduce
from typing import cast

from roll_async.config.loading.build import to_plain
from roll_async.config.loading.check import WITHOUT_EFFECT_ON_GIVEN_ROWS
from roll_async.config.loading.spec import spec_of
from roll_async.config.schema import ROLES, PipelineConfig, RunConfig
from roll_async.config.schema_worker import WorkerConfig
from roll_async.config.yaml.node import Plain, Scalar
from roll_async.config.yaml.yaml_text import resolve

_BARE = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./@+-]*( [A-Za-z0-9_./@+-]+)*")
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
_MAX_SIMPLE_KEY = 1000
"""Characters; YAML reads a longer key only after `?`."""
_DERIVED = (
    "samples_per_group", "groups_per_batch", "samples_per_batch", "data_parallel_size", "mini_batch_size",
    "optimizer_steps_per_batch", "num_servers", "sync_window_groups", "staleness_bound", "is_async", "colocated",
    "num_nodes",
)  # fmt: skip
_DERIVED_WITHOUT_ENGINES = ("data_parallel_size", "num_nodes")


def dump(config: RunConfig) -> str:
    """YAML of a loaded config; loading it gives an equal config."""
    tree = to_plain(config)
    for role, worker in config.roles():
        *above, name = role.split(".", 1)  # a teacher's name may have dots
        sections = reduce(lambda section, key: section[key], above, cast(dict, tree))
        sections[name] = _effective(sections[name], worker, "teacher" if above else role)
    for path in () if isinstance(config, PipelineConfig) else WITHOUT_EFFECT_ON_GIVEN_ROWS:
        *above, name = path.split(".")
        found = reduce(lambda section, key: section.get(key) or {}, above, cast(dict, tree))
        found.pop(name, None)
    return "".join(_map(tree, 0))


def to_yaml(tree: dict[str, Plain]) -> str:
    """YAML of plain maps, lists and scalars, in the same style."""
    return "".join(_map(tree, 0))


def derived_comments(config: RunConfig) -> str:
    """The derived properties of the config, as comment lines."""
    lines = ["# derived"]
    for name in _DERIVED if isinstance(config, PipelineConfig) else _DERIVED_WITHOUT_ENGINES:
        value = getattr(config, name)
        lines.append(f"# {name}: {scalar(value)}")
    return "\n".join(lines) + "\n"


def _effective(section: dict[str, Plain], worker: WorkerConfig, role: str) -> dict[str, Plain]:
    """Without the keys that have no effect on the role: the loader refuses them."""
    assert is_dataclass(worker) and role in ROLES
    kept = {}
    for name, field in spec_of(WorkerConfig).items():
        traits = field.traits
        if (not traits.roles or role in traits.roles) and (not traits.megatron or worker.is_megatron):
            kept[name] = section[name]
    data = kept.pop("data_args", None)
    if isinstance(data, dict):  # without files it is that of an agentic config, which has one key of it
        kept["data_args"] = data if data["file_name"] else {"template_kwargs": data["template_kwargs"]}
    ids = worker.device_mapping
    if ids is not None and ids == tuple(range(ids[0], ids[-1] + 1)):
        kept["device_mapping"] = f"range({ids[0]}, {ids[-1] + 1})"
    return kept


def _map(tree: dict[str, Plain], indent: int) -> list[str]:
    lines = []
    for key, value in tree.items():
        head = f"{' ' * indent}{_text(key, is_key=True)}:"
        if len(head) > _MAX_SIMPLE_KEY:
            head = f"{' ' * indent}? {_text(key, is_key=True)}\n{' ' * indent}:"
        lines += _entry(head, value, indent + 2)
    return lines


def _entry(head: str, value: Plain, indent: int) -> list[str]:
    if isinstance(value, dict) and value:
        return [f"{head}\n", *_map(value, indent)]
    if isinstance(value, list | tuple) and value:
        if not any(isinstance(v, dict | list) for v in value):
            items = ", ".join(scalar(v, in_flow=True) for v in value if not isinstance(v, dict | list))
            return [f"{head} [{items}]\n"]
        lines = [f"{head}\n"]
        for item in value:
            lines += _item(item, indent)
        return lines
    if isinstance(value, dict):
        return [f"{head} {{}}\n"]
    if isinstance(value, list | tuple):
        return [f"{head} []\n"]
    return [f"{head} {scalar(value)}\n"]


def _item(item: Plain, indent: int) -> list[str]:
    if isinstance(item, dict) and item:
        body = _map(item, indent + 2)
        return [f"{' ' * indent}- {body[0].lstrip(' ')}", *body[1:]]
    if isinstance(item, list | tuple) and item:
        return _entry(f"{' ' * indent}-", item, indent + 2)
    return _entry(f"{' ' * indent}-", item, indent + 2)


def scalar(value: Scalar, in_flow: bool = False) -> str:
    """One scalar as YAML."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"  # Python would write True
        case float():
            return _float(value)
        case int():
            return str(value)
        case _:
            return _text(value, in_flow=in_flow)


def _float(value: float) -> str:
    text = repr(value)
    # YAML 1.1, as PyYAML reads it, takes 1e-06 for a text.
    if "e" in text and "." not in text:
        mantissa, exponent = text.split("e")
        text = f"{mantissa}.0e{exponent}"
    return text


def _text(text: str, *, is_key: bool = False, in_flow: bool = False) -> str:
    """Bare where that reads back as the same string, else double-quoted in ASCII. `${` is escaped except in keys."""
    if not is_key:
        text = text.replace("${", "$${")
    plain_enough = _BARE.fullmatch(text) and isinstance(resolve(text), str) and not (in_flow and "," in text)
    if plain_enough and text not in ("<<", "---", "..."):
        return text
    return '"' + "".join(_ESCAPES.get(c) or _escaped(c) for c in text) + '"'


def _escaped(c: str) -> str:
    code = ord(c)
    if 32 <= code < 127:
        return c
    if code < 256:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
