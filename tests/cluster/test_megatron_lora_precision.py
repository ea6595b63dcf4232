"""Small adapters on bfloat16 weights: they act and learn as in float32, in training and in what is exported."""

from dataclasses import replace

import pytest

pytest.importorskip("megatron.core")
transformers = pytest.importorskip("transformers")

import megatron_cases as cases
import torch

STEPS, RATE = 20, 1e-5
"""Adapters are then 4e-4 of their weights: a step of bfloat16 is up to 8e-3 of a number."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Weights that bfloat16 holds exactly, so that float32 and bfloat16 start from the same model."""
    folder = cases.model_folder(tmp_path_factory.mktemp("model"), "dense")
    transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def test_a_small_adapter_learns_in_bfloat16_where_the_sum_of_weights_does_not(rank_pool, folder, tmp_path):
    settings = cases.settings_of(folder, optimizer={"learning_rate": RATE}, dtype="bf16", lora_rank=8, lora_alpha=16.0)

    def run(settings, **more):
        return rank_pool.run(cases.learned_by_adapters, 1, settings=settings, steps=STEPS, **more)[0]

    size, exact = run(replace(settings, dtype="fp32"))
    _, path = run(settings, export=str(tmp_path / "export"))
    _, sums = run(settings, merge=True)
    assert 2e-4 < size < 8e-4
    rise = float(exact.mean())
    assert 0.8 * rise < float(path.mean()) < 1.25 * rise
    assert float(sums.mean()) < 0.6 * rise

    rows, _ = cases.batch()
    plain = replace(settings, lora_rank=0)
    scores = [
        rank_pool.run(cases.score, 1, settings=replace(plain, model_folder=str(place)), rows=rows)[0]
        for place in (folder, tmp_path / "export")
    ]
    exported = float((scores[1] - scores[0])[rows.mask].mean())
    assert 0.75 * rise < exported < 1.3 * rise
