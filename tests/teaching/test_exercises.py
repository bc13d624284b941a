"""The framework: what a learner sees for every kind of answer, and that nothing a learner does stops the notebook."""

import functools
import itertools
import sys

import pytest
import torch

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching.exercises import Case, Check, CheckBook, MadeAnew


def double_cases(generator):
    for size in (2, 3):
        x = torch.randn(size, generator=generator, dtype=torch.float64)
        yield Case(f"size {size}", (x,), 2 * x, "Twice the input.")


@pytest.fixture
def check():
    return Check("double", "99_test", "Return twice x.", "Well done.", double_cases, ("One.", "Two."))


def test_a_right_answer(check, capsys):
    result = check(lambda x: 2 * x)
    assert result.solved
    assert capsys.readouterr().out == "Correct: double, 2 cases. Well done.\n"
    assert repr(result) == result.message


def stub_raises(x):
    raise NotImplementedError


def stub_dots(x):
    return ...


def stub_nothing(x):
    2 * x


@pytest.mark.parametrize("stub", [stub_raises, stub_dots, stub_nothing])
def test_a_stub_is_unsolved_and_uses_up_no_hint(check, stub, capsys):
    for _ in range(3):
        assert check(stub).status == "unsolved"
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("Not solved yet: Return twice x.") for line in lines)
    check.hint()
    assert capsys.readouterr().out == "Hint 1 of 2: One.\n"


def test_a_wrong_answer_says_what_differs_and_hints_go_on(check, capsys):
    assert check(lambda x: x).status == "wrong"
    first = capsys.readouterr().out
    assert first.startswith("Not right yet: case 1 of 2 (size 2)\n  first difference at [0]: expected ")
    assert "Rule: Twice the input.\nHint 1 of 2: One.\n" in first
    hints = []
    for _ in range(2):
        check(lambda x: x)
        hints.append(capsys.readouterr().out.splitlines()[-1])
    assert hints == ["Hint 2 of 2: Two.", "Hint 2 of 2: Two."]
    check.forget_hints()
    check.hint()
    assert capsys.readouterr().out == "Hint 1 of 2: One.\n"


def raises_inside(x):
    y = x
    return y @ torch.ones(7)


def test_an_exception_is_one_line_with_the_learners_own_line(check):
    result = check(raises_inside)
    assert result.status == "error"
    line = result.message.splitlines()[0]
    assert line.startswith("Not right yet: case 1 of 2 (size 2) raised RuntimeError: ")
    assert line.endswith(f"(line {raises_inside.__code__.co_firstlineno + 2}: return y @ torch.ones(7))")


def test_exceptions_without_text_and_wrong_signatures(check):
    def silent(x):
        raise ValueError

    assert "raised ValueError: no message" in check(silent).message
    assert "raised TypeError: " in check(lambda: 1).message


def test_a_result_instead_of_a_function(check):
    assert "pass the function itself, check.double(your_function)" in check(torch.ones(2)).message


def test_inputs_must_survive(check):
    def in_place(x):
        return x.mul_(2)

    assert "changed its inputs" in check(in_place).message


def test_an_answer_must_repeat(check):
    calls = itertools.count()

    def drifting(x):
        return 2 * x + (next(calls) % 2)

    assert "a second call with the same inputs" in check(drifting).message


def test_an_interrupt_is_not_caught(check):
    def stopped(x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check(stopped)


def test_an_exit_in_the_learners_function_is_an_error_of_it(check):
    result = check(lambda x: sys.exit("bye"))
    assert result.status == "error"
    assert "raised SystemExit: bye (line " in result.message


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x: torch.softmax(x.long(), -1), "not implemented for 'Long'"),
        (lambda x: torch.empty(1, device="meta").item() or x, "meta"),
        (lambda x: torch.nn.Module()(x), "forward"),
    ],
)
def test_a_not_implemented_error_of_pytorch_is_an_error_with_its_message(check, function, said):
    result = check(function)
    assert result.status == "error"
    assert said in result.message.splitlines()[0]


class Stub:
    def __call__(self, x):
        raise NotImplementedError("to do")


def stub_inside(x):
    with torch.no_grad():
        return stub_raises(x)


def stub_over_lines(x, *, factor=2):
    try:
        raise (
            NotImplementedError  # your code here
        )
    finally:
        factor += 1


@pytest.mark.parametrize("stub", [Stub(), stub_inside, stub_over_lines, functools.partial(stub_over_lines, factor=3)])
def test_the_learners_own_raise_is_unsolved_however_it_is_written(check, stub):
    assert check(stub).status == "unsolved"


def test_an_error_derived_from_not_implemented_is_an_error(check):
    class OtherError(NotImplementedError):
        pass

    def other(x):
        raise OtherError

    assert "raised OtherError: no message" in check(other).message


@pytest.mark.parametrize("answer", [lambda self: None, lambda self: 1 / 0, lambda self: sys.exit()])
def test_an_exception_whose_text_cannot_be_read(check, answer):
    broken = type("BrokenError", (Exception,), {"__str__": answer})

    def raises(x):
        raise broken

    assert "raised BrokenError: its message cannot be read (line " in check(raises).message


def test_an_exception_whose_first_line_is_empty(check):
    def raises(x):
        raise ValueError("\nsecond")

    assert "raised ValueError: no message" in check(raises).message


def test_an_argument_with_a_state_is_made_anew_for_each_call():
    made = []

    def counter():
        made.append(0)

        def count():
            made[-1] += 1
            return made[-1]

        return count

    def cases(generator):
        yield Case("a counter", (MadeAnew(counter),), 2, "Call it twice.")

    check = Check("twice", "99_test", "Return the second count.", "Well done.", cases, ("One.",))
    assert check(lambda count: (count(), count())[1]).solved
    assert made == [2, 2]  # an answer is asked for twice, and the second call starts from 0 again


def test_cases_are_the_same_each_time_whatever_the_global_seed(check):
    first = check.cases()
    torch.manual_seed(123)
    second = check.cases()
    assert all(torch.equal(a.arguments[0], b.arguments[0]) for a, b in zip(first, second, strict=True))


def test_book(check):
    book = CheckBook([check])
    assert book.double is check
    assert list(book) == [check]
    assert dir(book) == ["double"]
    assert "check.double(your_function)" in repr(book)
    with pytest.raises(AttributeError, match="no check named 'triple': choose one of double"):
        _ = book.triple
    with pytest.raises(InvalidArgumentError, match="twice"):
        CheckBook([check, check])
    with pytest.raises(InvalidArgumentError, match="hints"):
        Check("x", "y", "z", "w", double_cases, ())


def test_a_result_shows_nothing_in_a_notebook(check, capsys):
    from IPython.core.formatters import DisplayFormatter

    result = check(lambda x: 2 * x)
    capsys.readouterr()
    assert DisplayFormatter().format(result) == ({}, {})
