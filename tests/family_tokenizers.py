"""Tokenizers shaped as those of model families: their special tokens and, compact, what their chat templates say.

The vocabulary is bytes, so every text can be said and tokens are easy to count. `ends` are the tokens that the family's
generation_config.json makes engines stop at; `save_family` writes a folder that says so.
"""

import json
from dataclasses import dataclass

_TOOL_LIST = "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
_GLM_THOUGHT = (
    "{%- set c = m.content or '' %}{%- set thought = m.reasoning_content or '' %}"
    "{%- if not thought and '</think>' in c %}"
    "{%- set thought = c.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{%- set c = c.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{%- if loop.index0 > ns.last and thought %}{{ '\n<think>' + thought.strip() + '</think>' }}"
    "{%- else %}{{ '\n<think></think>' }}{%- endif %}{%- if c.strip() %}{{ '\n' + c.strip() }}{%- endif %}"
)
_GLM_CALLS = (
    "{%- for call in m.tool_calls or [] %}{%- set call = call.function or call %}"
    "{{ '\n<tool_call>' + call.name + '\n' }}"
    "{%- for k, v in call.arguments.items() %}{{ '<arg_key>' + k + '</arg_key>\n<arg_value>' }}"
    "{{- v if v is string else v | tojson }}{{ '</arg_value>\n' }}{%- endfor %}{{ '</tool_call>' }}{%- endfor %}"
)
_GLM_4_5 = (
    "[gMASK]<sop>{%- if tools %}{{ '<|system|>\n# Tools\n<tools>\n' }}" + _TOOL_LIST + "{{ '</tools>' }}{%- endif %}"
    "{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{{ '<|user|>\n' + m.content }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{ '/nothink' }}{%- endif %}"
    "{%- elif m.role == 'assistant' %}{{ '<|assistant|>' }}"
    + _GLM_THOUGHT
    + _GLM_CALLS
    + "{%- elif m.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{%- endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{%- elif m.role == 'system' %}{{ '<|system|>\n' + m.content }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{ '\n<think></think>' }}{%- endif %}{%- endif %}"
)
_GLM_4 = (
    "[gMASK]<sop>{%- if tools %}{{ '<|system|>\n# Tools\n' }}" + _TOOL_LIST + "{%- endif %}"
    "{%- for m in messages %}{%- if m.role == 'assistant' and m.tool_calls %}{%- for call in m.tool_calls %}"
    "{{ '<|assistant|>' + call.function.name + '\n' }}{{ call.function.arguments | tojson }}{%- endfor %}"
    "{%- elif m.role == 'tool' %}{{ '<|observation|>\n' + m.content }}"
    "{%- else %}{{ '<|' + m.role + '|>\n' + m.content }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>' }}{%- endif %}"
)
_LLAMA_HEAD = "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}"
_LLAMA_3 = (
    "{{ bos_token }}{%- for m in messages %}" + _LLAMA_HEAD + "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
_LLAMA_3_1 = (
    "{{ bos_token }}{%- if messages[0].role == 'system' %}{%- set system = messages[0].content | trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\n\n' }}{%- if tools %}{{ 'Environment: ipython\n' }}"
    + _TOOL_LIST
    + "{%- endif %}{{ system + '<|eot_id|>' }}"
    "{%- for m in messages %}{%- if m.tool_calls %}"
    "{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{%- endif %}"
    "{%- set call = m.tool_calls[0].function %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{{ '{\"name\": \"' + call.name + '\", \"parameters\": ' }}{{ call.arguments | tojson }}{{ '}<|eot_id|>' }}"
    "{%- elif m.role == 'tool' %}{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' }}{{ m.content | tojson }}"
    "{{ '<|eot_id|>' }}{%- else %}" + _LLAMA_HEAD + "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
_QWEN_3 = (
    "{%- if tools %}{{ '<|im_start|>system\n' }}"
    "{%- if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{%- endif %}"
    "{{ '# Tools\n<tools>\n' }}" + _TOOL_LIST + "{{ '</tools><|im_end|>\n' }}"
    "{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}"
    "{%- endif %}{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- if m.role == 'user' or m.role == 'system' and not loop.first %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- elif m.role == 'assistant' %}{%- set c = m.content or '' %}{%- set thought = m.reasoning_content or '' %}"
    "{%- if not thought and '</think>' in c %}"
    "{%- set thought = c.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{%- set c = c.split('</think>')[-1].lstrip('\n') %}{%- endif %}{{ '<|im_start|>assistant\n' }}"
    "{%- if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + c.lstrip('\n') }}{%- else %}{{ c }}{%- endif %}"
    "{%- for call in m.tool_calls or [] %}{%- if not loop.first or c %}{{ '\n' }}{%- endif %}"
    "{%- set call = call.function or call %}"
    '{{ \'<tool_call>\n{"name": "\' + call.name + \'", "arguments": \' }}'
    "{{- call.arguments if call.arguments is string else call.arguments | tojson }}{{ '}\n</tool_call>' }}"
    "{%- endfor %}{{ '<|im_end|>\n' }}"
    "{%- elif m.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{%- endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{%- endif %}"
    "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}"
)
_GEMMA = (
    "{{ bos_token }}{%- for m in messages %}{%- if m.role not in ['user', 'assistant'] %}"
    "{{ raise_exception('role not supported') }}{%- endif %}"
    "{%- set role = 'model' if m.role == 'assistant' else 'user' %}"
    "{{ '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{%- endif %}"
)
_DEEPSEEK_R1 = (
    "{{ bos_token }}{%- for m in messages %}{%- if m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
    "{%- elif m.role == 'assistant' %}{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] }}"
    "{{ '<｜end▁of▁sentence｜>' }}"
    "{%- else %}{{ m.content }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{%- endif %}"
)
_COHERE_2 = (
    "{{ bos_token }}{%- for m in messages %}"
    "{{ '<|START_OF_TURN_TOKEN|>' + ('<|CHATBOT_TOKEN|>' if m.role == 'assistant' else '<|USER_TOKEN|>') }}"
    "{%- if m.role == 'assistant' %}{{ '<|START_RESPONSE|>' + m.content + '<|END_RESPONSE|>' }}"
    "{%- else %}{{ m.content }}{%- endif %}{{ '<|END_OF_TURN_TOKEN|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>' }}{%- endif %}"
)
_PHI_3 = (
    "{%- for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{%- else %}{{ eos_token }}{%- endif %}"
)
_LLAMA_2 = (
    "{{ bos_token }}{%- for m in messages %}{%- if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{%- else %}{{ ' ' + m.content }}{%- if not loop.last %}{{ ' ' + eos_token }}{%- endif %}{%- endif %}{%- endfor %}"
)
"""With Mistral's older ones: no close after the last turn."""
_GLM_SPECIAL = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_GLM_ENDS = ("<|endoftext|>", "<|user|>", "<|observation|>")
_LLAMA_SPECIAL = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
    *("<|start_header_id|>", "<|end_header_id|>"),
)
_THOUGHT = ("<think>", "</think>")


@dataclass(frozen=True)
class Family:
    template: str | None
    special: tuple[str, ...]
    eos: str
    ends: tuple[str, ...] = ()
    """Of generation_config.json."""
    plain: tuple[str, ...] = ()
    """Added tokens that are not special."""
    bos: str | None = None
    adds_bos: bool = False
    """The tokenizer itself puts `bos` before each text."""
    strips_right: tuple[str, ...] = ()
    """Special tokens that take the white space after them away."""


FAMILIES = {
    "glm-4": Family(_GLM_4, _GLM_SPECIAL, "<|endoftext|>", _GLM_ENDS),
    "glm-4.5": Family(_GLM_4_5, _GLM_SPECIAL, "<|endoftext|>", _GLM_ENDS, (*_THOUGHT, "<tool_call>", "</tool_call>")),
    "llama-3": Family(
        _LLAMA_3, _LLAMA_SPECIAL, "<|eot_id|>", ("<|end_of_text|>", "<|eot_id|>"), (), "<|begin_of_text|>", True
    ),
    "llama-3.1": Family(
        *(_LLAMA_3_1, _LLAMA_SPECIAL, "<|eot_id|>", ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")),
        *((), "<|begin_of_text|>", True),
    ),
    "qwen-3": Family(
        *(_QWEN_3, ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "<|im_end|>", ("<|im_end|>", "<|endoftext|>")),
        (*_THOUGHT, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    ),
    "gemma": Family(
        *(_GEMMA, ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"), "<eos>", ("<eos>", "<end_of_turn>")),
        *((), "<bos>", True),
    ),
    "deepseek-r1": Family(
        *(_DEEPSEEK_R1, ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")),
        *("<｜end▁of▁sentence｜>", ("<｜end▁of▁sentence｜>",), _THOUGHT, "<｜begin▁of▁sentence｜>", True),
    ),
    "cohere-2": Family(
        _COHERE_2,
        (
            *("<PAD>", "<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>"),
            *("<|CHATBOT_TOKEN|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        ),
        *("<|END_OF_TURN_TOKEN|>", ("<|END_OF_TURN_TOKEN|>",), (), "<BOS_TOKEN>", True),
    ),
    "phi-3": Family(
        *(_PHI_3, ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), "<|endoftext|>"),
        ("<|endoftext|>", "<|assistant|>", "<|end|>"),
        strips_right=("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    ),
    "llama-2": Family(_LLAMA_2, ("<unk>", "<s>", "</s>"), "</s>", ("</s>",), (), "<s>", True),
}


def make_family(name, template=None):
    """The tokenizer of a family; with another template than its own on request."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    family = FAMILIES[name]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(
        [
            AddedToken(mark, special=True, normalized=False, rstrip=mark in family.strips_right)
            for mark in family.special
        ]
    )
    inner.add_tokens([AddedToken(word, special=False, normalized=False) for word in family.plain])
    if family.adds_bos:
        inner.post_processor = processors.TemplateProcessing(
            single=f"{family.bos} $A", special_tokens=[(family.bos, inner.token_to_id(family.bos))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=family.eos, pad_token=family.eos, bos_token=family.bos
    )
    tokenizer.chat_template = template or family.template
    return tokenizer


def end_ids_of(name, tokenizer):
    """What engines stop at, by generation_config.json."""
    return tuple(tokenizer.convert_tokens_to_ids(mark) for mark in FAMILIES[name].ends)


def save_family(name, folder, *, template=None, config=None, generation=None):
    """Tokenizer, config.json and generation_config.json. `config`, `generation`: their fields besides, or in place of,
    `eos_token_id`. Returns the tokenizer.
    """
    tokenizer = make_family(name, template)
    tokenizer.save_pretrained(folder)
    ends = list(end_ids_of(name, tokenizer))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": ends, **(config or {})}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends, **(generation or {})}))
    return tokenizer
