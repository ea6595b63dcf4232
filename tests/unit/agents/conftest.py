"""A tokenizer with a real chat template, and policies that say what they are told."""

import asyncio
import random
from array import array

import pytest

from roll_async.agents.messages import Message, TurnRequest
from roll_async.agents.rendering import TemplateRenderer
from roll_async.agents.session import Session, SessionOptions
from roll_async.schema import Completion, FinishReason, SamplingParams

QWEN = (
    "{%- if tools %}{{ '<|im_start|>system\n' }}{%- if messages[0].role == 'system' %}"
    "{{ messages[0].content }}{%- endif %}"
    "{{ '\n# Tools\n' }}{%- for tool in tools %}{{ tool | tojson }}{{ '\n' }}{%- endfor %}{{ '<|im_end|>\n' }}"
    "{%- elif messages[0].role == 'system' %}"
    "{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' or message.role == 'assistant' and not message.tool_calls %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- elif message.role == 'assistant' %}{{ '<|im_start|>assistant' }}"
    "{%- if message.content %}{{ '\n' + message.content }}{%- endif %}"
    "{%- for call in message.tool_calls %}{%- set call = call.function %}"
    '{{ \'\n<tool_call>\n{"name": "\' + call.name + \'", "arguments": \' }}{{ call.arguments | tojson }}'
    "{{ '}\n</tool_call>' }}{%- endfor %}{{ '<|im_end|>\n' }}"
    "{%- elif message.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{%- endif %}"
    "{{ '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{%- endif %}"
    "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
THINKING = (
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.role == 'assistant' %}{{ message.content.split('</think>')[-1] }}{%- else %}{{ message.content }}"
    "{%- endif %}{{ '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
TRIMMING = THINKING.replace("message.content.split('</think>')[-1]", "message.content | trim")


def make_tokenizer(template=QWEN):
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    from tokenizers import Regex, decoders, models, pre_tokenizers

    names = ["<pad>", "<|im_start|>", "<|im_end|>", *map(chr, (10, *range(32, 127)))]
    names += ["ab", "a b", "the", '{"', '": ']  # text that could be encoded in more than one way
    tokenizer = tokenizers.Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|im_end|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = template
    return fast


class ScriptedPolicy:
    """Samples the texts it is given, in order, encoded at random (as a policy does: not as the tokenizer would)."""

    closes = True
    """A turn ends with the end mark; else with a stop string."""

    def __init__(self, tokenizer, texts, delay_s=0.0):
        self._tokenizer, self._texts, self._delay_s = tokenizer, list(texts), delay_s
        self._rng = random.Random(0)
        self.requests, self.sampled, self.version = [], [], 0

    def _ids(self, text):
        ids, position = [], 0
        vocabulary = self._tokenizer.get_vocab()
        while position < len(text):
            fitting = [w for w in ("ab", "a b", "the", '{"', '": ') if text.startswith(w, position)]
            word = self._rng.choice(fitting) if fitting and self._rng.random() < 0.7 else text[position]
            ids.append(vocabulary[word])
            position += len(word)
        return ids

    async def generate(self, request, *, conversation, validation):
        self.requests.append(request)
        await asyncio.sleep(self._delay_s)
        text = self._texts.pop(0)
        if isinstance(text, Exception):
            raise text
        ids = array("i", self._ids(text) + [self._tokenizer.eos_token_id] * self.closes)
        reason = FinishReason.STOP
        if len(ids) > request.sampling.max_new_tokens:
            ids, reason = ids[: request.sampling.max_new_tokens], FinishReason.LENGTH
        logprobs = array("f", [-self._rng.random() for _ in ids])
        self.sampled.append((request.prompt_token_ids, ids, logprobs))
        return Completion(
            request_id=request.request_id,
            token_ids=ids,
            logprobs=logprobs,
            version_runs=((self.version, len(ids)),),
            finish_reason=reason,
            generation_s=0.1,
        )


def make_session(texts, template=QWEN, *, delay_s=0.0, executor=None, **options):
    tokenizer = make_tokenizer(template)
    policy = ScriptedPolicy(tokenizer, texts, delay_s)
    values = {"sampling": SamplingParams(max_new_tokens=200), "max_turns": 20, "max_context": 4000, **options}
    session = Session("t", policy, TemplateRenderer(tokenizer), SessionOptions(**values), executor)
    return session, policy, tokenizer


def ask(*messages, tools=(), **more):
    return TurnRequest(messages=tuple(Message(role=r, content=c) for r, c in messages), tools=tuple(tools), **more)


@pytest.fixture
def sessions():
    return make_session


@pytest.fixture
def request_of():
    return ask


@pytest.fixture
def templates():
    return {"qwen": QWEN, "thinking": THINKING, "trimming": TRIMMING}


def check_exact(session, policy):
    """Every trained token and log-prob is what the policy sampled, after exactly the tokens it was given; each once."""
    from roll_async.schema import Outcome, Reward

    rows = session.tree.rows("t", reward=Reward(score=1.0), outcome=Outcome.SOLVED)
    found = []
    for row in rows:
        ids = row.prompt_token_ids + row.response_token_ids
        start = len(row.prompt_token_ids)
        for turn in row.turns:
            first = start + turn.start
            piece = ids[first : first + turn.num_tokens]
            logprobs = row.behaviour_logprobs[turn.start : turn.start + turn.num_tokens]
            found.append((ids[:first].tolist(), piece.tolist(), logprobs.tolist()))
        assert sum(row.loss_mask) == sum(turn.num_tokens for turn in row.turns)
    expected = [(prompt.tolist(), ids.tolist(), logprobs.tolist()) for prompt, ids, logprobs in policy.sampled]
    assert sorted(found) == sorted(expected)
    return rows


@pytest.fixture
def exact():
    return check_exact


@pytest.fixture
def tiny_model(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=0,
    )
    model = transformers.Qwen2ForCausalLM(config).eval()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return str(tmp_path), model, tokenizer
