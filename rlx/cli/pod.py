"""`rlx pod`: one host of a run over several; on Kubernetes the command of the containers that the chart starts.

pod i   agent (`rlx.launch.agents`), which starts processes for the first host
pod 0   also the supervisor: compose, claim or rewind the run directory, wait for the other hosts' agents, run one attempt
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlx.config.roots import Root
    from rlx.launch.agents import Agent

SUMMARY = "one host of a run over several (on Kubernetes the command of its containers; elsewhere by hand)"
POLL_SECONDS = 1.0  # seconds between two looks of a waiting host at the first host's exit code
SHOWN = 20.0  # seconds that the display has to end after the run


def help_text() -> str:
    return f"""\
rlx pod: {SUMMARY}.

usage: rlx pod --job NAME --nodes N --volume DIR [--gpus N] [--hosts NAME:PORT,…] COMMAND [key=value …]

On Kubernetes the containers of the chart in `charts/rlx` run it (docs/cluster.md). Elsewhere start it on each host by hand, with
--hosts (docs/cluster.md).
COMMAND is train, sft, eval or synthesize. Host 0 runs it, in DIR/<run.name>; the others serve it until it ends. After a restart the run
resumes from its newest checkpoint.

  --gpus N               GPUs of each host: the layout fits them unless hardware= names one; default: those of host 0
  --hosts NAME:PORT,…    each host's agent, in order; default: the names of the Job's pods
  JOB_COMPLETION_INDEX   environment variable: the number of this host, from 0
  JOB_UID                environment variable, the same on all hosts: which start of the run this is

exit codes: those of the run; 75: preempted, to be started again"""


def run(argv: list[str]) -> int:
    from rlx.cli.arguments import Parser

    parser = Parser("pod")
    parser.add_argument("--job", required=True)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--volume", type=Path, required=True)
    parser.add_argument("--gpus", type=int)  # of each host; default: unknown
    parser.add_argument("--start-timeout", type=float, default=1800.0)
    parser.add_argument("--hosts", default="")  # NAME:PORT of each host's agent, in order; default: the names of the Job's pods
    parser.add_argument("command", choices=("train", "sft", "eval", "synthesize"))
    given, overrides = parser.parse_known_args(argv)
    return _as_init(argv) if os.getpid() == 1 else _host(given, overrides)


def _as_init(argv: list[str]) -> int:
    """Run the command in a child and be the container's first process: pass signals on, and reap whatever is left without a parent."""
    child = subprocess.Popen([sys.executable, "-m", "rlx.cli", "pod", *argv])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, lambda number, _: os.kill(child.pid, number))
    while True:
        pid, status = os.wait()
        if pid == child.pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _host(given: Namespace, overrides: list[str]) -> int:
    from rlx.launch.agents import PORT, Agent
    from rlx.paths import write_text
    from rlx.polling import LEFT

    index = int(os.environ.setdefault("JOB_COMPLETION_INDEX", "0"))  # it shows the rules that this is a pod
    file = given.volume / ".nodes" / f"{given.job}-{os.environ.get('JOB_UID', '')}"
    pods = [f"{given.job}-{number}.{given.job}:{PORT}" for number in range(given.nodes)]
    places = [place.rpartition(":") for place in (given.hosts.split(",") if given.hosts else pods)]
    hosts = [(name.strip("[]"), int(port)) for name, _, port in places]
    file.parent.mkdir(parents=True, exist_ok=True)
    end = file.with_name(f"{file.name}.end")  # the exit code with which the first host ended the run
    agent = Agent(lambda: _read(file), hosts[index][1])
    if index == 0:
        end.unlink(missing_ok=True)  # of an attempt after which the Job started this host again
        code = _first(given, overrides, hosts, file)
        if code != LEFT:  # then the Job ends; else the other hosts serve the next attempt
            with contextlib.suppress(OSError):
                write_text(end, f"{code} {secrets.token_hex(8)}")
        return code
    # By hand, the hosts of the next attempt start in any order, and the file is still that of the last one until the first host is there.
    # A Job whose run has ended starts no next attempt.
    old = _read(end) if given.hosts else None
    return _serve(agent, index, lambda: found if (found := _read(end)) != old else None)


