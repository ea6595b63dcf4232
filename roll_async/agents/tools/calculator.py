"""Arithmetic, computed exactly and never evaluated as code."""

from __future__ import annotations

from collections.abc import Mapping

from roll_async.agents.tools.toolbox import function
from roll_async.envs.worlds.arithmetic import compute, shown


class Calculator:
    """`calculator(expression)`."""

    schemas = (
        function(
            "calculator",
            "Compute an arithmetic expression of numbers, + - * / // % ** and parentheses.",
            {"expression": {"type": "string"}},
        ),
    )

    async def call(self, name: str, arguments: Mapping[str, object]) -> str:
        """Raises ValueError for what is no arithmetic."""
        expression = arguments.get("expression")
        if not isinstance(expression, str):
            raise ValueError('the argument is {"expression": string}')
        return shown(compute(expression)[0])
