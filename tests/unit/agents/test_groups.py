"""Groups of trajectories: faults of infrastructure are no rewards, and nothing that was not sampled is trained."""

import asyncio
import json
import random
from array import array
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import fields, replace
from pathlib import Path

import aiohttp
import pytest

from roll_async.agents.counts import AgentCounts
from roll_async.agents.episode import EpisodeOptions
from roll_async.agents.gateway.server import PolicyGateway
from roll_async.agents.messages import Message, TurnRequest
from roll_async.agents.protocol import Ending
from roll_async.agents.rendering import TemplateRenderer
from roll_async.agents.session import SessionOptions
from roll_async.agents.tasks import Tasks, task_of
from roll_async.agents.tools.toolbox import ToolSpec, open_tools, toolbox_of
from roll_async.agents.turn_handler import TrajectoryEnded
from roll_async.agents.worlds import AgentParts, TagPlan, WorldRunner
from roll_async.buffer.group_codec import decode_group, encode_group
from roll_async.envs.pool import WorldPool
from roll_async.envs.registry import WorldSpec, build
from roll_async.envs.worlds.question_rows import read_questions
from roll_async.launch.rollout_only import rolled
from roll_async.pipelines.validation import HeldOut, Validation
from roll_async.rollout.dispatch.requests import Interrupted
from roll_async.rollout.filters.group_filter import GroupFilter
from roll_async.rollout.group_source import GroupFate
from roll_async.rollout.groups import GroupOptions, GroupRunner
from roll_async.rollout.trace_tree import TraceTree
from roll_async.schema import Completion, FinishReason, Outcome, SamplingParams
from tests.patience import patient


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


class Manager:
    """The part of a server manager that trajectories use. Says `say(request, turn)`, encoded character by character."""

    def __init__(self, tokenizer, say, *, delay_s=0.0, interrupt_every=0):
        self._tokenizer, self._say, self._delay_s, self._interrupt_every = tokenizer, say, delay_s, interrupt_every
        self.sampled, self.asked, self.forgotten, self.aborted = {}, 0, [], []
        self.samplings, self.running, self.most, self.validation = [], set(), 0, set()
        self._rng = random.Random(0)

    async def generate(self, request, *, conversation, validation):
        self.asked += 1
        number = self.asked
        self.samplings.append(request.sampling)
        self.validation.add(validation)
        self.running.add(conversation)
        self.most = max(self.most, len(self.running))
        await asyncio.sleep(self._delay_s)
        if self._interrupt_every and number % self._interrupt_every == 0:
            raise Interrupted(request.request_id)
        ids = array("i", self._tokenizer(self._say(request))["input_ids"] + [self._tokenizer.eos_token_id])
        ids = ids[: request.sampling.max_new_tokens]
        logprobs = array("f", [-self._rng.random() for _ in ids])
        key = (request.prompt_token_ids.tobytes(), ids.tobytes(), logprobs.tobytes())
        self.sampled[key] = conversation
        return Completion(
            request_id=request.request_id,
            token_ids=ids,
            logprobs=logprobs,
            version_runs=((3, len(ids)),),
            finish_reason=FinishReason.STOP,
            generation_s=0.0,
        )

    async def abort(self, request_ids):
        self.aborted += request_ids

    def forget_affinity(self, key):
        self.forgotten.append(key)
        self.running.discard(key)

    def check(self, group):
        """Every trained token and log-prob is what was sampled after exactly the tokens before it."""
        for sample in group.samples:
            ids = sample.prompt_token_ids + sample.response_token_ids
            for turn in sample.turns:
                first = len(sample.prompt_token_ids) + turn.start
                logprobs = sample.behaviour_logprobs[turn.start : turn.start + turn.num_tokens]
                key = (ids[:first].tobytes(), ids[first : first + turn.num_tokens].tobytes(), logprobs.tobytes())
                assert self.sampled[key] == sample.trajectory
            assert sum(sample.loss_mask) == sum(turn.num_tokens for turn in sample.turns)


PLAY = {field.name for field in fields(EpisodeOptions)}


