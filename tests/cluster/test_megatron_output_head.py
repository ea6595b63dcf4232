"""Log-probs from logits of a few positions at a time: the same numbers, and no tensor as large as all logits."""

from dataclasses import replace

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

import megatron_cases as cases

from tests.rounding import assert_near

BUDGET = 4 * 4 * cases.VOCABULARY
"""Four positions of float32."""
T2 = {"parallel": {"tensor": 2, "sequence_parallel": True}}
T2_PLAIN = {"parallel": {"tensor": 2}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {kind: cases.model_folder(tmp_path_factory.mktemp("model"), kind) for kind in ("dense", "dense, tied")}


@pytest.mark.parametrize(
    ("kind", "world_size", "fields"),
    [
        ("dense", 1, {}),
        ("dense, tied", 1, {"top_k": 20, "top_p": 0.9, "temperature": 0.8}),
        ("dense", 2, T2),
        ("dense, tied", 2, {**T2_PLAIN, "micro_batching": "packed", "max_tokens_per_microbatch": 96}),
    ],
)
def test_pieces_give_the_same_step_as_the_whole(rank_pool, folders, kind, world_size, fields):
    settings = cases.settings_of(folders[kind], **fields)
    whole = rank_pool.run(cases.logits_in_pieces, world_size, settings=settings, budget=1 << 30)[0]
    found = rank_pool.run(cases.logits_in_pieces, world_size, settings=settings, budget=BUDGET)[0]
    assert_near(found["before"], whole["before"], cases.BOUNDS.forward)
    cases.assert_same_losses([found["step"]], [whole["step"]])
    for key in ("policy/entropy", "trainer/grad_norm"):
        assert_near(found["step"][key], whole["step"][key], cases.BOUNDS.step)
    moved = float((whole["after"] - whole["before"]).abs().max())
    difference = (found["after"] - whole["after"]).abs().flatten()
    # At the edge of top_p a step may be a jump of one token.
    assert difference.quantile(0.98) < cases.BOUNDS.moved * moved and difference.max() < 0.1


def test_no_tensor_is_as_large_as_the_logits_of_a_micro_batch(rank_pool, tmp_path):
    """A vocabulary that outgrows all else: 2,048 words, 16 rows at a time."""
    folder = cases.model_folder(tmp_path, "dense, tied", vocabulary=2048)
    settings = replace(cases.settings_of(folder, micro_batch_rows=16), scoring_rows=16)
    mask = cases.batch()[0].mask
    logits = int(mask.sum()) * 2048
    state = 2048 * 64  # of the embedding
    whole = rank_pool.run(cases.logits_in_pieces, 1, settings=settings, budget=1 << 30)[0]["largest"]
    pieces = rank_pool.run(cases.logits_in_pieces, 1, settings=settings, budget=4 * 4 * 2048)[0]["largest"]
    assert min(whole) >= logits > 3 * state
    assert max(pieces) < logits / 2
