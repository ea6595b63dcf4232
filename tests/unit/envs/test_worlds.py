"""Our own worlds: seeded, solvable, exact about rewards; options refused with their key."""

import json
import sys
import time
from collections import deque
from random import Random
from types import SimpleNamespace

import pytest
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

from roll_async.envs.registry import WORLDS, WorldSpec, build, check
from roll_async.envs.worlds.arithmetic import compute, shown
from roll_async.envs.worlds.countdown import Countdown, CountdownOptions
from roll_async.envs.worlds.frozen_lake import FrozenLake, FrozenLakeOptions, _solvable_map
from roll_async.envs.worlds.moves import STEPS, WORDS, direction
from roll_async.envs.worlds.questions import same_answer
from roll_async.envs.worlds.sokoban import SokobanOptions, generate
from tests.patience import patient


def lake_path(rows):
    """Shortest way to G around holes, as move numbers."""
    cells = {(r, c): symbol for r, row in enumerate(rows) for c, symbol in enumerate(row)}
    start = next(cell for cell, symbol in cells.items() if symbol == "P")
    queue, seen = deque([(start, [])]), {start}
    while queue:
        cell, path = queue.popleft()
        if cells[cell] == "G":
            return path
        for move, (dr, dc) in enumerate(STEPS):
            to = (cell[0] + dr, cell[1] + dc)
            if to in cells and cells[to] != "O" and to not in seen:
                seen.add(to)
                queue.append((to, [*path, move]))
    return None


def test_every_lake_can_be_crossed_and_the_same_seed_is_the_same_lake():
    world = FrozenLake(FrozenLakeOptions(words="short"))
    maps = set()
    for seed in range(60):
        text, info = world.reset(seed=seed)
        assert text == "\n".join(info["frame"]) and world.reset(seed=seed)[0] == text
        maps.add(text)
        path = lake_path(info["frame"])
        for move in path[:-1]:
            _, reward, ended, _, _ = world.step(WORDS[move])
            assert (reward, ended) == (0.0, False)
        _, reward, ended, _, info = world.step(f"I think <answer>{WORDS[path[-1]]}</answer>")
        assert (reward, ended, info["solved"]) == (1.0, True, True)
    assert len(maps) > 40


def test_a_hole_ends_without_reward_and_words_that_are_no_move_cost_what_was_said():
    world = FrozenLake(FrozenLakeOptions(format_penalty=-0.25, words="short"))
    for seed in range(50):
        text, _ = world.reset(seed=seed)
        rows = text.split("\n")
        if rows[0][1] == "O":
            assert world.step("no idea")[1:3] == (-0.25, False)
            _, reward, ended, _, info = world.step("Right")
            assert (reward, ended, info["solved"]) == (0.0, True, False)
            return
    pytest.fail("no lake with a hole beside the start")


@pytest.mark.parametrize("num_boxes", [1, 2])
def test_every_sokoban_room_can_be_solved(num_boxes):
    for seed in range(15):
        room = generate(SokobanOptions(num_boxes=num_boxes), Random(seed))
        assert room == generate(SokobanOptions(num_boxes=num_boxes), Random(seed))
        queue, seen = deque([room]), {(room.boxes, room.player)}
        while queue and not (found := queue.popleft()).solved:
            for move in range(4):
                after = found.moved(move)
                if (after.boxes, after.player) not in seen:
                    seen.add((after.boxes, after.player))
                    queue.append(after)
        assert found.solved, room.rows()


def test_countdown_accepts_any_right_expression_and_no_number_twice():
    world = Countdown(CountdownOptions(attempts=2))
    for seed in range(40):
        text, _ = world.reset(seed=seed)
        target = int(text.split()[1])
        numbers = [int(n.strip(" .")) for n in text.split("from")[1].split(",")]
        solution = next(
            f"({numbers[0]}{a}{numbers[1]}){b}{numbers[2]}"
            for a in "+-*"
            for b in "+-*"
            if compute(f"({numbers[0]}{a}{numbers[1]}){b}{numbers[2]}")[0] == target
        )
        cheat = world.step(f"<answer>{target}</answer>")
        assert cheat[1:3] == (0.0, False) and "other numbers" in cheat[0]
        # Its stop string may be no part of the text.
        said = ("So <answer>{}", "So <answer>{}</answer>", "{}, in <answer> tags")[seed % 3]
        assert world.step(said.format(f"{solution} = {target}"))[1:3] == (1.0, True)