def run_groups(tokenizer, work, *, env_type, values=None, say=None, tools=(), manager=None, **options):
    """`work(groups, tasks, manager)` on worlds of one tag."""
    plan_options = {key: options.pop(key) for key in PLAY if key in options}
    silence_s = options.pop("silence_s", float("inf"))
    limits = {key: options.pop(key) for key in ("max_worlds", "max_validation_worlds", "trains") if key in options}
    group = {"samples_per_group": options.pop("group_size", 3), "sampling": None, "retries": 2, **options}

    async def main():
        rng = random.Random(0)
        chosen = manager or Manager(tokenizer, say or (lambda request: rng.choice(["the", "ab"])))
        async with AsyncExitStack() as stack:
            worlds = WorldPool(step_timeout_s=1.5, max_per_worker=3)
            stack.push_async_callback(worlds.close)
            gateway = PolicyGateway()
            await gateway.start()
            stack.push_async_callback(gateway.close)
            spec = WorldSpec(env_type=env_type, values=values or {})
            from roll_async.agents.protocol import is_agent

            turns = plan_options.get("max_turns", 8)
            plan = TagPlan(
                spec=spec,
                session=SessionOptions(
                    sampling=SamplingParams(max_new_tokens=300),
                    max_turns=turns,
                    max_context=3000,
                    windowed=plan_options.get("windowed", False),
                ),
                play=EpisodeOptions(**{"max_turns": turns, **plan_options}),
                toolbox=toolbox_of(await open_tools(tools, stack), timeout_s=5),
                agent=build(spec) if is_agent(env_type) else None,
            )
            parts = AgentParts(
                tags={"T": plan},
                renderer=TemplateRenderer(tokenizer),
                worlds=worlds,
                gateway=gateway,
                silence_s=silence_s,
                **limits,
            )
            groups = GroupRunner(WorldRunner(chosen, parts), chosen, GroupOptions(**group))
            return await work(groups, Tasks(("T",), (1,), seed=1), chosen)

    return asyncio.run(main())


@pytest.fixture
def tokenizer(sessions):
    return sessions([])[2]


def test_a_group_shares_its_world_and_survives_the_ledger(tokenizer):
    async def work(groups, tasks, manager):
        outcome = await groups.run_group(tasks.at(0), group_id=7, attempt=1, admitted_version=3)
        assert outcome.fate is GroupFate.KEPT
        group = outcome.group
        assert len(group.trajectories) == 3 and {len(rows) for rows in group.trajectories} == {1}
        firsts = {tuple(rows[0].prompt_token_ids) for rows in group.trajectories}
        assert len(firsts) == 1 and f"seed {task_of(group.prompt).seed}" in tokenizer.decode(firsts.pop())
        for (row,) in group.trajectories:
            assert row.reward.score == sum(turn.reward for turn in row.turns) and len(row.turns) == 3
            assert row.outcome is (Outcome.SOLVED if row.reward.score else Outcome.FAILED)
            assert row.reward.metrics["acc"] == row.reward.score
        assert decode_group(*encode_group(group)) == group
        manager.check(group)
        assert sorted(manager.forgotten) == sorted(r[0].trajectory for r in group.trajectories)

    run_groups(tokenizer, work, env_type="faulty_worlds.Quick")


@pytest.mark.slow
def test_hung_crashing_and_ungraded_worlds_give_no_reward_and_the_run_goes_on(tokenizer, monkeypatch):
    monkeypatch.setattr("roll_async.rollout.groups._LONGEST_RETRY_S", 0.2)

    async def work(groups, tasks, manager):
        outcomes = await asyncio.gather(*(groups.run_group(tasks.at(i), group_id=i) for i in range(6)))
        kept = [outcome.group for outcome in outcomes if outcome.fate is GroupFate.KEPT]
        assert kept
        for group in kept:
            assert all(s.outcome.is_trusted and s.reward is not None for s in group.samples)
            manager.check(group)
        for outcome in outcomes:
            if outcome.fate is GroupFate.FAILED:
                assert "trajectories ended with trust" in outcome.reason and outcome.group is None
        counts = groups.counts()
        ended = {k.removeprefix("agent/outcomes/"): v for k, v in counts.ratios.items() if k.startswith("agent/out")}
        assert ended["infra_error"][0] > 0 and ended["grader_error"][0] > 0
        assert counts.metrics["agent/retries"] > 0 and counts.metrics["agent/lost_world_processes"] > 0
        attempts = counts.metrics["agent/attempts"]
        assert sum(part for part, _ in ended.values()) == attempts
        assert {whole for _, whole in ended.values()} == {attempts}

    # 12 trajectories that all find a grader: 1 in 4,000; 36 steps or more without hang and crash: rarer.
    values = {"hang_share": 0.05, "crash_share": 0.15, "ungraded_share": 0.5}
    run_groups(tokenizer, work, env_type="faulty_worlds.Faulty", values=values, group_size=2, retries=8)


