"""Values that a configuration takes from the run whose weights it uses, a named endpoint, or the config.json of its model.

They stand in the defaults list before environment variables, so everything that the user gives is stronger. Reads files; imports no hydra.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlx.config.errors import ConfigError, may_read
from rlx.config.keys import MISSING
from rlx.config.model_sizes import found_config, sizes_in
from rlx.config.nested import merge, nested, section_at, use_own_names
from rlx.config.strangers import executing, is_mine, said
from rlx.config.yaml_files import read

FILE = "config.yaml"
OF_THE_RUN = ("seed", "seq_len", "model", "lora", "sampling", "inference.max_model_len", "orchestrator.trajectory_strategy", "chat")
"""What evaluation and synthesis take from the run whose weights they use; also its environments, if none is chosen.

An entry of `envs` without `id` says how an environment of the run differs.
"""
OF_ENV = (  # not its split, weight and group size, nor how many runs of an episode train
    *("id", "args", "agents", "num_tasks"),
    *("rollout_timeout", "turn_timeout", "on_reward_error", "workers", "python", "sampling", "sandbox", "box", "harness"),
)
NAMED = "named"  # the option of a model that its own config.json describes
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
    client, found = data.get("client") or {}, []
    if client.get("endpoints") is not None or client.get("endpoint") is not None:
        found.append(_endpoint(client))
    if client.get("base_url") or found:
        found.append(Inherited("an endpoint", groups={"model": "endpoint"}))
    _, run = find_weights(str(data["weights_dir"])) if data.get("weights_dir") else (None, None)
    if run is not None:
        given = (data.get("envs") or {}).values()
        takes_envs = "env" not in chosen and all(isinstance(env, dict) and "id" not in env for env in given)
        found.append(_of_run(run, takes_envs))
    return found


def of_name(data: Mapping[str, Any], chosen: Sequence[str]) -> list[Inherited]:
    """The sizes of a model that only its name describes (`model.name=FOLDER`, without `model=`): those of its config.json."""
    model = data["model"]
    has_sizes = model["hidden_size"] != MISSING and ("model" in chosen or model.get("warm_start") is None)  # from an option
    if has_sizes or "/" not in str(model["name"]):
        return []
    path = found_config(model["name"])
    return [Inherited(str(path), {"model": dict(sizes_in(path))}, groups={"model": NAMED}, literal=True)]


def find_weights(given: str) -> tuple[Path, Path | None]:
    """The folder of the `step_N` folders that `weights_dir` names, and the directory of their run, if it is there. Both absolute.

    Raises ConfigError if the folder does not exist or has no weights.
    """
    path = Path(given).expanduser().absolute()
    with may_read(path):
        if (path / FILE).is_file():
            return path / "weights", path
        if any(path.glob("step_*")):
            is_a_runs = path.name == "weights" and (path.parent / FILE).is_file()
            return path, path.parent if is_a_runs else None
    what = "has no step_N folders and is no run directory" if path.is_dir() else f"is no directory; the current directory is {Path.cwd()}"
    raise ConfigError(f"weights_dir={given} {what}.\n  fix: name a run or its weights/")


def _of_run(run: Path, takes_envs: bool) -> Inherited:
    data = read(run / FILE)
    use_own_names(data)
    left = {} if is_mine(run) else dict(executing(data))
    for *above, last in left:
        del section_at(data, above)[last]
    values: dict[str, Any] = {}
    for key in OF_THE_RUN:
        *above, last = key.split(".")
        section = section_at(data, above)
        merge(values, nested(key, section[last]) if last in section else {})
    if takes_envs:
        values["envs"] = {name: {key: env[key] for key in OF_ENV if key in env} for name, env in data.get("envs", {}).items()}
    values.get("sampling", {}).pop("allow_biased_ratio", None)
    refuses = {"model": f"the weights are those of {run}, and its model is {values.get('model', {}).get('name')}"}
    note = f"not taken from the run {run} of another user, because it makes code run: {said(left)}" if left else ""
    return Inherited(f"the run {run}", values, refuses=refuses, note=note, literal=True)


def _endpoint(client: Mapping[str, Any]) -> Inherited:
    """The chosen entry of a file of endpoints."""
    file, name = client.get("endpoints"), client.get("endpoint")
    path = Path(str(file)).expanduser()
    if name is None or not path.is_file():
        raise ConfigError(f"client.endpoints={file} client.endpoint={name}: one is missing, or there is no such file.\n  fix: set both")
    entries = read(path)
    entry = entries.get(name)
    if not isinstance(entry, dict) or not entry.get("base_url") or not entry.keys() <= {*ENDPOINT}:
        raise ConfigError(
            f"client.endpoints={file} has no endpoint {name} with a base_url and no other keys than {', '.join(ENDPOINT)}.\n"
            f"  fix: client.endpoint= one of: {', '.join(map(str, entries))}"
        )
    model = {"model": {"name": entry["model"]}} if "model" in entry else {}
    return Inherited(f"{file}, {name}", {"client": {key: entry[key] for key in ENDPOINT[:2] if key in entry}, **model})
