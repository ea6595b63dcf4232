"""Every parallel layout takes the same step as one rank: loss, gradient norm and the loss of the step after it.

The table is printed at the end of the run; a summary is in docs_roll/benchmarks.md.
"""

import pytest
import torch

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

import megatron_cases as cases
from conftest import SUMMARY

from roll_async.cluster.network import held_port

PACKED = {"micro_batching": "packed", "max_tokens_per_microbatch": 96}
DYNAMIC = {"micro_batching": "dynamic", "max_tokens_per_microbatch": 96}
FULL = {"recompute": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}}
BLOCK = {"recompute": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}}
SELECTIVE = {"recompute": {"recompute_granularity": "selective"}}
DISTRIBUTED = {"optimizer": {"distributed": True}}
OVERLAP = {"optimizer": {"distributed": True, "overlap_grad_reduce": True, "overlap_param_gather": True}}
ALLGATHER = {"moe_dispatcher": "allgather"}
LETTERS = {"T": "tensor", "P": "pipeline", "V": "virtual_pipeline", "C": "context", "E": "expert", "X": "expert_tensor"}


def layout(text, *options):
    """`T2 P2 S` on its smallest number of ranks times D: tensor 2, pipeline 2, sequence parallel."""
    sizes, replicas = {}, 1
    for word in text.split():
        if word == "S":
            sizes["sequence_parallel"] = True
        elif word[0] == "D":
            replicas = int(word[1:])
        else:
            sizes[LETTERS[word[0]]] = int(word[1:])
    product = sizes.get("tensor", 1) * sizes.get("pipeline", 1) * sizes.get("context", 1)
    settings = {"parallel": sizes}
    for option in options:
        settings |= option
    return product * replicas, settings