@pytest.mark.parametrize("env_type", ["faulty_worlds.Unjudged", "faulty_worlds.UnjudgedAgent"])
def test_a_reward_that_is_no_finite_number_is_a_failure_of_the_grader(tokenizer, env_type):
    async def work(groups, tasks, manager):
        outcome = await groups.run_group(tasks.at(0), group_id=0)
        assert outcome.fate is GroupFate.FAILED and outcome.group is None
        assert "grader_error: the reward is nan" in outcome.reason

    run_groups(tokenizer, work, env_type=env_type, retries=1)


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["HangingAgent", "DeafAgent"])
def test_an_agent_that_hangs_is_no_failure_of_the_policy(tokenizer, agent):
    async def work(groups, tasks, manager):
        async with asyncio.timeout(patient(30)):
            outcome = await groups.run_group(tasks.at(0), group_id=0)
        assert outcome.fate is GroupFate.FAILED
        assert "infra_error: the agent asked the policy nothing for 0.3 s (fault.env_timeout)" in outcome.reason

    run_groups(tokenizer, work, env_type=f"faulty_worlds.{agent}", retries=1, silence_s=0.3)


def test_a_time_out_of_the_agents_own_is_no_limit_of_ours_and_gives_no_reward(tokenizer):
    async def work(groups, tasks, manager):
        outcome = await groups.run_group(tasks.at(0), group_id=0)
        assert outcome.fate is GroupFate.FAILED
        assert "agent_error: TimeoutError: the agent's own database" in outcome.reason

    run_groups(tokenizer, work, env_type="faulty_worlds.ImpatientAgent", retries=1)


@pytest.mark.slow
def test_an_agent_whose_turns_take_long_does_not_hang(tokenizer):
    async def work(groups, tasks, manager):
        outcome = await groups.run_group(tasks.at(0), group_id=0)
        assert outcome.fate is GroupFate.KEPT and len(outcome.group.trajectories) == 3

    slow = Manager(tokenizer, lambda request: "the", delay_s=0.6)
    run_groups(tokenizer, work, env_type="faulty_worlds.TwoTurnAgent", silence_s=0.3, manager=slow)


@pytest.mark.slow
def test_a_world_that_always_fails_fails_its_group_with_its_reason(tokenizer):
    async def work(groups, tasks, manager):
        outcome = await groups.run_group(tasks.at(0), group_id=0)
        assert outcome.fate is GroupFate.FAILED and "grader_error: the judge is away" in outcome.reason

    run_groups(tokenizer, work, env_type="faulty_worlds.Faulty", values={"ungraded_share": 1.0}, retries=1)


def test_redundant_trajectories_give_way_to_the_first_that_end(tokenizer):
    async def work(groups, tasks, manager):
        outcome = await groups.run_group(tasks.at(0), group_id=0)
        assert len(outcome.group.trajectories) == 2
        assert len(manager.forgotten) == 5

    run_groups(tokenizer, work, env_type="faulty_worlds.Quick", group_size=2, redundancy=3)


def test_an_aborted_group_comes_again_and_leaves_no_request(tokenizer):
    async def work(groups, tasks, manager):
        running = asyncio.ensure_future(groups.run_group(tasks.at(0), group_id=5))
        while not manager.asked:
            await asyncio.sleep(0.01)
        await groups.abort_groups([5, 99])
        outcome = await asyncio.wait_for(running, patient(5))
        assert outcome.fate is GroupFate.REQUEUED and manager.aborted

    manager = Manager(tokenizer, lambda request: "the", delay_s=30)
    run_groups(tokenizer, work, env_type="faulty_worlds.Quick", manager=manager)


class Stopping(Manager):
    """Aborts every request from the fourth on, as the end of a run does."""

    async def generate(self, request, **more):
        completion = await super().generate(request, **more)
        return replace(completion, finish_reason=FinishReason.ABORT) if self.asked > 3 else completion


