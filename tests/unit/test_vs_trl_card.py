"""tools/bench/vs_trl.py for a card, as far as a CPU goes: lengths of random weights, settings, figures."""

import json
import math
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from roll_async.cli import main as cli
from roll_async.config.api import load
from roll_async.launch.checks.gate import unsupported

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "bench"))
import vs_trl

from tools import gpu_suite, random_lengths, trl_card, trl_runs
from tools.card import Watch

ROWS = [("bf16", "0.5B", "heavy"), ("bf16", "1.5B", "heavy")]


def small_model(*, tied, dtype=torch.float32, vocabulary=512, layers=2):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=256, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied, eos_token_id=random_lengths.END, pad_token_id=0,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).to(dtype).eval()


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_token_ends_an_answer_with_the_same_probability(tied, dtype):
    vocabulary = 151936
    model = small_model(tied=tied, dtype=dtype, vocabulary=vocabulary, layers=8)
    told = random_lengths.set_hazard(model, 1 / 300)
    tokens = torch.randint(3, vocabulary, (8, 512), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        read = model.model(input_ids=tokens).last_hidden_state[:, [0, 5, 500]]
        chances = model.lm_head(read).float().softmax(-1)[:, :, random_lengths.END]
    first, early, late = chances.mean(0).tolist()
    assert first == pytest.approx(late, rel=0.01) and early == pytest.approx(late, rel=0.01)
    assert float(chances.std() / chances.mean()) < 0.01, "whatever was read"
    assert told == pytest.approx(1 / 300, rel=0.005 if dtype == torch.float32 else 0.03)
    assert early == pytest.approx(1 / 300, rel=0.01 if dtype == torch.float32 else 0.05), "logits in bf16 are coarse"


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_sampled_lengths_have_the_mean_that_was_asked_for_and_the_longest_are_cut(tied):
    mean, longest, rows = 30, 102, 512
    model = small_model(tied=tied)
    random_lengths.set_hazard(model, 1 / mean)
    torch.manual_seed(2)
    prompts = torch.randint(3, 512, (rows, 4))
    answers = model.generate(
        prompts, do_sample=True, max_new_tokens=longest, top_k=0, attention_mask=torch.ones_like(prompts)
    )[:, 4:]
    ended = answers == random_lengths.END
    lengths = torch.where(ended.any(1), ended.int().argmax(1) + 1, longest).float()
    left = math.exp(-longest / mean)
    assert float(lengths.mean()) == pytest.approx(mean * (1 - left), rel=0.12)
    assert 0.3 * left < float((~ended.any(1)).float().mean()) < 2.5 * left
    assert len(answers.unique()) > 400, "noise, not one token again and again"


@pytest.mark.slow
def test_a_folder_of_random_weights_has_prompts_of_the_length_asked_for_and_a_reward_with_a_spread(tmp_path):
    random_lengths.write("tiny", tmp_path, mean=12, prompt=256, device="cpu")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert tokenizer.eos_token_id == config["eos_token_id"] == random_lengths.END
    assert len(tokenizer) == config["vocab_size"], "every sampled token has a text"
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    lengths = [len(tokenizer(row["question"])["input_ids"]) for row in rows]
    assert 224 <= min(lengths) < max(lengths) <= 288 and sum(lengths) / len(lengths) == pytest.approx(256, rel=0.02)
    assert len({row["question"] for row in rows}) == len(rows)
    torch.manual_seed(0)
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in torch.randint(3, 512, (64, 20))]
    odd = sum(random_lengths.parity(text, "0", {}) for text in texts)
    assert 16 < odd < 48
    assert json.loads((tmp_path / "manifest.json").read_text())["end_probability"] == pytest.approx(1 / 12, rel=0.03)


def card(*more):
    return vs_trl.arguments(["--device", "cuda", *more])


