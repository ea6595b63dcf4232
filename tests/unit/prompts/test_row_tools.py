"""What rows say about tools: every form, and malformed ones refused."""

import json

import pytest

from roll_async.prompts.row_tools import RowTools, tools_of_row


@pytest.mark.parametrize(
    ("extra", "wanted"),
    [
        ({}, RowTools()),
        ({"extra_info": json.dumps({"index": 3, "split": "train"})}, RowTools()),
        ({"tools": '["search"]'}, RowTools(names=frozenset({"search"}))),
        ({"tools": "[]"}, RowTools(names=frozenset())),
        ({"tools_kwargs": '{"search": {"index": "wiki"}}'}, RowTools(arguments={"search": {"index": "wiki"}})),
        (
            {"extra_info": json.dumps({"tools_kwargs": {"calc": {"create_kwargs": {"ground_truth": "7"}}}})},
            RowTools(arguments={"calc": {"ground_truth": "7"}}),
        ),
        (
            {"tools_kwargs": '{"a": {"create_kwargs": null, "execute_kwargs": {"x": 1}}, "b": null}'},
            RowTools(arguments={"a": {"x": 1}, "b": {}}),
        ),
    ],
)  # fmt: skip
def test_every_form_is_read(extra, wanted):
    assert tools_of_row(extra) == wanted


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        ({"tools": "search"}, "tools is not JSON"),
        ({"tools": '"search"'}, "tools must be a list of names"),
        ({"tools_kwargs": '["search"]'}, "tools_kwargs must be"),
        ({"tools_kwargs": '{"search": 3}'}, "tools_kwargs must be"),
        ({"tools_kwargs": '{"search": {"create_kwargs": 3}}'}, "create_kwargs must be"),
    ],
)
def test_malformed_ones_are_refused(extra, problem):
    with pytest.raises(ValueError, match=problem):
        tools_of_row(extra)


def test_the_rows_arguments_stand_over_the_models():
    row = RowTools(names=frozenset({"a"}), arguments={"a": {"limit": 1}})
    assert row.completed("a", {"limit": 9, "query": "x"}) == {"limit": 1, "query": "x"}
    assert row.allows("a") and not row.allows("b") and RowTools().allows("b")