def test_an_agent_that_the_end_of_a_run_stops_is_no_agent_that_failed_and_is_not_tried_again(tokenizer):
    async def work(groups, tasks, manager):
        outcome = await groups.run_group(tasks.at(0), group_id=5)
        assert outcome.fate is GroupFate.REQUEUED and manager.asked <= 6, "two turns of three agents, none again"
        counts = groups.counts().ratios
        # Whoever is stopped while another one's end is told is not counted any more.
        cancelled, ended = counts["agent/outcomes/cancelled"]
        assert cancelled == ended >= 1 and counts["agent/outcomes/agent_error"] == (0.0, ended)

    manager = Stopping(tokenizer, lambda request: "the")
    run_groups(tokenizer, work, env_type="faulty_worlds.TwoTurnAgent", manager=manager)


def test_attempts_are_counted_by_tag_where_there_are_several():
    counts = AgentCounts()
    counts.ended("A", Ending(outcome=Outcome.SOLVED), TraceTree())
    assert counts.ratios()["agent/outcomes/solved"] == (1, 1) and "agent/A/outcomes/solved" not in counts.ratios()
    for outcome in (Outcome.FAILED, Outcome.SOLVED, Outcome.FAILED):
        counts.ended("B", Ending(outcome=outcome), TraceTree())
    found = counts.ratios()
    assert [found[f"agent/{tag}outcomes/solved"] for tag in ("", "A/", "B/")] == [(2, 4), (1, 1), (1, 3)]


def test_a_weight_push_that_discards_costs_a_turn_and_not_a_trajectory(tokenizer):
    async def work(groups, tasks, manager):
        outcome = await groups.run_group(tasks.at(0), group_id=0)
        assert outcome.fate is GroupFate.KEPT
        manager.check(outcome.group)
        assert groups.counts().metrics["agent/resampled_turns"] >= 2

    manager = Manager(tokenizer, lambda request: "the", interrupt_every=4)
    run_groups(tokenizer, work, env_type="faulty_worlds.Quick", manager=manager)


def test_the_step_manager_makes_one_row_per_turn_with_a_window_of_history(tokenizer):
    async def work(groups, tasks, manager):
        group = (await groups.run_group(tasks.at(0), group_id=0)).group
        manager.check(group)
        for rows in group.trajectories:
            assert [row.turns[0].index for row in rows] == [0, 1, 2] and len({r.reward.score for r in rows}) == 1
            last = tokenizer.decode(rows[2].prompt_token_ids)
            assert "1 left" in last and "2 left\n> the" in last and "seed" not in last
        assert groups.counts().metrics["agent/branches/window"] == 6

    run_groups(tokenizer, work, env_type="faulty_worlds.Quick", say=lambda r: "the", windowed=True, history_length=1)


def chat_of(tokenizer, **options):
    """The text before the last turn of a trajectory of three turns in a world with rules."""
    found = []

    async def work(groups, tasks, manager):
        group = (await groups.run_group(tasks.at(0), group_id=0)).group
        row = group.trajectories[0][-1]
        turn = row.turns[-1]
        ids = row.prompt_token_ids + row.response_token_ids
        found.append(tokenizer.decode(ids[: len(row.prompt_token_ids) + turn.start]))

    run_groups(tokenizer, work, env_type="faulty_worlds.Ruled", say=lambda request: "the", **options)
    return found[0].replace("<|im_end|>\n", "\n").replace("<|im_start|>", "")


def test_the_placeholders_of_roll_are_filled_and_what_a_world_says_is_not_a_template(tokenizer):
    turn = "{turn_idx}/{max_turns}: {observation} {suffix} {{x}} {actions_left} left of {max_response_length:03d}"
    system = "\\boxed{an answer} {{x}} {max_turns}"
    text = chat_of(tokenizer, turn_template=turn, system_template=system, max_response_tokens=9)
    assert "system\n\\boxed{an answer} {x} 8\n" in text
    assert "user\nSay the.\n1/8: seed " in text and " {history} {x} 8 left of 009\n" in text
    assert "2/8: 2 left  {x} 7 left of 009\n" in text and "3/8: 1 left  {x} 6 left of 009\n" in text
    assert text.count("Say the.") == 1


@pytest.mark.parametrize(
    ("system", "turn", "wanted"),
    [
        (None, None, "system\nSay the.\nuser\nseed"),
        ("Play: {instructions}", None, "system\nPlay: Say the.\nuser\nseed"),
        ("Play.", None, "system\nPlay.\nuser\nSay the.\nseed"),
        ("", "{observation}", "user\nSay the.\nseed"),
        (None, "{env_instruction} {observation}", "user\nSay the. seed"),
    ],
)
def test_the_rules_of_a_world_are_said_where_a_template_places_them_and_never_lost(tokenizer, system, turn, wanted):
    assert chat_of(tokenizer, system_template=system, turn_template=turn).startswith(wanted)


