"""From the chat template to the score: what is inside a thought is no answer, whoever opened the thought."""

import asyncio
import json

import pytest

pytest.importorskip("transformers")

from roll_async.config.schema_rollout import JudgeConfig, RewardConfig, SandboxConfig
from roll_async.observe.thoughts import marks_of
from roll_async.pipelines.metrics import batch_metrics
from roll_async.pipelines.validation import validation_metrics
from roll_async.prompts.end_marks import EndMarks
from roll_async.prompts.load import DataOptions, load_prompts
from roll_async.prompts.rows import Columns
from roll_async.prompts.tokenizer import batch_decoder, load_tokenizer
from roll_async.rewards.serving.router import RewardRouter
from roll_async.schema import FinishReason
from tests.family_tokenizers import FAMILIES, save_family

QWEN_THINKING = FAMILIES["qwen-3"].template.rpartition("{%- if enable_thinking")[0] + "{{ '<think>\\n' }}{%- endif %}"
MISTRAL = "{%- for m in messages %}{{ '[INST]' + m.content + '[/INST]' }}{%- endfor %}{{ '[THINK]' }}"
SEEN = """
import json, pathlib
def score(text, ground_truth, extra):
    pathlib.Path(__file__).with_name("seen.json").write_text(json.dumps([text, extra]))
    return {"score": 0.5, "acc": 1.0}
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return score(solution_str, ground_truth, extra_info)
"""
PROGRAM = "```python\ndef add(a, b):\n    return a + b\n```"
CASES = {
    "math_rule": (r"\boxed{18}", "18", {}),
    "exact_match": ("9+9=18", "18", {}),
    "multiple_choice": ("Answer: B", "B", {}),
    "qa": ("<answer>Paris</answer>", "Paris", {}),
    "ifeval": ("one word", json.dumps({"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}), {}),
    "code_sandbox": (PROGRAM, json.dumps(["assert add(1, 2) == 3"]), {}),
}
"""An answer that each rule takes, and its reference."""


def saved(folder, name, template=None, special=()):
    tokenizer = save_family(name, folder, template=template, config={"model_type": "qwen2"})
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
        tokenizer.save_pretrained(folder)
    return str(folder)


def loaded(folder, tmp_path, domains, template="native", **options):
    """One prompt of each domain, as a run gets it."""
    file = tmp_path / "rows.jsonl"
    rows = [
        {"id": name, "tag": name, "messages": [{"role": "user", "content": "9+9? <think>"}], "ground_truth": truth}
        for name, truth in domains.items()
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = load_prompts(
        DataOptions(
            files=(str(file),),
            columns=Columns(),
            template=template,
            prompt_length=500,
            domains={name: (name,) for name in domains},
            tokenizer_folder=folder,
            **options,
        )
    )
    return {name: prompts[name][0] for name in domains}


def scored(folder, prompts, rewards, texts):
    """A reward for each text and prompt, with texts decoded from tokens as on the reward host."""
    tokenizer = load_tokenizer(folder)
    ids = [tokenizer.encode(text, add_special_tokens=False) + [tokenizer.eos_token_id] for text in texts]
    router = RewardRouter(rewards, marks_of(tokenizer))

    async def go():
        await router.start()
        try:
            decoded = batch_decoder(tokenizer, EndMarks.of(tokenizer).ids)(ids)
            return await asyncio.gather(*(router.score(p, text) for text in decoded for p in prompts.values()))
        finally:
            await router.close()

    return asyncio.run(go())


SHAPES = {
    "qwen3-thinking": (("qwen-3", QWEN_THINKING), "", "</think>"),
    "deepseek-r1": (("deepseek-r1",), "", "</think>"),
    "qwen-3": (("qwen-3",), "<think>", "</think>"),  # the model opens its thought
    "mistral": (("llama-3", MISTRAL, ("[THINK]", "[/THINK]")), "", "[/THINK]"),  # as special tokens
}


@pytest.mark.parametrize("shape", SHAPES)
def test_an_answer_cut_inside_its_thought_scores_nothing_and_one_after_it_scores(tmp_path, shape):
    made, opening, closing = SHAPES[shape]
    folder = saved(tmp_path / "model", *made)
    prompts = loaded(folder, tmp_path, {"math": "18"})
    assert bool(prompts["math"].thought) == (not opening)
    rewards = {"math": RewardConfig(type="qa", answer_format="boxed")}
    cut = rf"{opening}9+9. I think \boxed{{18}}. But wait, maybe"
    closed = rf"{opening}9+9. \boxed{{17}}? No.{closing}\boxed{{18}}"
    unfinished, whole = scored(folder, prompts, rewards, [cut, closed])
    assert (unfinished.score, unfinished.metrics["acc"], unfinished.metrics["format"]) == (0, 0, 0)
    assert unfinished.metrics["unfinished_thought"] == 1 and unfinished.reason == "the thought never ends"
    assert (whole.score, whole.metrics["format"], whole.metrics["unfinished_thought"]) == (1, 1, 0)


def test_a_template_that_opens_no_thought_or_closes_one_leaves_answers_as_they_are(tmp_path):
    closes = QWEN_THINKING.replace("{{ '<think>\\n' }}", "{{ '<think>\\n\\n</think>\\n\\n' }}")
    for number, template in enumerate((None, closes)):
        folder = saved(tmp_path / f"model{number}", "qwen-3", template)
        prompts = loaded(folder, tmp_path, {"math": "18"})
        rewards = {"math": RewardConfig(type="qa", answer_format="boxed")}
        (reward,) = scored(folder, prompts, rewards, [r"I think \boxed{18}. But wait"])
        assert (reward.score, reward.metrics["unfinished_thought"]) == (1, 0) and not prompts["math"].thought


@pytest.mark.slow
def test_every_rule_gives_nothing_for_an_unfinished_thought(tmp_path):
    pytest.importorskip("math_verify")
    folder = saved(tmp_path / "model", "qwen-3", QWEN_THINKING)
    rewards = {name: RewardConfig(type=name, timeout=60.0) for name in CASES}
    rewards["code_sandbox"] = RewardConfig(
        type="code_sandbox", timeout=60.0, sandbox=SandboxConfig(isolation="best_effort")
    )
    prompts = loaded(folder, tmp_path, {name: truth for name, (_, truth, _) in CASES.items()})
    for name, (said, _, _) in CASES.items():
        texts = [f"so:\n{said}\n", f"no.</think>\n{said}"]
        unfinished, whole = scored(folder, {name: prompts[name]}, {name: rewards[name]}, texts)
        verdict = (unfinished.score, unfinished.metrics["acc"], unfinished.metrics["format"])
        assert verdict == (0, 0, 0) and unfinished.metrics["unfinished_thought"] == 1, name
        assert (whole.score, whole.metrics["format"], whole.metrics["unfinished_thought"]) == (1, 1, 0), name
        # What `filter_groups.metric` may name is there in both.
        assert unfinished.metrics.keys() == whole.metrics.keys(), name


def test_a_reference_that_the_empty_answer_equals_is_not_met_by_an_unfinished_thought(tmp_path):
    folder = saved(tmp_path / "model", "qwen-3", QWEN_THINKING)
    prompts = loaded(folder, tmp_path, {"qa": "The"})  # an article, of which SQuAD's normalisation leaves nothing
    (reward,) = scored(folder, prompts, {"qa": RewardConfig(type="qa")}, ["well"])
    assert (reward.score, reward.metrics["acc"], reward.metrics["format"]) == (0, 0, 0)


def test_a_judge_is_not_asked_about_an_unfinished_thought(tmp_path):
    folder = saved(tmp_path / "model", "qwen-3", QWEN_THINKING)
    prompts = loaded(folder, tmp_path, {"essay": "x"})
    nobody = JudgeConfig(api_url="http://127.0.0.1:9/v1", model="j", max_retries=0)
    (reward,) = scored(folder, prompts, {"essay": RewardConfig(type="llm_judge", judge=nobody)}, ["a fine essay"])
    assert (reward.score, reward.metrics["format"], reward.metrics["unfinished_thought"]) == (0, 0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("function", ["score", "compute_score"])
@pytest.mark.parametrize(("text", "state"), [("hm", "unfinished"), ("</think>18", "closed")])
def test_a_users_reward_gets_the_whole_text_and_how_its_thought_ended(tmp_path, monkeypatch, function, text, state):
    (tmp_path / "seen_reward.py").write_text(SEEN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    folder = saved(tmp_path / "model", "qwen-3", QWEN_THINKING)
    prompts = loaded(folder, tmp_path, {"mine": "18"})
    (reward,) = scored(folder, prompts, {"mine": RewardConfig(type=f"seen_reward.{function}")}, [text])
    said, extra = json.loads((tmp_path / "seen.json").read_text())
    assert (said, extra["thought"]) == (text, state)
    assert (reward.score, reward.metrics["unfinished_thought"]) == (0.5, float(state == "unfinished"))


def test_training_and_validation_count_what_is_right_and_complete_and_what_was_cut_in_a_thought(build, tmp_path):
    folder = saved(tmp_path / "model", "qwen-3", QWEN_THINKING)
    prompts = loaded(folder, tmp_path, {"math": "18"})
    rewards = {"math": RewardConfig(type="qa", answer_format="boxed")}
    texts = [r"hm \boxed{18}", r"hm</think>\boxed{18}", r"hm</think>\boxed{18} and"]
    ends = [FinishReason.LENGTH, FinishReason.STOP, FinishReason.LENGTH]
    found = scored(folder, prompts, rewards, texts)
    prompt = prompts["math"]
    samples = tuple(
        build.sample(prompt, reward=reward, sample_id=str(number), finish_reason=end)
        for number, (reward, end) in enumerate(zip(found, ends, strict=True))
    )
    metrics = batch_metrics([build.group(prompt=prompt, samples=samples)])
    assert metrics["reward/accuracy"] == pytest.approx(2 / 3)
    assert metrics["reward/accuracy_complete"] == metrics["reward/metrics/unfinished_thought"] == pytest.approx(1 / 3)
    metrics = validation_metrics([(prompt, (sample,)) for sample in samples], [prompt], num_samples=3)
    assert metrics["validation/accuracy"] == pytest.approx(2 / 3)
    assert metrics["validation/accuracy_complete"] == pytest.approx(1 / 3)
    assert metrics["validation/metrics/unfinished_thought"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("truth", "prompt_ends", "answer"),
    [
        ("18", "<think>\n\n</think>\n\n", "18<|im_end|>"),
        ("9+9</think>18", "<think>\n", "9+9</think>18<|im_end|>"),
        ("<think>\n9+9</think>18", "<think>\n", "9+9</think>18<|im_end|>"),
    ],
)
def test_a_supervised_answer_without_a_thought_follows_a_closed_one(tmp_path, truth, prompt_ends, answer):
    folder = saved(tmp_path / "model", "qwen-3", QWEN_THINKING)
    options = {"supervised": frozenset({"demo"}), "response_length": 100}
    prompts = loaded(folder, tmp_path, {"demo": truth, "math": "18"}, **options)
    tokenizer = load_tokenizer(folder)
    demo, math = prompts["demo"], prompts["math"]
    assert tokenizer.decode(demo.token_ids).endswith(f"assistant\n{prompt_ends}")
    assert tokenizer.decode(demo.answer_ids) == answer
    assert tokenizer.decode(math.token_ids).endswith("assistant\n<think>\n")  # sampled: as the template says


@pytest.mark.slow
def test_processes_that_render_close_the_thoughts_of_supervised_rows_too(tmp_path):
    folder = saved(tmp_path / "model", "qwen-3", QWEN_THINKING)
    options = {"supervised": frozenset({"demo"}), "response_length": 100}
    one = loaded(folder, tmp_path, {"demo": "18", "math": "18"}, **options)
    assert loaded(folder, tmp_path, {"demo": "18", "math": "18"}, **options, num_workers=2) == one


def test_a_supervised_answer_that_never_ends_its_thought_is_a_bad_row(tmp_path):
    folder = saved(tmp_path / "model", "qwen-3", QWEN_THINKING)
    options = {"supervised": frozenset({"demo"}), "response_length": 100}
    with pytest.raises(ValueError, match="the answer to train on ends inside a thought"):
        loaded(folder, tmp_path, {"demo": "<think>9+9"}, **options)


def test_special_marks_of_a_thought_stay_in_the_text_that_is_scored_and_others_do_not(tmp_path):
    folder = saved(tmp_path / "model", "llama-3", MISTRAL, ("[THINK]", "[/THINK]"))
    tokenizer = load_tokenizer(folder)
    texts = ["[THINK][THINK]a[/THINK] 18<|eot_id|>", "<|eot_id|>", "", "b"]
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    decode = batch_decoder(tokenizer, EndMarks.of(tokenizer).ids)
    assert list(decode(ids)) == ["[THINK][THINK]a[/THINK] 18", "", "", "b"]
