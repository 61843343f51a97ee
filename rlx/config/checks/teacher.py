"""The rules for teachers: what an objective that distils may learn from, and under which distribution."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from rlx.config.objectives import loss_of
from rlx.config.rules import Show, declared, rule, target_name
from rlx.config.schema import Config


def taught(cfg: Config) -> list[str]:
    """The environments whose rollouts the endpoint's teacher scores."""
    return [name for name in cfg.envs if cfg.teacher.base_url and declared(loss_of(cfg, name)).needs_teacher]


@rule("teacher", "inference.base_url")
def teacher_addresses(cfg: Config, of: Show) -> Iterator[str]:
    for url in cfg.teacher.base_url:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            yield f"{of('teacher.base_url')} has an address that is none: {url}. Write http://host:port."
    own = {_origin(url) for url in cfg.inference.base_url}
    if same := [url for url in cfg.teacher.base_url if _origin(url) in own]:
        yield (
            f"the teacher would be the policy itself, so there is nothing to learn from it: {same[0]} is in both "
            f"{of('teacher.base_url')} and {of('inference.base_url')}.\nGive the teacher servers of its own."
        )


@rule("teacher", "ref.name", "loss", "envs")
def teacher_is_used(cfg: Config, of: Show) -> Iterator[str]:
    if cfg.teacher.base_url and not taught(cfg):
        yield (
            f"nobody learns from the teacher: {of('teacher.base_url')}, but no objective in use needs one.\n"
            "Set loss=opd, or envs.NAME.loss=opd for one environment; or remove the teacher."
        )
    if taught(cfg) and cfg.ref.name is not None:
        name = target_name(loss_of(cfg, taught(cfg)[0]))
        yield f"{name} would have two teachers: {of('ref.name')} and {of('teacher.base_url')}. Set one of them to null or []."


@rule("teacher", "sampling.temperature", "loss", "envs")
def teachers_temperature(cfg: Config, of: Show) -> Iterator[str]:
    for name in taught(cfg):
        own = cfg.envs[name].sampling.temperature
        key = "sampling.temperature" if own is None else f"envs.{name}.sampling.temperature"
        if (cfg.sampling.temperature if own is None else own) != 1:
            yield (
                f"the teacher's servers report log-probabilities at temperature 1, but the policy's tokens of envs.{name} are scored at "
                f"the one that sampled them: {of(key)}. Their difference is no KL.\nSet {key}=1, or use ref.name, which the trainer scores "
                "at the same temperature."
            )


def _origin(url: str) -> str:
    return urlsplit(url).netloc or url
