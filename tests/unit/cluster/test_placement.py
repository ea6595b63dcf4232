"""From device mappings to processes, and what a cluster must have for them."""

import os
import platform
import subprocess
import sys

import pytest

from roll_async.cluster.placement import ProcessPlacement, devices_of, gpu_nodes, place, process_env, shortage


def placed(devices, processes, per_node=8):
    return place(devices, num_processes=processes, num_gpus_per_node=per_node, num_threads=1)


def test_a_replica_of_four_devices_takes_them_from_one_node_in_the_order_written():
    first, second = placed((11, 10, 9, 8, 4, 5, 6, 7), 2)
    assert (first.node, first.gpu_ids, first.device) == (1, (3, 2, 1, 0), "cuda")
    assert (second.node, second.gpu_ids) == (0, (4, 5, 6, 7))


def test_a_replica_that_spans_nodes_has_a_process_on_each_with_as_many_devices():
    (only,) = placed((6, 7, 8, 9), 1)
    assert [(p.index, p.node, p.gpu_ids, p.further) for p in only.parts[1:]] == [(0, 1, (0, 1), ())]
    assert (only.node, only.gpu_ids) == (0, (6, 7)) and devices_of([only], 8) == (6, 7, 8, 9)
    assert [(n.node, n.gpu_ids, n.num_processes) for n in gpu_nodes([only])] == [(0, (6, 7), 1), (1, (0, 1), 1)]
    for uneven, places in (((5, 6, 7, 8), "3 on node 0, 1 on node 1"), ((7, 8, 6, 9), "1 on node 0, 1 on node 1, 1")):
        with pytest.raises(ValueError, match=f"lie {places}.* order device_mapping by nodes"):
            placed(uneven, 1)


def test_the_seeds_layout_trainer_two_by_four_and_rollout_one_by_two_is_three_nodes():
    needs = gpu_nodes((*placed((0, 1, 2, 3, 8, 9, 10, 11), 8), *placed((16, 17), 2), *placed(None, 1)))
    assert [(n.node, n.gpu_ids, n.num_processes) for n in needs] == [
        (0, (0, 1, 2, 3), 4),
        (1, (0, 1, 2, 3), 4),
        (2, (0, 1), 2),
    ]
    assert shortage(needs, [2, 4, 4]) is None and shortage(needs, [8, 0, 8, 8]) is None
    assert shortage(needs, [10]) == "device_mapping needs 3 nodes with 4 + 4 + 2 GPUs, and Ray has 1 node with 10 GPUs"
    assert shortage(needs, [4, 2, 2]).endswith("and Ray has 3 nodes with 4 + 2 + 2 GPUs")
    assert shortage(needs, [0]).endswith("and Ray has no GPU")
    assert shortage(gpu_nodes(placed(None, 4)), []) is None


def test_roles_that_share_devices_need_them_once():
    (need,) = gpu_nodes((*placed((0, 1, 2, 3), 4), *placed((0, 1, 2, 3), 2)))
    assert (need.gpu_ids, need.num_processes) == ((0, 1, 2, 3), 6)
    assert shortage([need], [4]) is None


def test_a_process_sees_the_devices_that_the_scheduler_gave_and_no_others():
    """GPUs 4 to 7 of a shared node, as its allocation says: the mappings' device 1 is the machine's 5, not its 1."""
    (need,) = gpu_nodes(placed((0, 1, 2, 3), 2))
    granted = need.granted("10.0.0.2", ["7", "4", "6", "5"], 96)
    assert granted.devices == {0: "4", 1: "5", 2: "6", 3: "7"}
    env = process_env(ProcessPlacement(index=1, node=0, gpu_ids=(2, 3), num_threads=1), granted)
    assert env["CUDA_VISIBLE_DEVICES"] == "6,7" and env["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "1"
    assert env["OMP_NUM_THREADS"] == "8", "not the 48 cores of its share"
    (half,) = gpu_nodes(placed((6, 7), 2))
    assert half.granted("10.0.0.2", ["GPU-b", "GPU-a"], 2).devices == {6: "GPU-b", 7: "GPU-a"}
    assert half.granted("10.0.0.2", ["10", "9"], 2).devices == {6: "9", 7: "10"}, "numbers, not texts"
    on_cpu = process_env(ProcessPlacement(index=0, node=0, gpu_ids=(), num_threads=3), None)
    assert int(on_cpu["GOMP_SPINCOUNT"]) <= 1000, "a thread that waits leaves its core to the other roles"
    confined = {name: value for name, value in on_cpu.items() if not name.startswith(("MALLOC_", "GOMP_"))}
    assert confined == {"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": ""}


_FAULTS = """
import resource
def step():
    tensors = [bytearray(20 << 20) for _ in range(4)]
for _ in range(2):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_a_process_on_the_cpu_fetches_the_memory_of_its_steps_once():
    def faults(env):
        return int(subprocess.check_output([sys.executable, "-c", _FAULTS], env={**os.environ, **env}, text=True))

    on_cpu = process_env(ProcessPlacement(index=0, node=0, gpu_ids=(), num_threads=1), None)
    pages = 5 * 4 * (20 << 20) // os.sysconf("SC_PAGE_SIZE")
    by_default = {name: value for name, value in on_cpu.items() if not name.startswith("MALLOC_")}
    assert faults(on_cpu) < pages // 20 < faults(by_default)
