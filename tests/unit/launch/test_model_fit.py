"""What the files of a model tell before anything starts: every refusal has its key, its place, its value, a remedy."""

import ast
import json
import struct
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from roll_async.commands.run import prepare
from roll_async.config.api import ConfigError
from roll_async.config.engine_traits import ENGINE_TRAITS
from roll_async.config.versions import is_from
from roll_async.inference.backends import create_engine
from roll_async.inference.settings import EngineSettings
from roll_async.launch.checks import model_fit
from roll_async.launch.checks.gate import check_supported

ROOT = Path(__file__).resolve().parents[3]
CPU, WORLDS = ROOT / "configs/rlvr_config_async_cpu.yaml", ROOT / "configs/agentic_frozen_lake_async_cpu.yaml"
ENGINE = "actor_infer.strategy_args.strategy_config"
SIZES = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256,
    "vocab_size": 64, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip


def model_in(folder: Path, *, added: int = 0, rows: int = 64, **changes) -> Path:
    """A model as its files tell of it: a vocabulary of 60 with `added` tokens behind, weights of which the header is
    there."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in {**SIZES, **changes}.items() if v is not None}))
    tokens = [{"id": 60 + i, "content": f"<{i}>"} for i in range(added)]
    vocabulary = {f"t{i}": i for i in range(60)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": tokens}))
    entry = {"model.embed_tokens.weight": {"dtype": "F32", "shape": [rows, 128], "data_offsets": [0, 0]}}
    header = json.dumps(entry).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return folder


def refused(*overrides, config=CPU) -> list[str]:
    try:
        check_supported(config, overrides)
    except ConfigError as error:
        return [str(d) for d in error.diagnostics if d.is_error]
    return []


def only(*overrides, config=CPU) -> str:
    (problem,) = refused(*overrides, config=config)
    return problem


def test_a_model_that_fits_is_accepted(tmp_path):
    assert refused(f"pretrain={model_in(tmp_path / 'm', added=4)}") == []


def test_rows_longer_than_the_positions_of_the_model_are_refused_where_a_length_was_written(tmp_path):
    model = f"pretrain={model_in(tmp_path / 'm')}"
    assert refused(model, "prompt_length=416") == []  # 96 + 416 = 512
    problem = only(model, "prompt_length=417")
    assert problem.startswith(f"{CPU}:11: error C203: response_length: 513 tokens, but the model has 512 positions")
    assert "shorten prompt_length or response_length, or, if it was trained for more, raise max_pos" in problem
    problem = only(model, "sequence_length=513", "response_length=null")
    assert problem.startswith("<override sequence_length=513>: error C203: sequence_length: 513 tokens")
    problem = only(model, "sequence_length=600", config=WORLDS)
    assert "sequence_length: 600 tokens, but the model has 512 positions" in problem and "; use 512, or" in problem


def test_the_engines_own_limit_is_held_against_the_model_as_the_engine_does_it(tmp_path):
    model = f"pretrain={model_in(tmp_path / 'm')}"
    assert f"{ENGINE}.max_model_len: 600 tokens, but the model has 512" in only(model, f"{ENGINE}.max_model_len=600")
    sglang = (model, "actor_infer.strategy_args={strategy_name: sglang}")
    assert refused(*sglang, f"{ENGINE}.context_length=510") == []
    assert "511 tokens and 2 of SGLang's own" in only(*sglang, f"{ENGINE}.context_length=511")
    assert "use vllm, or shorten sequence_length to 510" in only(*sglang, "prompt_length=416")


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 2048),
        ({"type": "linear", "factor": 2}, 1024),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 512),
        ({"rope_type": "default", "rope_theta": 1e6}, 512),
    ],
)
def test_scaled_positions_count_as_engines_count_them(tmp_path, scaling, positions):
    key = "rope_scaling" if "type" in scaling else "rope_parameters"
    model = f"pretrain={model_in(tmp_path / 'm', **{key: scaling})}"
    assert refused(model, f"prompt_length={positions - 96}") == []
    assert f"the model has {positions} positions" in only(model, f"prompt_length={positions - 95}")


def test_a_tokenizer_larger_than_the_vocabulary_is_refused_wherever_its_tokens_are_listed(tmp_path):
    def problem(**files):
        folder = model_in(tmp_path / "m", added=4)
        for name, text in files.items():
            (folder / name.replace("_json", ".json").replace("_txt", ".txt")).write_text(text)
        return refused(f"pretrain={folder}")

    assert problem() == [] and problem(added_tokens_json='{"<pad>": 63}') == []
    (found,) = problem(added_tokens_json='{"<pad>": 64}')
    assert "error C203: pretrain: the tokenizer of" in found and "has ids up to 64, " in found
    assert "embeddings of 64; use the tokenizer that the model was made with" in found
    (tmp_path / "m" / "added_tokens.json").unlink()
    assert problem(tokenizer_config_json='{"added_tokens_decoder": {"70": {"content": "<x>"}}}')
    (tmp_path / "m" / "tokenizer_config.json").unlink()
    assert (
        problem(tokenizer_json="{}", vocab_json='{"a": 64}')
        and problem(tokenizer_json="{}", vocab_json='{"a": 63}') == []
    )
    assert problem(tokenizer_json='{"model": {"vocab": [["a", 0.0]]}}', vocab_txt="a\n" * 65)
    assert "tokenizer.json is truncated or not JSON" in problem(tokenizer_json="{")[0]


def test_rows_of_the_embedding_count_where_they_are_fewer_and_the_tokenizer_is_the_policys(tmp_path):
    policy = model_in(tmp_path / "policy", added=4)
    assert "embeddings of 62" in only(f"pretrain={model_in(tmp_path / 'short', added=4, rows=62)}")
    teacher = model_in(tmp_path / "teacher", vocab_size=32, rows=32)
    role = f"{{strategy_args: {{strategy_name: megatron_infer}}, model_args: {{model_name_or_path: {teacher}}}}}"
    problem = only(f"pretrain={policy}", "algorithm.distill_coef=0.1", f"teacher={role}")
    assert "error C203: teacher.model_args.model_name_or_path: the tokenizer of" in problem


def test_a_teacher_with_another_vocabulary_is_refused_with_a_token_that_differs(tmp_path):
    policy, same, added, other = (model_in(tmp_path / name, added=n) for name, n in zip("psao", (2, 2, 4, 2)))
    found = json.loads((other / "tokenizer.json").read_text())
    vocabulary = found["model"]["vocab"]
    vocabulary["t7"], vocabulary["t8"] = 8, 7
    (other / "tokenizer.json").write_text(json.dumps(found))

    def said(model):
        ranks = f"{{strategy_args: {{strategy_name: megatron_infer}}, model_args: {{model_name_or_path: {model}}}}}"
        return refused(f"pretrain={policy}", "algorithm.distill_coef=0.1", f"teachers={{maths: {ranks}}}")

    assert said(policy) == said(same) == said(added) == []
    (problem,) = said(other)
    assert "error C203: teachers.maths.model_args.model_name_or_path: token 't7' has another id here than in" in problem
    assert problem.endswith("use a teacher with the policy's tokenizer")
    (other / "tokenizer.json").unlink()
    assert said(other) == [], "what has no tokenizer is taken to have the policy's"


def test_a_model_of_no_known_family_is_refused_with_the_families(tmp_path):
    problem = only(f"pretrain={model_in(tmp_path / 'm', architectures=['GPT2LMHeadModel'], num_attention_heads=None)}")
    assert "C203: pretrain:" in problem and "GPT2LMHeadModel" in problem and "LlamaForCausalLM" in problem
    problem = only(f"pretrain={model_in(tmp_path / 'm', rope_parameters={'rope_type': 'dynamic', 'factor': 2.0})}")
    assert "rope_type 'dynamic' is not supported" in problem


def test_a_quantised_model_is_refused_where_it_would_be_trained(tmp_path):
    quantised = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    problem = only(f"pretrain={model_in(tmp_path / 'm', quantization_config=quantised)}")
    assert problem.endswith("the model is quantised (quantization_config); convert it to bf16 first")


def test_heads_and_blocks_that_the_device_of_vllm_lacks_are_refused(tmp_path):
    model = f"pretrain={model_in(tmp_path / 'm', num_attention_heads=8)}"
    assert "attention for heads of 32, 64" in only(model) and "this model's are of 16" in only(model)
    assert refused(model, "actor_infer.strategy_args={strategy_name: hf_infer}") == []
    assert refused(model, "actor_train.device_mapping=[0]", "actor_infer.device_mapping=[1]") == []
    for size, device, fits in ((16, [], False), (32, [], True), (16, [1], True), (8, [1], False)):
        devices = ["actor_train.device_mapping=[0]", "actor_infer.device_mapping=[1]"] if device else []
        found = refused(f"{ENGINE}.block_size={size}", *devices)
        assert (not found) == fits and all(f"{ENGINE}.block_size: {size}: vLLM's attention on" in one for one in found)


def test_rows_longer_than_a_window_are_refused_with_the_engine_that_would_lose_tokens(tmp_path):
    window = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}
    model, engine = f"pretrain={model_in(tmp_path / 'm', **window)}", "actor_infer.strategy_args.strategy_name="
    problem = only(model, "actor_infer.strategy_args={strategy_name: hf_infer}")  # rows of 24 + 96 tokens
    assert "hf_infer loses tokens outside of a sliding window; the model's is 64 positions" in problem
    assert "rows have 120; use strategy_name: vllm" in problem and refused(model, f"{engine}vllm") == []
    shorter = ("prompt_length=24", "response_length=40", "actor_infer.strategy_args={strategy_name: hf_infer}")
    assert refused(model, *shorter) == []


def test_queries_that_are_not_compressed_are_refused_where_megatron_would_normalise_them(tmp_path, monkeypatch):
    sizes = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    sizes |= {"architectures": ["YoutuForCausalLM"], "model_type": "youtu", "num_key_value_heads": 4}
    engine = "actor_infer.strategy_args={strategy_name: hf_infer}"
    whole, compressed = (
        model_in(tmp_path / name, q_lora_rank=rank, **sizes) for name, rank in (("a", None), ("b", 24))
    )
    for release, refusals in (("0.16.1", 0), ("0.18.0", 0), ("0.19.2", 1)):
        monkeypatch.setattr(model_fit, "is_from", partial(is_from, release_of={"megatron-core": release}.get))
        found = refused(f"pretrain={whole}", engine)
        assert len(found) == refusals and all('pip install "megatron-core<0.19"' in one for one in found), release
        assert refused(f"pretrain={compressed}", engine) == []


def test_a_family_that_an_engine_cannot_serve_is_refused_with_the_reason(tmp_path):
    nemotron = {"architectures": ["NemotronForCausalLM"], "hidden_act": "relu2", "norm_eps": 1e-5}
    model, engine = f"pretrain={model_in(tmp_path / 'm', **nemotron)}", "actor_infer.strategy_args="
    problem = only(model, f"{engine}{{strategy_name: hf_infer}}")
    assert "error C203: pretrain: hf_infer cannot serve NemotronForCausalLM (" in problem
    assert "do not hand its cache to their attention; use strategy_name: vllm" in problem
    assert refused(model, f"{engine}{{strategy_name: vllm}}") == []


def test_padded_rows_of_a_model_that_reads_images_are_refused_before_it_starts(tmp_path):
    sees = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_config": {"depth": 2}}
    given = (f"pretrain={model_in(tmp_path / 'm', **sees)}", "actor_infer.strategy_args={strategy_name: hf_infer}")
    problem = only(*given)
    assert "actor_train.micro_batching: fixed, but " in problem and problem.endswith("with max_tokens_per_microbatch")
    assert refused(*given, "actor_train.micro_batching=packed", "actor_train.max_tokens_per_microbatch=1024") == []


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_model_that_reads_images_is_refused_with_engines_that_are_not_shown_any(tmp_path, engine):
    sees = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_config": {"depth": 2}}
    model = f"pretrain={model_in(tmp_path / 'm', **sees)}"
    problem = only(model, f"actor_infer.strategy_args={{strategy_name: {engine}}}")
    assert "error C203: pretrain: " in problem and problem.endswith("; use strategy_name: hf_infer")
    assert f"ConditionalGeneration reads images, and {ENGINE_TRAITS[engine].title} shows it none: " in problem
    settings = EngineSettings(model_folder=str(tmp_path / "m"), dtype="fp32", device="cpu", max_model_len=64)
    with pytest.raises(ValueError, match="reads images, and .* shows it none"):  # of eval, which asks no config
        create_engine(engine, settings)
    found = refused(model, "actor_infer.strategy_args={strategy_name: hf_infer}")
    assert not [one for one in found if "shows it none" in one]


def test_the_tables_are_those_of_the_installed_vllm():
    """Read from its source: importing it takes seconds."""
    spec = find_spec("vllm")
    if spec is None:
        pytest.skip("vllm is not installed")
    backends = Path(spec.submodule_search_locations[0]) / "v1/attention/backends"

    def returned(file, function):
        """What the function of a class in a file returns, as written; the last statement counts."""
        for node in ast.walk(ast.parse((backends / file).read_text())):
            if isinstance(node, ast.FunctionDef) and node.name == function:
                return ast.unparse(node.body[-1].value)
        raise AssertionError(f"{file} has no {function}")

    assert ast.literal_eval(returned("cpu_attn.py", "get_supported_head_sizes")) == list(
        ENGINE_TRAITS["vllm"].cpu_head_sizes
    )
    blocks = "get_supported_kernel_block_sizes"
    multiples = ENGINE_TRAITS["vllm"].block_multiples
    assert returned("cpu_attn.py", blocks) == f"[MultipleOf({multiples['cpu']})]"
    for file in ("flash_attn.py", "triton_attn.py", "flex_attention.py"):
        assert returned(file, blocks) == f"[MultipleOf({multiples['cuda']})]"


def test_an_adapter_instead_of_a_model_is_refused_with_the_commands_that_merge_it(tmp_path):
    base, adapter = model_in(tmp_path / "base"), tmp_path / "adapter"
    adapter.mkdir()
    described = {"peft_type": "LORA", "base_model_name_or_path": str(base)}
    (adapter / "adapter_config.json").write_text(json.dumps(described))
    problem = only(f"pretrain={adapter}")
    assert f"C203: pretrain: {adapter} holds a LoRA adapter of {base}, not a model; merge it with: " in problem
    assert f"roll-async convert {base} {adapter}-megatron --adapter-path {adapter} && roll-async convert " in problem
    (adapter / "config.json").write_text(json.dumps(SIZES))  # some trainers write the base model's beside it
    assert only(f"pretrain={adapter}") == problem
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen2.5-0.5B"}')
    assert f"hf download Qwen/Qwen2.5-0.5B --local-dir {adapter}-base && roll-async convert {adapter}-base" in only(
        f"pretrain={adapter}"
    )
    (adapter / "model.safetensors").write_bytes(b"")
    assert "adapter" not in str(refused(f"pretrain={adapter}")).replace(str(adapter), "")


def test_a_model_of_a_hub_is_checked_once_it_is_here(tmp_path, monkeypatch):
    data = tmp_path / "rows.jsonl"
    data.write_text("{}\n")
    folder = model_in(tmp_path / "snapshot")
    monkeypatch.setattr("roll_async.launch.checks.inputs.model_folder", lambda key, model: str(folder))
    files = [f"{key}.file_name={data}" for key in ("actor_train.data_args", "validation.data_args")]
    typed = ["--config", str(CPU), "pretrain=nobody/nothing", *files]
    assert prepare(typed, "rlvr").pretrain == str(folder)
    with pytest.raises(ConfigError, match="C203: response_length: 696 tokens, but the model has 512 positions"):
        prepare([*typed, "prompt_length=600"], "rlvr")