def test_the_text_game_is_won_by_calls_and_pays_1_in_all():
    world = build(WorldSpec(env_type="text_game", values={"num_rooms": 6}))
    for seed in range(20):
        text, info = world.reset(seed=seed)
        assert {t["function"]["name"] for t in info["tools"]} == {"look", "go", "take", "open"}
        total, seen = 0.0, set()

        def call(name, **arguments):
            return world.step(json.dumps({"name": name, "arguments": arguments}))

        def explore(depth=0):
            nonlocal total
            text, reward, done, _, info = call("look")
            state = info["state"].split("/")[0]
            if state in seen:
                return False
            seen.add(state)
            for action in (("take", "key"), ("open", "chest")):
                _, reward, done, _, _ = call(action[0], thing=action[1])
                total += reward
                if done:
                    return True
            doors = text.split("Doors: ")[1].strip(".").split(", ")
            for door in doors:
                call("go", direction=door)
                if explore(depth + 1):
                    return True
                call("go", direction={"north": "south", "south": "north", "east": "west", "west": "east"}[door])
            return False

        done = explore()
        if not done:
            seen.clear()
            done = explore()
        assert done and total == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("text", "value"), [("12*3+1", "37"), ("(1+2)/4", "0.75"), ("-2**3", "-8"), ("7//2%2", "1"), ("0.1+0.2", "0.3")]
)
def test_arithmetic_is_exact(text, value):
    assert shown(compute(text)[0]) == value


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "1 if 1 else 2",
        "9**9**9",
        "2**100000",
        "(" * 200 + ")" * 200,
        "1/0",
        "a+1",
        "",
        "1," * 90,
        "True",
    ],
)
def test_arithmetic_refuses_what_is_none_and_what_is_too_large(text):
    with pytest.raises(ValueError):
        compute(text)


@pytest.mark.parametrize(
    ("text", "right"),
    [("so <answer>1,080</answer> it is 3", True), ("1079", False), (r"\boxed{1080.0}", True), ("no number", False)]
    + [("It is 1080. I put it in <answer> tags.", True), ("In `<answer>` tags: <answer>1080", True)],
)
def test_answers_by_number(text, right):
    assert same_answer(text, "1080", "number") is right


def test_answers_by_words():
    assert same_answer("<answer>The Eiffel tower.</answer>", "eiffel Tower", "text")
    assert same_answer("It is <answer>The Eiffel tower.", "eiffel Tower", "text")
    assert not same_answer("Eiffel", "eiffel tower", "text")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sise": 4}, "env_config.sise: unknown key; FrozenLakeOptions has: size"),
        ({"size": "4"}, "env_config.size: expected int, got str '4'"),
        ({"size": True}, "expected int, got bool"),
        ({"words": "long"}, "'long' is not one of full | short"),
        ({"size": 1}, "env_config: size must be 2 to 32"),
    ],
)
def test_settings_of_a_world_are_refused_with_their_key(values, message):
    with pytest.raises(ValueError, match=message.replace("|", r"\|")):
        check(WorldSpec(env_type="frozen_lake", values=values))


def test_an_unknown_world_is_refused():
    with pytest.raises(ValueError, match="'lake' is not one of"):
        check(WorldSpec(env_type="lake", values={}))
    with pytest.raises(ValueError, match="has no class Sea"):
        check(WorldSpec(env_type="roll_async.envs.worlds.frozen_lake.Sea", values={}))


@pytest.mark.parametrize(
    ("text", "move"),
    [
        ("Go LEFT", 0),
        ("up then down", 1),
        ("R", 2),
        ("Right, I'd say", 2),
        ("'up'", 3),
        ("I\u2019d \u2018L\u2019", 0),
        ("upper", None),
        ("", None),
    ],
)
def test_directions(text, move):
    assert direction(text) == move


@pytest.mark.parametrize("name", ["minigrid", "textarena", "reasoning_gym"])
def test_wrappers_of_extras_name_their_extra_or_work(name):
    module = {"reasoning_gym": "reasoning_gym"}.get(name, name)
    try:
        __import__(module)
    except ImportError:
        with pytest.raises(ValueError, match="pip install"):
            check(WorldSpec(env_type=name, values={}))
    else:
        assert check(WorldSpec(env_type=name, values={})) is not None


class FakeGame:
    """A game as TextArena's: it says the rules, then what each move led to, and echoes the player."""

    def __init__(self):
        self.said, self.rewards, self.about = [], None, {0: {}}

    def reset(self, num_players, seed=None):
        self.said = [(-1, "rules", "PROMPT"), (-1, "board 0", "BOARD")]

    def step(self, action):
        self.said.append((0, action, "PLAYER_ACTION"))
        number = int(action)
        if number < 9:
            self.said.append((-1, f"board {number}", "BOARD"))
            return False, {}
        self.rewards, self.about = {0: number / 10}, {0: {"reason": "over", "invalid_move": number == 11}}
        return True, {}

    def get_observation(self):
        said, self.said = self.said, []
        return 0, said

    def close(self):
        return self.rewards, self.about


