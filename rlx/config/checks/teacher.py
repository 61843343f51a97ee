"""The rules for teachers: what an objective that distils may learn from, and under which distribution."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from rlx.config.objectives import kl_of, loss_of, trained_by
from rlx.config.rules import Show, declared, rule, target_name
from rlx.config.schema import Config
from rlx.config.schema_teacher import FIELDS


def taught(cfg: Config) -> list[str]:
    """The environments whose rollouts the endpoint's teacher scores."""
    needs = {name: declared(loss_of(cfg, name)) for name in cfg.envs if cfg.teacher.base_url}
    return [name for name, facts in needs.items() if facts.needs_teacher and not facts.demonstrated]


def shown(cfg: Config) -> list[str]:
    """The environments whose rollouts the policy itself scores, with a demonstration in its prompt."""
    return [name for name in cfg.envs if declared(loss_of(cfg, name)).demonstrated]


def played(cfg: Config) -> list[str]:
    """The environments that the endpoint's teacher plays."""
    return [name for name, env in cfg.envs.items() if env.played_by == "teacher"]


@rule("teacher", "envs", "loss")
def played_by_the_teacher(cfg: Config, of: Show) -> Iterator[str]:
    for name in played(cfg):
        loss, key = loss_of(cfg, name), f"envs.{name}.loss" if cfg.envs[name].loss else "loss"
        if not cfg.teacher.base_url:
            yield f"there is no teacher who could play: {of(f'envs.{name}.played_by')} with {of('teacher.base_url')}. Set teacher.base_url."
        elif cfg.teacher.model is None:
            yield f"the model that plays envs.{name} must be named: {of('teacher.model')}. Set teacher.model to its name at the servers."
        if declared(loss).kind != "ce" or declared(loss).uses_ratio or not loss.get("ce_coef"):
            yield (
                f"the teacher samples the tokens of envs.{name}, so no ratio or advantage of the policy applies to them: "
                f"{of(f'envs.{name}.played_by')} with {of(f'{key}._target_')}, {of(f'{key}.ce_coef')}.\n"
                f"Learn them by cross-entropy: envs.{name}.loss=sft envs.{name}.loss.ce_coef=1."
            )


@rule("teacher", "inference.base_url", "inference.port", "hardware")
def teacher_addresses(cfg: Config, of: Show) -> Iterator[str]:
    for url in cfg.teacher.base_url:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            yield f"{of('teacher.base_url')} has an address that is none: {url}. Write http://host:port."
    first = cfg.inference.port
    started = range(first, first + cfg.hardware.inference_replicas) if first and not cfg.inference.base_url else ()
    own = {_origin(url) for url in (*cfg.inference.base_url, *(f"http://localhost:{port}" for port in started))}
    if same := [url for url in cfg.teacher.base_url if _origin(url) in own]:
        yield (
            f"the teacher would be the policy itself, so there is nothing to learn from it: {same[0]} is in both "
            f"{of('teacher.base_url')} and {of('inference.port' if started else 'inference.base_url')}.\n"
            "Give the teacher servers of its own; or let the policy teach itself with a demonstration in its prompt: loss=sdft "
            "teacher.demonstration=COLUMN, without teacher.base_url."
        )


@rule("teacher", "ref.name", "loss", "envs")
def teacher_is_used(cfg: Config, of: Show) -> Iterator[str]:
    if cfg.teacher.base_url and not taught(cfg) and not played(cfg):
        yield (
            f"nobody learns from the teacher: {of('teacher.base_url')}, but no objective in use needs one.\n"
            "Set loss=opd, or envs.NAME.loss=opd for one environment, or envs.NAME.played_by=teacher; or remove the teacher."
        )
    if taught(cfg) and cfg.ref.name is not None:
        name = target_name(loss_of(cfg, taught(cfg)[0]))
        yield f"{name} would have two teachers: {of('ref.name')} and {of('teacher.base_url')}. Set one of them to null or []."
    envs = shown(cfg)
    if cfg.ref.name is not None and envs and len(envs) == len(cfg.envs) and not any(kl_of(loss_of(cfg, name)).get("beta") for name in envs):
        key = f"envs.{envs[0]}.loss" if cfg.envs[envs[0]].loss else "loss"
        yield (
            f"the policy teaches itself, so nothing would read what the trainer scores with a second model: {_target(cfg, envs[0])} with "
            f"{of('ref.name')}.\nSet ref.name=null; or {key}=opd, which learns from that model; or {key}.kl.beta above 0, which keeps "
            "the policy close to it."
        )


