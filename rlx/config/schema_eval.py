"""The keys of `rlx eval`: what is evaluated, and where the model answers. The shared keys are in `schema_base.py`."""

# ruff: noqa: RUF009  (key and section return dataclass fields)
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from rlx.config.keys import key, section
from rlx.config.schema_base import PlayRoot
from rlx.config.schema_rollout import EvalTerms, SamplingConfig, ScoredEnvConfig

API_CONCURRENCY = 32  # rollouts in flight at an endpoint that rlx knows nothing of


@dataclass
class ScoredSamplingConfig(SamplingConfig):
    """Sampling without training: also greedy."""

    temperature: float = key(1.0, "sampling temperature; 0 is greedy", low=0)


@dataclass
class ClientConfig:
    """An OpenAI-compatible endpoint that answers instead of rlx's own servers."""

    base_url: str | None = key(None, "its address before `/chat/completions`, as in `https://api.openai.com/v1`; null: rlx's own servers")
    api_key_var: str | None = key(
        "OPENAI_API_KEY", "the environment variable that holds its key; the key itself is never written or shown; null: it asks for none"
    )
    endpoints: str | None = key(
        None, "a YAML file of named endpoints, each with `base_url` and, if wanted, `api_key_var` and `model`, its name for the model"
    )
    endpoint: str | None = key(None, "the entry of that file to use")
    parameters: dict[str, Any] = key(
        {},
        "request parameters that the endpoint does not take: null leaves one out, a text is its name there: "
        "{seed: null, max_tokens: max_completion_tokens}",
    )
    timeout: float = key(600.0, "seconds for one attempt at a request", above=0)
    max_retries: int = key(
        8,
        "further attempts at a request if the endpoint is overloaded (429), fails (5xx) or is silent; the waits grow, or are as long as it "
        "asks for (Retry-After)",
        low=0,
    )


@dataclass
class PlayWithModel(PlayRoot):
    """The keys of a command that plays environments with any model, and trains none."""

    may_change: ClassVar[tuple[str, ...]] = (
        *("orchestrator.max_concurrent", "orchestrator.env_workers"),
        *("client.timeout", "client.max_retries", "client.api_key_var"),
    )

    sampling: ScoredSamplingConfig = section(ScoredSamplingConfig)
    client: ClientConfig = section(ClientConfig)
    weights_dir: str | None = key(
        None,
        "a run's directory or its `weights/`, or another folder of `step_N` folders: the weights to sample with. Model, chat format, "
        "lengths and sampling are then those of the run, unless they are given",
    )

    @property
    def has_checkpoints(self) -> bool:
        return False

    @property
    def started_servers(self) -> int:
        return 0 if self.client.base_url else super().started_servers

    @property
    def concurrency(self) -> int:
        if self.client.base_url:
            return self.orchestrator.max_concurrent or API_CONCURRENCY
        return super().concurrency

    @property
    def adaptive_concurrency(self) -> bool:
        """Only the command's own engines: servers that others use, too, are busy with their work, and an endpoint does not say."""
        return bool(self.started_servers) and super().adaptive_concurrency


@dataclass
class EvalRoot(EvalTerms, PlayWithModel):
    """The keys of `rlx eval`."""

    envs: dict[str, ScoredEnvConfig] = key({}, "the environments to evaluate on, by name")  # type: ignore[assignment]
    steps: list[int] | None = key(None, "which `step_N` of `weights_dir` to evaluate; null: all that are complete when the command starts")

    @property
    def versions(self) -> list[int]:
        """What is evaluated, in this order: 0 is the initial model; `steps` must be resolved if there is a `weights_dir`."""
        if self.weights_dir is None:
            return [0]
        steps = sorted(set(self.steps or ()) - {0})
        return [*([0] if self.eval_base or 0 in (self.steps or ()) else []), *steps]

    @property
    def total_steps(self) -> int:
        return len(self.versions)

    @property
    def progress_source(self) -> str:
        return "eval"
