"""Between the first micro-batch of a step and its optimizer nothing asks the device for a number."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

import megatron_cases as cases

from roll_async.trainer.megatron.worker import MegatronWorker, RankSpec

WAITS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
}


class NothingWaits(TorchDispatchMode):
    """Counts what would make the host wait for a device: numbers as Python's, and shapes that depend on them."""

    def __init__(self):
        super().__init__()
        self.operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in WAITS, f"{func} waits for the device"
        if func is torch.ops.aten.index.Tensor:
            assert not any(x is not None and x.dtype == torch.bool for x in args[1]), "a mask as an index waits"
        self.operators += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("micro_batching", ["fixed", "packed"])
def test_a_step_asks_the_device_for_nothing_before_the_optimizer(micro_batching, tmp_path):
    folder = cases.model_folder(tmp_path, "dense")
    rows, policy = cases.batch()
    packs = {"max_tokens_per_microbatch": 96} if micro_batching == "packed" else {}
    worker = MegatronWorker(RankSpec.alone(), cases.settings_of(folder, micro_batching=micro_batching, **packs))
    worker.start()
    run, modes = worker._runner.run, []

    def watched(*arguments, **options):
        modes.append(NothingWaits())
        with modes[-1]:
            return run(*arguments, **options)

    worker._runner.run = watched
    worker.supervised_update(rows.tokens, rows.lengths, rows.mask)
    share = worker.splitter.policy(replace(policy, kept=torch.ones(cases.NUM_ROWS).bool()))[0]
    worker.update_policy(share, 0)
    worker.stop()
    assert len(modes) >= 2 and all(mode.operators > 1000 for mode in modes)
