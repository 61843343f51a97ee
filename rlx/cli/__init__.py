"""The command line: finds the command, imports only its module, and turns errors into a short message and an exit code.

Each command is a module, or an object in one, with `SUMMARY`, `help_text()` and `run(argv) -> exit code`. Nothing heavy is imported
here, so `rlx --help` and `rlx COMMAND --help` answer in a fraction of a second.
"""

from __future__ import annotations

import gc
import locale
import os
import pkgutil
import select
import shlex
import sys
from pathlib import Path

from rlx.terminal import safe_output

COMMANDS = {  # in the order of the help text
    "train": "rlx.cli.commands:TRAIN",
    "sft": "rlx.cli.commands:SFT",
    "eval": "rlx.cli.commands:EVAL",
    "synthesize": "rlx.cli.commands:SYNTHESIZE",
    "gateway": "rlx.cli.commands:GATEWAY",
    "fetch": "rlx.cli.fetch",
    "runs": "rlx.cli.runs",
    "watch": "rlx.cli.watch",
    "doctor": "rlx.cli.doctor",
    "diff": "rlx.cli.diff",
    "show": "rlx.cli.show",
    "view": "rlx.cli.view",
    "report": "rlx.cli.report",
    "replay": "rlx.cli.replay",
    "push": "rlx.cli.push",
    "servers": "rlx.cli.servers",
    "env": "rlx.cli.env",
    "prepare": "rlx.cli.role:PREPARE",
    "inference": "rlx.cli.role:INFERENCE",
    "orchestrator": "rlx.cli.role:ORCHESTRATOR",
    "trainer": "rlx.cli.role:TRAINER",
    "pod": "rlx.cli.pod",
}

READ_ONLY = {"runs", "watch", "doctor", "diff", "show", "view", "report", "env", "push", "servers"}  # start nothing


CLOSED = 141  # 128 + SIGPIPE, as a shell reports it


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code.

    0 done, 1 a role failed, 2 nothing was started, 130 interrupted, 141 the reader of its output left (`rlx … | head`).
    """
    if argv is None and not sys.flags.utf8_mode and locale.getencoding().lower() not in ("utf-8", "utf8"):  # of all files, too
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {"PYTHONUTF8": "1"})
    if argv is None:
        os.environ.pop("PYTHONIOENCODING", None)  # the logs of processes are UTF-8
    gc.set_threshold(20_000)  # what composing makes stays; looking through it again and again was a twentieth of a dry run
    try:
        with safe_output():
            code = _main(argv)
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        if not _stdout_is_closed():
            raise
        return CLOSED


def _stdout_is_closed() -> bool:
    """Whether nobody reads standard output any more. It then becomes the null device, so that Python's flush at exit is silent."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _main(argv: list[str] | None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_usage(), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from rlx import __version__

        print(f"rlx {__version__}")
        return 0
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        print(_unknown(name, rest), file=sys.stderr)
        return 2
    command = pkgutil.resolve_name(COMMANDS[name])
    if {"-h", "--help"} & {*rest}:
        print(command.help_text())
        return 0
    from rlx.config.errors import ConfigError

    _let_children_find_the_same_code()
    try:
        return command.run(rest)
    except ConfigError as error:
        print(format_problems(error.problems, starts=name not in READ_ONLY), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("rlx: interrupted", file=sys.stderr)
        return 130


def format_problems(problems: list[str], starts: bool = True) -> str:
    """The message about problems. `starts`: whether the command would have started something."""
    parts = [f"{number}. {problem}".replace("\n", "\n   ") for number, problem in enumerate(problems, 1)]
    text = problems[0] if len(problems) == 1 else f"{len(problems)} problems\n\n" + "\n\n".join(parts)
    return f"rlx: {text}" + ("\nNothing was started." if starts else "")


def _usage() -> str:
    commands = "\n".join(f"  {name.ljust(14)}{pkgutil.resolve_name(place).SUMMARY}" for name, place in COMMANDS.items())
    return f"""\
rlx: reinforcement-learning experiments on language models.

usage: rlx COMMAND [key=value …]

{commands}

rlx COMMAND --help shows more. Start with:  rlx train dry_run=true"""


def _unknown(name: str, rest: list[str]) -> str:
    import difflib

    near = ["train " + shlex.join([name, *rest])] if "=" in name else difflib.get_close_matches(name, COMMANDS, n=1)
    return f"rlx: there is no command {name!r}.\n  fix: " + (f"rlx {near[0]}" if near else f"one of {', '.join(COMMANDS)}")


def _let_children_find_the_same_code() -> None:
    """Make the processes of a run import this copy of rlx, and modules in the working directory, as this process does.

    With `-m`, Python searches the working directory first, and that may be another checkout. PYTHONSAFEPATH keeps Python from it, so
    PYTHONPATH names that folder, last. An installed rlx comes after all of PYTHONPATH, which then must not name another rlx: whoever
    reads the run adds the working directory (`rlx.config.load`).
    """
    import rlx

    source, here = Path(rlx.__file__).resolve().parents[1], os.getcwd()
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    installed = source.name in ("site-packages", "dist-packages")
    if not installed and next(filter(_has_rlx, paths), None) != str(source):
        paths.insert(0, str(source))
    if here not in paths and os.pathsep not in here and not (installed and _has_rlx(here)):
        paths.append(here)
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
    if here not in sys.path:
        sys.path.append(here)


def _has_rlx(folder: str) -> bool:
    return Path(folder, "rlx", "__init__.py").is_file()
