"""docs_roll/families.md says what the code does."""

import json
from contextlib import redirect_stdout
from io import StringIO

import pytest

pytest.importorskip("transformers")

from tests.families_page import CODE, PAGE, page
from tests.family_tokenizers import save_family


@pytest.mark.slow
def test_the_page_is_what_the_code_does_now():
    assert PAGE.read_text() == page(), "run python -m tests.families_page --write"


@pytest.mark.parametrize(
    ("name", "calls", "opening", "after"),
    [
        ("glm-4", "GLM-4", "", "<|observation|>\n42<|assistant|>"),  # own: the head of the user's turn
        (
            *("llama-3.1", "Llama-3", "<|begin_of_text|>"),
            '<|start_header_id|>ipython<|end_header_id|>\n\n"42"<|eot_id|>'
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
    ],
)
def test_its_lines_for_an_own_model_run_and_tell_the_familys_form(name, calls, opening, after, tmp_path):
    save_family(name, tmp_path)
    with redirect_stdout(StringIO()) as printed:
        exec(CODE.replace('"FOLDER"', json.dumps(str(tmp_path))), {})
    lines = dict(line.split(": ", 1) for line in printed.getvalue().splitlines())
    assert (lines["calls"], lines["opening"], lines["after a call"]) == (calls, repr(opening), repr(after))
    assert "<|e" in lines["ends"]
