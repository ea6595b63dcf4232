"""A reward host answers at once what it can and the rest later. One that is killed is an outage, and another one takes
over; neither imports torch.
"""

import asyncio
import os
import subprocess
import sys
from array import array
from dataclasses import replace
from pathlib import Path

import pytest

from tests.family_tokenizers import save_family
from tests.patience import patient

pytest.importorskip("ray")
pytest.importorskip("psutil")
pytest.importorskip("transformers")

from roll_async.schema import ExpertRecord, FinishReason, Image, Prompt, Reward, Sample

ROOT = Path(__file__).resolve().parents[2]

DRIVER = """
import asyncio, sys
from array import array
from dataclasses import replace
import psutil
from roll_async.cluster.roles.reward_group import HostPlan, RayScorer
from roll_async.cluster.runtime import ray_runtime
from roll_async.config.schema import RewardConfig
from roll_async.prompts.tokenizer import load_tokenizer
from roll_async.schema import FinishReason, Prompt, Sample
from tests.patience import patient

def sample(ids, name):
    n = len(ids)
    return Sample(
        sample_id=name, prompt_token_ids=array("i", [1]), response_token_ids=array("i", ids), loss_mask=b"\\x01" * n,
        behaviour_logprobs=array("f", [0.0] * n), version_runs=((0, n),), finish_reason=FinishReason.STOP,
        generation_s=0.0,
    )

TEXTS = ("=7", "=8[/THINK]=7")

def maps(process):
    return [mapped.path for mapped in process.memory_maps()]

async def main(folder):
    ids = load_tokenizer(folder).encode("=7", add_special_tokens=False)
    prompt = Prompt(row_id="r", token_ids=array("i", [1]), domain="a", ground_truth="7")
    rewards = {"a": RewardConfig(type="exact_match"), "slow": RewardConfig(type="slow_reward.slow")}
    rewards["boxed"] = RewardConfig(type="qa", answer_format="boxed")
    scorer = await RayScorer.start(HostPlan(rewards=rewards, tokenizer_folder=folder, env={}, rpc_timeout_s=100.0))
    order = []
    async def ask(domain):
        score = (await scorer.score(replace(prompt, domain=domain), sample(ids, domain))).score
        order.append((domain, score))
    await asyncio.gather(ask("slow"), ask("slow"), ask("a"))
    print("order", order, flush=True)
    opened = replace(prompt, thought="[THINK]")
    said = [load_tokenizer(folder).encode(text, add_special_tokens=False) for text in TEXTS]
    thoughts = [await scorer.score(opened, sample(ids, "thought")) for ids in said]
    print("thoughts", [(r.score, r.metrics["unfinished_thought"]) for r in thoughts], flush=True)
    await asyncio.gather(*(ask("boxed") for _ in range(20)))
    # Only among the processes of this driver: other runs on the machine have reward hosts, too.
    mine = psutil.Process().children(recursive=True)
    host = next(p for p in mine if "ray::RewardHost" in " ".join(p.cmdline()))
    mapped = {name for process in (host, *host.children(recursive=True)) for name in maps(process)}
    print("torch" if any("libtorch" in name for name in mapped) else "no torch", flush=True)
    workers = host.children(recursive=True)
    host.kill()
    outages, scores = 0, []
    while len(scores) < 20:
        try:
            scores.append((await scorer.score(prompt, sample(ids, str(len(scores))))).score)
        except ConnectionError:
            outages += 1
            await asyncio.sleep(0.2)
    _, alive = psutil.wait_procs(workers, timeout=patient(10))
    print("outages", outages > 0, "scores", set(scores), "restarts", scorer.restarts, "orphans", len(alive), flush=True)
    # As when the run starts again, and Ray has not yet given up the names of those that died.
    again = await scorer._plan.start(0)
    print("again", await again.close.remote(), flush=True)
    await scorer.close()

with ray_runtime(num_processes=3, env={}):
    asyncio.run(main(sys.argv[1]))
"""

