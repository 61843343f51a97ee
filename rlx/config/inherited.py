"""Values that a configuration takes from the run whose weights it uses, or from a named endpoint.

They stand in the defaults list before environment variables, so everything that the user gives is stronger. Reads files; imports no hydra.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rlx.config.elsewhere import is_away
from rlx.config.errors import ConfigError, may_read
from rlx.config.tree import called_a_secret

OF_THE_RUN = ("seed", "seq_len", "model", "lora", "sampling", "inference.max_model_len", "orchestrator.trajectory_strategy", "chat", "envs")
"""What evaluation and synthesis take from the run whose weights they use; `envs` only if no environment is chosen.

An entry of `envs` without `id` says how an environment of the run differs.
"""
OF_ENV = (  # not its split, weight and group size, nor how many runs of an episode train
    *("id", "args", "agents", "num_tasks"),
    *("rollout_timeout", "reward_raises", "workers", "python", "sampling"),
)
ENDPOINT = ("base_url", "api_key_var", "model")  # keys of an entry in a file of endpoints


@dataclass(frozen=True)
class Inherited:
    """Values from one place."""

    origin: str  # its name in messages: `the run outputs/mine`
    values: dict[str, Any] = field(default_factory=dict)  # nested like the configuration
    groups: dict[str, str] = field(default_factory=dict)  # options for groups that the user has not chosen
    refuses: dict[str, str] = field(default_factory=dict)  # group -> why the user's choice of it cannot be
    later: bool = False  # the values stand for those of a run that only the pods can read; they replace them
    literal: bool = False  # `${` in a value is text, as in a run's `config.yaml`; in a file of the user's it is a reference


@dataclass(frozen=True)
class Later:
    """What a configuration leaves open until it is composed in a pod, which can read the run whose weights are used."""

    keys: tuple[str, ...]  # their values here only stand for those of the run
    sections: tuple[str, ...]  # what is left open, but for the values that are given
    given: dict[str, Any]  # those values, nested like the configuration


def left_open(inherited: Inherited, origins: Mapping[str, str], data: dict[str, Any]) -> tuple[Later, str]:
    """What nothing but the placeholders of a run that only the pods can read has set, and a note for the user.

    `origins`: what set each key last. Takes the environments out of `data` if they are the run's. Raises ConfigError for a secret in them.
    """
    keys: list[str] = []
    given: dict[str, Any] = {}
    sections = OF_THE_RUN if "envs" in inherited.values else OF_THE_RUN[:-1]
    for section in sections:
        for (*above, last), value in _leaves(data, section):
            if origins.get(key := ".".join(map(str, [*above, last]))) == inherited.origin:
                keys.append(key)
                continue
            if section == "envs" and called_a_secret(str(last)):
                raise ConfigError(
                    f"a secret must not be in a manifest: {key}.\n  fix: give the environment its secret as a variable of a Secret"
                )
            target = given
            for part in above:
                target = target.setdefault(part, {})
            target[last] = value
    if "envs" in sections:
        keys.append("envs")
        data["envs"] = {}
    note = f"{inherited.origin} is on the volume: the pods take from it what is not given here (docs/kubernetes.md)"
    return Later(tuple(keys), sections, given), note


def _leaves(data: Mapping[str, Any], key: str) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The values at and below a dotted key, with the names on the way. A name may be a number, or hold a dot (`gpt-4.1`)."""
    names, value = tuple(key.split(".")), functools.reduce(lambda found, part: found[part], key.split("."), data)
    yield from _below(names, value)


def _below(names: tuple[Any, ...], value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, dict) and value:
        for name, each in value.items():
            yield from _below((*names, name), each)
    else:
        yield names, value


def of_model(data: Mapping[str, Any], chosen: Sequence[str]) -> list[Inherited]:
    """What an evaluation inherits. `data`: its composed tree. `chosen`: groups that the user has chosen. Raises ConfigError."""
    found = []
    client = data.get("client") or {}
    entry = _endpoint(client)
    if entry is not None:
        found.append(entry)
    if client.get("base_url") or entry is not None:
        found.append(Inherited("an endpoint", groups={"model": "endpoint"}))
    launcher, volume = data.get("launcher") or {}, data.get("kubernetes") or {}
    if data.get("weights_dir") and is_away(launcher.get("name"), volume.get("mount")):
        if "model" not in chosen:  # else the weights may be no run's, and then their model must be named
            found.append(_of_run_elsewhere(data, envs=_takes_envs(data, chosen)))
    elif data.get("weights_dir"):
        _, run = find_weights(str(data["weights_dir"]))
        if run is not None:
            found.append(_of_run(run, envs=_takes_envs(data, chosen)))
    return found


