"""The one exception for a configuration that cannot run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml


class ConfigError(Exception):
    """One or more problems with a configuration, each in a few lines: what is wrong, the values, what to do.

    The command line prints them without a traceback and exits with 2.
    """

    def __init__(self, problems: list[str] | str) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n\n".join(self.problems))


@contextmanager
def may_read(path: Path) -> Iterator[None]:
    """Turn a PermissionError into a ConfigError that names the file; `path` if the error names none."""
    try:
        yield
    except PermissionError as error:
        raise ConfigError(f"you may not read {error.filename or path} ({error.strerror}).\n  fix: ask its owner") from error


@contextmanager
def may_parse(path: Path | str) -> Iterator[None]:
    """Turn an error of reading YAML, or of a file that is not UTF-8, into a ConfigError that names the file, the line and the problem."""
    try:
        yield
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        while_ = f" ({error.context})" if error.context and error.problem else ""
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{path}{line}: {error.problem or error.context}{while_}.\nCorrect the file: it must be YAML.") from None
    except UnicodeDecodeError as error:
        number = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}, line {number}: the byte 0x{error.object[error.start]:02x} is not UTF-8.\nSave it as UTF-8.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a character that YAML forbids, `!!int many`, an alias of itself
        said = " ".join(str(error).split())[:200]
        raise ConfigError(f"{path}: {said}.\nCorrect the file: it must be YAML.") from None
