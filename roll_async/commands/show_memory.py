"""`roll-async show CONFIG --memory`: memory per device of a config, estimated without devices."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from roll_async.config.api import ConfigError, load_with_warnings
from roll_async.launch.device_memory import CONTEXT_BYTES, GB, DeviceUse, device_uses, span

_USAGE = "usage: roll-async show CONFIG [KEY=VALUE...] --memory [--device-gb 80]"


def run_show_memory(args: Sequence[str]) -> int:
    """Print the table. Exit 0: everything fits; 2: something does not, or bad usage."""
    try:
        path, overrides, device_gb = _parse(args)
        config = load_with_warnings(path, overrides, None).config
        uses = device_uses(config, int(device_gb * GB))
    except (ConfigError, ValueError) as error:
        print(f"roll-async show --memory: {error}", file=sys.stderr)
        return 2
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


def _parse(args: Sequence[str]) -> tuple[str, list[str], float]:
    paths, overrides, device_gb, rest = [], [], 80.0, iter(args)
    for arg in rest:
        if arg == "--memory":
            continue
        if arg == "--device-gb" or arg.startswith("--device-gb="):
            value = arg.partition("=")[2] or next(rest, "")
            try:
                device_gb = float(value)
            except ValueError:
                raise ValueError(f"--device-gb {value!r}: expected gigabytes of one device\n{_USAGE}") from None
        elif "=" in arg:
            overrides.append(arg)
        else:
            paths.append(arg)
    if len(paths) != 1 or not device_gb > 0:
        raise ValueError(f"expected one config and a device of more than 0 GB\n{_USAGE}")
    return paths[0], overrides, device_gb
