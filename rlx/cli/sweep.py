"""`rlx train -m`: several runs from one command line, as a SLURM job array or in a pool on this machine.

All runs are composed, checked and planned before the first one starts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlx.cli.start import check_nodes, look, resolve
from rlx.config.errors import ConfigError
from rlx.invocation import program, short

if TYPE_CHECKING:
    from rlx.cli.commands import Command
    from rlx.config.composition import Kept
    from rlx.config.sweeps import Sweep, SweepLine
    from rlx.launch.sweep import Element


def run(argv: list[str], command: Command) -> int:
    """Run or submit the sweep of a command line. Returns the exit code: 0, or 1 if SLURM rejects it or an awaited run is not completed."""
    from rlx.config.sweeps import expand

    sweep = expand(argv, None, command.root)
    directory = folder(sweep)
    elements = checked(sweep.elements, directory, command)
    if elements[0].cfg.dry_run:
        print(dry_run(elements, sweep, directory))
        return 0
    code = start(elements, sweep.name, directory, wait=elements[0].cfg.launcher.wait)
    print(f"the sweep's report, at any time: {program('report')} {short(directory)}")
    return code


def folder(sweep: Sweep) -> Path:
    """The sweep's directory, absolute."""
    if Path(sweep.name).name != sweep.name:
        raise ConfigError(f"run.name={sweep.name} is not the name of one folder.\n  fix: give only the folder's name, or set run.dir=")
    return Path(sweep.directory).expanduser().absolute() if sweep.directory else Path("outputs").absolute() / sweep.name


def checked(lines: Sequence[SweepLine], directory: Path, command: Command) -> list[Element]:
    """Compose, check and plan all runs of a command. Raises one ConfigError with the problems of all of them."""
    from rlx.config.instantiate import all_nodes_of
    from rlx.config.schema import RunConfig
    from rlx.launch.sweep import Element
    from rlx.plan.make import make_plan

    elements: list[Element] = []
    problems: dict[str, list[str]] = {}  # problem -> names of the runs that have it
    built: list[tuple[object, ...]] = []
    kept: Kept = {}
    for line in lines:
        try:
            composed, resolved = resolve(line.argv, command, kept)
            cfg = replace(resolved, run=RunConfig(name=line.name, dir=str(directory / line.name)))
            nodes = tuple(node for node, _ in all_nodes_of(cfg).values())
            if nodes not in built:
                check_nodes(cfg, composed)
                built.append(nodes)
            elements.append(Element(line.name, cfg, composed.overrides, make_plan(cfg, Path(str(cfg.run.dir))), composed.origins.files))
        except ConfigError as error:
            for text in error.problems:
                problems.setdefault(text, []).append(line.name)
    if problems:
        raise ConfigError([f"{text}\n(in {names[0]}; {len(names)} of {len(lines)} runs)" for text, names in problems.items()])
    launchers = [e.cfg.launcher for e in elements]
    if len({(each.name, each.array_parallelism, each.wait) for each in launchers}) > 1:
        raise ConfigError("the runs of a sweep are launched together.\n  fix: give launcher= and its keys the same values for all runs")
    if elements[0].cfg.launcher.name == "slurm":
        from rlx.launch.slurm import check_directory

        check_directory(directory)
    for element, environments in zip(elements, look([element.cfg for element in elements]), strict=True):
        element.environments = environments
    return elements


def start(elements: list[Element], name: str, directory: Path, *, wait: bool) -> int:
    """Start the elements that are not done or alive; return the exit code."""
    from rlx.launch import sweep
    from rlx.launch.wait_for_job import wait_for_jobs

    with sweep.alone(directory):
        launcher = elements[0].cfg.launcher
        code = _submit(elements, name, directory) if launcher.name == "slurm" else _run_here(elements, directory)
    if launcher.name == "local":
        return code
    if wait:
        wait_for_jobs({element.job: element.paths for element in elements if element.job is not None})
        print("\n".join(sweep.summary(elements)))
        return 1 if sweep.failed(elements) else 0
    print("\n".join(f"  {each.job or '-':<10} {each.paths.root}" for each in elements))
    return code


def _left(elements: list[Element], directory: Path) -> tuple[list[Element], dict[str, str] | None]:
    """The elements that must be started, and what SLURM said of jobs. Prints how many are done, alive or to be resumed."""
    from rlx.launch import sweep

    jobs = sweep.find_states(elements)
    todo = [element for element in elements if element.state in ("new", "again")]
    states = [element.state for element in elements]
    words = {"done": "already completed", "alive": "already queued or running", "again": "to resume"}
    found = "; ".join(f"{states.count(state)} {words[state]}" for state in words if state in states)
    print(f"{len(states)} runs in {directory}" + (f" ({found})" if found else ""), flush=True)
    return todo, jobs


def _submit(elements: list[Element], name: str, directory: Path) -> int:
    """Submit the remaining runs; return 1 if SLURM rejects them. Holds the runs' locks until their job ids are recorded."""
    from rlx.launch import sweep

    todo, jobs = _left(elements, directory)
    locks = sweep.make_directories(todo, jobs)
    try:
        if todo:
            sweep.submit_arrays(todo, name, directory)
    except RuntimeError as error:
        print(f"rlx: {error}", file=sys.stderr)
        return 1
    finally:
        sweep.release(locks)
    return 0


def _run_here(elements: list[Element], directory: Path) -> int:
    """Run the remaining runs in a pool on this machine; return 1 if a run is not completed."""
    from rlx.launch import sweep

    todo, jobs = _left(elements, directory)
    gpus = _machine_gpus(elements)
    parallel = sweep.check_local(elements, gpus, elements[0].cfg.launcher.array_parallelism)
    sweep.release(sweep.make_directories(todo, jobs))  # each run takes its own lock; this process still holds the sweep's
    try:
        sweep.run_pool(todo, parallel, gpus, say=lambda text: print(text, flush=True))
    finally:
        print("\n".join(sweep.summary(elements)), flush=True)
    left = sweep.failed(elements)
    if left:
        print(f"{len(left)} of {len(elements)} runs are not completed; run the same command again to resume them", file=sys.stderr)
    return 1 if left else 0


def dry_run(elements: list[Element], sweep: Sweep, directory: Path) -> str:
    """The report of a dry run: the elements, the first one's plan, and the sbatch script of the array."""
    from rlx.launch.slurm import FOLDER, sbatch_script
    from rlx.plan.explain import explain
    from rlx.runs.run_dir import write_description

    explained = {each.name: explain(each.cfg, each.plan, {}, [], str(each.paths.root), each.environments) for each in elements}
    script = None
    if elements[0].cfg.launcher.name == "slurm":
        script = sbatch_script(elements[0].cfg, sweep.name, directory / FOLDER, [each.paths.root for each in elements])
    written = [write_description(each.cfg, each.overrides, each.plan, script, explained[each.name]) for each in elements]
    parts = [
        f"{len(elements)} runs in {directory}\n" + "\n".join(f"  {element.name}" for element in elements),
        f"the first run\n\n{explained[elements[0].name]}",
        *([f"sbatch script\n{script}"] if script else []),
        f"written: configuration, plan and explanation, in the directories of {sum(map(bool, written))} runs",
        "dry run: nothing was started",
    ]
    return "\n\n".join(parts)


def _machine_gpus(elements: Sequence[Element]) -> list[str]:
    from rlx.config.gpus import visible_gpus

    if not any(element.cfg.num_gpus for element in elements):
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [part for part in named.split(",") if part] if named is not None else [str(gpu) for gpu in range(visible_gpus())]
