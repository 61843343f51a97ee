"""The one exception for a configuration that cannot run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
