"""The name tables: both spellings resolve, nothing is named twice, unknown names and undescribed models are refused."""

import re
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import synthetic

from roll_async.checkpoint.folders.hf_config import HfConfig
from roll_async.checkpoint.hf_names.families import FAMILIES, family_of, is_tied
from roll_async.checkpoint.hf_names.table import ParameterRow, Transform, shape_of
from roll_async.checkpoint.hf_names.value_head import as_critic, language_model
from roll_async.checkpoint.rotary import Rotary
from roll_async.checkpoint.tower import tower_of, tower_shapes
from roll_async.checkpoint.transforms import DeltaHeads, HeadLayout, rows_of_hf, shard, to_hf, to_megatron, unshard

ARCHITECTURES = list(synthetic.CONFIGS)
PAGES = Path(__file__).resolve().parents[3] / "docs_roll" / "models"


def parameters(architecture):
    config = HfConfig(synthetic.config_of(architecture), "config.json")
    family = family_of(architecture)
    return family, list(family.parameters(shape_of(3, family.fields(config))))


def test_every_family_has_a_synthetic_model():
    assert {a for family in FAMILIES for a in family.architectures} == set(ARCHITECTURES)


def test_every_family_has_a_page_with_a_certificate_that_holds():
    """`roll-async certify FAMILY --pages docs_roll/models` makes it."""
    assert {path.stem for path in PAGES.glob("*.md")} == {family.name for family in FAMILIES}
    for family in FAMILIES:
        page = (PAGES / f"{family.name}.md").read_text()
        assert "All checks hold." in page and f"| check | {' | '.join(family.tiny)} |" in page, family.name
        checked = re.findall(r"^\| (.*?) \|", page, re.M)[1:]
        experts = any(row.is_expert for row in family.rows)
        assert len(checked) == (21 if experts else 19 if family.reads_images else 16) and "an engine" in checked[-1], (
            family.name,
            checked,
        )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_both_spellings_of_a_parameter_resolve_to_its_hf_names(architecture):
    family, matches = parameters(architecture)
    for match in matches:
        assert family.match(match.name).hf_names == match.hf_names
        assert family.match(match.te_name).hf_names == match.hf_names


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_name_is_used_twice(architecture):
    _, matches = parameters(architecture)
    hf = [name for match in matches for name in match.hf_names]
    assert len(hf) == len(set(hf))
    assert len(matches) == len({match.name for match in matches}) == len({match.te_name for match in matches})


@pytest.mark.parametrize(
    ("architecture", "name", "hf"),
    [
        ("Qwen3", "{L}.self_attention.linear_qkv.layer_norm_weight", "{H}.input_layernorm.weight"),
        ("Qwen3Moe", "{L}.mlp.experts.linear_fc2.weight5", "{H}.mlp.experts.5.down_proj.weight"),
        ("Qwen3Moe", "{L}.mlp.experts.local_experts.5.linear_fc2.weight", "{H}.mlp.experts.5.down_proj.weight"),
        ("Mixtral", "{L}.mlp.router.weight", "{H}.block_sparse_moe.gate.weight"),
        ("GptOss", "{L}.mlp.experts.linear_fc1.bias5", "{H}.mlp.experts.5.gate_up_proj_bias"),
        ("GptOss", "{L}.self_attention.core_attention.softmax_offset", "{H}.self_attn.sinks"),
        ("Olmo2", "{L}.post_self_attn_layernorm.weight", "{H}.post_attention_layernorm.weight"),
        ("Nemotron", "{L}.mlp.linear_fc1.layer_norm_bias", "{H}.post_attention_layernorm.bias"),
        ("Qwen3_5", "{L}.self_attention.in_proj.layer_norm_weight", "{H}.input_layernorm.weight"),
        ("Qwen3_5", "{L}.self_attention.norm_weight", "{H}.linear_attn.norm.weight"),
        ("DeepseekV3", "{L}.mlp.router.expert_bias", "{H}.mlp.gate.e_score_correction_bias"),
        ("DeepseekV3", "{L}.self_attention.linear_kv_up_proj.layer_norm_weight", "{H}.self_attn.kv_a_layernorm.weight"),
    ],
)  # fmt: skip
def test_names_that_are_easily_got_wrong(architecture, name, hf):
    family = family_of(f"{architecture}ForCausalLM")
    assert family.match(name.format(L="decoder.layers.2")).hf_names == (hf.format(H="model.layers.2"),)


@pytest.mark.parametrize(
    "name",
    ["decoder.layers.0.mlp.linear_fc3.weight", "decoder.layers.x.mlp.router.weight", "decoder.layers.0.mlp.weight1"],
)  # fmt: skip
def test_an_unknown_megatron_name_is_refused_by_name(name):
    with pytest.raises(ValueError, match=name):
        family_of("Qwen3MoeForCausalLM").match(name)


