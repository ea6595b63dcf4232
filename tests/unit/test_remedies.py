"""Every remedy that a message prints is typed as it is printed, and takes the refusal away.

The refusals are those of the tests of the loader, of the rules and of the gate. Each is provoked, its message is read
by one grammar (`PRINTED`), what it names is typed, and the same refusal may not come back. One remedy may uncover the
next refusal, whose remedy is typed in turn, until the config is accepted or a message leaves the choice to the user
(`LEFT_TO_THE_USER`). A remedy that is answered by a wrong type or a bad choice is a wrong remedy.
"""

import ast
import json
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from roll_async.cli import COMMANDS
from roll_async.config.api import ConfigError, Diagnostic
from roll_async.config.loading.names import REFUSED as FOREIGN_KEYS
from roll_async.config.schema import AgenticConfig, RLVRConfig
from roll_async.config.yaml.paths import keys
from roll_async.launch.checks.gate import check_supported
from tests.unit.config import test_config_loading as loading
from tests.unit.config import test_config_rules as rules
from tests.unit.config.conftest import AGENTIC, RLVR, Remove, edited
from tests.unit.test_gate import CPU, REFUSED, SEVEN

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Typed:
    """A config as a user has it: a file (a tree, or the path of a shipped one) and overrides behind it."""

    file: dict | Path
    overrides: tuple[str, ...] = ()

    def refused(self, folder: Path) -> list[Diagnostic]:
        """The gate's errors."""
        path = self.file
        if isinstance(path, dict):
            path = folder / "run.yaml"
            path.write_text(json.dumps(self.file, indent=1))
        try:
            check_supported(path, self.overrides)
        except ConfigError as error:
            return [d for d in error.diagnostics if d.is_error]
        return []

    def override(self, key: str, value: object) -> "Typed":
        """`KEY=VALUE` behind everything else. An entry of a list is written in the file."""
        if isinstance(self.file, dict) and re.search(r"\.\d+(\.|$)", key):
            return self.edit(key, None if value == "null" else value)
        return Typed(self.file, (*self.overrides, f"{key}={value}"))

    def edit(self, key: str, value: object) -> "Typed":
        """The line of the key rewritten, or with Remove taken out; also where an override holds it."""
        kept = tuple(o for o in self.overrides if o.partition("=")[0] != key)
        if len(kept) < len(self.overrides):
            return Typed(self.file, kept if value is Remove else (*kept, f"{key}={value}"))
        assert isinstance(self.file, dict), f"{key} is not written in {self.overrides}"
        tree = json.loads(json.dumps(self.file))
        section, last = _place(tree, key)
        if value is Remove:
            del section[last]
        else:
            section[last] = value
        return Typed(tree, self.overrides)

    def value(self, key: str) -> object:
        """What is written under the key."""
        for override in reversed(self.overrides):
            if override.partition("=")[0] == key:
                return override.partition("=")[2]
        section, last = _place(self.file, key)
        return section[last]


def _place(tree: dict, key: str) -> tuple[dict | list, str | int]:
    """The map or list that holds the key, and its name there. A file may write `a.b: 1`, and leave `algorithm.` out."""
    here, parts = tree, key.split(".")
    while parts:
        if isinstance(here, list):
            name, used = int(parts[0]), 1
        else:
            used = next((n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in here), 0)
            name = ".".join(parts[:used])
        if not used and parts[0] == "algorithm":
            return _place(tree, key.partition(".")[2])
        assert used or len(parts) == 1, f"{key} is not written"
        parts = parts[max(used, 1) :]
        if not parts:
            return here, name or key.rpartition(".")[2]
        here = here[name]
    raise AssertionError(key)


def renamed(typed: Typed, key: str, name: str) -> Typed:
    value = typed.value(key)
    return typed.edit(key, Remove).override(name, json.dumps(value) if not isinstance(value, str) else value)


def unquoted(typed: Typed, key: str) -> Typed:
    value = typed.value(key)
    if typed.overrides:
        return typed.override(key, value.strip("'\""))
    return typed.edit(key, float(value) if "." in value or "e" in value else int(value))


def nearest(typed: Typed, key: str, constraint: str) -> Typed:
    """A value at the end of the range that a message names."""
    closed = re.match(r">= (-?[\d.]+)|in \[(-?[\d.]+),|(-?\d+)(?: or|$)", constraint)
    if closed:
        return typed.override(key, next(g for g in closed.groups() if g is not None))
    above = re.match(r"> (-?[\d.]+)|in \((-?[\d.]+),", constraint)
    return typed.override(key, f"{float(above[1] or above[2]) + 1:g}")


