"""What the cluster tests share: a barely trained demo model, and a way to run the launcher as a user does."""

import fcntl
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # ranks on CPU, here and in every process that a test starts
sys.path.insert(0, str(Path(__file__).resolve().parent))
from roll_async.commands.certify.rank_pool import RankPool
from tests.patience import patient

SUMMARY = []
"""Lines to print at the end of the test run."""

ROOT = Path(__file__).resolve().parents[2]
RLVR = "start_rlvr_pipeline.py"
SMALL = (
    "rollout_batch_size=8",
    "response_length=40",
    "num_return_sequences_in_group=4",
    "actor_train.training_args.per_device_train_batch_size=32",
    "actor_train.training_args.gradient_accumulation_steps=1",
    "eval_steps=0",
    "save_steps=0",
)


@pytest.fixture(scope="session")
def demo_assets(tmp_path_factory, worker_id):
    """Tokenizer, data and a model after few warm-start steps: right in form, seldom in value. Made by the first process
    of pytest-xdist that needs them, for all. DEMO_ASSETS names a finished folder, to spare the making.
    """
    pytest.importorskip("megatron.core")
    if "DEMO_ASSETS" in os.environ:
        return Path(os.environ["DEMO_ASSETS"]).resolve()
    shared = tmp_path_factory.getbasetemp()
    shared = shared if worker_id == "master" else shared.parent
    folder = shared / "demo_assets"
    with open(shared / "demo_assets.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            make = [sys.executable, "tools/make_demo_assets.py", "--small", "--output", str(folder)]
            subprocess.run(make, cwd=ROOT, check=True, capture_output=True, timeout=patient(300))
    return folder


@pytest.fixture(scope="module")
def short_folder():
    """For Ray's sockets, whose paths may have 107 characters: those of tmp_path are longer in a worker of xdist."""
    with tempfile.TemporaryDirectory(prefix="roll-") as folder:
        yield Path(folder)


class Launcher:
    """Runs a start script of `examples/` on the assets."""

    def __init__(self, assets, output):
        self.assets, self.output = assets, output

    def command(self, *overrides, config="rlvr_config_async_cpu.yaml", name="run", small=True, script=RLVR):
        places = (
            f"pretrain={self.assets}/model",
            f"actor_train.data_args.file_name={self.assets}/train.jsonl",
            f"validation.data_args.file_name={self.assets}/validation.jsonl",
            f"output_dir={self.output}",
            f"exp_name={name}",
        )
        if config == "rlvr_gsm8k_cpu.yaml":
            places = places[3:]
        return [
            sys.executable,
            str(ROOT / "examples" / script),
            "--config",
            config,
            *places,
            *(SMALL if small else ()),
            *overrides,
        ]

    def start(self, *overrides, env=None, **kwargs):
        env = env or {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        return subprocess.Popen(
            self.command(*overrides, **kwargs),
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *overrides, timeout=240, **kwargs):
        process = self.start(*overrides, **kwargs)
        try:
            output, _ = process.communicate(timeout=patient(timeout))
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return process.returncode, output

    def metrics(self, name="run"):
        lines = (self.output / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


def pytest_terminal_summary(terminalreporter):
    """Tables that tests collected."""
    for line in SUMMARY:
        terminalreporter.write_line(line)


@pytest.fixture(scope="module")
def sglang_on_cpu():
    """SGLang, which lies beside the other packages. An engine finds it by itself, and what stands in for modules that a
    CPU does not have; after the module nothing else does.
    """
    if not (Path(sys.prefix) / "sglang" / "sglang").is_dir():
        pytest.skip("SGLang is not installed here")
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name in [name for name in sys.modules if name.partition(".")[0] in ("torchvision", "sgl_kernel", "IPython")]:
        del sys.modules[name]


@pytest.fixture(scope="session")
def rank_pool():
    """Processes that play the ranks of one layout after another."""
    return RankPool(patient)


@pytest.fixture
def launcher(demo_assets, tmp_path):
    return Launcher(demo_assets, tmp_path)