@rule("ref.name", "model", "loss", "envs", "teacher")
def teacher_is_another_model(cfg: Config, of: Show) -> Iterator[str]:
    losses = [loss for loss, _ in trained_by(cfg)]
    loads_it = cfg.model.warm_start is None  # else the name is a label
    if cfg.ref.name is None or not loads_it or _model(cfg.ref.name) != _model(cfg.model.name):
        return
    if all(declared(loss).needs_teacher and not declared(loss).demonstrated and not loss.get("ce_coef") for loss in losses):
        yield (
            f"the teacher would be the initial policy itself, so there is nothing to learn from it: {of('ref.name')}, {of('model.name')}, "
            f"and every objective distils.\nSet ref.name to another model with the policy's vocabulary."
        )


def _model(name: str) -> str:
    """A model's name, or the absolute path of its folder."""
    path = Path(name).expanduser()
    return str(path.resolve()) if path.is_dir() else name


@rule("teacher", "loss", "envs", "inference.max_model_len", "seq_len")
def demonstrations(cfg: Config, of: Show) -> Iterator[str]:
    envs, column = shown(cfg), cfg.teacher.demonstration
    if not envs:
        if column is not None:
            yield (
                f"no objective in use reads a demonstration: {of('teacher.demonstration')}.\n"
                "Set loss=sdft, or envs.NAME.loss=sdft for one environment; or remove the key."
            )
        return
    if column is None:
        yield (
            f"the policy would be its own teacher and read the same as before, so there is nothing to learn: {_target(cfg, envs[0])} "
            f"with {of('teacher.demonstration')}.\nName the column of the rows that holds a demonstration: teacher.demonstration=answer."
        )
    for part in FIELDS:
        if part not in cfg.teacher.template:
            yield f"the teacher would not read its {part[1:-1]}: {of('teacher.template')} has no {part}. Write both {' and '.join(FIELDS)}."
    if cfg.max_model_len <= cfg.seq_len:
        yield (
            f"a sample of seq_len tokens leaves no room for a demonstration: {of('inference.max_model_len')}, {of('seq_len')}.\n"
            "Set inference.max_model_len to seq_len + the tokens of the longest demonstration and of teacher.template + 1."
        )


def _target(cfg: Config, env: str) -> str:
    return f"{f'envs.{env}.loss' if cfg.envs[env].loss else 'loss'}={target_name(loss_of(cfg, env))}"


@rule("teacher", "sampling.temperature", "loss", "envs")
def teachers_temperature(cfg: Config, of: Show) -> Iterator[str]:
    for name in [*taught(cfg), *shown(cfg)]:
        own = cfg.envs[name].sampling.temperature
        key = "sampling.temperature" if own is None else f"envs.{name}.sampling.temperature"
        if (cfg.sampling.temperature if own is None else own) != 1:
            yield (
                f"the teacher's servers report log-probabilities at temperature 1, but the policy's tokens of envs.{name} are scored at "
                f"the one that sampled them: {of(key)}. Their difference is no KL.\nSet {key}=1, or use ref.name, which the trainer scores "
                "at the same temperature."
            )


def _origin(url: str) -> str:
    """What two addresses of one server have in common: host and port, with one name for this machine."""
    parts = urlsplit(url)
    try:
        host, port = (parts.hostname or "").rstrip("."), parts.port
    except ValueError:  # no port; `teacher_addresses` and the servers' own rule report it
        return url
    own = host == "localhost" or host.endswith(".localhost") or host.startswith("127.") or host in ("::1", "0.0.0.0", "::")
    return f"{'localhost' if own else host}:{port or {'https': 443}.get(parts.scheme, 80)}" if host else url