SLOW_REWARD = """
import time
from roll_async.rewards.verdict import Verdict

def slow(text, ground_truth, extra):
    time.sleep(0.5)
    return Verdict(score=0.25, acc=0.0)
"""


def test_slow_answers_delay_no_others_and_a_killed_reward_host_comes_back(tmp_path):
    tokenizer = save_family("llama-3", tmp_path)
    tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]"]})
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "slow_reward.py").write_text(SLOW_REWARD)
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=patient(180),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
    )
    assert "order [('a', 1.0), ('slow', 0.25), ('slow', 0.25)]" in done.stdout, done.stdout + done.stderr[-3000:]
    assert "thoughts [(0.0, 1.0), (1.0, 0.0)]" in done.stdout, done.stdout + done.stderr[-3000:]
    assert "rewards.boxed: the first 16 scored responses hold no readable answer" in done.stderr, done.stderr[-3000:]
    assert "no torch" in done.stdout, "seconds of a core and 300 MB in a process that decodes text"
    assert "outages True scores {1.0} restarts 1 orphans 0" in done.stdout, done.stdout + done.stderr[-3000:]
    assert "again None" in done.stdout, done.stdout + done.stderr[-3000:]


class Listening:
    """A host that keeps what it is asked and answers with a score of 1, at once."""

    def __init__(self):
        self.questions = []

    @property
    def submit(self):
        return Called(self._submit)

    @property
    def collect(self):
        return Called(self._collect)

    async def _submit(self, questions):
        self.questions += questions
        return [(number, Reward(score=1.0), "") for number, *_ in questions], ["one notice"]

    async def _collect(self):
        await asyncio.Event().wait()


class Called:
    def __init__(self, function):
        self.remote = function


PROMPT = Prompt(row_id="r", token_ids=array("i", [1]), domain="a", ground_truth="7")


def sample_of(ids, experts=None):
    return Sample(
        sample_id="s", prompt_token_ids=array("i", [1]), response_token_ids=ids, loss_mask=b"\x01" * len(ids),
        behaviour_logprobs=array("f", [0.0] * len(ids)), version_runs=((0, len(ids)),),
        finish_reason=FinishReason.STOP, generation_s=0.0, experts=experts,
    )  # fmt: skip


def test_a_question_carries_the_answer_and_nothing_that_no_judge_reads(caplog):
    """Log-probs are as large as the tokens, the record of a model's experts a hundred times that, and files of images
    larger still. What is scored at once comes with the call that asked: a message costs a millisecond of a core.
    """
    from roll_async.cluster.roles.reward_group import HostPlan, RayScorer

    ids, layers = array("i", [5, 6, 7]), 48
    experts = ExpertRecord(ids=array("B", bytes(3 * layers * 2)), num_layers=layers, top_k=2)

    async def go():
        host = Listening()
        scorer = RayScorer(host, HostPlan(rewards={}, tokenizer_folder="", env={}, rpc_timeout_s=5.0))
        shown = replace(PROMPT, images=(Image(data=bytes(1000), grid=(1, 1)),))
        assert (await scorer.score(shown, sample_of(ids, experts))).score == 1
        ((_, *asked),) = host.questions
        assert asked == [PROMPT, ids]

    asyncio.run(go())
    assert "one notice" in caplog.text


class Failing(Listening):
    async def _submit(self, questions):
        from roll_async.buffer.errors import RoleFailed

        raise RoleFailed("rewards: TypeError: no text")


def test_a_host_that_can_not_score_leaves_no_question_without_an_answer():
    from roll_async.buffer.errors import RoleFailed
    from roll_async.cluster.roles.reward_group import HostPlan, RayScorer

    async def go():
        scorer = RayScorer(Failing(), HostPlan(rewards={}, tokenizer_folder="", env={}, rpc_timeout_s=5.0))
        with pytest.raises(RoleFailed, match="TypeError: no text"):  # a fault of ours, which is no outage
            await scorer.score(PROMPT, sample_of(array("i", [5])))

    asyncio.run(go())