def test_a_card_has_rows_and_steps_of_its_own_and_the_cpu_keeps_what_it_had():
    assert vs_trl.rows_of(card()) == ROWS and (card().steps, card().skipped, card().limit) == (8, 2, 240.0)
    assert vs_trl.rows_of(card("--only", "bf16,0.5B,heavy")) == ROWS[:1]
    usual = vs_trl.arguments([])
    assert (usual.device, usual.steps, usual.skipped, len(vs_trl.rows_of(usual))) == ("cpu", 40, 5, 12)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "cuda", "--sizes", "5M"], "--device cuda has no 5M: dtypes bf16; sizes 0.5B, 1.5B; tails heavy"),
        (["--device", "cuda", "--only", "fp32,0.5B,light"], "--device cuda has no fp32: dtypes bf16; sizes"),
        (
            ["--only", "bf16,0.5B,heavy"],
            "--device cpu has no 0.5B: dtypes fp32, bf16; sizes 0.6M, 5M, 20M; tails light",
        ),
        (["--trl", "beta=0"], "--trl is for --device cuda"),
    ],
)
def test_what_a_device_does_not_have_is_one_line_with_what_it_has(words, said, capsys):
    with pytest.raises(SystemExit):
        vs_trl.arguments(words)
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_without_a_card_it_says_so_and_ends_well(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["vs_trl.py", "--device", "cuda"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert vs_trl.main() is None
    assert capsys.readouterr().out == "skipped: no CUDA device\n"


def test_without_trl_on_a_card_one_line_says_what_to_name(monkeypatch):
    monkeypatch.setattr(vs_trl, "find_spec", lambda name: None)
    assert "cannot import trl: name an interpreter that can with --trl-python" in vs_trl.without_trl(card())
    assert vs_trl.without_trl(card("--sides", "best")) is None
    monkeypatch.setattr(vs_trl, "find_spec", lambda name: object())
    assert vs_trl.without_trl(card()) is None


@pytest.mark.parametrize("row", ROWS)
def test_both_sides_of_ours_are_supported_configs_on_one_device(row, tmp_path, capsys):
    path = ROOT / "configs" / trl_card.CARD_CONFIG
    found = {}
    for side in ("defaults", "best"):
        overrides = trl_card.card_overrides(row, side, 43, tmp_path, card())
        found[side] = config = load(str(path), overrides, "rlvr")
        assert not unsupported(config)
        assert not cli(["validate", str(path), *overrides]), capsys.readouterr()
        assert config.samples_per_batch == trl_runs.SAMPLES and config.seed == 43
        assert config.actor_train.device_mapping == config.actor_infer.device_mapping == (0,)
        assert config.response_length == 1024 and config.prompt_length >= 288
        assert not config.actor_infer.engine.eager, "graphs, as in a run of 200 steps"
        assert config.max_steps > card().steps, "the run is ended before it saves"
    assert (found["defaults"].colocation, found["defaults"].async_generation_ratio) == ("turns", 0)
    assert (found["best"].colocation, found["best"].async_generation_ratio) == ("resident", 1)


def test_the_walk_on_a_cpu_is_a_supported_config_too(tmp_path):
    args = vs_trl.arguments(["--device", "walk", "algorithm.ppo_epochs=2"])
    (row,) = vs_trl.rows_of(args)
    for side, epochs in (("defaults", 1), ("best", 2)):
        overrides = trl_card.card_overrides(row, side, 1, tmp_path, args)
        config = load(str(ROOT / "configs" / trl_card.CARD_CONFIG), overrides, "rlvr")
        assert not unsupported(config) and config.algorithm.ppo_epochs == epochs


def test_trl_has_vllm_on_a_card_alone_and_as_many_samples_a_step_as_ours():
    for row in ROWS:
        config = trl_card.card_trl_config(row, 43, card())
        rows = config["per_device_train_batch_size"] * config["gradient_accumulation_steps"]
        assert rows == trl_runs.SAMPLES and config["use_vllm"] and config["bf16"] and not config["use_cpu"]
        assert config["vllm_max_model_length"] >= 288 + config["max_completion_length"] == 288 + 1024
    changed = trl_card.card_trl_config(
        ROWS[0], 43, card("--trl", "per_device_train_batch_size=16", "vllm_enable_sleep_mode=true")
    )
    assert changed["gradient_accumulation_steps"] == 16 and changed["vllm_enable_sleep_mode"] is True
    walk = trl_card.card_trl_config(("fp32", "tiny", "heavy"), 43, vs_trl.arguments(["--device", "walk"]))
    assert walk["use_cpu"] and not any("vllm" in name for name in walk)


def run(side, rate, **more):
    return {
        "row": list(ROWS[0]), "side": side, "steps": 8, "seed": 42, "samples_per_s": rate, "tokens_per_s": 300 * rate,
        "rewards": [0.5], "length_mean": 290.0, "length_max": 1024.0, "precision": "bf16", "settings": [],
        "first_step_s": 60.0, "peak_mb": 40_000, **more,
    }  # fmt: skip


def test_the_line_of_a_card_has_speed_start_and_memory_of_both_and_no_accuracy():
    ours = run("best", 30.0, staleness_mean=1.0, idle_trainer=0.1, first_step_s=50.0, peak_mb=30_000)
    line = vs_trl.card_line_of(ROWS[0], [ours], [run("trl", 20.0)], device="a card")
    assert (line["name"], line["ratio"], line["budget"], line["ok"]) == ("vs_trl/bf16/0.5B/heavy/best", 1.5, 1.5, True)
    assert not vs_trl.card_line_of(ROWS[0], [ours], [run("trl", 20.1)], device="a card")["ok"]
    assert (line["tokens_per_s"], line["trl_tokens_per_s"]) == (9000.0, 6000.0)
    assert (line["first_step_s"], line["trl_first_step_s"]) == (50.0, 60.0)
    assert (line["peak_mb"], line["trl_peak_mb"]) == (30_000, 40_000)
    assert not any("accurac" in name for name in line)
    blind = vs_trl.card_line_of(ROWS[0], [{**ours, "peak_mb": None}], [run("trl", 20.0)], device="a card")
    assert blind["peak_mb"] is None and blind["ok"]


def test_rates_are_those_between_the_ends_of_the_steps_that_count():
    times, lengths = [100.0, 110.0, 112.0, 116.0], [900.0, 900.0, 200.0, 400.0]
    metrics = [
        {"time_s": t, "reward/mean": 0.5, "response/length_mean": n, "response/length_max": 2 * n}
        for t, n in zip(times, lengths, strict=True)
    ]
    found = trl_runs.figures(metrics, 1)
    assert found["samples_per_s"] == 2 * 256 / 6 and found["tokens_per_s"] == 256 * 600 / 6
    assert (found["length_mean"], found["length_max"]) == (500.0, 1000.0)


@pytest.mark.slow
def test_a_run_is_ended_with_its_steps_and_seen_from_outside(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_suite, "LOOKS_S", 0.05)
    code = (
        "import sys, time\nfor i in range(5): print('{}', file=open(sys.argv[1], 'a')); time.sleep(0.2)\n"
        "open(sys.argv[1], 'a').write('{\"half'); time.sleep(60)"
    )
    steps, used = tmp_path / "steps.jsonl", iter([100, 700, 900, *[400] * 1000])
    watch = Watch(steps, 5, lambda: next(used))
    began_s = time.monotonic()
    assert gpu_suite.finish([sys.executable, "-c", code, str(steps)], 30.0, enough=watch) == ""
    assert time.monotonic() - began_s < 25.0, "it would have slept for a minute"
    assert watch.peak_mb == 900 and 0 < watch.first_step_s < time.monotonic() - began_s - 0.5
    steps.write_text('{"step": 1}\n{"ste')
    assert trl_runs.steps_of(steps) == [{"step": 1}], "half a line of a run that was ended"


def test_the_next_run_waits_until_the_memory_of_the_one_before_is_free(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    used = iter([500, 60_000, 30_000, 600, 1])
    Watch(tmp_path / "none", 1, lambda: next(used)).settle()
    assert next(used) == 1


def test_a_run_that_takes_too_long_is_a_line_that_says_so(monkeypatch, tmp_path):
    asked = {}

    def finish(command, limit_s, environment, watch):
        asked.update(command=command, limit_s=limit_s)
        return {"timed_out_after_s": limit_s, "output": "loading"}

    monkeypatch.setattr(trl_card, "finish", finish)
    args = card("--limit", "9", "--trl-python", "/opt/python")
    found = trl_card.run_on_card(ROWS[0], "trl", 42, tmp_path, tmp_path, args)
    assert asked["limit_s"] == 9.0 and asked["command"][0] == "/opt/python"
    line = vs_trl.failed_line({"row": ROWS[0], "side": "trl", "seed": 42, **found})
    assert line == {
        "name": "vs_trl/bf16/0.5B/heavy/trl", "ok": False, "seed": 42, "steps_done": 0, "timed_out_after_s": 9.0,
        "output": "loading",
    }  # fmt: skip


def test_the_script_of_trl_gets_what_it_reads():
    compile(trl_runs.TRL_RUN, "TRL_RUN", "exec")
    command = trl_runs.trl_command("python", {"use_cpu": True}, Path("assets"), Path("out"), "a.b", final="")
    given = json.loads(command[-1])
    assert all(f'given["{name}"]' in trl_runs.TRL_RUN for name in given)
