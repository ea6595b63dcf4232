"""`roll-async eval` as typed, against a real HTTP server on this machine; and what it says of targets that are none."""

import json
import os
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from roll_async.cli import main
from roll_async.commands.command_line import output_of
from roll_async.config.api import load
from roll_async.inference.endpoint import EndpointOptions
from roll_async.launch.agents import validation_tasks
from roll_async.launch.evaluation import EndpointRunner, Report, for_evaluation
from roll_async.observe.run_record import unused
from roll_async.pipelines.validation import HeldOut
from roll_async.prompts.tokenizer import load_tokenizer
from roll_async.schema import Outcome, SamplingParams, Turn
from roll_async.weight_sync.adapters import adapters_of

pytest.importorskip("aiohttp")
pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "rlvr_config_async_cpu.yaml"
WORLDS = ROOT / "configs" / "agentic_frozen_lake_async_cpu.yaml"
BASE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


class Server(ThreadingHTTPServer):
    """An OpenAI-compatible server that adds: right when it is greedy, else wrong every second time."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies, self.keys, self.busy, self.models = [], [], 0, ["adder"]
        self.sampled, self.lock = 0, threading.Lock()
        self.reads_thoughts = False  # then the sum of 10 and more is not reached before the length limit
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        self.answer(200, {"data": [{"id": name} for name in self.server.models]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server, question = self.server, body["messages"][-1]["content"]
        with server.lock:
            server.bodies.append(body)
            server.keys.append(self.headers.get("Authorization"))
            server.busy -= 1
            busy = server.busy >= 0
            server.sampled += body["temperature"] > 0
            wrong = body["temperature"] > 0 and server.sampled % 2
        if busy:
            return self.answer(503, {"error": "busy"})
        if question == "too long=":
            return self.answer(400, {"error": "context length"})
        a, b = question.removesuffix("=").split("+")
        text = f"{a}+{b}={int(a) + int(b) + wrong}"
        message, finish = {"content": text}, "stop"
        if server.reads_thoughts:
            message["reasoning_content"] = f"is it {text}?"
            message["content"], finish = (None, "length") if int(a) >= 10 else (text, "stop")
        return self.answer(200, {"choices": [{"message": message, "finish_reason": finish}]})

    def answer(self, status, value):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server():
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a byte-level tokenizer and a config.json, and no weights: an address needs none."""
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("model")
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>")
    fast.chat_template = BASE + "{{ mood | default('') }}"
    fast.save_pretrained(folder)
    (folder / "config.json").write_text("{}")
    return folder