class FakeWrapper:
    """Repeats everything in every observation."""

    def __init__(self, env):
        self.env, self._all = env, []

    def __getattr__(self, name):
        return getattr(self.env, name)

    def get_observation(self):
        self._all += self.env.get_observation()[1]
        return 0, str(self._all)


@pytest.fixture
def text_arena(monkeypatch):
    fake = SimpleNamespace(make=lambda env_id: FakeWrapper(FakeGame()), Wrapper=FakeWrapper)
    monkeypatch.setitem(sys.modules, "textarena", fake)
    monkeypatch.delitem(sys.modules, "roll_async.envs.wrappers.any_textarena", raising=False)
    yield lambda: build(WorldSpec(env_type="textarena", values={"id": "2048-v0"}))
    sys.modules.pop("roll_async.envs.wrappers.any_textarena", None)


def test_a_game_of_textarena_says_only_what_is_new_and_wins_as_it_says_itself(text_arena):
    world = text_arena()
    assert world.reset(seed=1)[0] == "rules\nboard 0"
    assert world.step("3") == ("board 3", 0.0, False, False, {})
    assert world.step("9") == ("over", 0.9, True, False, {"solved": False}), "the greater part of the way is no win"
    world.reset(seed=1)
    assert world.step("10")[1:] == (1.0, True, False, {"solved": True})
    world.reset(seed=1)
    assert world.step("11")[4] == {"solved": False}, "paid for, and lost by an invalid move"


def test_a_move_that_a_game_cannot_read_ends_it_as_the_policys(text_arena):
    world = text_arena()
    world.reset(seed=1)
    text, *rest = world.step("up")
    assert "not valid: invalid literal" in text and rest == [0.0, True, False, {"solved": False}]


def test_an_empty_answer_to_a_reasoning_gym_is_one(monkeypatch):
    data = [{"question": "1+1"}]
    scored = []

    class Data(list):
        def score_answer(self, answer, entry):
            scored.append(answer)
            return 0.0

    tags = SimpleNamespace(extract_answer=lambda text: text[8:-9] if text.startswith("<answer>") else None)
    fake = SimpleNamespace(create_dataset=lambda name, size, seed: Data(data), utils=tags, __spec__=object())
    monkeypatch.setitem(sys.modules, "reasoning_gym", fake)
    monkeypatch.setitem(sys.modules, "reasoning_gym.utils", tags)
    world = build(WorldSpec(env_type="reasoning_gym", values={}))
    for said in ("<answer></answer>", "<answer>2</answer>", " 2 "):
        world.reset(seed=1)
        world.step(said)
    assert scored == ["", "2", "2"]


def test_any_discrete_gymnasium_environment_is_a_world():
    world = build(WorldSpec(env_type="gymnasium", values={"id": "Blackjack-v1", "actions": ["stick", "hit"]}))
    _, info = world.reset(seed=1)
    assert "one of: stick, hit" in info["instructions"]
    assert world.step("what?")[0] == "There is no action in that."
    assert world.step("I stick")[2] is True
    assert set(WORLDS) >= {"frozen_lake", "sokoban", "countdown", "math", "qa", "text_game"}


@pytest.mark.slow
def test_a_search_for_a_room_that_there_is_not_holds_the_event_loop_for_seconds_at_most():
    for kind in ({"num_boxes": 29, "num_pulls": 1000}, {"num_boxes": 10, "num_pulls": 1}):
        began_s = time.monotonic()
        with pytest.raises(ValueError, match="none was found"):
            generate(SokobanOptions(size=32, **kind), Random(0))
        assert time.monotonic() - began_s < patient(8)


def test_options_that_leave_nothing_to_solve_end_with_their_names_and_a_remedy():
    for wrong in ({"size": 4}, {"num_pulls": 0}, {"wall_share": 1.0}, {"wall_share": -0.1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            SokobanOptions(**wrong)
    with pytest.raises(ValueError, match=r"none was found in \d+ tries; lower wall_share"):
        generate(SokobanOptions(wall_share=0.99, num_pulls=1000), Random(0))
    with pytest.raises(ValueError, match="none was found in 10000 tries; raise frozen_share"):
        FrozenLake(FrozenLakeOptions(frozen_share=0.01, size=8)).reset(seed=0)
    for seed in range(20):
        assert _solvable_map(FrozenLakeOptions(size=6), seed) == generate_random_map(size=6, p=0.8, seed=seed)


@pytest.mark.slow
def test_a_room_that_is_seldom_found_is_found_with_every_seed():
    for seed in (3, 4):
        room = generate(SokobanOptions(size=8, num_boxes=4, num_pulls=5), Random(seed))
        assert not room.boxes & room.targets
