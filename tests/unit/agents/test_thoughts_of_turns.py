"""What a world is told of a turn is what follows its thought."""

import asyncio

import pytest

from roll_async.agents.episode import EpisodeOptions, WorldEpisode
from roll_async.envs.protocol import Observation
from roll_async.envs.worlds.questions import same_answer
from roll_async.rollout.tools import Toolbox
from roll_async.schema import Outcome


class Question:
    """One question, whose answer is 18."""

    def __init__(self):
        self.heard = []

    async def reset(self, seed):
        return Observation(text="9+9? <think>")

    async def step(self, action):
        self.heard.append(action)
        right = same_answer(action, "18", "number")
        return Observation(text="Right." if right else "Wrong.", reward=float(right), terminated=True)

    async def close(self):
        pass


@pytest.fixture
def opens(templates):
    return templates["qwen"].replace(
        "'<|im_start|>assistant\n' }}{%- endif %}", "'<|im_start|>assistant\n<think>\n' }}{%- endif %}"
    )


@pytest.mark.parametrize(
    ("said", "heard", "outcome", "unfinished"),
    [
        ("it is <answer>18</answer>, or", "", Outcome.FAILED, 1),
        ("7? no</think> 18", "18", Outcome.SOLVED, 0),
        ("<answer>18</answer>? no</think> 7", "7", Outcome.FAILED, 0),
    ],
)
def test_an_action_inside_a_thought_that_the_template_opened_is_none(sessions, opens, said, heard, outcome, unfinished):
    session, _, _ = sessions([said], opens)
    world = Question()
    episode = WorldEpisode(session, world, Toolbox({}, timeout_s=1), EpisodeOptions(max_turns=2))
    ending = asyncio.run(episode.run(0))
    assert world.heard == [heard]
    assert (ending.outcome, ending.metrics["unfinished_thought"]) == (outcome, unfinished)


def test_a_template_that_opens_none_leaves_the_action_whole_and_a_thought_of_the_models_own_is_left_out(sessions):
    for said, heard in (("18, I think", "18, I think"), ("<think>7</think>18", "18"), ("<think>18", "")):
        world = Question()
        session, _, _ = sessions([said])
        asyncio.run(WorldEpisode(session, world, Toolbox({}, timeout_s=1), EpisodeOptions(max_turns=2)).run(0))
        assert world.heard == [heard]