def test_an_unknown_architecture_names_the_known_ones():
    with pytest.raises(ValueError, match=r"GptBigCodeForCausalLM .* Qwen2ForCausalLM"):
        family_of("GptBigCodeForCausalLM")


@pytest.mark.parametrize(
    ("architecture", "changes", "problem"),
    [
        ("LlamaForCausalLM", {"attention_bias": True}, "attention_bias=True is not supported"),
        ("Gemma3ForCausalLM", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 is not supported"),
        ("GptOssForCausalLM", {"swiglu_alpha": 1.0}, "swiglu_alpha=1.0 is not supported, only 1.702 is"),
        ("Olmo2ForCausalLM", {"attention_bias": True}, "attention_bias=True is not supported"),
        ("NemotronForCausalLM", {"mlp_bias": True}, "mlp_bias=True is not supported"),
        ("OlmoeForCausalLM", {"clip_qkv": 8.0}, "clip_qkv=8.0 is not supported"),
        ("MiniMaxM2ForCausalLM", {"rotary_dim": 12}, "rotary_dim=12 is not supported, only 16"),
        ("DeepseekV3ForCausalLM", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("DeepseekV3ForCausalLM", {"num_experts_per_tok": 3, "topk_group": 2}, "twice topk_group"),
        ("MixtralForCausalLM", {"num_local_experts": "many"}, "num_local_experts is 'many', expected an integer"),
        ("MixtralForCausalLM", {"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
        ("Qwen2MoeForCausalLM", {"mlp_only_layers": 1}, "mlp_only_layers is 1, expected a list"),
        ("Ernie4_5ForCausalLM", {"use_bias": True}, "use_bias=True is not supported"),
        ("SeedOssForCausalLM", {"attention_out_bias": True}, "attention_out_bias=True is not supported"),
        ("SmolLM3ForCausalLM", {"use_sliding_window": True}, "use_sliding_window=True is not supported"),
    ],
)  # fmt: skip
def test_a_model_that_the_rows_do_not_describe_is_refused(architecture, changes, problem):
    config = HfConfig(synthetic.config_of(architecture, **changes), "config.json")
    with pytest.raises(ValueError, match=problem):
        family_of(architecture).fields(config)


@pytest.mark.parametrize(
    ("changes", "windowed"),
    [
        ({"use_sliding_window": False, "sliding_window": 8}, None),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, [True] * 3),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, [False, False, True]),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, None),
        ({"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "full_attention"],
          "use_sliding_window": True, "max_window_layers": 3}, [True, False, False]),
    ],
)  # fmt: skip
def test_a_window_is_in_the_layers_that_the_config_says(changes, windowed):
    config = HfConfig(synthetic.config_of("Qwen2ForCausalLM", **changes), "config.json")
    fields = family_of("Qwen2ForCausalLM").fields(config)
    assert fields.get("window_size") == (None if windowed is None else (7, 0))
    every = windowed is None or all(windowed)
    assert fields.get("window_attn_skip_freq") == (None if every else [int(seen) for seen in windowed])


def test_older_files_of_gemma_give_the_pattern_of_windows_and_the_base_of_their_rotation():
    given = {"sliding_window_pattern": 3, "layer_types": None, "rope_local_base_freq": 10_000.0, "rope_theta": 1e6}
    config = HfConfig(synthetic.config_of("Gemma3ForCausalLM", **given), "config.json")
    assert family_of("Gemma3ForCausalLM").fields(config)["window_attn_skip_freq"] == [1, 1, 0]
    assert (Rotary.of(config).base, Rotary.local(config).base) == (1e6, 1e4)


def test_windowed_layers_of_olmo_are_not_scaled_where_the_file_gives_the_scaling_alone():
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
    given = {"rope_parameters": None, "rope_scaling": scaling, "rope_theta": 5e5, "layer_types": None}
    config = HfConfig(synthetic.config_of("Olmo3ForCausalLM", **given, num_hidden_layers=4), "config.json")
    family = family_of("Olmo3ForCausalLM")
    local = Rotary.local(config, scaled=family.scaled_windows)
    assert local is not None and (local.kind, local.base, Rotary.of(config).kind) == ("default", 5e5, "yarn")
    assert Rotary.local(config) is None, "of other families all layers rotate alike"
    assert family.fields(config)["window_attn_skip_freq"] == [1, 1, 1, 0]


def test_windowed_layers_whose_rotation_is_written_twice_rotate_as_the_others():
    alike = {"rope_type": "default", "rope_theta": 5e5}
    given = {"rope_parameters": {"full_attention": alike, "sliding_attention": alike}}
    assert Rotary.local(HfConfig(synthetic.config_of("Olmo3ForCausalLM", **given), "config.json")) is None


def test_layers_without_experts_are_told_apart():
    config = HfConfig(synthetic.config_of("Qwen2MoeForCausalLM", num_hidden_layers=4, decoder_sparse_step=2), "c")
    assert shape_of(4, family_of("Qwen2MoeForCausalLM").fields(config)).moe_layers == (False, False, False, True)


DELTA = DeltaHeads(num_keys=2, values_per_key=3, key_size=4, value_size=5)
HEADS = HeadLayout(num_groups=2, heads_per_group=3, head_size=4, delta=DELTA)


def hf_parts(row):
    if row.transform.groups_heads:
        rows = [sum(of_tensor) for of_tensor in rows_of_hf(row, HEADS)]
    else:
        rows = [24 // len(row.hf)] * len(row.hf)
    return [torch.randn(n, 8) for n in rows]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    "row",
    [
        ParameterRow(megatron="m", hf=("a",), tp_dim=0),
        ParameterRow(megatron="m", hf=("a",), tp_dim=1),
        ParameterRow(megatron="m", hf=("a",)),
        ParameterRow(megatron="m", hf=("q", "k", "v"), transform=Transform.QKV, tp_dim=0),
        ParameterRow(megatron="m", hf=("qkv",), transform=Transform.QKV, tp_dim=0),
        ParameterRow(megatron="m", hf=("gate", "up"), transform=Transform.GATE_UP, tp_dim=0),
        ParameterRow(megatron="m", hf=("gate_up",), transform=Transform.GATE_UP, tp_dim=0),
        ParameterRow(megatron="m", hf=("q", "k", "v"), transform=Transform.GATED_QKV, tp_dim=0),
        ParameterRow(megatron="m", hf=("qkv", "z", "b", "a"), transform=Transform.DELTA_INPUT, tp_dim=0),
        ParameterRow(megatron="m", hf=("qkvz", "ba"), transform=Transform.DELTA_GROUPED, tp_dim=0),
        ParameterRow(megatron="m", hf=("qkv",), transform=Transform.DELTA_QKV, tp_dim=0),
        ParameterRow(megatron="m", hf=("a",), transform=Transform.TRANSPOSED),
        ParameterRow(megatron="m", hf=("gate_up",), transform=Transform.IN_TURN),
    ],
    ids=lambda row: f"{row.transform.value}-{len(row.hf)}-{row.tp_dim}",
)
def test_merging_and_sharding_are_undone_bit_for_bit(row, size):
    parts = hf_parts(row)
    full = to_megatron(row, parts, HEADS)
    shards = [shard(row, full, rank=rank, size=size) for rank in range(size)]
    again = to_hf(row, unshard(row, shards), HEADS)
    assert all(torch.equal(a, b) for a, b in zip(parts, again, strict=True))
    if row.tp_dim is not None:
        assert shards[0].shape[row.tp_dim] * size == full.shape[row.tp_dim]


def test_a_rank_holds_its_part_of_gate_and_of_up():
    row = ParameterRow(megatron="m", hf=("gate", "up"), transform=Transform.GATE_UP, tp_dim=0)
    gate, up = torch.arange(4.0)[:, None], 10 + torch.arange(4.0)[:, None]
    mine = shard(row, to_megatron(row, [gate, up], HEADS), rank=1, size=2)
    assert mine[:, 0].tolist() == [2, 3, 12, 13]


def test_columns_of_gate_and_of_up_in_turn_become_rows_of_gate_over_those_of_up():
    row = ParameterRow(megatron="m", hf=("gate_up",), transform=Transform.IN_TURN)
    matrix = torch.tensor([[1.0, 10, 2, 20], [3, 30, 4, 40]])
    assert to_megatron(row, [matrix], HEADS).tolist() == [[1, 3], [2, 4], [10, 30], [20, 40]]
    assert to_megatron(row, [matrix[0]], HEADS).tolist() == [1, 2, 10, 20], "a bias"


def test_a_group_of_heads_keeps_its_queries_key_and_value_together():
    row = ParameterRow(megatron="m", hf=("q", "k", "v"), transform=Transform.QKV, tp_dim=0)
    heads = HeadLayout(num_groups=2, heads_per_group=2, head_size=1)
    parts = [torch.tensor(x)[:, None] for x in ([0.0, 1, 2, 3], [10.0, 11], [20.0, 21])]
    assert to_megatron(row, parts, heads)[:, 0].tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


def test_a_key_head_of_a_delta_net_keeps_all_that_its_input_is_projected_to_together():
    delta = DeltaHeads(num_keys=2, values_per_key=2, key_size=1, value_size=1)
    heads = HeadLayout(num_groups=1, heads_per_group=2, head_size=1, delta=delta)
    qkv, z, b, a = [0.0, 1, 10, 11, 20, 21, 22, 23], [30.0, 31, 32, 33], [40.0, 41, 42, 43], [50.0, 51, 52, 53]
    row = ParameterRow(megatron="m", hf=("qkv", "z", "b", "a"), transform=Transform.DELTA_INPUT, tp_dim=0)
    whole = to_megatron(row, [torch.tensor(x)[:, None] for x in (qkv, z, b, a)], heads)
    assert whole[:10, 0].tolist() == [0, 10, 20, 21, 30, 31, 40, 41, 50, 51], "of the first of two"
    grouped = ParameterRow(megatron="m", hf=("qkvz", "ba"), transform=Transform.DELTA_GROUPED, tp_dim=0)
    of_next = [[0.0, 10, 20, 21, 30, 31, 1, 11, 22, 23, 32, 33], [40.0, 41, 50, 51, 42, 43, 52, 53]]
    assert torch.equal(to_megatron(grouped, [torch.tensor(x)[:, None] for x in of_next], heads), whole)


def test_queries_and_their_gates_are_apart_within_a_group_of_heads():
    row = ParameterRow(megatron="m", hf=("q", "k", "v"), transform=Transform.GATED_QKV, tp_dim=0)
    heads = HeadLayout(num_groups=1, heads_per_group=2, head_size=2)
    parts = [torch.tensor(x)[:, None] for x in ([0.0, 1, 50, 51, 2, 3, 52, 53], [10.0, 11], [20.0, 21])]
    assert to_megatron(row, parts, heads)[:, 0].tolist() == [0, 1, 2, 3, 50, 51, 52, 53, 10, 11, 20, 21]


def test_the_tower_of_a_model_has_the_same_names_on_both_sides_and_the_sizes_of_the_text_are_found():
    """In a section of their own, as newer files have them, and at the top, as older ones do."""
    text = {"hidden_size": 16, "num_hidden_layers": 3, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 0]}}
    top = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "tie_word_embeddings": None}
    nested = HfConfig({**top, "text_config": {**text, "tie_word_embeddings": True}}, "config.json")
    flat = HfConfig({**top, **text, "tie_word_embeddings": True}, "config.json")
    for config in (nested, flat):
        assert config.integer("num_hidden_layers") == 3 and config.flag("tie_word_embeddings")
        rotary = Rotary.of(config)
        assert (rotary.kind, rotary.sections) == ("default", (1, 1, 0)) and len(rotary.frequencies(4, 99)) == 2
        with pytest.raises(ValueError, match=r"mrope_section=\[1, 1, 0\] are not the 4 frequencies of a head"):
            rotary.frequencies(8, 99)
    family = family_of(nested.architecture())
    assert family.match("visual.blocks.3.attn.qkv.weight").hf_names == ("visual.blocks.3.attn.qkv.weight",)
    with pytest.raises(ValueError, match="no Hugging Face name"):
        family_of("Qwen2ForCausalLM").match("visual.blocks.3.attn.qkv.weight")


