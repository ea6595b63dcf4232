"""What the CPU demo needs: tokenizer, data, and a model warm-started on this project's own Megatron trainer.

    python -m roll_async.commands.demo.assets [--output output/demo_assets] [--force] [--small] [--size 5M]

The warm start learns from a teacher that forgets most carries and gets some digits wrong: the model knows the form,
and what it finds most likely is wrong wherever a carry is needed. So its greedy answers have as much to learn as the
sampled ones, and training must turn a habit, not only suppress noise.

Deterministic and idempotent: a complete folder is left as it is. About a minute on one core; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from roll_async.checkpoint.folders.manifest import replaced
from roll_async.commands.demo.addition import ALPHABET, Problem, problems
from roll_async.config.processor import multiplies_bf16
from roll_async.observe.disk import cannot

VERSION = 9
VOCABULARY = 64
SPECIAL = ("<pad>", "<bos>", "<eos>")
WHITE = ("\u0120", "\u010a")
"""A space and a line break, as byte-level vocabularies spell them."""
NUM_TRAIN, NUM_VALIDATION, NUM_TEST = 20_000, 128, 200
WARM_STEPS, WARM_BATCH, WARM_ROWS, WARM_RATE = 500, 64, 16, 2e-3
WRONG_DIGITS, FORGOTTEN_CARRIES = 0.02, 0.6
HEAVY_WARM_STEPS = 2_000
"""--heavy-tail: finding the digits of long numbers takes longer to learn (loss 0.43 at 500 steps, 0.12 at 2,000)."""
SMALL_WARM_STEPS, SMALL_NUM_TRAIN = 40, 2_000
"""--small: right in form, seldom in value; for tests of everything but learning."""


def make_tokenizer(folder: Path, vocabulary: int = VOCABULARY) -> None:
    """Character level, padded to so many entries; the chat template is the plain content. Byte-level, as the tokenizer
    of the model's family is, which transformers loads it as.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [*SPECIAL, *ALPHABET, *WHITE]
    names += [f"<unused{i}>" for i in range(vocabulary - len(names))]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    fast.save_pretrained(folder)


SIZES = {"0.6M": (128, 3, 4), "5M": (256, 6, 4), "20M": (512, 6, 8)}
"""Parameters, about; hidden size, layers, heads."""


def make_model(folder: Path, size: str) -> None:
    """A randomly initialised Qwen2."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # of writing a file of two megabytes
    torch.manual_seed(0)
    hidden, layers, heads = SIZES[size]
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=SPECIAL.index("<eos>"),
        pad_token_id=SPECIAL.index("<pad>"),
        dtype="float32",
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config.eos_token_id = SPECIAL.index("<eos>")
    model.save_pretrained(folder)


def write_rows(path: Path, rows: Sequence[Problem]) -> None:
    """ROLL's columns, one JSON object a line."""
    with open(path, "w") as file:
        for number, problem in enumerate(rows):
            row = {
                "id": f"{path.stem}-{number}",
                "tag": "addition",
                "messages": [{"role": "user", "content": problem.prompt}],
                "ground_truth": problem.answer,
            }
            file.write(json.dumps(row) + "\n")


def write_given_rows(folder: Path, everything: Mapping[str, Sequence[Problem]]) -> None:
    """Chats and pairs of configs/sft_demo_cpu.yaml and dpo_demo_cpu.yaml: worked solutions, and beside them what the
    careless teacher says.
    """
    rng = random.Random(3)
    for ending, rows in everything.items():
        with open(folder / f"sft{ending}.jsonl", "w") as chats, open(folder / f"pairs{ending}.jsonl", "w") as pairs:
            for problem in rows:
                right, wrong = problem.solution(rng, 0, 0), problem.solution(rng, WRONG_DIGITS, FORGOTTEN_CARRIES)
                said = {"role": "user", "content": problem.prompt}, {"role": "assistant", "content": right}
                chats.write(json.dumps({"messages": said}) + "\n")
                if wrong != right:
                    pairs.write(json.dumps({"prompt": problem.prompt, "chosen": right, "rejected": wrong}) + "\n")


