"""The demo task: additions, solved column by column."""

from roll_async.prompts.addition import ALPHABET, Problem, problems


def test_the_worked_example_of_the_demo_task():
    problem = Problem(58, 367)
    assert problem.prompt == "58+367=" and problem.answer == "425"
    assert problem.solution() == "8+7+0=15;5+6+1=12;0+3+1=4;=425"


def test_demo_problems_are_distinct_reproducible_and_solved_right_in_the_alphabet():
    many = problems(500, seed=3)
    assert len(set(many)) == 500 and many == problems(500, seed=3) != problems(500, seed=4)
    for problem in many:
        solution = problem.solution()
        assert int(solution.rpartition("=")[2]) == problem.left + problem.right
        assert set(problem.prompt + solution) <= set(ALPHABET)
