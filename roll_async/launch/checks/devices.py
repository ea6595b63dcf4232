"""What is wrong with the devices of this machine for a run, in one line, before Ray starts."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from shutil import which

from roll_async.config.schema import RunConfig

OLDEST_DRIVER = {"12": 525, "13": 580}
"""That runs wheels of a CUDA version, by its major number."""
FOREIGN_SHARE = 0.1
"""Of a device's memory: what a display or a monitor holds is less, a run more."""
_FIELDS = "index,uuid,name,driver_version,compute_cap,memory.total,memory.used"


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """A device as nvidia-smi describes it."""

    index: int
    uuid: str
    name: str
    driver: str
    capability: float
    total_mib: int
    used_mib: int

    @classmethod
    def of(cls, line: str) -> Card:
        """Of a line of `nvidia-smi --query-gpu`, without header and units."""
        index, uuid, name, driver, capability, total, used = (field.strip() for field in line.split(","))
        return cls(
            index=int(index), uuid=uuid, name=name, driver=driver, capability=float(capability), total_mib=int(total),
            used_mib=int(used),
        )  # fmt: skip

    def __str__(self) -> str:
        return f"device {self.index} ({self.name})"


def cards_here() -> list[Card]:
    """None of them where nvidia-smi is not there, or does not say all of it, as of slices of a card (MIG)."""
    if which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=60)
    return [] if done.returncode or "[" in done.stdout else [Card.of(line) for line in done.stdout.splitlines()]


def device_problem(config: RunConfig, cards: Sequence[Card], visible: str | None, cuda: str | None) -> str | None:
    """The first thing wrong; None where nothing is, or no card is known. `visible`: CUDA_VISIBLE_DEVICES, None = not
    set; `cuda`: the version that torch was built with.
    """
    numbers = {device for _, role in config.roles() for device in role.device_mapping or ()}
    if not cards or not numbers:
        return None
    seen = _seen(cards, visible)
    if isinstance(seen, str):
        return seen
    here = [seen[n % config.num_gpus_per_node] for n in sorted(numbers) if n % config.num_gpus_per_node < len(seen)]
    return next(_problems(config, [card for card in here if card is not None], cuda), None)


def _seen(cards: Sequence[Card], visible: str | None) -> list[Card | None] | str:
    """The devices in the order of their numbers in a config, None for a slice of one; or what is wrong with the names.
    CUDA itself ends the list at a name that it does not know.
    """
    if visible is None:
        return list(cards)
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if not names:
        return f"CUDA_VISIBLE_DEVICES is empty and hides the {len(cards)} devices of this machine; unset it"
    found: list[Card | None] = []
    for name in names:
        # A UUID may be cut short where that is clear.
        by_uuid = name.startswith("GPU-")
        of_name = [card for card in cards if (card.uuid.startswith(name) if by_uuid else str(card.index) == name)]
        if not name.startswith("MIG-") and len(of_name) != 1:
            what = "not clear" if of_name else "no device of this machine"
            there = ", ".join(f"{card.index} or {card.uuid}" for card in cards)
            return f"CUDA_VISIBLE_DEVICES={visible}: {name} is {what}; there are {there}"
        found.append(of_name[0] if of_name else None)
    if len(set(names)) < len(names):
        return f"CUDA_VISIBLE_DEVICES={visible} names a device twice; CUDA then shows none"
    return found


def _problems(config: RunConfig, cards: Sequence[Card], cuda: str | None) -> Iterator[str]:
    bf16 = [name for name, role in config.roles() if role.device_mapping and role.model_args.dtype == "bf16"]
    for card in cards:
        oldest = OLDEST_DRIVER.get((cuda or "").partition(".")[0], 0)
        if int(card.driver.partition(".")[0]) < oldest:
            yield (
                f"the driver {card.driver} of {card} is older than torch's CUDA {cuda} takes ({oldest} or later); "
                "update it, or install torch built for an older CUDA"
            )
        if bf16 and card.capability < 8:
            yield (
                f"{bf16[0]}.model_args.dtype=bf16, and {card} computes no bf16 (compute capability {card.capability}, "
                "8.0 is needed); set fp32, or take another card"
            )
        if card.used_mib > FOREIGN_SHARE * card.total_mib:
            yield (
                f"other processes hold {card.used_mib / 1024:.1f} of {card.total_mib / 1024:.0f} GiB of {card}, as "
                "another run does (roll-async status); end it, or choose others by CUDA_VISIBLE_DEVICES"
            )
