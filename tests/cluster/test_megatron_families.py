"""Every family's certificate holds: against Transformers on one rank, under tensor, pipeline and expert parallelism
against one rank; files and adapters. And what the certificate would not overlook.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

import megatron_cases as cases
import tiny_families
from tiny_families import FAMILIES, MOE

from roll_async.checkpoint.folders.hf_folder import HfFolder
from roll_async.checkpoint.hf_names.families import family_of
from roll_async.cli import main
from roll_async.commands.certify import checks
from roll_async.trainer.megatron.model.model_config import transformer_config
from tests.patience import patient

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_certificate_of_a_family_holds(rank_pool, tmp_path, name):
    family, _ = FAMILIES[name]
    found = [*checks.checks_of_layouts(family, name, rank_pool, tmp_path)]
    found += checks.checks_of_files(family, rank_pool, tmp_path)
    expected = 20 if name in MOE else 18 if family.reads_images else 15
    assert len(found) == expected, [check.what for check in found]
    assert not [check for check in found if not check.holds]


def test_a_certificate_sees_a_thousandth_of_a_nat_a_tensor_and_another_step(rank_pool, tmp_path, monkeypatch):
    (family, _), theirs, one = FAMILIES["qwen3"], checks.transformers_logprobs, checks.measure
    monkeypatch.setattr(checks, "LAYOUTS", {name: checks.LAYOUTS[name] for name in ("1 rank", "PP2")})
    monkeypatch.setattr(checks, "transformers_logprobs", lambda *given: theirs(*given) + 1e-3)

    class Changed:
        """Ranks whose layouts train otherwise and whose export lacks a tensor."""

        def run(self, function, world_size, **given):
            answers = rank_pool.run(function, world_size, **given)
            if function is one and world_size == 2:
                answers[0] = replace(answers[0], after=answers[0].after * 1.001, unequal=("model.norm.weight",))
            return answers

    found = [*checks.checks_of_layouts(family, "qwen3", Changed(), tmp_path)]
    assert {check.what for check in found if not check.holds} == {
        "log-probs against Transformers, 1 rank", "log-probs against Transformers, PP2",
        "export, PP2", "after a step, PP2",
    }  # fmt: skip
    assert any("model.norm.weight" in check.found for check in found)


def test_the_command_asks_an_engine_too_and_writes_the_page(tmp_path):
    """Of a mixture of experts: the run replays routes."""
    command = [sys.executable, "-m", "roll_async", "certify", "olmoe", "--pages", str(tmp_path / "pages")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(300), cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all checks hold; families: 1;" in done.stdout and "FAIL" not in done.stdout
    engine = [line for line in (tmp_path / "pages" / "olmoe.md").read_text().splitlines() if "an engine" in line]
    assert len(engine) == 1 and "hf_infer: " in engine[0] and "nats, after steps that moved them by" in engine[0]


def test_an_engine_that_stays_behind_or_a_run_that_ends_is_no_certificate(tmp_path, monkeypatch):
    def ends(code, difference, moved, told=""):
        def run(command, **given):
            (tmp_path / "run").mkdir(exist_ok=True)
            metrics = {"weights/canary_difference": difference, "weights/canary_moved": moved}
            (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps({"step": 1}) + "\n" + json.dumps(metrics))
            return subprocess.CompletedProcess(command, code, told, "")

        return run

    def found(run):
        monkeypatch.setattr(checks.subprocess, "run", run)
        (check,) = checks.checks_of_engine(FAMILIES["qwen3"][0], "qwen3", "hf_infer", tmp_path)
        return check.holds, check.found

    assert found(ends(0, 1e-6, 0.5))[0]
    assert not found(ends(0, 0.4, 0.5))[0] and not found(ends(0, 1e-6, 1e-6))[0]
    holds, said = found(ends(3, 0.0, 0.0, "step 1\nERROR: SyncFailed: no engine\n"))
    assert not holds and "the run ended with 3: ERROR: SyncFailed: no engine" in said


def test_a_rank_that_raises_is_a_check_that_fails(monkeypatch, capsys):
    monkeypatch.setattr(checks, "measure", cases.raises)
    assert main(["certify", "qwen3", "--engine", "none"]) == 1
    said = capsys.readouterr()
    assert "FAIL ranks: ZeroDivisionError: of a rank" in said.out and "checks FAILED: 1;" in said.out
    assert "in raises" in said.err, "the traceback of the rank"


@pytest.fixture
def folder(tmp_path):
    def make(name):
        tiny_families.save_tiny(name, tmp_path)
        return str(tmp_path)

    return make


@pytest.mark.parametrize(
    ("name", "parallel", "problem"),
    [
        ("qwen3", {"tensor": 4}, "num_key_value_heads=2 cannot be shared evenly by 4"),
        ("qwen3", {"tensor": 5}, "vocab_size=96 cannot be shared evenly by 5"),
        ("qwen3", {"pipeline": 3}, "num_hidden_layers=4 cannot be shared evenly by 3"),
        ("qwen3", {"expert": 2}, "expert_model_parallel_size=2, but the model has no experts"),
        ("qwen3 moe", {"expert": 3}, "num_experts=4 cannot be shared evenly by 3"),
        (
            "gpt-oss",
            {"tensor": 2, "expert_tensor": 2, "sequence_parallel": True},
            "experts with biases cannot be split",
        ),
        ("qwen3 moe", {"tensor": 2}, "needs sequence_parallel: true"),
    ],
)
def test_a_layout_that_does_not_divide_the_model_is_refused_by_name(folder, name, parallel, problem):
    settings = cases.settings_of(folder(name), parallel=parallel)
    config = HfFolder(settings.model_folder).config
    with pytest.raises(ValueError, match=problem):
        transformer_config(config, family_of(config.architecture()), settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_transformer_engine_is_refused_where_it_cannot_run(folder):
    settings = replace(cases.settings_of(folder("qwen3")), transformer_impl="transformer_engine")
    config = HfFolder(settings.model_folder).config
    with pytest.raises(ValueError, match="the package transformer_engine is not installed; install it, or use auto"):
        transformer_config(config, family_of(config.architecture()), settings)