def test_a_text_of_its_own_for_every_turn_holds_the_rules_and_the_history(tokenizer):
    turn = "{step_count} done, last {history_length}: {history}; at {current_step}: {current_observation}"
    text = chat_of(tokenizer, windowed=True, history_length=1, turn_template=turn, system_template="Play.")
    assert text.startswith("system\nPlay.\nuser\nSay the.\n2 done, last 1: 2 left\n> the; at 3: 1 left\n")


def test_turns_are_limited_and_the_state_at_the_end_is_graded(tokenizer):
    async def work(groups, tasks, manager):
        group = (await groups.run_group(tasks.at(0), group_id=0)).group
        assert {s.outcome for s in group.samples} == {Outcome.TRUNCATED_TURNS}
        assert {s.reward.score for s in group.samples} == {0.0} and {len(s.turns) for s in group.samples} == {2}

    run_groups(tokenizer, work, env_type="faulty_worlds.Quick", max_turns=2)


def test_the_story_of_a_trajectory_is_all_that_was_said_in_its_order(tokenizer):
    def story_of(**options):
        told = []

        async def work(groups, tasks, manager):
            tell = lambda name, task, ending, rows: told.append(ending.story)  # noqa: E731
            groups.runner._parts = replace(groups.runner._parts, tell=tell)
            await groups.run_group(tasks.at(0), group_id=0)

        run_groups(tokenizer, work, **options)
        return told[0]

    (_, seed), *rest = story_of(env_type="faulty_worlds.Quick", say=lambda request: "the")
    said = ("assistant", "the")
    assert seed.startswith("seed ") and rest == [
        said,
        ("user", "2 left"),
        said,
        ("user", "1 left"),
        said,
        ("user", "0 left"),
    ]
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "12*12"}}</tool_call>'
    say = lambda request: "done" if "144" in tokenizer.decode(request.prompt_token_ids) else call  # noqa: E731
    story = story_of(env_type="math", say=say, tools=(ToolSpec(tool_id="calculator", values={}),))
    assert [role for role, _ in story if role != "system"] == ["user", "assistant", "tool", "assistant", "user"]
    assert ("assistant", call) in story and ("tool", "144") in story


@pytest.mark.parametrize("env_type", ["faulty_worlds.Quick", "faulty_worlds.Clocked", "faulty_worlds.StubbornAgent"])
@pytest.mark.parametrize(("said", "is_solved"), [("the", True), ("ab", False)])
def test_what_is_solved_with_its_last_turn_is_solved_and_not_truncated(tokenizer, env_type, said, is_solved):
    async def work(groups, tasks, manager):
        group = (await groups.run_group(tasks.at(0), group_id=0)).group
        missed = Outcome.FAILED if env_type == "faulty_worlds.Quick" else Outcome.TRUNCATED_TURNS
        assert {s.outcome for s in group.samples} == {Outcome.SOLVED if is_solved else missed}
        assert (
            {s.reward.score for s in group.samples}
            == {float(is_solved)}
            == {s.reward.metrics["acc"] for s in group.samples}
        )

    agent = env_type.endswith("Agent")
    values = {} if agent else {"turns": 3}
    run_groups(tokenizer, work, env_type=env_type, values=values, say=lambda r: said, max_turns=2 if agent else 3)


def test_tools_of_one_turn_run_together_and_malformed_calls_are_told(tokenizer):
    calls = [
        '<tool_call>{"name": "calculator", "arguments": {"expression": "12*12"}}</tool_call>'
        '<tool_call>{"name": "abacus", "arguments": {}}</tool_call><tool_call>{oops</tool_call>',
        "<answer>144</answer>",
    ]

    def say(request):
        return calls["144" in tokenizer.decode(request.prompt_token_ids)]

    async def work(groups, tasks, manager):
        group = (await groups.run_group(tasks.at(0), group_id=0)).group
        manager.check(group)
        for sample in group.samples:
            text = tokenizer.decode(sample.response_token_ids)
            assert "<tool_response>\n144\n</tool_response>" in text and len(sample.turns) == 2
            assert "there is no tool 'abacus'" in text and "the call is not valid JSON" in text
        counts = groups.counts()
        assert (counts.tool_calls, counts.tool_failures) == (9, 6)

    tools = (ToolSpec(tool_id="calculator", values={}),)
    run_groups(tokenizer, work, env_type="math", say=say, tools=tools)


