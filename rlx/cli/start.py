"""Starts a run of any command that has a run directory: compose, check, plan, launch, and follow the run until it ends."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from rlx.cli.command import Command, check_cluster, check_nodes, failure, label_of


def run(argv: list[str], command: Command) -> int:
    """Run the command line and return the exit code."""
    from rlx.config.errors import ConfigError
    from rlx.config.load import compose
    from rlx.config.sweeps import is_sweep
    from rlx.plan.environment import hub_variables
    from rlx.plan.make import make_plan
    from rlx.plan.place import require_one_host
    from rlx.preflight.chats import check_chats
    from rlx.preflight.hub import check_cache, use_cache
    from rlx.preflight.probes import environments_of, lines_of
    from rlx.runs.claim import changes, create, settle, sources, write_description
    from rlx.runs.differences import change_note
    from rlx.runs.rewind import is_fork

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # exit code 130, as after Ctrl-C
    if is_sweep(argv):
        from rlx.cli import sweep

        return sweep.run(argv, command)
    composed = compose(argv, None, command.root)
    check_cluster(composed)
    if not composed.cfg.dry_run:  # which may be absent where a dry run is made
        use_cache(hub_variables(composed.cfg))
    cfg, label = command.resolve(composed.cfg), label_of(composed, command)
    cfg = settle(cfg, label)
    assert cfg.run.dir is not None
    plan = make_plan(cfg, Path(cfg.run.dir))
    if cfg.launcher.name == "local":
        if not cfg.dry_run:  # a plan may be for other machines
            require_one_host(plan)
    else:
        from rlx.launch.slurm import check_directory

        check_directory(Path(cfg.run.dir))
    check_nodes(cfg, composed)
    check_cache([cfg])
    (found,) = environments_of([cfg])
    check_chats([cfg], [found])
    environments = lines_of(found)
    if cfg.dry_run:
        sources(cfg)
        from rlx.config.load import to_yaml
        from rlx.plan.explain import explain

        print(to_yaml(cfg), end="\n")
        explained = explain(cfg, plan, composed.choices, composed.notes, cfg.run.dir, environments)
        print(explained)
        if changed := changes(cfg):
            fork = f"starts from {cfg.resume}, with {', '.join(changed)}"
            print("\n" + (fork if is_fork(cfg.resume) else change_note(Path(cfg.run.dir), changed)))
        script = None
        if cfg.launcher.name == "slurm":
            from rlx.launch.slurm import FOLDER, sbatch_script

            script = sbatch_script(cfg, str(cfg.run.name), Path(cfg.run.dir) / FOLDER, [Path(cfg.run.dir)])
            print("\nsbatch script\n" + "".join(f"  {line}\n" for line in script.splitlines()), end="")
        try:
            written = write_description(cfg, composed.overrides, plan, script, explained)
            print(f"\nwritten to {written.root}" if written else f"\nnot written: {cfg.run.dir} holds a run")
        except ConfigError as error:
            if composed.cfg.run.dir or composed.cfg.run.name:
                raise
            print(f"\nnot written: {error}")
        print("\ndry run: nothing was started")
        return 0
    from rlx.config.limits import multiplies_in_16_bits
    from rlx.plan.forecast import notes_of

    here = cfg.launcher.name == "local"
    times = notes_of(cfg, sixteen_bit=here and multiplies_in_16_bits())
    for note in [*composed.notes, *times, *(f"environment {line}" for line in environments)]:
        print(note, flush=True)
    paths, lock = create(cfg, composed.overrides, plan)

    from rlx.runs.status import read_status

    if cfg.launcher.name == "slurm":
        from rlx.launch.follow import follow
        from rlx.launch.slurm import FOLDER, submit

        try:
            (job,) = submit([(paths, cfg)], str(cfg.run.name), paths.root / FOLDER)  # the name that a dry run shows
        except RuntimeError as error:
            print(f"rlx: {error}", file=sys.stderr)
            return 1
        finally:
            lock.close()  # the job owns the directory now, and its id is recorded
        print(f"job {job}: {paths.root}")
        if not cfg.launcher.wait:
            print(f"  state    squeue -j {job}; {paths.status}\n  stop     scancel {job}")
            return 0
        exit_code = follow(paths, job, command.display(paths.root, cfg, argv))
    else:
        from rlx.launch.local import launch
        from rlx.launch.supervisor import Limits

        exit_code = launch(paths, Limits.of(cfg), lock, command.display(paths.root, cfg, argv))
    status = read_status(paths)
    if status is not None and status.cause is not None:
        print(failure(status.cause, paths.root), file=sys.stderr)
    return exit_code
