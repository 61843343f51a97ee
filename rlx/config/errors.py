"""The one exception for a configuration that cannot run."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

MOST = 64 << 20  # bytes of a file that is read whole
LINES = (".jsonl", ".zst")  # suffixes of files that are read line by line, however many these are


class ConfigError(Exception):
    """One or more problems with a configuration, each in a few lines: what is wrong, the values, what to do.

    The command line prints them without a traceback and exits with 2.
    """

    def __init__(self, problems: list[str] | str) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n\n".join(self.problems))


@contextmanager
def may_read(path: Path) -> Iterator[None]:
    """Turn a PermissionError into a ConfigError that names the file; `path` if the error names none.

    Raises ConfigError also for what may be in a stranger's directory: a pipe or a device, which would be read for ever, or a huge file.
    """
    try:
        found = os.stat(path) if os.path.exists(path) else None
        huge = found is not None and found.st_size > MOST and Path(path).suffix not in LINES
        if found is not None and not stat.S_ISDIR(found.st_mode) and (huge or not stat.S_ISREG(found.st_mode)):
            raise ConfigError(f"{path} is not read: it is a pipe or a device, or has more than {MOST >> 20} MiB")
        yield
    except PermissionError as error:
        raise ConfigError(f"you may not read {error.filename or path} ({error.strerror}).\n  fix: ask its owner") from error


@contextmanager
def may_parse(path: Path | str) -> Iterator[None]:
    """Turn an error of reading YAML, or of a file that is not UTF-8, into a ConfigError that names the file, the line and the problem."""
    try:
        yield
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a byte that is not UTF-8, `!!int many`
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        said = " ".join(str(getattr(error, "problem", None) or error).split())[:200]
        raise ConfigError(f"{path}{line}: {said}.\n  fix: write it as YAML, in UTF-8") from None