def test_a_file_that_does_not_say_whether_the_output_layer_is_the_embedding_means_what_transformers_takes_it_for():
    transformers = pytest.importorskip("transformers")
    for family in FAMILIES:
        for architecture in family.architectures:
            expected = getattr(transformers, architecture).config_class().tie_word_embeddings
            for ending in ("ForCausalLM", "ForSequenceClassification"):
                name = architecture.replace("ForCausalLM", ending)
                assert is_tied(HfConfig({"architectures": [name]}, "config.json")) == expected, name
    assert not is_tied(HfConfig({"architectures": ["Gemma3ForCausalLM"], "tie_word_embeddings": False}, "config.json"))


@pytest.mark.slow
def test_the_shapes_of_the_tower_are_those_of_transformers():
    pytest.importorskip("transformers")
    for vision in (
        {"depth": 3},
        {"hidden_size": 32, "num_heads": 2, "in_channels": 1, "patch_size": 6, "out_hidden_size": 48},
    ):
        config = HfConfig({"hidden_size": vision.get("out_hidden_size", 3584), "vision_config": vision}, "config.json")
        with torch.device("meta"):
            tower = tower_of(config, torch.bfloat16)
        theirs = {f"visual.{name}": tuple(x.shape) for name, x in tower.named_parameters()}
        assert tower_shapes(config) == theirs
    with pytest.raises(ValueError, match="out_hidden_size=3584, but hidden_size=16"):
        tower_of(HfConfig({"hidden_size": 16, "vision_config": {}}, "config.json"), torch.bfloat16)


def test_a_critic_that_reads_images_is_named_and_read_back():
    named = as_critic({"architectures": ["Qwen2_5_VLForConditionalGeneration"]})["architectures"]
    assert named == ["Qwen2_5_VLForSequenceClassification"]
    assert language_model(named[0]) == "Qwen2_5_VLForConditionalGeneration"