def warm_rate(size: str) -> float:
    """Of the warm start, as 1 / width (Yang et al., "Tensor Programs V", 2022): at the small model's rate one of 5 M
    parameters ends with a loss of 0.30 instead of 0.08, and knows neither the digits nor where to stop.
    """
    hidden, smallest = SIZES[size][0], SIZES["0.6M"][0]
    return WARM_RATE * smallest / hidden


def warm_dtype(size: str) -> str:
    """Of the steps, over float32 weights. bfloat16 is faster for larger models; the smallest one, from which the demo
    starts, is the same on every processor.
    """
    return "bf16" if size != "0.6M" and multiplies_bf16() else "fp32"


def warm_start(source: Path, target: Path, steps: int, rate: float, dtype: str, *, heavy_tail: bool) -> float:
    """Supervised steps on the careless teacher's solutions: right in form, often wrong in value. The last loss."""
    import torch
    from transformers import AutoTokenizer

    from roll_async.trainer.megatron.settings import MegatronSettings, OptimizerSettings
    from roll_async.trainer.megatron.worker import MegatronWorker, RankSpec

    tokenizer = AutoTokenizer.from_pretrained(source)
    worker = MegatronWorker(
        RankSpec.alone(),
        MegatronSettings(
            model_folder=str(source),
            dtype=dtype,
            optimizer=OptimizerSettings(learning_rate=rate),
            micro_batch_rows=WARM_ROWS,
        ),
    )
    worker.start()
    rng = random.Random(1)
    pool = problems(NUM_TRAIN, seed=11, heavy_tail=heavy_tail)
    loss = 0.0
    for step in range(steps):
        batch = [rng.choice(pool) for _ in range(WARM_BATCH)]
        texts = [(p.prompt, p.solution(rng, WRONG_DIGITS, FORGOTTEN_CARRIES)) for p in batch]
        texts.sort(key=lambda text: len(text[0] + text[1]))  # micro-batches of like lengths: little padding
        prompts = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt, _ in texts]
        answers = [tokenizer(a, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id] for _, a in texts]
        lengths = torch.tensor([len(p) + len(a) for p, a in zip(prompts, answers, strict=True)])
        tokens = torch.zeros(len(batch), int(lengths.max()), dtype=torch.int64)
        mask = torch.zeros_like(tokens, dtype=torch.bool)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            tokens[row, : lengths[row]] = torch.tensor(prompt + answer)
            mask[row, len(prompt) : lengths[row]] = True
        loss = worker.supervised_update(tokens, lengths, mask)
        if (step + 1) % 100 == 0:
            print(f"  warm start: step {step + 1} of {steps}, loss {loss:.3f}", flush=True)
    worker.export_hf(str(target))
    return loss