ABOUT = {"tools": ["calculator"], "tools_kwargs": {"calculator": {"expression": "6*7"}},
         "interaction_kwargs": {"grade": "text", "attempts": 2, "instructions": "Say the place."}}  # fmt: skip
CHAT = [{"role": "system", "content": "unused"}, {"role": "user", "content": "Where?"}]
QUESTION_ROWS = [
    {"question": "Where?", "answer": "The Hague", **ABOUT},
    {"id": "1", "tag": "places", "messages": json.dumps(CHAT), "ground_truth": "The Hague", **ABOUT},
    {"data_source": "places", "prompt": CHAT, "reward_model": {"style": "rule", "ground_truth": "The Hague"},
     "extra_info": {"index": 3, **ABOUT, "interaction_kwargs": {"name": "places", **ABOUT["interaction_kwargs"]}}},
    {"data_source": "places", "prompt": CHAT, "extra_info": json.dumps(
        {**ABOUT, "interaction_kwargs": {**ABOUT["interaction_kwargs"], "query": "Where?",
                                         "ground_truth": "The Hague"}})},
]  # fmt: skip


@pytest.mark.parametrize("question", QUESTION_ROWS, ids=["question", "ROLL", "verl", "verl interaction"])
def test_a_questions_own_arguments_reach_its_world_and_its_tools(tokenizer, tmp_path, question):
    """Of two tools one is allowed; its argument is the row's, and the world grades as the row says."""
    file = tmp_path / "questions.jsonl"
    file.write_text(json.dumps(question) + "\n")
    calls = ('<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>'
             '<tool_call>{"name": "lookup", "arguments": {}}</tool_call>')  # fmt: skip

    def say(request):
        seen = tokenizer.decode(request.prompt_token_ids)
        assert "Say the place." in seen and "lookup" not in seen.partition("Where?")[0]
        return calls if "42" not in seen else "<answer>Delft</answer>" if "Wrong." not in seen else "hague"

    async def work(groups, tasks, manager):
        group = (await groups.run_group(tasks.at(0), group_id=0)).group
        for sample in group.samples:
            text = tokenizer.decode(sample.response_token_ids)
            assert "\n42\n" in text and "there is no tool 'lookup'; there are: calculator" in text
            assert sample.outcome is Outcome.SOLVED and len(sample.turns) == 3

    tools = tuple(ToolSpec(tool_id=name, values={}) for name in ("calculator", "faulty_worlds.Lookup"))
    run_groups(tokenizer, work, env_type="math", values={"file": str(file)}, say=say, tools=tools)
    file.write_text(json.dumps({**question, "interaction_kwargs": {"file": "x"}}) + "\n")
    with pytest.raises(ValueError, match="questions.jsonl:1: interaction_kwargs may hold grade, attempts"):
        read_questions(str(file))


def test_a_world_with_tools_of_its_own_is_played_by_calls(tokenizer):
    async def work(groups, tasks, manager):
        group = (await groups.run_group(tasks.at(0), group_id=0)).group
        text = tokenizer.decode(group.samples[0].response_token_ids)
        assert text.count("<tool_response>\nYou are in the ") == 7

    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    run_groups(tokenizer, work, env_type="text_game", say=lambda r: call)


def test_an_agent_of_ones_own_is_trained_through_its_endpoint(tokenizer):
    async def work(groups, tasks, manager):
        group = (await groups.run_group(tasks.at(0), group_id=0)).group
        manager.check(group)
        for sample in group.samples:
            assert len(sample.turns) == 2 and sample.outcome in (Outcome.SOLVED, Outcome.FAILED)

    run_groups(tokenizer, work, env_type="faulty_worlds.TwoTurnAgent")


def test_limits_end_any_agent_and_one_that_breaks_is_no_failure_of_the_policy(tokenizer):
    async def endless(groups, tasks, manager):
        group = (await groups.run_group(tasks.at(0), group_id=0)).group
        assert {s.outcome for s in group.samples} == {Outcome.TRUNCATED_TURNS}
        manager.check(group)

    async def broken(groups, tasks, manager):
        outcome = await groups.run_group(tasks.at(0), group_id=0)
        assert outcome.fate is GroupFate.FAILED and "agent_error: KeyError: 'config'" in outcome.reason

    run_groups(tokenizer, endless, env_type="faulty_worlds.EndlessAgent", max_turns=5)
    run_groups(tokenizer, broken, env_type="faulty_worlds.BrokenAgent", retries=0)