def foreign(typed: Typed, key: str, reason: str) -> Typed:
    """A key of another system is taken out, and what the reason names with a value is typed."""
    named = re.search(r"([a-z_]+(?:\.[a-z_]+)*): ([a-z]+)", reason)
    return typed.edit(key, Remove).override(named[1], named[2]) if named else typed.edit(key, Remove)


PRINTED: list[tuple[str, Callable[[Typed, str, re.Match], Typed]]] = [
    (r"not a key of roll_async: (.*)", lambda t, key, m: foreign(t, key, m[1])),
    (r"unknown key; did you mean '([^']+)'\?", lambda t, key, m: renamed(t, key, m[1])),
    (r"is not one of .*did you mean '([^']+)'\?", lambda t, key, m: t.override(key, m[1])),
    (r"is not one of (\S+)", lambda t, key, m: t.override(key, m[1])),
    (r"names no key of this config; did you mean '([^']+)'\?", lambda t, key, m: t.override(key, f"${{{m[1]}}}")),
    (r"use KEY=null to clear", lambda t, key, m: t.edit(key, Remove).override(key, "null")),
    (r"\b(?:set|use) ([a-z_]+(?:\.[a-z_0-9]+)*): ([^\s,;]+)", lambda t, key, m: t.override(m[1], m[2])),
    (r"set it to ([a-z0-9.]+)", lambda t, key, m: t.override(key, m[1])),
    (r"remove the quotes", lambda t, key, m: unquoted(t, key)),
    (r"; quote it", lambda t, key, m: t.edit(key, str(t.value(key)))),
    (r"; write (true|false|\d+)$", lambda t, key, m: t.override(key, m[1])),
    (r"; write a list of items", lambda t, key, m: t.override(key, f"[{t.value(key)}]")),
    (r"write a list of ints, list\(range\(a,b\)\), range", lambda t, key, m: t.override(key, "list(range(0,4))")),
    (r"for a fraction of a batch use (\w+)", lambda t, key, m: renamed(t, key, m[1])),
    (r"remove it|drop it|drop world_size|remove the key", lambda t, key, m: t.edit(key, Remove)),
    (r"drop one of the three", lambda t, key, m: t.override("response_length", "null")),
    (r"keep one|keep '[^']+'", lambda t, key, m: t.edit(key, Remove)),
    (r"give one of (\w+) \|", lambda t, key, m: t.override(key, m[1])),
    (r"; use < (\d+),", lambda t, key, m: t.override(key, str(int(m[1]) - 1))),
    (r"; (?:[a-z]+ )?use (> \d+)$", lambda t, key, m: nearest(t, key, m[1])),
    (r"[;:] (?:[a-z]+ )?use (\S+)$", lambda t, key, m: t.override(key, m[1])),
    # The bound that a value breaks is the remedy of a message that says nothing else.
    (r"must be null while", lambda t, key, m: t.override(key, "null")),
    (r"must be ((?:>|in |-?\d).*)", lambda t, key, m: nearest(t, key, m[1])),
    (r"must be < \w+ (\d+)", lambda t, key, m: t.override(key, str(int(m[1]) - 1))),
    (r"must be null with", lambda t, key, m: t.override(key, "null")),
    (r"at least (\d+)", lambda t, key, m: t.override(key, m[1])),
    (r"must lie between (\d+) and", lambda t, key, m: t.override(key, m[1])),
    (r"exceeds [a-z_]+ (\d+)$", lambda t, key, m: t.override(key, m[1])),
    (r"cannot hold (?:one sequence of sequence_length|the) (\d+)", lambda t, key, m: t.override(key, m[1])),
    (r"is below (?:sequence_length |the )?(\d+)", lambda t, key, m: t.override(key, m[1])),
]
"""What a message prints, and how a user types it. The first that is found counts."""