def deepen(folder: Path, times: int) -> None:
    """Each layer is followed by `times` - 1 that add nothing to the residual stream until they are trained: the same
    function at `times` the cost (block expansion: Wu et al., "LLaMA Pro", 2024).
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    old, config = model.state_dict(), AutoConfig.from_pretrained(folder)
    config.num_hidden_layers *= times
    if config.layer_types is not None:
        config.layer_types = [kind for kind in config.layer_types for _ in range(times)]
    deep = AutoModelForCausalLM.from_config(config)
    new = {}
    for name, tensor in old.items():
        head, layer, rest = name.partition(".layers.")
        if not layer:
            new[name] = tensor
            continue
        number, _, rest = rest.partition(".")
        for copy in range(times):
            adds = rest in ("self_attn.o_proj.weight", "mlp.down_proj.weight") and copy
            new[f"{head}.layers.{int(number) * times + copy}.{rest}"] = tensor * 0 if adds else tensor
    deep.load_state_dict(new)
    deep.generation_config.eos_token_id = model.generation_config.eos_token_id
    deep.save_pretrained(folder)


def wanted(args: argparse.Namespace) -> dict[str, object]:
    """What the manifest of the folder says when it holds what was asked for."""
    usual = HEAVY_WARM_STEPS if args.heavy_tail else WARM_STEPS
    steps = args.warm_steps or (SMALL_WARM_STEPS if args.small else usual)
    made: dict[str, object] = {"version": VERSION, "small": args.small, "warm_start_steps": steps}
    if (args.size, args.heavy_tail) != ("0.6M", False):
        made |= {"size": args.size, "heavy_tail": args.heavy_tail}
    if args.size != "0.6M":
        made |= {"warm_rate": warm_rate(args.size)}
    if args.deeper > 1:
        made |= {"deeper": args.deeper}
    return made


def make(args: argparse.Namespace, made: dict[str, object]) -> None:
    """The folder, whole or not at all."""
    started, output = time.time(), Path(args.output)
    print(f"making demo assets in {output}", flush=True)
    with replaced(output) as temporary:
        num_train = SMALL_NUM_TRAIN if args.small else NUM_TRAIN
        everything = problems(num_train + NUM_VALIDATION + NUM_TEST, seed=7, heavy_tail=args.heavy_tail)
        write_rows(temporary / "train.jsonl", everything[:num_train])
        write_rows(temporary / "validation.jsonl", everything[num_train : num_train + NUM_VALIDATION])
        write_rows(temporary / "test.jsonl", everything[num_train + NUM_VALIDATION :])
        given = {"": everything[: min(num_train, 2_000)], "_validation": everything[num_train : num_train + 128]}
        write_given_rows(temporary, given)
        source, model = temporary / "random", temporary / "model"
        make_model(source, args.size)
        make_tokenizer(source)
        steps = int(str(made["warm_start_steps"]))
        rate, dtype = warm_rate(args.size), warm_dtype(args.size)
        loss = warm_start(source, model, steps, rate, dtype, heavy_tail=args.heavy_tail)
        shutil.rmtree(source)
        if args.deeper > 1:
            deepen(model, args.deeper)
        (temporary / "manifest.json").write_text(json.dumps({**made, "warm_start_loss": loss}))
    print(f"done in {time.time() - started:.0f} s")


def main(argv: Sequence[str] | None = None) -> None:
    """Of a process of its own: it takes one thread and no GPU, whatever else its environment says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="output/demo_assets")
    parser.add_argument("--force", action="store_true", help="make it anew")
    parser.add_argument("--small", action="store_true", help="a barely trained model and little data, for tests")
    parser.add_argument("--size", choices=list(SIZES), default="0.6M", help="parameters of the model")
    parser.add_argument("--heavy-tail", action="store_true", help="numbers of up to 24 digits, few of them long")
    parser.add_argument("--deeper", type=int, default=1, help="times as many layers, the new ones without effect yet")
    parser.add_argument("--warm-steps", type=int, default=0, help="supervised steps (500; 2,000 with a heavy tail)")
    args = parser.parse_args(argv)
    # Before torch is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # where cores are shared, waiting for a second thread costs more
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a rank on the CPU, see cpu_shim.hide_cuda
    made, manifest = wanted(args), Path(args.output) / "manifest.json"
    if not args.force and manifest.is_file() and made.items() <= json.loads(manifest.read_text()).items():
        print(f"demo assets are complete in {args.output}")
        return
    if not manifest.is_file() and os.path.isdir(args.output) and os.listdir(args.output):
        sys.exit(f"{args.output} has other files, which assets would replace: name an empty folder, or a new one")
    try:
        make(args, made)
    except OSError as error:
        sys.exit(str(cannot(f"cannot write {args.output}", error, "folder")))


if __name__ == "__main__":
    main()