def test_groups_without_spread_are_filtered_by_trajectories(tokenizer):
    async def work(groups, tasks, manager):
        outcome = await groups.run_group(tasks.at(0), group_id=0)
        assert outcome.fate is GroupFate.FILTERED and outcome.reason == "dropped_equal"

    run_groups(tokenizer, work, env_type="faulty_worlds.Quick", say=lambda r: "the", filter=GroupFilter())


def test_validation_has_worlds_of_its_own_and_does_not_count_as_training(tokenizer):
    async def work(groups, tasks, manager):
        held_out = Tasks(("T",), (1,), seed=1, validation=True)
        prompts = [held_out.at(i) for i in range(4)]
        answered = await groups.validate(prompts, SamplingParams(max_new_tokens=50), name="validation.1")
        assert [prompt.row_id for prompt, _ in answered] == [prompt.row_id for prompt in prompts]
        assert groups.counts().metrics["agent/attempts"] == 0
        assert manager.validation == {True}, "the scheduler tells it from training, and with mode share puts it behind"
        assert not {task_of(p).seed for p in prompts} & {task_of(tasks.at(i)).seed for i in range(1000)}

    run_groups(tokenizer, work, env_type="faulty_worlds.Quick")


def test_a_validations_turns_are_as_long_as_those_of_training(tokenizer):
    async def work(groups, tasks, manager):
        held_out = Tasks(("T",), (1,), seed=1, validation=True)
        sampling = SamplingParams(max_new_tokens=50, temperature=0.0)
        await groups.validate([held_out.at(0)], sampling, name="validation.1")
        assert {(s.max_new_tokens, s.temperature) for s in manager.samplings} == {(300, 0.0)}

    manager = Manager(tokenizer, lambda request: "the")
    run_groups(tokenizer, work, env_type="faulty_worlds.Quick", manager=manager)


def test_a_validation_beside_training_has_worlds_and_a_limit_of_its_own(tokenizer):
    """Three at a time, whatever the training's worlds are."""
    at_once, most = 0, 0

    class Counting(Manager):
        async def generate(self, request, **more):
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            await asyncio.sleep(0.002)
            at_once -= 1
            return await super().generate(request, **more)

    async def work(groups, tasks, manager):
        held_out = Tasks(("T",), (1,), seed=1, validation=True)
        answered = await groups.validate([held_out.at(i) for i in range(9)], SamplingParams(max_new_tokens=9), name="v")
        assert len(answered) == 9 and most == 3

    manager = Counting(tokenizer, lambda request: "the")
    run_groups(tokenizer, work, env_type="faulty_worlds.Quick", manager=manager, max_worlds=1, max_validation_worlds=3)


class Pushed(Manager):
    """Samples one turn after the other under these versions, the last one up to the length limit."""

    def __init__(self, tokenizer, versions):
        super().__init__(tokenizer, lambda request: "the")
        self.versions = versions

    async def generate(self, request, **more):
        turn = await super().generate(request, **more)
        last = self.asked == len(self.versions)
        runs = ((self.versions[self.asked - 1], len(turn.token_ids)),)
        return replace(turn, version_runs=runs, finish_reason=FinishReason.LENGTH if last else turn.finish_reason)


@pytest.mark.parametrize(("versions", "other"), [((7, 7), 0), ((7, 8), 1), ((8, 7), 1)])
def test_a_validation_counts_the_tokens_and_the_versions_of_all_turns(tokenizer, versions, other):
    async def work(groups, tasks, manager):
        prompt = Tasks(("T",), (1,), seed=1, validation=True).at(0)
        held_out = HeldOut("", [prompt], SamplingParams(max_new_tokens=50))
        metrics = await Validation([held_out], groups, None, lambda: 7)(7)
        assert (metrics["validation/other_version"], metrics["validation/samples"]) == (other, 1 - other)
        if not other:
            assert (metrics["validation/length_mean"], metrics["validation/truncated"]) == (8, 1)

    options = {"manager": Pushed(tokenizer, versions), "values": {"turns": 2}, "windowed": True, "history_length": 1}
    run_groups(tokenizer, work, env_type="faulty_worlds.Quick", **options)


