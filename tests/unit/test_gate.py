"""One gate: validate, show, simulate and the launchers accept the same configs, and refuse the others alike."""

import io
import re
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from roll_async.cli import main
from roll_async.cluster.roles.training_role import TrainingRole
from roll_async.commands.configs.validate import run_validate
from roll_async.commands.run import prepare
from roll_async.config.api import ConfigError, load
from roll_async.config.schema import RLVRConfig
from roll_async.launch.checks.gate import check_supported
from roll_async.weight_sync.bucket import STAGED
from roll_async.weight_sync.layout import EngineLayout
from roll_async.weight_sync.transport.transports import transport_of

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = [*sorted((ROOT / "configs").glob("*.yaml")), *sorted((ROOT / "examples").rglob("*.yaml"))]
SHIPPED = [path for path in SHIPPED if not path.stem.startswith(("sft_", "dpo_"))]  # test_supervised_configs.py
SEVEN, CPU = ROOT / "configs/rlvr_config_async.yaml", ROOT / "configs/rlvr_config_async_cpu.yaml"
MOE = ROOT / "configs/qwen3_30b_a3b_moe.yaml"
ENGINE, TRAIN = "actor_infer.strategy_args.strategy_config", "actor_train.strategy_args.strategy_config"
VLLM = "actor_infer.strategy_args.strategy_name=vllm"