LEFT_TO_THE_USER = {
    r"unknown key; .+ has: ": "no key of the section is near; all of them are listed",
    r"names no key of this config; at its top": "no key is near; those at the top are listed",
    r"^expected \w+, got ": "a value of another type has no counterpart",
    r"an integer of 64 bits|a name matching|must be a .json|must be at least one file": "only the user knows the value",
    r"choose another (name|tag)$": "names of sets and tags are the user's",
    r"^required and not set; (add it|give api_url|give strategy_name|a rule needs)": "it names the key to set",
    "^set response_length": "it names the keys",
    r"^\S+: (empty|device|negative|more than)|^\[.*\]: (empty|device)": "which device was meant is not known",
    r"is a key of (rlvr|agentic) configs": "key or kind: one of them was not meant",
    r"in part .* make them equal": "devices are the user's",
    r"divisible by|does not divide|needs whole groups|needs pipeline_model": "one of the sizes must change",
    r"leaves no room|entries with sum": "lengths and shares are the user's",
    "is no date and time": "which moment was meant is not known",
    "is no address": "only the user knows where the teacher is",
    "none has the name of the tag": "which teacher is meant for the tag is not known",
    r"unknown placeholder|a literal brace is written twice": "which of the names that it lists was meant is not known",
    r"gets none of the \d+ groups": "whether a world is wanted is the user's choice",
    r"is not in (custom_envs|rewards)|sum is|tag '|has no tag_included": "domains and tags are the user's",
    r"^required by ": "the section that it asks for has a model or files of its own; or the key that it names goes",
    r"is for agentic configs|cannot be combined with router_replay|contradicts rec": "one of the two keys must go",
    r"^[\d.]+ exceeds [\d.]+$|all weights would be 1": "a pair of bounds: one of them must change",
}
"""Messages without a remedy that can be typed, and why. Their words are those of the contract of the config."""
OF_TEXT = {
    "C009": "what a tag was meant to do is not known",
    "C010": "the file is too large",
    "C012": "every member of the circle is named, one of them must change",
    "C013": "the form that is supported is named",
    "C014": "the file that is missing or includes itself is named",
}
"""Refusals of the text of a file that name a place and no remedy."""

ON_SHIPPED = [
    ("rollout_batch_size=63",), ("response_length=8191",), ("async_generation_ratio=9",),
    ("actor_infer.device_mapping=8-15",), ("actor_infer.generating_args.temperature=0",),
    ("pg_variant=tis", "algorithm.correction.weight_level=token"), ("is_num_return_sequences_expand=false",),
    ("actor_infer.generating_args.num_return_sequences=4",), ("actor_train.world_size=3",),
    ("async_training.staleness.soft_versions=0.5",), ("seed='3'",), ("adv_estimatr=grpo",), ("pg_variant=tsi",),
    ("seed=",),
]  # fmt: skip
OF_RLVR, OF_AGENTIC = (*loading.RLVR_CASES, *rules.RLVR_CASES), (*loading.AGENTIC_CASES, *rules.AGENTIC_CASES)
CASES = [
    *(Typed(edited(RLVR, case[1])) for case in OF_RLVR),
    *(Typed(edited(AGENTIC, case[1])) for case in OF_AGENTIC),
    *(Typed(edited(RLVR, {key: 1})) for key, _ in loading.REFUSED),
    Typed(edited(RLVR, {"exp_name": "${pretrian}"})),
    Typed(edited(RLVR, {"adv_estimator": "rloo", "algorithm": {"adv_estimator": "grpo"}})),
    Typed(edited(RLVR, {"trainer": {"n_gpus_per_node": 2}})),
    *(Typed(path, tuple(overrides)) for path, overrides in REFUSED),
    *(Typed(SEVEN, overrides) for overrides in ON_SHIPPED),
    Typed(CPU, ("async_training.interrupt.mode=keep", "actor_infer.strategy_args={strategy_name: hf_infer}")),
]


def named_by(case: Typed) -> str:
    edits = case.overrides or [k for k, v in case.file.items() if v not in (RLVR.get(k), AGENTIC.get(k))]
    return ",".join(edits)[-60:]


def remedy(message: str) -> tuple[Callable[[Typed, str, re.Match], Typed], re.Match] | None:
    """What the message prints; None where it leaves the choice to the user."""
    for pattern, how in PRINTED:
        if match := re.search(pattern, message):
            return how, match
    assert any(re.search(pattern, message) for pattern in LEFT_TO_THE_USER), f"no remedy in: {message}"
    return None


WITHOUT_REMEDY = [case for case in (*OF_RLVR, *OF_AGENTIC) if remedy(case[2].partition(": ")[2]) is None]
_LEFT = [Typed(edited(RLVR if case in OF_RLVR else AGENTIC, case[1])) for case in WITHOUT_REMEDY]
WITH_REMEDY = [case for case in CASES if case not in _LEFT]
IN_TEXT = [
    ("seed: 1\nseed: 2\n", r"lines \d+ and (\d+)\); keep one", lambda lines, m: lines[: int(m[1]) - 1]),
    ("true: 2\n", r"key '(\w+)' is not a string; quote it", lambda lines, m: [lines[0].replace(m[1], f"'{m[1]}'")]),
]  # fmt: skip
"""Refusals of a text (C007, C008): the text, what the message prints, the lines with that done."""


