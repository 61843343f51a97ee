"""The one exception for a configuration that cannot run."""

from __future__ import annotations


class ConfigError(Exception):
    """One or more problems with a configuration, each in a few lines: what is wrong, the values, what to do.

    The command line prints them without a traceback and exits with 2.
    """

    def __init__(self, problems: list[str] | str) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n\n".join(self.problems))
