"""`rlx env`: list, describe, install, write and check environments. `rlx.cli.env_check` has the check."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rlx.config.presets import LANGUAGE_MODEL, default_seq_len, options_by_id, shipped_options
from rlx.invocation import program

if TYPE_CHECKING:
    from rlx.envs.kinds import Listed

SUMMARY = "environments: list, info, install, init, check"
MANY = 4  # environments of one package whose commands are printed
ACTIONS = ("list", "info", "install", "init", "check")


def help_text() -> str:
    from rlx.envs.scaffold import FLAVOURS

    kinds = ", ".join(name for name in FLAVOURS if name != "v1")
    return f"""\
rlx env: {SUMMARY}.

usage: rlx env list
       rlx env info NAME
       rlx env install FOLDER|PACKAGE|OWNER/NAME[@VERSION]|ADDRESS
       rlx env init NAME [--kind KIND] [--v1] [--folder FOLDER]
       rlx env check NAME [GROUP=OPTION …] [key=value …] [--json]

  rlx env list                          the environments of this Python, and those that were installed
  rlx env info my-env                   arguments, data, rewards, tools, what it needs, how to train on it
  rlx env init my-env --kind tools      write the package my-env: {kinds}; --v1: a v1 taskset
  rlx env install ./my-env              from a folder (which it stays in), a package's name, the Environments Hub
                                        (owner/name@version) or an address (git+https://…), into a Python of its own
                                        with locked versions, below $RLX_PYTHONS or .pythons
  rlx env install rlx                   the Python of the environments that rlx ships (make install has made it)
  rlx env check my-env model=qwen3_0_6b sample a few rollouts: is it worth training on? Keys are those of rlx eval:
                                        num_examples=16 rollouts_per_example=8 client.base_url=… inference.base_url=…

NAME: an environment's name (my-env), or an option of env= (math).

exit codes: 0 done, and of check: worth training on; 1 the installation failed, or the environment cannot be loaded or run;
            2 wrong arguments, nothing was started; 3 of check: it runs, but is not worth training on as it is; 130 interrupted"""


def run(argv: list[str]) -> int:
    from rlx.cli.arguments import Parser

    parser = Parser("env")
    parser.add_argument("action", choices=ACTIONS)
    parser.add_argument("name", nargs="?")  # `install`: what is installed
    parser.add_argument("--kind")
    parser.add_argument("--v1", action="store_true")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", action="store_true")
    chosen, given = parser.parse_known_args(argv)
    if chosen.action != "list" and (chosen.name is None or (chosen.action == "check" and "=" in chosen.name)):
        parser.error(f"{chosen.action} needs an environment's name")
    if given and chosen.action != "check":
        parser.error(f"unrecognized arguments: {' '.join(given)}")
    if chosen.action == "check":
        from rlx.cli import env_check

        return env_check.run(chosen.name, given, chosen.json)
    return {"list": _list, "info": _info, "install": _install, "init": _init}[chosen.action](chosen)


# list


def _list(_: argparse.Namespace) -> int:
    import msgspec

    from rlx.config import pythons
    from rlx.envs.kinds import Listed
    from rlx.envs.kinds import installed as here

    own = [(msgspec.convert(listed, Listed), python.folder) for python in pythons.installed() for listed in python.environments]
    newest = {one.name: folder for one, folder in reversed(own)}
    found = [one for one in here() if one.name not in newest]
    options = options_by_id()
    print("\n".join(_table(found, options)) if found or own else "no environments; rlx env init NAME writes one")
    for folder in sorted(set(newest.values())):
        print("\n".join([f"\n{folder}", *_table([one for one, place in own if newest[one.name] == place == folder], {})]))
    return 0


def _table(found: Sequence[Listed], options: Mapping[str, str]) -> list[str]:
    from rlx.plan.explain import table

    rows = [[one.name, one.kind, one.version, f"env={options[one.name]}" if one.name in options else "", one.summary] for one in found]
    width = shutil.get_terminal_size((140, 24)).columns
    return [line[:width] for line in table(["name", "kind", "version", "shipped as", "what"], rows)]


# info


def _info(chosen: argparse.Namespace) -> int:
    from rlx.config.errors import ConfigError
    from rlx.config.pythons import python_for, sources_of
    from rlx.config.schema import EnvConfig
    from rlx.config.yaml_files import described
    from rlx.preflight.env_probe import about_of

    env_id = shipped_options().get(chosen.name, chosen.name)
    own = python_for(env_id)
    if own is None and sources_of(env_id) is None:
        raise ConfigError(f"{chosen.name} is not installed.\n  fix: `rlx env list` shows what is; rlx env install {chosen.name}")
    python = None if own is None else str(own.path)
    about = about_of(EnvConfig(id=env_id, python=python))
    print(described({"name": env_id, "python": python} | asdict(about)))
    if about.problem is None:
        print("\nnext", *(f"  {line}" for line in next_commands(env_id, about.prompt_chars)), sep="\n")
    return 1 if about.problem else 0


def next_commands(env_id: str, prompt_chars: int = 0) -> list[str]:
    """The commands that check an environment and train on it. `prompt_chars`: characters of a short prompt."""
    option = options_by_id().get(env_id)
    own = [LANGUAGE_MODEL] if prompt_chars >= default_seq_len() else []
    chosen = ["env=custom", f"envs.custom.id={env_id}"] if option is None else [f"env={option}"]
    return [f"rlx env check {shlex.join([option or env_id, *own])}", f"{program()} {shlex.join([*chosen, *own])}"]


# install


def _install(chosen: argparse.Namespace) -> int:
    from rlx.preflight.env_install import InstallFailed, install

    try:
        done = install(chosen.name)
    except InstallFailed as error:
        print(f"rlx: {error}", file=sys.stderr)
        return 1
    print(f"{'installed into' if done.new else 'this was installed before:'} {done.folder}, {done.packages} packages\n")
    if not done.environments:
        print(
            f"rlx: {chosen.name} has no environment that can be seen: no module with load_environment, and none whose __all__ names a "
            f"Taskset.\n  fix: if its author knows the module: envs.custom.id=MODULE envs.custom.python={done.folder}/bin/python",
            file=sys.stderr,
        )
        return 1
    print("\n".join(_table(done.environments, options_by_id())))
    for line in (line for one in done.environments[:MANY] for line in next_commands(one.name)):
        print(f"  {line}")
    return 0


# init


def _init(chosen: argparse.Namespace) -> int:
    from rlx.config.errors import ConfigError
    from rlx.envs.scaffold import FLAVOURS, create

    flavour = "v1" if chosen.v1 else chosen.kind or "single-turn"
    if flavour not in FLAVOURS or (chosen.v1 and chosen.kind not in (None, "single-turn")):
        raise ConfigError(
            f"there is no --kind {chosen.kind}{' --v1' * chosen.v1}.\n  fix: --v1, or --kind with one of {', '.join(FLAVOURS)}"
        )
    folder = chosen.folder or Path(chosen.name)
    name, files, needed = create(chosen.name, folder, flavour)
    keys = "".join(f" {key}" for key in needed)
    shown = f"./{folder}" if not folder.is_absolute() else str(folder)
    print(f"wrote {shown}: {', '.join(files)}\n\nnext")
    install = f"rlx env install {shlex.quote(shown)}"
    for line in (install, f"rlx env check {name}{keys}", f"rlx train env=custom envs.custom.id={name}{keys}"):
        print(f"  {line}")
    return 0