def rows(path, *questions):
    """A prompt file."""
    made = [
        {"id": f"row-{i}", "messages": [{"role": "user", "content": q}], "ground_truth": answer}
        for i, (q, answer) in enumerate(questions)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path


@pytest.fixture
def evaluate(model, tmp_path, capsys):
    """`evaluate(TARGET, *more) -> (exit code, stdout, stderr, output folder)`."""
    rows(tmp_path / "sums.jsonl", ("1+2=", "3"), ("10+5=", "15"))

    def run(target, *more):
        output = unused(tmp_path / "results")
        places = (f"pretrain={model}", f"validation.data_args.file_name={tmp_path}/sums.jsonl")
        code = main(["eval", str(target), "--config", str(CONFIG), "--output", str(output), *places, *more])
        shown = capsys.readouterr()
        return code, shown.out, shown.err, output

    return run


SAMPLED = "validation.sets={sampled: {generating_args: {temperature: 0.7, top_p: 0.9, num_return_sequences: 4}}}"


def test_an_address_is_told_the_variables_of_the_template_and_asked_for_a_row_in_one_way(server, evaluate, tmp_path):
    code, _, err, _ = evaluate(server.url, "validation.data_args.template_kwargs={mood: calm}")
    assert code == 0, err
    assert [b["chat_template_kwargs"] for b in server.bodies] == [{"mood": "calm"}] * 2
    other = f"validation.sets={{more: {{data_args: {{file_name: {tmp_path}/sums.jsonl, template_kwargs: {{}}}}}}}}"
    code, _, err, _ = evaluate(server.url, "validation.data_args.template_kwargs={mood: calm}", other)
    assert code == 2 and "sets.more.data_args.template_kwargs: row row-0 is in another set with others" in err


def test_rows_of_one_id_and_one_question_are_asked_with_their_own_chats(server, evaluate, tmp_path):
    said = [
        {
            "id": 1,
            "messages": [{"role": "system", "content": how}, {"role": "user", "content": "1+2="}],
            "ground_truth": 3,
        }
        for how in ("calm", "loud")
    ]
    (tmp_path / "same.jsonl").write_text("".join(json.dumps(row) + "\n" for row in said))
    code, _, err, _ = evaluate(server.url, f"validation.data_args.file_name={tmp_path}/same.jsonl")
    assert code == 0, err
    assert sorted(body["messages"][0]["content"] for body in server.bodies) == ["calm", "loud"]


@pytest.mark.slow
def test_an_address_is_measured_set_by_set_as_plain_lines_with_json_and_samples(server, evaluate):
    code, out, err, output = evaluate(server.url, SAMPLED)
    assert code == 0, err
    lines = dict(line.split(" ") for line in out.splitlines())
    assert (lines["main/accuracy"], lines["main/samples"], lines["main/unscored"]) == ("1", "2", "0")
    assert (lines["sampled/samples"], lines["sampled/accuracy"], lines["sampled/avg@4"]) == ("8", "0.5", "0.5")
    assert "sampled/pass@4" in lines and "main/pass@1" not in lines and not [k for k in lines if "version" in k]
    results = json.loads((output / "results.json").read_text())
    assert results["target"] == server.url and results["sets"]["sampled"]["pass@1"] == 0.5
    samples = [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 10 and {s["set"] for s in samples} == {"main", "sampled"}
    greedy = {s["prompt"]: (s["response"], s["score"], s["ground_truth"]) for s in samples if s["set"] == "main"}
    assert greedy == {"1+2=": ("1+2=3", 1.0, "3"), "10+5=": ("10+5=15", 1.0, "15")}
    asked = [(b["model"], b["temperature"], b["top_p"], b["max_tokens"]) for b in server.bodies]
    assert sorted(set(asked)) == [("adder", 0.0, 1.0, 96), ("adder", 0.7, 0.9, 96)] and len(asked) == 10
    assert all("top_k" not in b and "repetition_penalty" not in b for b in server.bodies), "not every server knows them"


@pytest.mark.slow
def test_a_second_measurement_has_a_folder_of_its_own_and_no_command_writes_among_results(
    server, model, tmp_path, capsys
):
    sums = rows(tmp_path / "sums.jsonl", ("1+2=", "3"))
    places = [f"pretrain={model}", f"output_dir={tmp_path}", f"validation.data_args.file_name={sums}"]
    typed = ["eval", server.url, "--config", str(CONFIG), *places]
    assert main(typed) == main(typed) == 0
    first, second = sorted((tmp_path / "eval").iterdir())
    assert second.name == f"{first.name}.1"
    assert [json.loads((folder / "results.json").read_text())["model"] for folder in (first, second)] == [None, None]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").touch()
    for more in (typed, ["rollout", "--config", str(WORLDS)]):
        for folder, name in ((first, "results.json"), (tmp_path / "run", "run.json")):
            assert main([*more, "--output", str(folder)]) == 2
            assert f"--output {folder} has {name} of another start: " in capsys.readouterr().err


def test_two_starts_at_one_moment_and_a_link_to_nowhere_have_folders_of_their_own(tmp_path):
    default = tmp_path / "eval" / "model"
    found = [output_of(None, default) for _ in range(2)]
    default.with_name("model.2").symlink_to(tmp_path / "nowhere")
    assert [*found, output_of(None, default)] == [default, *(default.with_name(f"model.{n}") for n in (1, 3))]
    (default / "run.log").touch()  # a start that failed before it measured anything: it may be repeated
    assert [output_of(path, default) for path in found] == found


@pytest.mark.slow
def test_a_server_that_reads_thoughts_itself_has_them_beside_the_answer(server, evaluate):
    server.reads_thoughts = True
    code, out, err, output = evaluate(server.url)
    assert code == 0, err
    lines = dict(line.split(" ") for line in out.splitlines())
    assert (lines["main/accuracy"], lines["main/accuracy_complete"]) == ("0.5", "0.5")
    assert (lines["main/metrics/unfinished_thought"], lines["main/truncated"]) == ("0.5", "0.5")
    samples = [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]
    assert {s["response"] for s in samples} == {"<think>is it 1+2=3?</think>1+2=3", "<think>is it 10+5=15?"}


def test_the_tokens_of_a_record_are_those_that_were_sampled(model, build):
    prompt, report = build.prompt(), Report(load(CONFIG, [f"pretrain={model}"]))
    called = build.sample(prompt, ids=(7, 8, 9), loss_mask=bytes((1, 0, 1)))
    report.add(HeldOut("", [prompt], SamplingParams(max_new_tokens=9)), [(prompt, (called,))])
    assert [record["tokens"] for record in report.evaluation({}).samples] == [2]


def test_a_terminal_gets_a_table(server, evaluate, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _, _ = evaluate(server.url, SAMPLED)
    assert code == 0
    header = next(line for line in out.splitlines() if "accuracy" in line)
    assert "pass@4" in header and "standard_error" in header
    assert any("sampled" in line and "0.5" in line for line in out.splitlines())


@pytest.mark.slow
def test_a_busy_server_is_asked_again_and_what_it_refuses_is_unscored(server, evaluate, tmp_path):
    server.busy = 2
    rows(tmp_path / "some.jsonl", ("1+2=", "3"), ("too long=", "3"))
    code, out, err, output = evaluate(server.url, f"validation.data_args.file_name={tmp_path}/some.jsonl")
    assert code == 0, err
    assert "main/samples 1\n" in out and "main/unscored 1\n" in out
    assert "row row-1: " in (output / "run.log").read_text() and "context length" in (output / "run.log").read_text()


def test_a_set_without_answers_is_said_and_no_success(server, evaluate, tmp_path):
    rows(tmp_path / "none.jsonl", ("too long=", "3"))
    more = f"validation.sets={{none: {{data_args: {{file_name: {tmp_path}/none.jsonl}}}}}}"
    code, out, err, _ = evaluate(server.url, more)
    assert (code, "Traceback" in err) == (3, False), err
    assert "no answer of set none has a score" in err
    assert "main/accuracy 1" in out, "the other set is measured"


def test_the_key_comes_from_the_environment(server, evaluate, monkeypatch):
    monkeypatch.setenv("MY_KEY", "sesame")
    code, _, err, _ = evaluate(server.url, "--key-env", "MY_KEY")
    assert code == 0 and set(server.keys) == {"Bearer sesame"}, err
    code, _, err, _ = evaluate(server.url, "--key-env", "NO_KEY_HERE")
    assert code == 2 and "NO_KEY_HERE" in err


def test_a_server_of_several_models_wants_a_name(server, evaluate):
    server.models = ["adder", "other"]
    code, _, err, _ = evaluate(server.url)
    assert code == 2 and "which model? it serves adder, other; name one with --model or teachers.NAME.model" in err
    assert evaluate(server.url, "--model", "other")[0] == 0 and {b["model"] for b in server.bodies} == {"other"}
    code, _, err, _ = evaluate(server.url, "--model", "third")
    assert code == 2 and "there is no model third" in err


def test_an_address_that_is_down_is_one_readable_line(server, evaluate):
    code, _, err, _ = evaluate("http://127.0.0.1:9/v1")
    assert code == 3 and "nothing answers at http://127.0.0.1:9/v1/models" in err and "is the server up?" in err
    assert "Traceback" not in err


def test_a_target_that_is_none_is_one_readable_line_with_a_remedy(evaluate, tmp_path):
    code, _, err, _ = evaluate(tmp_path / "nowhere")
    assert code == 2 and f"{tmp_path}/nowhere: no such folder; name a model folder, a checkpoint, or an address" in err
    (tmp_path / "run" / "hf").mkdir(parents=True)
    code, _, err, _ = evaluate(tmp_path / "run")
    assert code == 2 and f"name {tmp_path}/run/hf" in err
    code, _, err, _ = evaluate(tmp_path, "validation=null", "eval_steps=0")
    assert code == 2 and "validation: it says which prompts are asked and how" in err
    code, _, err, _ = evaluate(tmp_path / "run" / "hf", "validation.data_args.file_name=no/rows.jsonl")
    assert code == 2 and "Traceback" not in err


def test_a_row_without_an_answer_names_its_file(server, evaluate, tmp_path):
    (tmp_path / "bare.jsonl").write_text(
        json.dumps({"id": 1, "messages": [{"role": "user", "content": "1+1="}]}) + "\n"
    )
    code, _, err, _ = evaluate(server.url, f"validation.data_args.file_name={tmp_path}/bare.jsonl")
    assert code == 2 and "no prompt for domain addition" in err and "bare.jsonl:1" in err


def test_a_row_with_an_image_is_refused_where_nothing_would_show_it(server, evaluate, model, tmp_path):
    shown = [{"type": "image", "image": "data:image/png;base64,AAAA"}, {"type": "text", "text": "1+1="}]
    row = {"id": 1, "messages": [{"role": "user", "content": shown}], "ground_truth": "2"}
    (tmp_path / "shown.jsonl").write_text(json.dumps(row) + "\n")
    code, _, err, _ = evaluate(server.url, f"validation.data_args.file_name={tmp_path}/shown.jsonl")
    assert code == 2 and "shown.jsonl:1: an image: " in err and "reads no images; name a model that does" in err
    config = load(CONFIG, [f"pretrain={model}", f"validation.data_args.file_name={tmp_path}/shown.jsonl"])
    with pytest.raises(ValueError, match="shown.jsonl:1: an image, and an address is asked in text; measure a model"):
        EndpointRunner(config, None, None, None)


def test_only_the_measured_model_and_its_prompts_are_left_of_the_config():
    apart = [
        "validation.mode=replicas",
        "actor_infer.world_size=2",
        "actor_infer.strategy_args.strategy_config.load_format=dummy",
        "actor_train.model_args.lora_rank=4",
    ]
    assert adapters_of(load(CONFIG, apart)) is not None
    config = for_evaluation(load(CONFIG, apart), "some/model")
    assert config.num_validation_replicas == 0 and config.num_servers == 2 and config.eval_steps == 1
    assert {role.model_args.model_name_or_path for _, role in config.roles()} == {"some/model"} == {config.pretrain}
    assert config.actor_infer.strategy_args.strategy_config.load_format == "auto"
    assert config.actor_train.data_args == config.validation.data_args
    assert adapters_of(config) is None, "nobody pushes adapters to these engines"


def test_of_an_agentic_config_the_worlds_of_validation_are_left_on_all_engines():
    apart = [
        "val_env_manager={mode: replicas, generating_args: {temperature: 0}}",
        "eval_steps=0",
        "actor_infer.world_size=2",
        "actor_infer.strategy_args.strategy_config.load_format=dummy",
        "actor_train.data_args.template_kwargs={enable_thinking: false}",
    ]
    config = for_evaluation(load(WORLDS, apart), "some/model")
    assert config.num_validation_replicas == 0 and config.num_servers == 2
    assert config.validation_sampling[""].temperature == 0 and config.template_kwargs == {"enable_thinking": False}
    assert len(validation_tasks(config)[""]) == config.val_batch_size
    assert {role.model_args.model_name_or_path for _, role in config.roles()} == {"some/model"} == {config.pretrain}
    assert config.actor_infer.strategy_args.strategy_config.load_format == "auto"


def test_every_row_of_a_trajectory_is_a_record_that_says_how_it_ended(model, build):
    prompt = replace(build.prompt(), text="")
    ended = {"trajectory": "v.1/0", "outcome": Outcome.FAILED}
    report = Report(load(WORLDS, [f"pretrain={model}"]))
    end = load_tokenizer(str(model)).eos_token_id
    rows = [
        replace(build.sample(prompt, ids=ids, score=0.5), turns=(Turn(index=i, start=0, num_tokens=2),), **ended)
        for i, ids in enumerate([(7, 8, end), (9, 10)])
    ]
    report.add(HeldOut("", [prompt], SamplingParams(max_new_tokens=9)), [(prompt, rows)])
    first, second = report.evaluation({}).samples
    assert first["prompt"] and first["response"] != second["response"], "the task of a world has no text of its own"
    assert first["response"].endswith("<|end|>"), "marks tell turns apart"
    assert [record["turns"][0]["index"] for record in (first, second)] == [0, 1]
    assert (first["trajectory"], first["outcome"], first["score"]) == ("v.1/0", "failed", 0.5)


def test_what_an_agentic_config_cannot_measure_is_said_before_anything_starts(model, tmp_path, capsys):
    def said(target, *more):
        code = main(["eval", str(target), "--config", str(WORLDS), "--output", str(tmp_path / "results"), *more])
        assert code == 2 and not (tmp_path / "results").exists()
        return capsys.readouterr().err

    assert "an address is asked for chats, and worlds need the tokens of a model; name a" in said("http://localhost:1")
    assert "custom_envs.FrozenLake.env_config" in said(model, "custom_envs.FrozenLake.env_config={sice: 4}")


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://host:8000", "http://host:8000/v1"),
        ("http://host:8000/", "http://host:8000/v1"),
        ("https://host/v1/", "https://host/v1"),
        ("https://host/api/v3", "https://host/api/v3"),
    ],
)
def test_the_version_is_added_to_an_address_without_a_path(url, base):
    assert EndpointOptions(url=url).base == base


@pytest.mark.slow
def test_nothing_is_left_of_a_converted_model(evaluate, tmp_path):
    broken = tmp_path / "checkpoints" / "step_00000003" / "actor_train"
    broken.mkdir(parents=True)
    code, _, err, output = evaluate(tmp_path / "checkpoints")
    assert code == 2 and f"{broken} cannot be converted: " in err and "Traceback" not in err
    assert not [name for name in os.listdir(output) if name.startswith("model-")]
