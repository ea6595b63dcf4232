"""A tokenizer is proved when it is loaded: what it decodes is what it encoded."""

import json
import sys
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from roll_async.agents.messages import Message
from roll_async.agents.rendering import TemplateRenderer
from roll_async.commands.demo import assets
from roll_async.prompts.tokenizer import ChatEncoder, load_tokenizer, lost_by, told, unread

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
import make_agentic_assets

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = "{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endfor %}"
ASCII = [chr(c) for c in (10, *range(32, 127))]
QWEN = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}


def saved(folder, core, template=None, config=None, **options):
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", **options)
    fast.chat_template = template
    fast.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config or {}))
    return str(folder)


def byte_level():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return core


def words_of_pieces(scheme):
    """As Llama's: a space is part of a piece, and one stands before the text."""
    names = ["<unk>", *(c.replace(" ", "\u2581") for c in ASCII)]
    core = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(names)}, [], unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    core.decoder = decoders.Metaspace(prepend_scheme="never")
    core.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return core


def characters():
    core = tokenizers.Tokenizer(models.WordLevel({n: i for i, n in enumerate(["<unk>", *ASCII])}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return core


@pytest.mark.parametrize("core", [byte_level(), characters(), words_of_pieces("first"), words_of_pieces("always")])
@pytest.mark.parametrize("template", [None, CHATML, LLAMA])
def test_a_tokenizer_that_gives_back_what_it_was_given_is_loaded(tmp_path, core, template):
    assert load_tokenizer(saved(tmp_path, core, template)).eos_token == "<|im_end|>"


def test_a_tokenizer_that_its_model_s_family_reads_otherwise_is_refused(tmp_path):
    """transformers takes the class of the model's family, whatever the folder of the tokenizer names."""
    folder = saved(tmp_path, characters(), CHATML, QWEN)
    with pytest.raises(ValueError, match="the tokenizer of .* loses spaces, line breaks: .* name a model whose"):
        load_tokenizer(folder)
    assert load_tokenizer(saved(tmp_path, byte_level(), CHATML, QWEN)).eos_token == "<|im_end|>"


def test_what_is_lost_is_named(tmp_path):
    core = words_of_pieces("first")
    core.normalizer = normalizers.Replace(Regex(" {2,}"), " ")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")
    assert lost_by(fast) == ["spaces"]
    core.normalizer = normalizers.Replace("\n", " ")
    assert "line breaks" in lost_by(transformers.PreTrainedTokenizerFast(tokenizer_object=core))
    core.normalizer = normalizers.Lowercase()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")
    fast.chat_template = LLAMA
    (lost,) = lost_by(fast)
    assert lost.startswith("the template's '[INST] 1 [/INST]")


@pytest.mark.slow
def test_the_demos_tokenizers_keep_all_text_beside_the_demos_models(tmp_path):
    config = {**QWEN, "vocab_size": make_agentic_assets.VOCABULARY}
    make_agentic_assets.make_tokenizer(tmp_path / "agentic")
    (tmp_path / "agentic" / "config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(str(tmp_path / "agentic"))
    for text in (
        "<|im_start|>user\n_P_\n_O_G<|im_end|>\n",
        "12 + 7 =\t2\u00e9, Up  the hill",
        make_agentic_assets.CALL,
    ):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assets.make_tokenizer(tmp_path / "demo")
    (tmp_path / "demo" / "config.json").write_text(json.dumps(QWEN))
    tokenizer = load_tokenizer(str(tmp_path / "demo"))
    assert tokenizer("1+23=")["input_ids"] == [4, 13, 5, 6, 14], "as the models of the demo know them"


ASKING = "{% if not date_string is defined %}{% set date_string = 'today' %}{% endif %}{{ date_string }}"
VARIABLES = [
    ("{{ messages }}{{ tools }}{{ documents }}{{ bos_token }}{{ strftime_now('%Y') }}{{ raise_exception }}", set()),
    ("{% if enable_thinking is defined and enable_thinking %}{{ namespace(a=1) }}{% endif %}", {"enable_thinking"}),
    (ASKING, {"date_string"}),
    ("{% set effort = reasoning_effort | default('low') %}{{ effort }}", {"reasoning_effort"}),
    ("{% for m in messages %}{% if m.x %}{% set role = m.x %}{% endif %}{{ role }}{% endfor %}", set()),
    ("{% generation %}{{ mode }}{% endgeneration %}{% for x in messages %}{% break %}{% endfor %}", {"mode"}),
]  # fmt: skip


@pytest.mark.parametrize(("template", "known"), VARIABLES, ids=[",".join(sorted(k)) or "none" for _, k in VARIABLES])
def test_a_variable_that_the_template_does_not_read_is_refused_with_those_it_reads(tmp_path, template, known):
    tokenizer = load_tokenizer(saved(tmp_path, byte_level(), template, bos_token="<|im_start|>"), proves=False)
    tried = {"enable_thinking", "date_string", "reasoning_effort", "mode", "role", "effort", "messages", "bos_token"}
    assert tried - unread(tokenizer, "native", dict.fromkeys(tried)).keys() == known
    assert unread(tokenizer, "chatml", {"mode": 1})["mode"].endswith(
        "(chatml) reads no such variable; it reads none: remove it"
    )
    with pytest.raises(
        ValueError, match=f"template_kwargs.other: 7 has no effect.*{'or remove it' if known else 'none'}"
    ):
        told(tokenizer, "native", None, {"other": 7})


def test_what_is_told_reaches_prompts_and_turns_of_agents_alike(tmp_path):
    template = ASKING + "{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}"
    tokenizer = load_tokenizer(saved(tmp_path, byte_level(), template), proves=False)
    encoder, renderer = ChatEncoder(tokenizer, "native"), TemplateRenderer(tokenizer)
    told(tokenizer, "native", None, {"date_string": "26 Jul "})
    ((ids, _),) = encoder.render([[{"role": "user", "content": "hi"}]])
    assert tokenizer.decode(ids) == "26 Jul user: hi"
    assert renderer.render([Message(role="user", content="hi")], [], []).text == "26 Jul user: hi"
    assert renderer.encode("26 Jul user: hi").tolist() == list(ids)
