"""What is wrong with the devices of this machine for a run, in one line, before Ray starts."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from roll_async.config.schema import RunConfig

OLDEST_DRIVER = {"12": 525, "13": 580}
"""That runs wheels of a CUDA version, by its major number."""
FOREIGN_SHARE = 0.1
"""Of a device's memory: what a display or a monitor holds is less, a run more."""
_ANSWERS_WITHIN_S = 10.0
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

    @property
    def computes_bf16(self) -> bool:
        """Natively."""
        return self.capability >= 8.0

    @property
    def computes_fp8(self) -> bool:
        return self.capability >= 8.9

    @property
    def is_used(self) -> bool:
        """By another process."""
        return self.used_mib > FOREIGN_SHARE * self.total_mib

    def too_old_for(self, cuda: str | None) -> int | None:
        """The oldest driver that runs wheels of this CUDA, where the card's is older."""
        oldest = OLDEST_DRIVER.get((cuda or "").partition(".")[0], 0)
        return oldest if int(self.driver.partition(".")[0]) < oldest else None

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


def nvidia_smi(*arguments: str) -> str:
    """What the driver's program answers. Raises OSError where there is none, SubprocessError where it fails."""
    command = ["nvidia-smi", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_ANSWERS_WITHIN_S).stdout


def cards_of(ask: Callable[..., str] = nvidia_smi) -> list[Card]:
    """The devices of this machine. Raises what `nvidia_smi` does, ValueError where it does not say all of them, as of
    slices of a card (MIG).
    """
    return [Card.of(line) for line in ask(f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits").splitlines()]


def cards_here() -> list[Card]:
    """`cards_of`; none where nobody says."""
    try:
        return cards_of()
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def cuda_of_torch(folders: Sequence[str] | None = None) -> str | None:
    """The CUDA that the installed torch was built for, as its file says; None for a build for the CPU."""
    spec = find_spec("torch") if folders is None else None
    for folder in folders or (spec.submodule_search_locations if spec is not None else None) or ():
        match = re.search(r"^cuda\b.*?=\s*'([\d.]+)'", (Path(folder) / "version.py").read_text(), re.M)
        return match[1] if match else None
    return None


def device_problem(config: RunConfig, cards: Sequence[Card], visible: str | None, cuda: str | None) -> str | None:
    """The first thing wrong; None where nothing is, or no card is known. `visible`: CUDA_VISIBLE_DEVICES, None = not
    set; `cuda`: the version that torch was built with.
    """
    numbers = {device for _, role in config.roles() for device in role.device_mapping or ()}
    if not cards or not numbers:
        return None
    seen = seen_devices(cards, visible)
    if isinstance(seen, str):
        return seen
    here = [seen[n % config.num_gpus_per_node] for n in sorted(numbers) if n % config.num_gpus_per_node < len(seen)]
    return next(_problems(config, [card for card in here if card is not None], cuda), None)


def seen_devices(cards: Sequence[Card], visible: str | None) -> list[Card | None] | str:
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
        if (oldest := card.too_old_for(cuda)) is not None:
            yield (
                f"the driver {card.driver} of {card} is older than torch's CUDA {cuda} takes ({oldest} or later); "
                "update it, or install torch built for an older CUDA"
            )
        if bf16 and not card.computes_bf16:
            yield (
                f"{bf16[0]}.model_args.dtype=bf16, and {card} computes no bf16 (compute capability {card.capability}, "
                "8.0 is needed); set fp32, or take another card"
            )
        if card.is_used:
            yield (
                f"other processes hold {card.used_mib / 1024:.1f} of {card.total_mib / 1024:.0f} GiB of {card}, as "
                "another run does (roll-async status); end it, or choose others by CUDA_VISIBLE_DEVICES"
            )
