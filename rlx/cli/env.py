"""`rlx env`: list, describe, install, write and check environments. `rlx.cli.env_check` has the check."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlx.config.shipped import LANGUAGE_MODEL, default_seq_len, shipped_options
from rlx.started import program

if TYPE_CHECKING:
    from rlx.envs.catalog import Listed
    from rlx.envs.probed import Entry, Probed

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
  rlx env check my-env model=qwen3_0_6b play a few rollouts: is it worth training on? Keys are those of rlx eval:
                                        num_examples=16 rollouts_per_example=8 client.base_url=… inference.base_url=…

NAME: an environment's name (my-env), or an option of env= (math).

exit codes: 0 done, and of check: worth training on; 1 the installation failed, or the environment cannot be loaded or played;
            2 wrong arguments, nothing was started; 3 of check: it plays, but is not worth training on as it is; 130 interrupted"""


class _Parser(argparse.ArgumentParser):
    """Reports wrong arguments in rlx's way."""

    def error(self, message: str) -> None:  # type: ignore[override]
        from rlx.config.errors import ConfigError

        raise ConfigError(f"{message}.\n  fix: rlx env --help shows how")


def run(argv: list[str]) -> int:
    if not argv or argv[0] not in ACTIONS:
        import difflib

        near = difflib.get_close_matches(argv[0], ACTIONS, n=1) if argv else []
        what = f"there is no `rlx env {argv[0]}`. " + (f"Did you mean: rlx env {near[0]}" if near else "") if argv else ""
        print(f"rlx: {what or 'usage: rlx env ' + '|'.join(ACTIONS) + '. See rlx env --help.'}", file=sys.stderr)
        return 2
    if argv[0] == "check":
        from rlx.cli import env_check

        return env_check.run(argv[1:])
    parser = _Parser(prog=f"rlx env {argv[0]}", add_help=False)
    if argv[0] == "info":
        parser.add_argument("name")
    elif argv[0] == "install":
        parser.add_argument("what", metavar="FOLDER|PACKAGE|OWNER/NAME|ADDRESS")
    elif argv[0] == "init":
        parser.add_argument("name")
        parser.add_argument("--kind")
        parser.add_argument("--v1", action="store_true")
        parser.add_argument("--folder", type=Path)
    chosen = parser.parse_args(argv[1:])
    return {"list": _list, "info": _info, "install": _install, "init": _init}[argv[0]](chosen)


# list


def _list(_: argparse.Namespace) -> int:
    import msgspec

    from rlx.config import pythons
    from rlx.envs.catalog import Listed
    from rlx.envs.catalog import installed as here

    options = {name: option for option, name in shipped_options().items()}
    own = [(msgspec.convert(listed, Listed), python.folder) for python in pythons.installed() for listed in python.environments]
    newest = {one.name: folder for one, folder in reversed(own)}
    found = [one for one in here() if one.name not in newest]
    print("\n".join(_table(found, options)) if found or own else "no environments; rlx env init NAME writes one")
    for folder in sorted(set(newest.values())):
        print(f"\n{folder}")
        print("\n".join(_table([one for one, place in own if place == folder and newest[one.name] == folder], {})))
    return 0


def _table(found: Sequence[Listed], options: Mapping[str, str]) -> list[str]:
    from rlx.plan.explain import table

    rows = [[one.name, one.kind, one.version, f"env={options[one.name]}" if one.name in options else "", one.summary] for one in found]
    head = ["name", "kind", "version", "shipped as", "what"]
    if not any(row[3] for row in rows):
        head, rows = [*head[:3], head[4]], [[*row[:3], row[4]] for row in rows]
    width = shutil.get_terminal_size((140, 24)).columns
    return [line if len(line) <= width else line[: width - 1] + "…" for line in table(head, rows)]


# info


def _info(chosen: argparse.Namespace) -> int:
    from rlx.cli.env_check import say_shadowed
    from rlx.config.errors import ConfigError
    from rlx.config.pythons import python_for, sources_of
    from rlx.config.schema import EnvConfig
    from rlx.preflight.probes import about_of

    say_shadowed(chosen.name)
    env_id = shipped_options().get(chosen.name, chosen.name)
    own = python_for(env_id)
    if own is None and sources_of(env_id) is None:
        raise ConfigError(f"{chosen.name} is not installed.\n  fix: `rlx env list` shows what is; rlx env install {chosen.name}")
    python = None if own is None else str(own.path)
    about = about_of(EnvConfig(id=env_id, python=python))
    print("\n".join(_described(env_id, python, about)))
    return 1 if about.problem else 0