@pytest.mark.parametrize(("text", "printed", "mended"), IN_TEXT, ids=["C007", "C008"])
def test_a_remedy_for_a_text_works_when_it_is_done(text, printed, mended, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    (problem,) = Typed(file).refused(tmp_path)
    match = re.search(printed, problem.message)
    assert match, problem
    file.write_text("\n".join(mended(text.splitlines(), match)))
    assert problem.id not in {d.id for d in Typed(file).refused(tmp_path)}


def test_every_code_has_a_remedy_that_is_typed_or_a_reason_for_none():
    """169 refusals are answered as their message says; 74 leave the choice to the user (LEFT_TO_THE_USER)."""
    codes = set()
    for folder in ("config", "launch"):
        for path in (ROOT / "roll_async" / folder).rglob("*.py"):
            codes |= set(re.findall(r'"(C\d{3})"', path.read_text()))
    without = {case[0] for case in WITHOUT_REMEDY}
    typed = {case[0] for case in (*OF_RLVR, *OF_AGENTIC) if case not in WITHOUT_REMEDY}
    typed |= {"C002", "C007", "C008", "C011", "C015", "C016", "C201", "C202", "C203"}  # the other tables, and IN_TEXT
    assert codes - {"C204"} == typed | without | set(OF_TEXT)  # C204: the commands below
    never = {"C018", "C019", "C102", "C112", "C113", "C114", "C115", "C116", "C122", "C126", "C128", "C130",
             "C141", "C144", "C145", "C147", "C148", "C150", "C155"}  # fmt: skip
    assert without - typed == never
    assert (len(WITH_REMEDY) + len(IN_TEXT), len(WITHOUT_REMEDY)) == (169, 74)


def first_refusal(case: Typed, folder: Path) -> Diagnostic:
    """What is typed against: an option of a wrong strategy goes with the strategy."""
    errors = case.refused(folder)
    assert errors, "accepted"
    return next((e for e in errors if ".strategy_config." not in e.key), errors[0])


@pytest.mark.parametrize("case", WITH_REMEDY, ids=named_by)
def test_a_remedy_works_when_it_is_typed(case, tmp_path):
    problem = first_refusal(case, tmp_path)
    for _ in range(5):
        how, match = remedy(problem.message)
        case = how(case, problem.key, match)
        left = case.refused(tmp_path)
        assert (problem.id, problem.key) not in [(d.id, d.key) for d in left], f"still refused: {problem} after {case}"
        if not left:
            return
        assert left[0].id not in ("C003", "C004", "C006", "C015"), f"a wrong remedy: {problem}: {left[0]}"
        problem = left[0]
        if remedy(problem.message) is None:
            return
    pytest.fail(f"no end: {problem}")


# ---- what messages name -------------------------------------------------------------------------------------------


PROGRAM = re.compile(r"examples/|tools/|assets|roll-async|hf |pip install|ray job")


def texts() -> Iterator[tuple[str, str]]:
    """(file, text) of every string but docstrings in files that name a command; a value of an f-string is `{}`."""
    for path in sorted((ROOT / "roll_async").rglob("*.py")):
        if not PROGRAM.search(path.read_text()):
            continue
        tree = ast.parse(path.read_text())
        parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if id(node) in docs or id(node) in parts:
                continue
            if isinstance(node, ast.JoinedStr):
                yield path.name, "".join(v.value if isinstance(v, ast.Constant) else "{}" for v in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield path.name, node.value


COMMAND = re.compile(
    r"(?:^|[ `'])((?:python examples/|python tools/|bash examples/|make [a-z]+-assets|roll-async [a-z-]+|"
    r"hf (?:download|auth)|pip install |ray job submit)[^`;,]*)"
)


def test_every_command_that_a_message_names_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    makefile = (ROOT / "Makefile").read_text()
    found = [(file, match[1]) for file, text in texts() for match in COMMAND.finditer(text)]
    for file, command in found:
        program, *words = command.replace('"', "").replace("'", "").split()
        match program:
            case "python" | "bash":
                script = ROOT / words[0].rstrip(":.")
                assert script.is_file(), (file, command)
                options = [w for w in words if w.startswith("--")]
                assert all(option in script.read_text() for option in options), (file, command)
            case "make":
                assert re.search(rf"^{words[0]}:", makefile, re.M), (file, command)
            case "roll-async":
                assert words[0].rstrip(":") in COMMANDS, (file, command)
            case "pip":
                for named in re.findall(r"roll_async\[([a-z,]+)\]", command):
                    assert set(named.split(",")) <= set(extras), (file, command)
    assert len(found) >= 32


def test_every_key_that_a_reason_names_exists():
    """Reasons against keys of ROLL and verl name ours, in full, by their last part or as a value of one of them."""
    names = set()
    for kind in (RLVRConfig, AgenticConfig):
        for path in keys(kind):
            parts = path.split(".")
            names |= {".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)}
    for reason in set(FOREIGN_KEYS.values()):
        named = re.findall(r"[a-z]+(?:[._][a-z_]+)+", reason)
        assert set(named) <= names | {"pg_clip", "env_config", "num_workers", "max_concurrent"}, reason
