"""`roll-async show CONFIG --memory`: memory per device of a config, estimated without devices."""

from __future__ import annotations

from collections.abc import Sequence

from roll_async.config.schema import RunConfig
from roll_async.launch.checks.device_memory import CONTEXT_BYTES, GB, DeviceUse, device_uses, span


def show_memory(config: RunConfig, device_gb: float) -> int:
    """Print the table. Exit 0: everything fits; 2: something does not."""
    uses = device_uses(config, int(device_gb * GB))
    print("\n".join(table(uses)) if uses else "no role has a device_mapping: everything runs on CPU")
    for use in uses:
        if use.problem is not None:
            print(f"devices {span(use.devices)}: {use.problem}")
    return 2 if any(use.problem is not None for use in uses) else 0


def table(uses: Sequence[DeviceUse]) -> list[str]:
    """GB per device, a line per role and one per set of devices."""
    lines = [
        "| devices | role | weights | gradients | optimizer | activations | logits | KV cache | buckets | total |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for use in uses:
        place = span(use.devices)
        for name, m in use.trainers:
            parts = (m.weights, m.gradients, m.optimizer, m.activations, m.logits)
            cells = [*(f"{part / GB:.1f}" for part in parts), "", "", f"{(m.total + CONTEXT_BYTES) / GB:.1f}"]
            lines.append(f"| {place} | {name} | {' | '.join(cells)} |")
        if use.engine is not None:
            e = use.engine
            kv = f"{e.kv / GB:.1f} ({e.kv_tokens} tokens)"
            cells = [f"{e.weights / GB:.1f}", "", "", "", "", kv, "", f"{e.reserved / GB:.1f}"]
            lines.append(f"| {place} | actor_infer | {' | '.join(cells)} |")
        fits = "fits" if use.problem is None else "does not fit"
        total = f"{use.total / GB:.1f} of {use.device_bytes / GB:.0f}, {fits}"
        lines.append(f"| {place} | **together** | | | | | | | {use.buckets / GB:.1f} | **{total}** |")
    return lines
