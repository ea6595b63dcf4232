"""Rows per second of the prompt loader: files read, checked, rendered and tokenised, in each schema and format.

    python tools/bench/loader.py [--rows 20000] [--tokenizer output/demo_assets/model] [--workers 1 2]

Rows are like those of Skywork and GSM8K in length (about 300 characters). Budget: 2,000 rows a second in one process,
tokenised; reading alone is printed beside it.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from roll_async.prompts.load import DataOptions, load_prompts
from roll_async.prompts.rows import BadRows, Columns, read_rows
from tools.prepare_rows import Preparation, Question, prepare, write_rows

BUDGET_ROWS_PER_S = 2000
WORDS = "the sum of all positive integers n such that divides squared plus find remainder when 12 7 1000 is".split()


def write_files(folder: Path, count: int) -> dict[str, str]:
    """The same problems in ROLL's columns and in verl's, as json, jsonl and parquet."""
    import pyarrow
    from pyarrow import parquet

    rng = random.Random(0)
    questions = [f"Problem {n}: " + " ".join(rng.choices(WORDS, k=55)) for n in range(count)]
    roll = [
        {"id": str(n), "tag": "math", "messages": [{"role": "user", "content": q}], "ground_truth": str(n)}
        for n, q in enumerate(questions)
    ]
    asked = ({"q": q, "a": str(n)} for n, q in enumerate(questions))
    verl = prepare(
        asked, lambda r: Question(question=str(r["q"]), answer=str(r["a"])), Preparation(data_source="math")
    ).rows["train"]
    files = {}
    for schema, rows in (("roll", roll), ("verl", verl)):
        files |= {f"{schema}_{suffix}": str(folder / f"{schema}.{suffix}") for suffix in ("json", "jsonl", "parquet")}
        Path(files[f"{schema}_json"]).write_text(json.dumps(rows))
        Path(files[f"{schema}_jsonl"]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_rows(Path(files["verl_parquet"]), verl)
    parquet.write_table(pyarrow.Table.from_pylist(roll), files["roll_parquet"])
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--tokenizer", default="output/demo_assets/model")
    parser.add_argument("--workers", type=int, nargs="+", default=[1], help="2 pays from about 100,000 rows on")
    args = parser.parse_args()
    from tools.machine import machine_line

    print(machine_line(args), flush=True)
    if not Path(args.tokenizer).is_dir():
        sys.exit(f"loader: no tokenizer in {args.tokenizer}; make demo-assets, or --tokenizer FOLDER")
    with tempfile.TemporaryDirectory() as folder:
        for name, file in write_files(Path(folder), args.rows).items():
            started = time.perf_counter()
            assert sum(1 for _ in read_rows([file], Columns(), BadRows())) == args.rows
            reading = args.rows / (time.perf_counter() - started)
            for workers in args.workers:
                options = DataOptions(
                    files=(file,),
                    columns=Columns(),
                    template="chatml",
                    prompt_length=100_000,
                    domains={"math": ()},
                    tokenizer_folder=args.tokenizer,
                    num_workers=workers,
                )
                started = time.perf_counter()
                assert len(load_prompts(options)["math"]) == args.rows
                rate = args.rows / (time.perf_counter() - started)
                line = {"name": f"loader_{name}_{workers}_workers", "value": round(rate), "unit": "rows/s"}
                line |= {"ratio": round(rate / BUDGET_ROWS_PER_S, 2), "budget": 1.0, "ok": rate >= BUDGET_ROWS_PER_S}
                print(json.dumps({**line, "reading_only_per_s": round(reading)}), flush=True)


if __name__ == "__main__":
    main()
