"""Values that a configuration takes from the run whose weights it uses, or from a named endpoint.

They stand in the defaults list before environment variables, so everything that the user gives is stronger. Reads files; imports no hydra.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rlx.config.errors import ConfigError, may_read
from rlx.config.strangers import executing, is_mine, said

OF_THE_RUN = ("seed", "seq_len", "model", "lora", "sampling", "inference.max_model_len", "orchestrator.trajectory_strategy", "chat", "envs")
"""What evaluation and synthesis take from the run whose weights they use; `envs` only if no environment is chosen.

An entry of `envs` without `id` says how an environment of the run differs.
"""
OF_ENV = (  # not its split, weight and group size, nor how many runs of an episode train
    *("id", "args", "agents", "num_tasks"),
    *("rollout_timeout", "reward_raises", "workers", "python", "sampling", "sandbox", "box", "harness"),
)
ENDPOINT = ("base_url", "api_key_var", "model")  # keys of an entry in a file of endpoints


@dataclass(frozen=True)
class Inherited:
    """Values from one place."""

    origin: str  # its name in messages: `the run outputs/mine`
    values: dict[str, Any] = field(default_factory=dict)  # nested like the configuration
    groups: dict[str, str] = field(default_factory=dict)  # options for groups that the user has not chosen
    refuses: dict[str, str] = field(default_factory=dict)  # group -> why the user's choice of it cannot be
    note: str = ""  # for the user
    literal: bool = False  # `${` in a value is text, as in a run's `config.yaml`; in a file of the user's it is a reference


def of_model(data: Mapping[str, Any], chosen: Sequence[str]) -> list[Inherited]:
    """What an evaluation inherits. `data`: its composed tree. `chosen`: groups that the user has chosen. Raises ConfigError."""
    found = []
    client = data.get("client") or {}
    entry = _endpoint(client)
    if entry is not None:
        found.append(entry)
    if client.get("base_url") or entry is not None:
        found.append(Inherited("an endpoint", groups={"model": "endpoint"}))
    if data.get("weights_dir"):
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


def _of_run(run: Path, *, envs: bool) -> Inherited:
    try:
        data = yaml.load((run / "config.yaml").read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"weights_dir: {run / 'config.yaml'} cannot be read: {error}") from error
    left = {} if is_mine(run) else dict(executing(data))
    for *above, last in left:
        del functools.reduce(operator.getitem, above, data)[last]
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
    note = f"not taken from the run {run} of another user, because it makes code run: {said(left)}" if left else ""
    return Inherited(f"the run {run}", values, refuses=refuses, note=note, literal=True)


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
