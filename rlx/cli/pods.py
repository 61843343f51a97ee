"""`rlx pods`: list, follow and delete the runs on a Kubernetes cluster. Also starts one, for `rlx train launcher=kubernetes`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlx.config.inherited import Later
    from rlx.config.schema import CommandConfig

SUMMARY = "runs on a Kubernetes cluster: list, follow, delete"
OPTIONS = ("namespace", "context")


def help_text() -> str:
    return f"""\
rlx pods: {SUMMARY}.

usage: rlx pods [list | follow NAME | delete NAME] [--namespace NAMESPACE] [--context CONTEXT]

  rlx pods                          the Jobs of runs in the namespace, and their state
  rlx pods follow mine              pods, why they wait, and the output of the first host, until the Job ends
  rlx pods delete mine              delete the Job; its pods get their grace time for a checkpoint, and its run directory stays

exit codes: 0 done; of `follow`: those of the run; 2 the cluster refuses"""


def run(argv: list[str]) -> int:
    from rlx.config.schema_launch import KubernetesConfig
    from rlx.launch.kube import Cluster, Follower, delete, jobs
    from rlx.plan.explain import table

    words, given = [], {}
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and name in OPTIONS and (equals or rest):
            given[name] = value if equals else rest.pop(0)
        else:
            words.append(word)
    action, names = (words[0] if words else "list"), words[1:]
    if action not in ("list", "follow", "delete") or len(names) != (action != "list"):
        print("usage: rlx pods [list | follow NAME | delete NAME]. See rlx pods --help.", file=sys.stderr)
        return 2
    cluster = Cluster.of(replace(KubernetesConfig(), namespace=given.get("namespace"), context=given.get("context")))
    if action == "list":
        rows = jobs(cluster)
        print("\n".join(table(["run", "state", "since"], rows)) if rows else f"no runs in the namespace {cluster.namespace}")
        return 0
    if action == "delete":
        delete(cluster, names[0])
        print(f"{names[0]} is being deleted; its run directory stays")
        return 0
    return Follower(cluster, names[0], _say).run()


def check_client(cfg: CommandConfig) -> None:
    """Raise ConfigError if the run cannot be started because the client is missing."""
    from rlx.launch.kube import require_client

    if not cfg.dry_run:
        require_client()


def settled(cfg: Any, label: str) -> Any:
    """The configuration of a run in the cluster, with `run.name`, and `run.dir` on the volume."""
    from rlx.runs.claim import settle

    name = settle(cfg, label).run.name
    return replace(cfg, run=replace(cfg.run, name=name, dir=cfg.run.dir or str(Path(cfg.kubernetes.mount) / str(name))))


def objects_of(cfg: CommandConfig, later: Later | None = None) -> list[dict[str, Any]]:
    """The objects of a settled run. `later`: what its configuration takes from a run that only the pods can read."""
    from rlx.launch.manifests import manifests, object_name, values_of

    return manifests(object_name(str(cfg.run.name)), values_of(replace(cfg, dry_run=False), later))


def text_of(objects: Sequence[dict[str, Any]]) -> str:
    """The manifests for people and for `kubectl apply -f`."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, block)
    return yaml.dump_all(objects, Dumper=Dumper, sort_keys=False, width=1000)


def start(cfg: CommandConfig, later: Later | None = None) -> int:
    """Create the objects of a settled run. Follows it if `launcher.wait`. Returns the exit code."""
    from rlx.config.errors import ConfigError
    from rlx.launch.kube import Cluster, Follower, apply

    objects = objects_of(cfg, later)
    name, cluster = objects[-1]["metadata"]["name"], Cluster.of(cfg.kubernetes)
    apply(cluster, objects)
    there = f" --namespace {cluster.namespace}"
    print(f"Job {name} in {cluster.namespace}: {cfg.run.dir} on the claim {cfg.kubernetes.claim}", flush=True)
    if not cfg.launcher.wait:
        print(f"  state    rlx pods follow {name}{there}\n  stop     rlx pods delete {name}{there}")
        return 0
    try:
        return Follower(cluster, name, _say, answered=True).run()
    except KeyboardInterrupt:
        print(f"\nthe Job {name} continues; stop it with: rlx pods delete {name}{there}", file=sys.stderr)
        raise
    except ConfigError as error:  # 2 would mean that nothing was started
        print(f"rlx: {error}\nThe Job {name} was started, but cannot be followed: rlx pods follow {name}{there}", file=sys.stderr)
        return 1


def _say(line: str) -> None:
    print(line, flush=True)
