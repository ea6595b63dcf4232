"""The config that `roll-async new` writes, `roll_async.train` starts from, and configs/gsm8k_* are.

A layout of the devices is one that the gate accepts and that fits by `show --memory`; of those the first in this order:
optimizer on the devices, trainer and engines apart, no recomputation, few tensor ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from roll_async.checkpoint.known_models import known_config
from roll_async.checkpoint.model_sizes import longest_context
from roll_async.config.api import ConfigError
from roll_async.config.schema_rollout import REWARDS
from roll_async.config.yaml.diagnostics import printable
from roll_async.config.yaml.emit import scalar
from roll_async.prompts.rows import BadRows, found_columns, read_records

SIZES = {0.5: "Qwen2.5-0.5B", 1.5: "Qwen2.5-1.5B", 3.0: "Qwen2.5-3B", 7.6: "Qwen2.5-7B", 14.8: "Qwen2.5-14B",
         32.8: "Qwen2.5-32B", 72.7: "Qwen2.5-72B"}  # fmt: skip
"""Models whose shapes stand for those of about as many parameters, in billions."""
DATA: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "gsm8k": ("data/gsm8k/train.jsonl", {"prompt": "question", "ground_truth": "answer"}),
    "deepmath": ("data/math_deepmath_deal.jsonl", {}),
    "demo": ("output/demo_assets/train.jsonl", {}),
}
"""Known data by name: file and the keys of `data_args`. A run says where one comes from that is not there."""
RULES = [name for name, path in REWARDS.items() if path is not None]
"""Shipped rewards that need no section of their own."""
OWN_REWARD = "reward.score"
REWARD_FILE = '''"""The reward of this run: a number for each answer of the model. Change `score` as you like."""

import re


def score(text: str, ground_truth: str, extra: dict) -> float:
    """1.0 when the last number of the answer is that of the data (without numbers: when it ends like it), else 0.0.

    text: what the model wrote. ground_truth: the row's reference. extra: the other columns of the row.
    """
    # Change this. Any number will do, higher is better; {"score": 1.0, "length": len(text)} adds metrics of your own.
    wanted, said = _last_number(ground_truth), _last_number(text)
    if wanted is None:
        return float(text.strip().lower().endswith(ground_truth.strip().lower()))
    return float(said == wanted)


def _last_number(text: str) -> float | None:
    found = re.findall(r"-?\\d[\\d,]*(?:\\.\\d+)?", text)
    return float(found[-1].replace(",", "")) if found else None
'''
_FILLED = 0.9
"""Of a device by training: activations are an estimate."""
_TOY_BILLIONS = 0.1
"""Smaller models are trained from nothing, and take larger steps."""


_SAMPLES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """What a config is made of."""

    name: str
    """exp_name."""
    model: str
    billions: float
    """Parameters."""
    context: int
    """Tokens that the model can read."""
    file: str
    columns: Mapping[str, str]
    """Keys of `data_args`."""
    reward: str
    """A shipped rule, or a dotted path."""
    gpus: int
    engine: str = "vllm"
    """hf_infer where vLLM is not installed, on CPU."""
    prompts: int | None = None
    """Of a step; None = by the number of GPUs."""
    samples: int = _SAMPLES
    """Answers to each prompt."""

    @classmethod
    def of(
        cls,
        name: str,
        model: str,
        data: tuple[str, Mapping[str, str]],
        reward: str,
        gpus: int,
        *,
        billions: float | None = None,
        overrides: Mapping[str, object] | None = None,
    ) -> Choices:
        """With what the model's folder or name says, and what is here by its absolute path: the config may be used in
        another folder. `data`: of `describe_data`. `overrides`: keys that the config is run with; its batches are
        divided as they say. Raises ValueError.
        """
        asked = overrides or {}
        prompts, samples = asked.get("rollout_batch_size"), asked.get("num_return_sequences_in_group")
        size, context = describe_model(model, billions)
        return cls(
            name=name,
            model=_absolute(model),
            billions=size,
            context=context,
            file=_absolute(data[0]),
            columns=data[1],
            reward=reward_type(reward),
            gpus=gpus,
            engine="vllm" if gpus or find_spec("vllm") else "hf_infer",
            prompts=prompts if isinstance(prompts, int) else None,
            samples=samples if isinstance(samples, int) else _SAMPLES,
        )


class DeviceLayout(NamedTuple):
    """Which devices do what."""

    trainers: int
    engines: int
    """Devices behind the trainer's; 0 = the trainer's, in turn."""
    tensor: int
    """Ranks that split the trainer's layers."""
    engine_tensor: int
    recompute: bool
    offload: bool
    """The optimizer is in host memory."""


