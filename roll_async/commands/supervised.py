"""The `sft` and `dpo` commands: train on given rows, without engines."""

from __future__ import annotations

from roll_async.commands.run import launcher

command = {
    name: launcher(name, pipeline=name, example=f"roll-async {name} {name}_demo_cpu max_steps=5")
    for name in ("sft", "dpo")
}
