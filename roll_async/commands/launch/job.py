"""What a config asks of a cluster, whoever manages its machines."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from roll_async.config.schema import RunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterJob:
    """One run on machines of its own."""

    name: str
    config: Path
    overrides: tuple[str, ...]
    output_dir: Path
    """The same folder on every node."""
    num_nodes: int
    gpus_per_node: int
    """The most that any node of the mappings uses."""

    @classmethod
    def of(cls, config: RunConfig, path: Path, overrides: tuple[str, ...]) -> ClusterJob:
        """Raises ValueError for a config without devices."""
        ids = {device for _, role in config.roles() for device in role.device_mapping or ()}
        if not ids:
            raise ValueError(
                f"{path} has no device_mapping: it runs on one machine, with roll-async run --config {path}"
            )
        return cls(
            name=config.exp_name,
            config=path.absolute(),
            overrides=overrides,
            output_dir=Path(config.output_dir).absolute(),
            num_nodes=config.num_nodes,
            gpus_per_node=max(Counter(device // config.num_gpus_per_node for device in ids).values()),
        )