def test_rollout_alone_limits_counts_and_groups_the_worlds_of_validation(tokenizer):
    async def work(groups, tasks, manager):
        held_out = Tasks(("T",), (1,), seed=1, validation=True)
        kept = await rolled(groups, held_out, range(2, 5))
        assert [group.group_id for group in kept] == [2, 3, 4] and manager.most == 2
        assert [group.prompt for group in kept] == [held_out.at(i) for i in range(2, 5)]
        assert {len(group.trajectories) for group in kept} == {3}
        assert groups.counts().metrics["agent/attempts"] == 9
        for group in kept:
            manager.check(group)

    manager = Manager(tokenizer, lambda request: "the", delay_s=0.01)
    run_groups(tokenizer, work, env_type="faulty_worlds.Quick", manager=manager, trains=False, max_worlds=2)


def test_rollout_alone_goes_on_without_a_group_whose_attempts_are_used_up(tokenizer, caplog):
    async def work(groups, tasks, manager):
        assert await rolled(groups, Tasks(("T",), (1,), seed=1, validation=True), range(2)) == []
        assert "a group gave no trajectories: 0 of 3 trajectories ended with trust" in caplog.text

    run_groups(tokenizer, work, env_type="faulty_worlds.BrokenAgent", retries=0, trains=False)


def test_outcomes_are_counted_by_tag_where_there_are_several():
    counts, tree = AgentCounts(), TraceTree()
    counts.ended("A", Ending(outcome=Outcome.SOLVED), tree)
    counts.ended("A", Ending(outcome=Outcome.FAILED), tree)
    alone = counts.ratios()
    assert alone["agent/outcomes/solved"] == (1, 2) and not any(name.startswith("agent/A/") for name in alone)
    counts.ended("B", Ending(outcome=Outcome.SOLVED), tree)
    counts.ended("B", Ending(outcome=Outcome.SOLVED), tree)
    both = counts.ratios()
    shares = [both[f"agent/{tag}outcomes/solved"] for tag in ("", "A/", "B/")]
    assert shares == [(3, 4), (1, 2), (2, 2)] and counts.metrics(0)["agent/attempts"] == 4


def test_tasks_follow_the_partition_and_the_seed():
    tasks = Tasks(("A", "B"), (3, 1), seed=42)
    assert Counter(tasks.at(i).domain for i in range(40)) == {"A": 30, "B": 10}
    assert tasks.at(17) == Tasks(("A", "B"), (3, 1), seed=42).at(17) != Tasks(("A", "B"), (3, 1), seed=43).at(17)


def test_a_session_ends_with_its_trajectory_also_for_an_agent_that_keeps_its_key(tokenizer):
    kept = []

    async def work(groups, tasks, manager):
        gateway = groups.runner._parts.gateway
        opened = gateway.open

        def remembering(session):
            kept.append((session, opened(session)))
            return kept[-1][1]

        gateway.open = remembering
        await groups.run_group(tasks.at(0), group_id=0)
        asked, request = manager.asked, TurnRequest(messages=(Message(role="user", content="more"),))
        for session, endpoint in kept:
            with pytest.raises(TrajectoryEnded, match="the trajectory is over"):
                await session.turn(request)
            headers = {"authorization": f"Bearer {endpoint.api_key}"}
            body = {"messages": [{"role": "user", "content": "more"}]}
            async with (
                aiohttp.ClientSession(headers=headers) as http,
                http.post(f"{endpoint.base_url}/chat/completions", json=body) as response,
            ):
                answer = await response.json()
                assert (response.status, answer["error"]["code"]) == (401, "trajectory_ended")
        assert len(kept) == 3 and manager.asked == asked

    run_groups(tokenizer, work, env_type="faulty_worlds.TwoTurnAgent")


def test_a_request_that_an_agent_leaves_under_way_ends_with_its_trajectory(tokenizer):
    class Slow(Manager):
        async def generate(self, request, *, conversation, validation):
            self._delay_s = 0.5 if self.sampled.values() and conversation in self.sampled.values() else 0.0
            return await super().generate(request, conversation=conversation, validation=validation)

    async def work(groups, tasks, manager):
        await groups.run_group(tasks.at(0), group_id=0)
        assert (manager.asked, len(manager.sampled)) == (6, 3)
        await asyncio.sleep(0.6)
        assert len(manager.sampled) == 3, "nothing is sampled for a trajectory that is over"

    manager = Slow(tokenizer, lambda request: "the")
    run_groups(tokenizer, work, env_type="faulty_worlds.LeavingAgent", manager=manager)