def _takes_envs(data: Mapping[str, Any], chosen: Sequence[str]) -> bool:
    """Whether the environments are those of the run: none is chosen."""
    return "env" not in chosen and not any(not isinstance(env, dict) or "id" in env for env in (data.get("envs") or {}).values())


def find_weights(given: str) -> tuple[Path, Path | None]:
    """The folder of the `step_N` folders that `weights_dir` names, and the directory of their run, if it is there. Both absolute.

    Raises ConfigError if the folder does not exist or has no weights.
    """
    path = Path(given).expanduser().absolute()
    with may_read(path):
        return _find_weights(given, path)


def _find_weights(given: str, path: Path) -> tuple[Path, Path | None]:
    if not path.is_dir():
        raise ConfigError(f"weights_dir={given} is no directory; the current directory is {Path.cwd()}.\n  fix: name a run or its weights/")
    if (path / "config.yaml").is_file():
        return path / "weights", path
    if any(path.glob("step_*")):
        run = path.parent
        return path, run if path.name == "weights" and (run / "config.yaml").is_file() else None
    raise ConfigError(f"weights_dir={given} has no step_N folders and is no run directory.\n  fix: name a run or its weights/")


def _of_run_elsewhere(data: Mapping[str, Any], *, envs: bool) -> Inherited:
    """The configuration's own values in place of those that the pods will take from the run."""
    values: dict[str, Any] = {}
    for key in OF_THE_RUN[:-1]:
        *above, last = key.split(".")
        source, target = data, values
        for part in above:
            source, target = source[part], target.setdefault(part, {})
        target[last] = source[last]
    if envs:
        values["envs"] = {}
    return Inherited(f"the run of {data['weights_dir']}", values, later=True, literal=True)


def _of_run(run: Path, *, envs: bool) -> Inherited:
    try:
        data = yaml.load((run / "config.yaml").read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"weights_dir: {run / 'config.yaml'} cannot be read: {error}") from error
    values: dict[str, Any] = {}
    for key in OF_THE_RUN:
        *above, last = key.split(".")
        source, target = data, values
        for part in above:
            source, target = source.get(part) or {}, target.setdefault(part, {})
        if last in source:
            target[last] = source[last]
    own = values.pop("envs", {})
    if envs:
        values["envs"] = {name: {key: env[key] for key in OF_ENV if key in env} for name, env in own.items()}
    values.get("sampling", {}).pop("allow_biased_ratio", None)
    name = values.get("model", {}).get("name")
    refuses = {"model": f"the weights are those of {run}, and its model is {name}"}
    return Inherited(f"the run {run}", values, refuses=refuses, literal=True)


def _endpoint(client: Mapping[str, Any]) -> Inherited | None:
    """The chosen entry of a file of endpoints."""
    file, name = client.get("endpoints"), client.get("endpoint")
    if file is None and name is None:
        return None
    if file is None or name is None:
        lacks, has = ("client.endpoints", "client.endpoint") if file is None else ("client.endpoint", "client.endpoints")
        raise ConfigError(f"{has}={name or file} needs {lacks}.\n  fix: client.endpoints=FILE client.endpoint=NAME")
    path = Path(str(file)).expanduser()
    try:
        entries = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(
            f"client.endpoints={file} cannot be read: {error}.\n  fix: give a YAML file with an entry for each endpoint"
        ) from error
    if not isinstance(entries, dict) or name not in entries:
        known = ", ".join(map(str, entries)) if isinstance(entries, dict) else "none"
        raise ConfigError(f"client.endpoints={file} has no endpoint {name}.\n  fix: client.endpoint= one of: {known}")
    entry = entries[name]
    wrong = sorted(set(entry) - set(ENDPOINT)) if isinstance(entry, dict) else ["a value instead of keys"]
    if wrong or not entry.get("base_url"):
        what = f"unknown: {', '.join(wrong)}" if wrong else "base_url is missing"
        raise ConfigError(f"the endpoint {name} of {file} is not one: {what}.\n  fix: its keys are {', '.join(ENDPOINT)}")
    values: dict[str, Any] = {"client": {key: entry[key] for key in ENDPOINT[:2] if key in entry}}
    if "model" in entry:
        values["model"] = {"name": entry["model"]}
    return Inherited(f"{file}, {name}", values)
