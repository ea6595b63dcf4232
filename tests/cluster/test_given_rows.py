"""Steps on given rows: every layout takes the same ones as one rank, and one rank those of a plain loop."""

import pytest
import torch

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

import megatron_cases as cases

from roll_async.algorithms.objective import PreferenceOptions

PAIRS = PreferenceOptions(beta=0.3, label_smoothing=0.1)
PACKED = {"micro_batching": "packed", "max_tokens_per_microbatch": 96}
LAYOUTS = {
    "T2": (2, {"parallel": {"tensor": 2}}),
    "P2, packed": (2, {"parallel": {"pipeline": 2}, **PACKED}),
    "D2, packed": (2, {**PACKED}),
    "D2, padded": (2, {}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return cases.model_folder(tmp_path_factory.mktemp("model"), "dense")


@pytest.fixture(scope="module")
def on_one_rank(rank_pool, folder):
    return {
        preference: rank_pool.run(cases.given_steps, 1, settings=cases.settings_of(folder), preference=preference)[0]
        for preference in (None, PAIRS)
    }


def losses(steps):
    return torch.tensor([step["trainer/loss"] for step in steps], dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("preference", [None, PAIRS], ids=["cross-entropy", "preference"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_takes_the_steps_of_one_rank(rank_pool, folder, on_one_rank, name, preference):
    ranks, settings = LAYOUTS[name]
    whole = on_one_rank[preference]
    (found, *_) = rank_pool.run(
        cases.given_steps, ranks, settings=cases.settings_of(folder, **settings), preference=preference
    )
    torch.testing.assert_close(losses(found), losses(whole), rtol=2e-4, atol=2e-5)
    for key in ("rewards/margins", "rewards/chosen", "rewards/accuracies") if preference else ():
        assert found[-1][key] == pytest.approx(whole[-1][key], rel=1e-2, abs=1e-3)
    assert whole[-1]["trainer/loss"] < whole[0]["trainer/loss"]


@pytest.mark.slow
def test_the_first_losses_are_those_of_a_loop_over_rows_in_transformers(folder, on_one_rank):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows, _ = cases.batch(a_copy=True)
    sums, count = [], 0
    with torch.no_grad():
        for tokens, length, mask in zip(rows.tokens, rows.lengths.tolist(), rows.mask, strict=True):
            logprobs = model(tokens[None, :length]).logits[0].log_softmax(-1)
            trained = [t for t in range(1, length) if mask[t]]
            sums.append(sum(float(logprobs[t - 1, tokens[t]]) for t in trained))
            count += len(trained)
    assert on_one_rank[None][0]["trainer/loss"] == pytest.approx(-sum(sums) / count, abs=1e-5)
    # The reference is the model itself at the first step: no margin yet.
    first = on_one_rank[PAIRS][0]
    assert first["trainer/loss"] == pytest.approx(0.693147, abs=1e-5)
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-4)
    assert on_one_rank[PAIRS][-1]["rewards/accuracies"] > 0.8