DENSE = {
    "T2": layout("T2"),
    "T2 S": layout("T2 S"),
    "T2 S, recompute full": layout("T2 S", FULL),
    "T2 S, recompute block": layout("T2 S", BLOCK),
    "T2 S, recompute selective": layout("T2 S", SELECTIVE),
    "T2 S, packed": layout("T2 S", PACKED),
    "P2, 1F1B": layout("P2"),
    "P2, dynamic": layout("P2", DYNAMIC),
    "P2, packed": layout("P2", PACKED),
    "P2, recompute full": layout("P2", FULL),
    "P2 V2, interleaved": layout("P2 V2"),
    "P2 V2, odd number of micro-batches": layout("P2 V2", {"micro_batch_rows": 6}),
    "P4": layout("P4"),
    "C2": layout("C2"),
    "C2, packed": layout("C2", PACKED),
    "C4": layout("C4"),
    "D2": layout("D2"),
    "D2, packed": layout("D2", PACKED),
    "D2, overlap of gradients": layout("D2", {"optimizer": {"overlap_grad_reduce": True}}),
    "D2, distributed optimizer": layout("D2", DISTRIBUTED),
    "D2, distributed optimizer, overlap": layout("D2", OVERLAP),
    "D4, distributed optimizer": layout("D4", DISTRIBUTED),
    "T2 P2 S": layout("T2 P2 S"),
    "T2 P2 V2 S": layout("T2 P2 V2 S"),
    "T2 C2 S": layout("T2 C2 S"),
    "T2 C2 S, packed": layout("T2 C2 S", PACKED),
    "T2 D2 S, distributed optimizer": layout("T2 S D2", DISTRIBUTED),
    "P2 D2, distributed optimizer": layout("P2 D2", DISTRIBUTED),
    "P2 V2 D2, distributed optimizer, overlap": layout("P2 V2 D2", OVERLAP),
    "P2 C2": layout("P2 C2"),
    "C2 D2, distributed optimizer": layout("C2 D2", DISTRIBUTED),
}
TIED = ("T2 S", "P2, 1F1B", "P2 V2, interleaved", "T2 P2 S", "P2 D2, distributed optimizer", "P4")
MOE = {
    "E2, alltoall": layout("E2 D2"),
    "E2, allgather": layout("E2 D2", ALLGATHER),
    "E2, packed": layout("E2 D2", PACKED),
    "E2, distributed optimizer": layout("E2 D2", DISTRIBUTED),
    "E2, distributed optimizer, overlap": layout("E2 D2", OVERLAP),
    "E2, recompute full": layout("E2 D2", FULL),
    "E2, recompute selective": layout("E2 D2", SELECTIVE),
    "E4": layout("E4 D4"),
    "E2 D2": layout("E2 D4"),
    "T2 S, experts whole": layout("T2 S"),
    "T2 X2 S, alltoall": layout("T2 X2 S"),
    "T2 X2 S, allgather": layout("T2 X2 S", ALLGATHER),
    "T2 E2 S": layout("T2 E2 S"),
    "T2 E2 X2 S, alltoall": layout("T2 E2 X2 S D2", DISTRIBUTED),
    "T2 E2 X2 S, allgather": layout("T2 E2 X2 S D2", ALLGATHER),
    "P2": layout("P2"),
    "P2 V2": layout("P2 V2"),
    "P2 E2, alltoall": layout("P2 E2 D2"),
    "P2 E2, allgather": layout("P2 E2 D2", ALLGATHER),
    "P2 V2 E2": layout("P2 V2 E2 D2"),
    "T2 P2 S": layout("T2 P2 X2 S"),
    "T2 P2 E2 S": layout("T2 P2 E2 S"),
    "C2": layout("C2"),
    "C2 E2": layout("C2 E2"),
    "D2, distributed optimizer": layout("D2", DISTRIBUTED),
    "D2, dynamic": layout("D2", DYNAMIC),
}
ROWS = [
    *(("dense", name, *DENSE[name]) for name in DENSE),
    *(("dense, tied", name, *DENSE[name]) for name in TIED),
    *(("MoE", name, *MOE[name]) for name in MOE),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {kind: cases.model_folder(tmp_path_factory.mktemp("model"), kind) for kind in cases.MODELS}


@pytest.fixture(scope="module")
def one_rank(rank_pool, folders):
    """What a single rank measures, per model."""
    return {kind: rank_pool.run(cases.measure, 1, settings=cases.settings_of(folders[kind]))[0] for kind in folders}


@pytest.fixture(scope="module")
def table():
    """Collects a line per layout; printed at the end of the run."""
    heading = "| model | layout | ranks | loss | gradient norm, relative | next loss | weights out | s |"
    SUMMARY.extend(["", heading, "|---|---|---|---|---|---|---|---|"])
    return SUMMARY


def assert_parts_are_the_model(parts_of_ranks, whole):
    """What the ranks send in a push: every element once, equal to what gathering gives, from all that hold it."""
    sent = {name: torch.zeros(tensor.shape, dtype=torch.int64) for name, tensor in whole.items()}
    for parts in parts_of_ranks:
        for name, shape, cut, tensor in parts:
            assert tuple(whole[name].shape) == shape
            place = slice(None) if cut is None else (slice(None),) * cut.dim + (slice(cut.start, cut.stop),)
            assert torch.equal(whole[name][place], tensor), name
            sent[name][place] += 1
    assert all((count == 1).all() for count in sent.values())
    sizes = [sum(tensor.numel() for *_, tensor in parts) for parts in parts_of_ranks]
    assert min(sizes) > 0, "a rank that holds weights sends some"


@pytest.mark.parametrize(("kind", "name", "world_size", "settings"), ROWS, ids=[f"{r[0]}: {r[1]}" for r in ROWS])
def test_a_layout_takes_the_same_step_as_one_rank(
    rank_pool, folders, one_rank, table, kind, name, world_size, settings
):
    expected = one_rank[kind]
    of_ranks = rank_pool.run(cases.measure, world_size, settings=cases.settings_of(folders[kind], **settings))
    found = of_ranks[0]
    loss, next_loss = (abs(found["steps"][i]["trainer/loss"] - expected["steps"][i]["trainer/loss"]) for i in (0, 1))
    norm = abs(found["steps"][0]["trainer/grad_norm"] / expected["steps"][0]["trainer/grad_norm"] - 1)
    same = found["exported"].keys() == expected["exported"].keys()
    same = same and all((found["exported"][key] == tensor).all() for key, tensor in expected["exported"].items())
    out = "bitwise" if same else "differ"
    seconds = found["seconds"]
    table.append(
        f"| {kind} | {name} | {world_size} | {loss:.0e} | {norm:.0e} | {next_loss:.0e} | {out} | {seconds:.1f} |"
    )
    assert same
    assert_parts_are_the_model([ranks["parts"] for ranks in of_ranks], found["trained"])
    cases.assert_same_steps(found, expected)


@pytest.mark.parametrize(
    ("scale", "fields"),
    [(1.001, {}), (1.0, {"optimizer": {"learning_rate": 3e-3 * 1.001}}), (1.0, {"temperature": 1.001})],
    ids=("gradient", "learning rate", "temperature"),
)
def test_a_factor_of_a_thousandth_too_much_is_no_rounding(rank_pool, folders, one_rank, scale, fields):
    settings = cases.settings_of(folders["dense"], **fields)
    found = rank_pool.run(cases.measure, 1, settings=settings, scale=scale)[0]
    with pytest.raises(AssertionError, match="rounding explains"):
        cases.assert_same_steps(found, one_rank["dense"])


def test_the_reference_learns_so_that_a_next_loss_says_something(one_rank):
    for found in one_rank.values():
        first, second = (step["trainer/loss"] for step in found["steps"])
        assert second < first - 1e-3
        assert (found["after"] - found["before"]).abs().max() > 0.1


@pytest.mark.parametrize("mode", ["fixed", "dynamic", "packed"])
@pytest.mark.parametrize("kind", ["dense", "MoE"])
def test_a_teacher_of_two_ranks_scores_its_only_row_of_a_batch(rank_pool, folders, kind, mode):
    settings = cases.settings_of(folders[kind], micro_batching=mode, max_tokens_per_microbatch=96)
    alone, among = rank_pool.run(cases.scores_of_one_row, 2, settings=settings)[0]
    torch.testing.assert_close(alone, among, rtol=0, atol=1e-5)
    assert bool((alone != 0).any())


def test_a_worker_that_stops_takes_its_groups_along(rank_pool, folders):
    settings = cases.settings_of(folders["dense"], parallel={"tensor": 2})
    with held_port("127.0.0.1") as one, held_port("127.0.0.1") as other:
        all_counts = rank_pool.run(cases.threads_after_stops, 2, settings=settings, more_ports=(one, other))
    for counts in all_counts:
        assert counts[2] - counts[0] <= 12, counts  # about twenty groups a layout, three threads each
