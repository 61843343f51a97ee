"""Command lines of the commands that are no runs: `argparse`, whose errors have the shape of all others."""

from __future__ import annotations

import argparse
from typing import NoReturn

from rlx.config.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """`Parser("view")` reads the arguments of `rlx view`. Its help text is the command's own, so it has no --help."""

    def __init__(self, command: str) -> None:
        super().__init__(prog=f"rlx {command}", add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}.\n  fix: {self.prog} --help shows how")