def describe_model(model: str, billions: float | None = None) -> tuple[float, int]:
    """(billions of parameters, longest context) of a folder or a hub name. `billions`: for a name that does not say
    it. Raises ValueError for one whose size nobody knows.
    """
    known = known_config(model)
    if known is None:
        said = re.search(r"(\d+(?:\.\d+)?)[bB](?![a-zA-Z])", Path(model).name)
        billions = billions if billions is not None else float(said[1]) if said else None
        if billions is None:
            raise ValueError(
                f"model {model}: no folder with a config.json, and its name has no size; give the size, too"
            )
        return billions, 32_768
    from roll_async.trainer.megatron.memory_estimate import rank_memory
    from roll_async.trainer.megatron.settings import MegatronSettings

    weights = rank_memory(known, MegatronSettings(model_folder="", dtype="bf16"), 1).weights
    return round(weights / 2 / 1e9, 3), longest_context(known)


def describe_data(data: str) -> tuple[str, Mapping[str, str]]:
    """(file, keys of `data_args`) of known data, or of a file that is looked into. Raises ValueError."""
    if data in DATA and not Path(data).exists():
        return DATA[data]
    bad = BadRows()
    for where, record in read_records(data, bad):
        return data, found_columns(record, where)
    raise ValueError(f"{data} has no rows" + (f": {bad.problems[0]}" if bad.problems else ""))


def _absolute(path: str) -> str:
    return str(Path(path).resolve()) if Path(path).exists() else path


def reward_type(reward: str) -> str:
    """What `--reward` names: a shipped rule, or MODULE.NAME. Raises ValueError."""
    if reward in RULES or re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", reward):
        return reward
    why = "needs a section of its own (docs_roll/rewards.md)" if reward in REWARDS else "is no reward"
    raise ValueError(f"--reward {reward}: {why}; there are {', '.join(RULES)}, or MODULE.NAME of a function")


def first_config(choices: Choices, device_bytes: int, code: Mapping[str, str] = {}) -> str:
    """The text of a config that the gate accepts and that fits. `code`: files beside it. Raises ValueError with what
    keeps the last layout from it.
    """
    from roll_async.launch.checks.device_memory import device_uses, span
    from roll_async.launch.checks.gate import check_supported

    stand_in = choices.model
    if known_config(choices.model) is None:
        stand_in = SIZES[min(SIZES, key=lambda size: (size < 0.9 * choices.billions, abs(size - choices.billions)))]
    problem = ""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        for name, text in code.items():
            (Path(folder) / name).write_text(text)
        for layout in _layouts(choices.gpus):
            text = _text(choices, layout)
            path.write_text(text)
            try:
                uses = device_uses(check_supported(path, [f"pretrain={scalar(stand_in)}"]).config, device_bytes)
            except ConfigError as error:
                problem = "; ".join(f"{d.key}: {d.message}" for d in error.diagnostics if d.is_error)
                continue
            problem = "; ".join(f"devices {span(use.devices)}: {use.problem}" for use in uses if use.problem)
            if not problem and all(use.training <= _FILLED * device_bytes for use in uses):
                return text
    raise ValueError(f"{choices.model} on {choices.gpus} GPUs: {problem or 'it would fill them to the brim'}")


