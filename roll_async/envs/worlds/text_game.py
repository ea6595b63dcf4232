"""A text game played with tools: find the key, open the chest. Rooms, items and doors are made from the seed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random

from roll_async.envs.worlds.text_world import TextWorld

_OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}
_SHIFT = {"north": (-1, 0), "south": (1, 0), "east": (0, 1), "west": (0, -1)}
_NAMES = (
    "hall", "kitchen", "cellar", "library", "garden", "attic", "workshop", "chapel", "stable", "tower", "pantry",
    "study",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TextGameOptions:
    """`env_config` of text_game."""

    num_rooms: int = 4
    key_reward: float = 0.2
    """For taking the key; opening the chest brings the rest of 1."""

    def __post_init__(self) -> None:
        if not 2 <= self.num_rooms <= len(_NAMES):
            raise ValueError(f"num_rooms must be 2 to {len(_NAMES)}")


def _tool(name: str, description: str, **parameters: str) -> dict:
    properties = {key: {"type": "string", "description": value} for key, value in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [
    _tool("look", "Describe the room."),
    _tool("go", "Walk through a door.", direction="north, south, east or west"),
    _tool("take", "Take a thing that lies here.", thing="its name"),
    _tool("open", "Open a thing.", thing="its name"),
]


class TextGame(TextWorld):
    """Actions are calls of its tools, or the same as words: `go north`."""

    Options = TextGameOptions

    def __init__(self, options: TextGameOptions) -> None:
        self._options = options

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        """Rooms on a grid, each joined to one before it, so all can be reached."""
        super().reset(seed=seed)
        rng = Random(int(self.np_random.integers(2**31)))
        self._names = rng.sample(_NAMES, self._options.num_rooms)
        places = [(0, 0)]
        self._doors: list[dict[str, int]] = [{}]
        while len(places) < self._options.num_rooms:
            room, way = rng.randrange(len(places)), rng.choice(sorted(_SHIFT))
            spot = (places[room][0] + _SHIFT[way][0], places[room][1] + _SHIFT[way][1])
            if spot in places:
                continue
            places.append(spot)
            self._doors.append({_OPPOSITE[way]: room})
            self._doors[room][way] = len(places) - 1
        self._key, self._chest = rng.sample(range(self._options.num_rooms), 2)
        self._room, self._has_key = 0, False
        info = {
            "instructions": "Somewhere is a key, somewhere a chest. Open the chest.",
            "tools": TOOLS,
            "solved": False,
            "state": self._state(),
        }
        return self._look(), info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """One action."""
        verb, what = _parsed(action)
        reward, done = 0.0, False
        match verb:
            case "look":
                said = self._look()
            case "go" if what in self._doors[self._room]:
                self._room = self._doors[self._room][what]
                said = self._look()
            case "go":
                said = f"There is no door {what or 'like that'}."
            case "take" if what == "key" and self._room == self._key and not self._has_key:
                self._has_key, reward, said = True, self._options.key_reward, "You have the key."
            case "take":
                said = f"There is no {what or 'such thing'} here."
            case "open" if what == "chest" and self._room == self._chest and self._has_key:
                reward, done, said = 1.0 - self._options.key_reward, True, "The chest is open. You have won."
            case "open" if what == "chest" and self._room == self._chest:
                said = "It is locked."
            case "open":
                said = f"There is no {what or 'such thing'} to open here."
            case _:
                said = "You can look, go, take and open."
        return said, reward, done, False, {"solved": done, "state": self._state()}

    def _look(self) -> str:
        things = ["a key"] if self._room == self._key and not self._has_key else []
        things += ["a chest"] if self._room == self._chest else []
        here = f" Here is {' and '.join(things)}." if things else ""
        doors = ", ".join(sorted(self._doors[self._room]))
        return f"You are in the {self._names[self._room]}.{here} Doors: {doors}."

    def _state(self) -> str:
        return f"{self._room}/{self._has_key}"


def _parsed(action: str) -> tuple[str, str]:
    """(verb, object) of a call as JSON, or of words."""
    try:
        call = json.loads(action)
    except ValueError:
        call = None
    if isinstance(call, dict):
        arguments = call.get("arguments")
        values = list(arguments.values()) if isinstance(arguments, dict) else []
        # The one parameter, whatever the model calls it.
        return str(call.get("name", "")), str(values[0]).lower().strip() if values else ""
    words = action.strip().lower().rstrip(".").split()
    return (words[0] if words else ""), (words[-1] if len(words) > 1 else "")