@pytest.fixture(autouse=True)
def cluster(monkeypatch):
    """Engines run there: what is installed there is not known here."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")


def printed(command, args) -> tuple[int, list[str]]:
    """Exit code and lines of both streams."""
    text = io.StringIO()
    with redirect_stdout(text), redirect_stderr(text):
        code = command([str(a) for a in args])
    return code, text.getvalue().splitlines()


def launcher(path: Path, *overrides: str):
    kind = "rlvr" if isinstance(load(path), RLVRConfig) else "agentic"
    return prepare(["--config", str(path), *overrides], kind)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_shipped_config_passes_the_gate_of_its_launcher(path):
    loaded = check_supported(path)
    assert (
        check_supported(path, pipeline="rlvr" if isinstance(loaded.config, RLVRConfig) else "agentic").config
        == loaded.config
    )


def test_validate_accepts_everything_that_is_shipped():
    code, lines = printed(run_validate, SHIPPED)
    assert code == 0 and sum(line.startswith("ok: ") for line in lines) == len(SHIPPED)


def inputs_of(path: Path, folder: Path) -> list[str]:
    """Stand-ins for the model and the data of a shipped config, as overrides."""
    model, data = folder / "model", folder / "rows.jsonl"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{" + ", ".join(f'"{k}": {v}' for k, v in SIZES.items()) + "}")
    data.write_text("{}\n")
    config, names = load(path), []
    if isinstance(config, RLVRConfig):
        names = ["actor_train.data_args", *(["validation.data_args"] if config.validation is not None else [])]
    return [f"pretrain={model}", *(f"{name}.file_name={data}" for name in names)]


SIZES = {
    "num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 1024,
    "vocab_size": 1024, "num_experts": 128, "moe_intermediate_size": 768,
}  # fmt: skip


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_launcher_starts_what_it_is_given(path, tmp_path):
    """All but the devices is real: the arguments, the gate, the folders, the names."""
    config = launcher(path, *inputs_of(path, tmp_path))
    assert config.actor_infer.model_args.model_name_or_path == str(tmp_path / "model")


def test_the_first_command_of_the_readme_passes_the_gate(tmp_path):
    config = prepare(["--config", "rlvr_config_async.yaml", *inputs_of(SEVEN, tmp_path)], "rlvr")
    assert config.exp_name == "rlvr_config_async" and config.actor_train.num_ranks == 16


SYNCHRONOUS = ["async_generation_ratio=0", "correction={weight_level: none}"]
HF = "actor_infer.strategy_args={strategy_name: hf_infer}"
REFUSED = [
    (SEVEN, ["actor_train.logits_in_fp32=false"]),
    (SEVEN, [*SYNCHRONOUS, "actor_infer.generating_args.logprobs=false"]),
    (SEVEN, ["weight_sync.transport=shm"]),
    (SEVEN, ["weight_sync.transport=nccl", f"{ENGINE}.pipeline_parallel_size=2"]),
    (SEVEN, [VLLM, "weight_sync.transport=cuda_ipc"]),
    (CPU, ["weight_sync.transport=cuda_ipc"]),
    (SEVEN, [f"{TRAIN}.tensor_model_parallel_size=8"]),
    (SEVEN, [VLLM, f"{ENGINE}.tensor_parallel_size=8"]),
    (SEVEN, [f"{TRAIN}.pipeline_model_parallel_size=8"]),
    (SEVEN, [f"{TRAIN}.expert_model_parallel_size=2"]),
    (SEVEN, ["actor_train.router_replay=true", "actor_train.micro_batching=fixed"]),
    (SEVEN, [f"{TRAIN}.overlap_param_gather=true"]),
    (MOE, [f"{TRAIN}.sequence_parallel=false"]),
    (MOE, [f"{ENGINE}.enable_prefix_caching=false"]),
    (CPU, [f"{ENGINE}.pipeline_parallel_size=2", "actor_infer.world_size=2"]),
    (CPU, [HF, "actor_infer.generating_args.stop_strings=[a]"]),
    (CPU, [HF, "actor_infer.generating_args.repetition_penalty=1.1"]),
]  # fmt: skip


def name(x: Path | list[str]) -> str:
    return x[-1][-50:] if isinstance(x, list) else x.stem


@pytest.mark.parametrize(("path", "overrides"), REFUSED, ids=name)
def test_all_commands_and_launchers_refuse_in_the_same_words(path, overrides):
    with pytest.raises(ConfigError) as raised:
        launcher(path, *overrides)
    errors = [str(d) for d in raised.value.diagnostics if d.is_error]
    assert errors and all(re.search(r": error C20[123]: [a-z0-9_.]+: ", line) for line in errors)
    shows = [["show", *flags] for flags in ([], ["--memory"], ["--weights"])]
    for command in (["validate"], *shows, ["simulate"]):
        code, lines = printed(main, [*command, path, *overrides])
        assert code == 2 and [line for line in lines if ": error " in line] == errors, command


@pytest.mark.parametrize(
    ("overrides", "transport", "reason"),
    [
        ([], "nccl", "lie on different devices"),
        ([f"{ENGINE}.tensor_parallel_size=2"], "nccl", "lie on different devices"),
        ([f"{ENGINE}.pipeline_parallel_size=2"], "gloo", "SGLang has pipeline stages.*, so its front end receives"),
        ([f"{ENGINE}.extra={{dp_size: 2}}"], "gloo", "with dp_size SGLang's ranks keep other parts"),
        ([*SYNCHRONOUS, "actor_infer.device_mapping=0-15"], "cuda_ipc", "share devices"),
    ],
)
def test_sglang_gets_weights_on_its_devices_as_vllm_does_where_its_ranks_keep_what_ours_say(
    overrides, transport, reason
):
    config = load(str(SEVEN), overrides)
    found, why = transport_of(config)
    assert found == transport and re.search(reason, why)
    role = TrainingRole.of(config, "actor_train", config.actor_train)
    on_devices = transport not in STAGED
    ranks = config.actor_infer.strategy_args.strategy_config.tensor_parallel_size if on_devices else 1
    assert role.engine_layout(transport, num_kv_heads=4) == EngineLayout(tensor=ranks, num_kv_heads=4)
    assert role.engine_layout("shm", num_kv_heads=4).tensor == 1, "what waits in host memory waits in one process"


@pytest.mark.parametrize("transport", ["shm", "gloo", "nccl"])
def test_every_worker_of_vllm_takes_its_part_over_every_transport(transport):
    config = load(str(MOE))
    role = TrainingRole.of(config, "actor_train", config.actor_train)
    assert role.engine_layout(transport, num_kv_heads=4).tensor == 4


def test_a_missing_folder_is_an_error_where_a_run_starts_and_not_where_a_config_is_looked_at(tmp_path):
    override = f"pretrain={tmp_path}/nothing"
    with pytest.raises(ConfigError, match=r"C204: pretrain: model folder .*nothing does not exist"):
        launcher(CPU, override)
    code, lines = printed(run_validate, [CPU, override])
    assert code == 0 and lines[-1].startswith("ok: ")


def test_engines_may_span_nodes_with_as_many_ranks_on_each_where_their_library_can():
    def refusal(train, engines, per_node, *more, stages=1):
        mappings = (f"actor_train.device_mapping={train}", f"actor_infer.device_mapping={engines}")
        ranks = f"tensor_parallel_size: {len(engines) // stages}, pipeline_parallel_size: {stages}"
        parallel = f"actor_infer.strategy_args.strategy_config={{{ranks}}}"
        sizes = (f"num_gpus_per_node={per_node}", f"actor_infer.world_size={len(engines)}")
        try:
            check_supported(CPU, (*more, *mappings, *sizes, parallel))
        except ConfigError as error:
            return str(error)
        return None

    assert refusal([0], [1, 2], 2) is None
    sglang = "actor_infer.strategy_args.strategy_name=sglang"
    assert refusal([0], [1, 2], 2, sglang) is None
    assert "use pipeline_parallel_size: 1, or vllm, or order them" in refusal([0], [1, 2], 2, sglang, stages=2)
    assert "lie 3 on node 0, 1 on node 1, and a replica that spans nodes needs as many" in refusal([0], [1, 2, 3, 4], 4)
    shared = ("async_generation_ratio=0", "actor_train.world_size=2", "rollout_batch_size=64")
    assert "actor_train shares them; give engines" in refusal([1, 2], [1, 2], 2, *shared)