def _described(env_id: str, python: str | None, about: Probed) -> list[str]:
    lines = [f"{env_id}: {about.kind or 'unknown kind'}" + (f", {about.type}" if about.type else "")]
    lines += [f"  {about.doc}"] if about.doc else []
    lines += [f"  python   {python}"] if python else []
    lines += [f"  data     {about.examples:,} {'tasks' if about.kind.startswith('v1') else 'examples'}"] if about.examples else []
    for number, line in enumerate(about.prompt.splitlines()):
        lines += [f"  {'first' if number == 0 else '':9}{line}"]
    if about.arguments:
        lines += ["", "arguments (env.args.NAME=VALUE)", *_entries(about.arguments)]
    elif about.kind:
        lines += ["", "no arguments"]
    groups = {
        "rewards": [one for one in about.rewards if one.weight != 0],
        "metrics": [one for one in about.rewards if one.weight == 0],
        "tools": about.tools,
        "agents": about.agents,
    }
    for name, entries in groups.items():
        lines += ["", name + (", comparing the rollouts of a group" if name == "rewards" and about.scores_groups else "")] * bool(entries)
        lines += _entries(entries)
    if about.problem:
        lines += ["", f"problem: {about.problem}", f"  fix: {about.fix}"]
    else:
        lines += ["", "next", *(f"  {line}" for line in next_commands(env_id, about.prompt_chars))]
    return lines


def _entries(entries: Sequence[Entry]) -> list[str]:
    from rlx.plan.explain import table

    rows = []
    for one in entries:
        value = "" if one.default is None else f"= {one.default}"
        kind = one.type if one.weight is None else "" if one.weight in (0, 1) else f"× {one.weight:g}"
        needed = "must be given" if one.type and one.default is None else ""
        rows.append([f"  {one.name}", " ".join(part for part in (kind, value, needed) if part), one.doc])
    return [line.rstrip() for line in table(["", "", ""], rows)[1:]]


def next_commands(env_id: str, prompt_chars: int = 0) -> list[str]:
    """The commands that check an environment and train on it. `prompt_chars`: characters of a short prompt."""
    option = next((option for option, name in shipped_options().items() if name == env_id), None)
    own = [LANGUAGE_MODEL] if prompt_chars >= default_seq_len() else []
    chosen = ["env=custom", f"envs.custom.id={env_id}"] if option is None else [f"env={option}"]
    return [f"rlx env check {shlex.join([option or env_id, *own])}", f"{program()} {shlex.join([*chosen, *own])}"]


# install


def _install(chosen: argparse.Namespace) -> int:
    from rlx.preflight.packages import InstallFailed, install

    try:
        done = install(chosen.what)
    except InstallFailed as error:
        print(f"rlx: {error}", file=sys.stderr)
        return 1
    print(f"{'installed into' if done.new else 'this was installed before:'} {done.folder}, {done.packages} packages")
    if not done.environments:
        print(
            f"\nrlx: {chosen.what} has no environment that can be seen: no module with load_environment, and none whose __all__ names a "
            f"Taskset.\n  If its module is only known to its author: envs.custom.id=MODULE envs.custom.python={done.folder}/bin/python",
            file=sys.stderr,
        )
        return 1
    if len(done.environments) > MANY:
        options = {name: option for option, name in shipped_options().items()}
        print("\n".join(["", *_table(done.environments, options)]))
        return 0
    for one in done.environments:
        print(f"\n{one.name} {one.version}: {one.kind}" + (f". {one.summary}" if one.summary else ""))
        print("\n".join(f"  {line}" for line in next_commands(one.name)))
    return 0


# init


def _init(chosen: argparse.Namespace) -> int:
    from rlx.config.errors import ConfigError
    from rlx.envs.scaffold import FLAVOURS, create

    kinds = [name for name in FLAVOURS if name != "v1"]
    if chosen.kind is not None and chosen.kind not in kinds:
        raise ConfigError(f"there is no --kind {chosen.kind}.\n  fix: one of {', '.join(kinds)}")
    if chosen.v1 and chosen.kind not in (None, "single-turn"):
        raise ConfigError(f"--v1 writes a taskset of one turn, not {chosen.kind}.\n  fix: leave out --kind, or --v1")
    folder = chosen.folder or Path(chosen.name)
    name, files, needed = create(chosen.name, folder, "v1" if chosen.v1 else chosen.kind or "single-turn")
    keys = "".join(f" {key}" for key in needed)
    shown = f"./{folder}" if not folder.is_absolute() else str(folder)
    print(f"wrote {shown}: {', '.join(files)}\n\nnext")
    install = f"rlx env install {shlex.quote(shown)}"
    for line in (install, f"rlx env check {name}{keys}", f"rlx train env=custom envs.custom.id={name}{keys}"):
        print(f"  {line}")
    return 0
