"""The shipped configs with devices: gate, memory of each device, what they start and what starts them.

    python tools/shipped_configs.py [--write]

Prints the tables of docs_roll/cluster.md and docs_roll/memory.md; --write puts them there, and the configs that
`roll-async new` would write, the first ones for 1, 2, 4 and 8 GPUs, into configs/. Needs no device and no Ray.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from roll_async.cluster.placement import gpu_nodes, place_roles, processes_of
from roll_async.commands.configs.template import DATA, Choices, first_config
from roll_async.config.schema import AgenticConfig, PipelineConfig, roles_on_engine_devices
from roll_async.launch.checks.device_memory import GB, DeviceUse, device_uses, span
from roll_async.launch.checks.gate import check_supported

ROOT = Path(__file__).resolve().parents[1]
DEVICE_BYTES = int(80e9)
CLUSTER, MEMORY = ROOT / "docs_roll" / "cluster.md", ROOT / "docs_roll" / "memory.md"
FIRST = {
    "gsm8k_0.5b_1gpu": ("Qwen/Qwen2.5-0.5B-Instruct", 1),
    "gsm8k_1.5b_2gpu": ("Qwen/Qwen2.5-1.5B-Instruct", 2),
    "gsm8k_3b_4gpu": ("Qwen/Qwen2.5-3B-Instruct", 4),
    "gsm8k_7b_8gpu": ("Qwen/Qwen2.5-7B-Instruct", 8),
}
"""Configs that `roll-async new` writes: model and number of GPUs."""
CLUSTER_HEAD = (
    "| config | gate | GPUs by node | ranks of actor_train | engine replicas | GB of a trainer's device, an engine's "
    "| started by |",
    "|---|---|---|---|---|---|---|",
)
MEMORY_HEAD = (
    "| config | devices | role | weights | gradients | optimizer | activations | logits | KV cache | buckets "
    "| together |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
)


def shipped() -> list[Path]:
    """The configs of `configs/` with engines that name devices."""
    found = sorted((ROOT / "configs").glob("*.yaml"))
    return [path for path in found if not path.stem.endswith("_cpu") and path.stem not in ("sft_7b", "dpo_7b")]


def first_text(name: str) -> str:
    """The text of a config of FIRST."""
    model, gpus = FIRST[name]
    choices = Choices.of(name, model, DATA["gsm8k"], "math_rule", gpus)
    return first_config(choices, DEVICE_BYTES)


def cluster_table() -> list[str]:
    """A line per config; raises what the gate or the placement refuses."""
    return [*CLUSTER_HEAD, *(_cluster_row(path) for path in shipped())]


def memory_table() -> list[str]:
    """A line per config, devices and role."""
    return [*MEMORY_HEAD, *(row for path in shipped() for row in memory_rows(path))]


def memory_rows(path: Path) -> Iterator[str]:
    """The lines of one config."""
    for use in device_uses(check_supported(path).config, DEVICE_BYTES):
        yield from (f"| {path.stem} | {row}" for row in _of_devices(use))


def in_document(text: str, head: Sequence[str]) -> list[str]:
    """The table that begins with these lines, line by line."""
    return text.splitlines()[slice(*_place(text, head))]


def _cluster_row(path: Path) -> str:
    config = check_supported(path).config
    roles = place_roles(config)
    engines, ranks = roles["actor_infer"], roles["actor_train"]
    nodes = [len(need.gpu_ids) for need in gpu_nodes(processes_of(config))]
    there = " + ".join(map(str, nodes)) if len(nodes) < 4 else f"{len(nodes)} x {nodes[0]}"
    sharing = ", sharing" if "actor_train" in roles_on_engine_devices(config) else ""
    engine = f"{config.actor_infer.strategy_args.strategy_name} of {len(engines[0].gpu_ids)}"
    uses = device_uses(config, DEVICE_BYTES)
    trainer = max(use.total for use in uses if use.trainers)
    server = max(use.total for use in uses if use.engine is not None)
    fit = "" if all(use.problem is None for use in uses) else ", does not fit"
    return (
        f"| `{path.stem}` | accepted | {there} | {len(ranks)}{sharing} | {len(engines)} "
        f"{engine} | {trainer / GB:.1f}, {server / GB:.1f} of {DEVICE_BYTES / GB:.0f}{fit} | {_starter(path, config)} |"
    )


def _starter(path: Path, config: PipelineConfig) -> str:
    """The script of `examples/` that takes this config without being told, or the one that takes any."""
    if isinstance(config, AgenticConfig):
        return "`start_agentic_pipeline.py`"
    for script in sorted((ROOT / "examples").rglob("*.sh")):
        if path.name in script.read_text():
            return f"`{script.relative_to(ROOT / 'examples')}`"
    return "`fully_async_main.py`" if path.stem.startswith("fully_async") else "`start_rlvr_pipeline.py`"


def _of_devices(use: DeviceUse) -> Iterator[str]:
    place, rest = span(use.devices), f"{use.buckets / GB:.1f} | {use.total / GB:.1f} |"
    for name, m in use.trainers:
        parts = " | ".join(f"{x / GB:.1f}" for x in (m.weights, m.gradients, m.optimizer, m.activations, m.logits))
        yield f"{place} | {name} | {parts} | | {rest}"
    if use.engine is not None:
        yield f"{place} | actor_infer | {use.engine.weights / GB:.1f} | | | | | {use.engine.kv / GB:.1f} | {rest}"


def _place(text: str, head: Sequence[str]) -> tuple[int, int]:
    lines = text.splitlines()
    first = lines.index(head[0])
    last = next((i for i in range(first, len(lines)) if not lines[i].startswith("|")), len(lines))
    return first, last


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into the documents")
    args = parser.parse_args()
    for name in FIRST if args.write else ():
        (ROOT / "configs" / f"{name}.yaml").write_text(first_text(name))
    for document, table in ((CLUSTER, cluster_table()), (MEMORY, memory_table())):
        print("\n".join(table), end="\n\n")
        if args.write:
            text = document.read_text()
            first, last = _place(text, table)
            lines = text.splitlines()
            document.write_text("\n".join([*lines[:first], *table, *lines[last:]]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
