"""The demo task: additions, solved column by column."""

import random

from roll_async.commands.demo.addition import ALPHABET, Problem, problems


def test_the_worked_example_of_the_demo_task():
    problem = Problem(58, 367)
    assert problem.prompt == "58+367=" and problem.answer == "425"
    assert problem.solution() == "8+7+0=15;5+6+1=12;0+3+1=4;=425"


def test_a_forgotten_carry_shows_in_the_next_column_and_in_the_sum():
    rng = random.Random(0)
    assert Problem(58, 367).solution(rng, forgotten_carries=1.0) == "8+7+0=15;5+6+0=11;0+3+0=3;=315"
    assert Problem(99, 1).solution(rng, forgotten_carries=1.0) == "9+1+0=10;9+0+0=9;=90"
    assert Problem(12, 34).solution(rng, forgotten_carries=1.0) == Problem(12, 34).solution()
    forgotten = sum(Problem(9, 11).solution(rng, forgotten_carries=0.6).endswith("=10") for _ in range(2000))
    assert abs(forgotten / 2000 - 0.6) < 0.05


def test_demo_problems_are_distinct_reproducible_and_solved_right_in_the_alphabet():
    many = problems(500, seed=3)
    assert len(set(many)) == 500 and many == problems(500, seed=3) != problems(500, seed=4)
    for problem in many:
        solution = problem.solution()
        assert int(solution.rpartition("=")[2]) == problem.left + problem.right
        assert set(problem.prompt + solution) <= set(ALPHABET)
