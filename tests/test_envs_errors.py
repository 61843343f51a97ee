"""What people read about an environment's exception: the causes, the user's line, and each failure once."""

from __future__ import annotations

import logging
import sys
import textwrap

import pytest

from rlx.config.pythons import sources_of
from rlx.envs.errors import FailureLog, chain, in_one_line, place_of


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An environment's package: `scores` raises inside the standard library, `wraps` wraps that error."""
    folder = tmp_path / "its_env"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        textwrap.dedent("""\
        import json

        def scores(text):
            return json.loads(text)

        def wraps(text):
            try:
                return scores(text)
            except ValueError as error:
                raise RuntimeError(f"scoring failed") from error
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    sys.modules.pop("its_env", None)


def raised(call, *arguments) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        call(*arguments)
    return caught.value


def test_the_line_is_the_innermost_of_the_environments_own_code(package):
    import its_env

    error = raised(its_env.wraps, "nonsense")
    assert [type(each).__name__ for each in chain(error)] == ["RuntimeError", "JSONDecodeError"]
    assert place_of(error, package) == f"{package}/__init__.py:4 in scores"
    expected = "RuntimeError: scoring failed ← JSONDecodeError: Expecting value: line 1 column 1 (char 0); at "
    assert in_one_line(error, package) == f"{expected}{package}/__init__.py:4 in scores"


def test_an_installed_package_has_its_line_although_it_lies_among_the_installed_ones(package):
    assert sources_of("someone/its-env@1.0") == package
    assert sources_of("not-there") is None
    assert sources_of("json").name == "json"


def test_a_message_that_a_cause_repeats_is_said_once():
    def fails():
        try:
            raise OSError("server disconnected")
        except OSError as error:
            raise ValueError(str(error)) from error

    assert in_one_line(raised(fails)).startswith("ValueError ← OSError: server disconnected; at ")


def test_half_of_a_surrogate_pair_is_a_question_mark():
    assert in_one_line(ValueError("\ud83d is no word; \U0001f600 is")) == "ValueError: ? is no word; \U0001f600 is"


def test_a_key_error_a_group_and_a_circle():
    assert in_one_line(KeyError("answer")) == "KeyError: no key 'answer'"
    assert (
        in_one_line(ExceptionGroup("tasks", [ValueError("x"), TypeError("y")]))
        == "ExceptionGroup: tasks (2 sub-exceptions) ← ValueError: x"
    )
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    assert in_one_line(one) == "ValueError: one ← ValueError: two"


def test_a_syntax_error_has_the_line_of_the_file(package):
    (package / "broken.py").write_text("x = 1\ndef f(:\n")

    def load():
        import its_env.broken  # noqa: F401

    assert place_of(raised(load), package) == f"{package}/broken.py:2 in <module>"


def test_a_failure_is_written_once_and_then_counted(package, caplog):
    import its_env

    failures = FailureLog(logging.getLogger("failures"))
    with caplog.at_level(logging.WARNING):
        for number in range(38):
            error = raised(its_env.scores, f"text {number}")
            text = in_one_line(error, package).replace("Expecting", "abc"[number % 3] + " of the model")
            failures.note("its", f"example {number}", text, "its traceback")
        failures.note("its", "example 0", "ValueError: another")
    first, tenth, other = [record.getMessage() for record in caplog.records]
    assert first.startswith("its: example 0 failed: JSONDecodeError: ")
    assert first.endswith("\nits traceback")
    assert "… 9 more like it (10 in all)" in tenth
    assert other == "its: example 0 failed: ValueError: another"