def _layouts(gpus: int) -> Iterator[DeviceLayout]:
    """In the order of preference; one of no devices for the CPU."""
    if gpus == 0:
        yield DeviceLayout(1, 1, 1, 1, False, False)
        return
    half, whole = (2 ** (n.bit_length() - 1) for n in (max(1, gpus // 2), gpus))  # batches are divided by powers of two
    apart = [(half, gpus - half)] if gpus > 1 else []
    for offload, (trainers, engines), recompute in product((False, True), (*apart, (whole, 0)), (False, True)):
        for tensor, engine_tensor in product((1, 2, 4, 8), (1, 2, 4, 8)):
            if tensor <= trainers and (engines or trainers) % engine_tensor == 0:
                yield DeviceLayout(trainers, engines, tensor, engine_tensor, recompute, offload)


def _text(choices: Choices, layout: DeviceLayout) -> str:
    on_cpu, toy = choices.gpus == 0, choices.billions < _TOY_BILLIONS
    prompts = choices.prompts or (16 if on_cpu else 32 if choices.gpus == 1 else 64)
    prompt, response = (256, 256) if on_cpu else (512, 1024) if choices.billions < 1 else (1024, 2048)
    if prompt + response > choices.context:
        prompt, response = choices.context // 2, choices.context - choices.context // 2
    samples, rate = prompts * choices.samples, "3.0e-4" if toy else "1.0e-6"
    accumulation = max(1, samples // (layout.trainers // layout.tensor))
    tokens = max(4096 if on_cpu else 8192, prompt + response)
    settings = [f"tensor_model_parallel_size: {layout.tensor}, sequence_parallel: true"] if layout.tensor > 1 else []
    settings += ["recompute_granularity: full"] if layout.recompute else []
    settings += ["optimizer_cpu_offload: true"] if layout.offload else []
    settings += ["transformer_impl: local"] if on_cpu else []
    engine = [f"tensor_parallel_size: {layout.engine_tensor}"] if layout.engine_tensor > 1 else []
    engine += ["gpu_memory_utilization: 0.8"] if not on_cpu else ["enforce_eager: true"] * (choices.engine == "vllm")
    rule = choices.reward if choices.reward in RULES else "mine"
    reward = "num_workers: 2" if rule == choices.reward else f"type: {scalar(choices.reward)}, num_workers: 2"
    data = {"file_name": choices.file, **choices.columns}
    where = "on CPU" if on_cpu else f"{choices.gpus} GPU" + "s" * (choices.gpus > 1)
    together = layout.engines == 0
    how = "trainer and engine take turns" if together else "the next batch is generated while one is trained"
    head = f"{Path(choices.model).name}, {where}: {how}"
    return f"""\
# {printable(head)}.
# Check it with `roll-async validate FILE` and `roll-async show FILE --memory`; all keys: docs_roll/configuration.md.
# Derived: {prompts} groups * {choices.samples} = {samples} samples per step = 1 optimizer step.
exp_name: {scalar(choices.name)}  # output goes to output/{printable(choices.name)}
pretrain: {scalar(choices.model)}
max_steps: 200
save_steps: 50  # a checkpoint; the model as a Transformers folder is written at the end
rollout_batch_size: {prompts}  # prompts of a step
num_return_sequences_in_group: {choices.samples}  # answers to each prompt, which are compared with one another
prompt_length: {prompt}  # tokens; longer prompts are skipped
response_length: {response}  # tokens; longer answers are cut (response/length_max)
async_generation_ratio: {int(not together)}  # batches generated ahead: 0 = each side waits for the other
rewards:
  {rule}: {{{reward}}}
actor_train:
{_devices(0, 0 if on_cpu else layout.trainers)}  micro_batching: {"dynamic" if on_cpu else "packed"}
  max_tokens_per_microbatch: {tokens}  # less when memory is short
{"  model_args: {dtype: fp32}" + chr(10) if on_cpu else ""}\
  training_args: {{learning_rate: {rate}, gradient_accumulation_steps: {accumulation}}}
  data_args: {{{", ".join(f"{key}: {scalar(value)}" for key, value in data.items())}}}
  strategy_args:
    strategy_name: megatron_train
{_settings(settings)}\
actor_infer:
{_devices(0 if together else layout.trainers, 0 if on_cpu else layout.engines or layout.trainers)}\
{"  model_args: {dtype: fp32}" + chr(10) if on_cpu else ""}\
  strategy_args:
    strategy_name: {choices.engine}
{_settings(engine)}"""


def _devices(first: int, number: int) -> str:
    return f"  device_mapping: range({first}, {first + number})\n" if number else "  world_size: 1\n"


def _settings(settings: Sequence[str]) -> str:
    return f"    strategy_config: {{{', '.join(settings)}}}\n" if settings else ""