def _serve(agent: Agent, index: int, end: Callable[[], str | None]) -> int:
    """Serve until the first host ends the run, or until this host is taken away.

    `end`: what the first host left, its exit code and a word of its own.
    """
    from rlx.polling import LEFT

    taken = threading.Event()

    def leave(*_: object) -> None:
        taken.set()

    signal.signal(signal.SIGTERM, leave)
    print(f"host {index} serves", flush=True)
    while not taken.wait(POLL_SECONDS):
        if (code := end()) is not None:
            return int(code.split()[0])
    agent.give_notice()
    while agent.is_busy:  # the kubelet ends this after the pod's grace time
        time.sleep(0.1)
    return LEFT


def _first(given: Namespace, overrides: list[str], hosts: list[tuple[str, int]], file: Path) -> int:
    """Run one attempt of the run. Returns its exit code."""
    from rlx.cli.commands import BY_NAME
    from rlx.cli.start import label_of, resolve
    from rlx.launch.agents import wait_for_agents
    from rlx.launch.k8s import after_missing, attempt, is_restart, make_token
    from rlx.paths import RunPaths
    from rlx.plan.make import make_plan
    from rlx.polling import LEFT
    from rlx.runs.run_dir import resolve_run_dir
    from rlx.runs.status import read_status

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(LEFT))
    command = BY_NAME[given.command]
    composed, cfg = resolve(arguments(given, overrides, command.root), command)
    if cfg.run.dir is None:
        cfg = replace(cfg, run=replace(cfg.run, dir=str(given.volume / str(cfg.run.name))))
    cfg = resolve_run_dir(cfg, label_of(composed, command))
    plan = make_plan(cfg, Path(str(cfg.run.dir)))
    needed = max(spec.node for spec in plan) + 1
    if needed > given.nodes:
        print(f"the layout needs {needed} hosts, but the Job has {given.nodes}: correct `nodes` of the chart", file=sys.stderr)
        return 2
    root = Path(str(cfg.run.dir))
    # By hand, the same start may come again with other values, which `attempt` compares; a Job's stay what they are.
    begun = is_restart(root, given.job)
    status = read_status(RunPaths(root)) if begun and not given.hosts else None
    if status is not None and status.state == "completed":  # this pod was lost at the end, and the others have left
        print(f"{root} is completed", flush=True)
        return 0
    token = make_token(file)
    if (missing := wait_for_agents(hosts, token, given.start_timeout, lambda text: print(text, flush=True))) is not None:
        print(f"{missing}\nSee kubectl describe pod: it is not scheduled, or its image cannot be pulled.", file=sys.stderr)
        if not begun:
            return 1
        if given.hosts:
            return LEFT  # by hand: people wait
        return after_missing(cfg, missing)
    shown = []

    def show(root: Path) -> None:
        shown.append(subprocess.Popen([sys.executable, "-m", "rlx.cli", "watch", str(root)]))

    code = attempt(cfg, composed.overrides, plan, composed.origins.files, hosts, file, given.job, show)
    sys.stdout.flush()
    for each in shown:
        try:
            each.wait(SHOWN)
        except subprocess.TimeoutExpired:
            each.kill()
    return code


def arguments(given: Namespace, overrides: list[str], root: Root) -> list[str]:
    """The command line of the run, with what the pod knows: the launcher, the layout of its GPUs, the run's name, secrets.

    A configuration that was written elsewhere (the chart's `config`) names another launcher and a directory that no pod has.
    """
    from rlx.config.environment import variable_of
    from rlx.config.gpus import choose_layout
    from rlx.config.validate import secret_keys

    typed = {part.partition("=")[0] for part in overrides}
    has_all = bool(typed & {"--config-name", "-cn"})
    found = {"launcher.name": "local"} | ({} if "run.name" in typed else {"run.name": given.job})
    if given.gpus is not None and not has_all and variable_of("hardware") not in os.environ:
        found["hardware"] = choose_layout(given.gpus)[0]
    if has_all:  # such a file reads no variables, but secrets can only be in them
        found |= {"run.dir": "null"}
        found |= {key: f"${{oc.env:{name}}}" for key in secret_keys(root.schema) if (name := variable_of(key)) in os.environ}
    return [*overrides, *(f"{key}={value}" for key, value in found.items() if key not in typed)]


def _read(file: Path) -> str | None:
    from rlx.paths import arrived

    try:
        return (arrived(file) or b"").decode().strip() or None
    except OSError:
        return None
