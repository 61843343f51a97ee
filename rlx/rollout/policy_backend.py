"""The model that a command samples with: rlx's servers (`connect_servers`), or also an endpoint of others (`connected`).

A command that does not train sees a `Backend`: `ServerBackend` has any version of the weights, `ApiBackend` has one version.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rlx.config.eval_envs import rollout_envs
from rlx.config.schema import PlayRoot
from rlx.config.schema_eval import PlayWithModel
from rlx.envs.base import Local, sampling_of
from rlx.envs.load import give_policy, let_play
from rlx.envs.worker_metrics import away
from rlx.inference.endpoints import find_servers, present_servers
from rlx.inference.fleet import Fleet
from rlx.inference.replica import ServerState
from rlx.inference.sampler import Sampler
from rlx.inference.wire import InferenceError
from rlx.paths import RunPaths
from rlx.policy.base import PolicyError
from rlx.policy.chat import Chat
from rlx.policy.openai import REFUSES, OpenAIPolicy
from rlx.policy.spec import EndpointSpec, PolicySpec, policy_of
from rlx.rollout import concurrency
from rlx.rollout.rollout_runner import RolloutRunner
from rlx.types import Rollout
from rlx.weights.subscribe import Subscriber, digest_at, version_at

log = logging.getLogger(__name__)

NO_KEY = "none"  # sent to endpoints that ask for no key


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What answers, in its own words."""

    model: str | None = None  # the servers' model (a folder, several joined with commas), or the endpoint's name for what it served
    weights: str | None = None  # the folder of the served version; None: an endpoint
    attested: float | None = None  # share of the weights that the servers compared with the trainer's; None: version 0, or an endpoint
    digest: str | None = None  # tells these weights from others of the same version; None: an endpoint, or servers that do not say


class ServerBackend:
    """Servers of rlx: the command's own, or servers that already run (`inference.base_url`)."""

    def __init__(self, config: PlayWithModel, fleet: Fleet, sampler: Sampler, envs: Mapping[str, Local]) -> None:
        self.config, self.fleet, self.sampler, self.envs = config, fleet, sampler, envs

    async def versions(self, wanted: Sequence[int]) -> Sequence[int]:
        """The versions to play, of those wanted: one of servers that somebody else updates."""
        others = self.config.weights_dir is None and self.config.inference.base_url
        return [self.fleet.version] if others else wanted

    async def reach(self, version: int) -> None:
        """Serve this version from now on."""
        if version != self.fleet.version:
            assert self.config.weights_dir is not None
            weights = version_at(Path(self.config.weights_dir) / f"step_{version}", version)
            await self.fleet.update(weights, self.config.weight_broadcast.timeout)
            log.info("version %d is served; %.1f %% of its weights were compared", version, 100 * self.fleet.compared)
        self.sampler.version = version

    async def info(self) -> ModelInfo:
        """What serves this version."""
        states = await self.fleet.states()
        model, version = ", ".join(sorted({state.model for state in states})), self.fleet.version
        weights, compared = model, None
        if version and self.config.weights_dir is not None:
            weights = version_at(Path(self.config.weights_dir) / f"step_{version}", version).where
            compared = self.fleet.compared
        return ModelInfo(model, weights, compared, await asyncio.to_thread(_digest_of, states, weights, version))

    def away(self) -> float:
        """Seconds so far in which nothing could be sampled, because no server took requests."""
        return away(self.sampler, self.envs)

    async def follow(self, runner: RolloutRunner) -> None:
        """Adapt how many rollouts are in flight to the engines, for ever, if no key says how many."""
        await concurrency.follow(self.config, self.fleet, runner)

    def check(self, rollout: Rollout) -> None:
        """Raise an error that ends everything if this rollout shows that the model is not what it should be."""
        check_version(rollout, self.sampler.version)


class ApiBackend:
    """An OpenAI-compatible endpoint: one version, whatever is wanted. It does not say which weights it serves, nor how busy it is."""

    def __init__(self, policy: OpenAIPolicy) -> None:
        self.policy = policy

    async def versions(self, wanted: Sequence[int]) -> Sequence[int]:
        return [0]

    async def reach(self, version: int) -> None:
        pass

    async def info(self) -> ModelInfo:
        return ModelInfo(self.policy.served_model)

    def away(self) -> float:
        return 0.0

    async def follow(self, runner: RolloutRunner) -> None:
        pass

    def check(self, rollout: Rollout) -> None:
        if REFUSES in (rollout.error or ""):
            raise PolicyError(rollout.error)


Backend = ServerBackend | ApiBackend


@asynccontextmanager
async def connected(
    config: PlayWithModel, paths: RunPaths, envs: Mapping[str, Local], chat: Chat | None, beat: Callable[[str], None]
) -> AsyncIterator[Backend]:
    """The model of a command, with which the environments play. `chat`: None for an endpoint, which has its own."""
    if chat is None:
        async with AsyncExitStack() as stack:
            yield await connect_endpoint(stack, config, envs, beat)
        return
    others = bool(config.inference.base_url) and config.weights_dir is None
    async with connect_servers(config, paths, envs, chat, beat, adopt=others) as (fleet, sampler):
        yield ServerBackend(config, fleet, sampler, envs)


@asynccontextmanager
async def connect_servers(
    config: PlayRoot,
    paths: RunPaths,
    envs: Mapping[str, Local],
    chat: Chat | None,
    beat: Callable[[str], None],
    adopt: bool = False,
) -> AsyncIterator[tuple[Fleet, Sampler]]:
    """Wait for the servers and let the environments play on them. `chat`: None if there are no environments.

    `adopt`: see `Fleet`.

    Raises InferenceError if servers of others have another model. Adapters, which a server adds to its own model, would fit that as well.
    """

    def tick() -> None:
        beat("waiting for inference servers")

    endpoints = await asyncio.to_thread(find_servers, config, paths, tick)
    patience = config.inference.startup_timeout
    run = secrets.token_hex(4)  # of this process: what an earlier attempt has loaded is loaded anew
    verify_every = getattr(config.weight_broadcast, "verify_every", 1)
    async with (
        Fleet(endpoints, patience, run=run, adopt=adopt, verify_every=verify_every, find=lambda: present_servers(config, paths)) as fleet,
        Sampler(
            endpoints,
            config.inference.request_timeout,
            patience,
            restore=fleet.restore,
            run=None if adopt else run,
        ) as sampler,
    ):
        fleet.on_change = sampler.change
        if config.model.warm_start is not None:
            version_0 = paths.initial_model.read_text().strip()
            fleet.initial = lambda model: version_0 if Path(model) == paths.untrained_model else model
        published = Subscriber(paths)
        fleet.look_up, fleet.trained = published.at, published.initial
        fleet.insists = not config.inference.base_url  # servers of others may have the weights in another form
        if chat is not None:
            give_policy(envs, config, chat, sampler)
        await fleet.wait_ready(config.inference.startup_timeout, tick=tick)
        if config.inference.base_url:
            weights_dir = config.weights_dir if isinstance(config, PlayWithModel) else None
            check_model(paths.initial_model.read_text().strip(), [state.model for state in await fleet.states()], weights_dir)
        await asyncio.to_thread(shutil.rmtree, paths.untrained_model, ignore_errors=True)
        yield fleet, sampler


async def connect_endpoint(
    stack: AsyncExitStack, config: PlayWithModel, envs: Mapping[str, Local], beat: Callable[[str], None]
) -> ApiBackend:
    """Let the environments play at `client.base_url`. `stack` closes the connections.

    Raises PolicyError if the endpoint cannot be reached, refuses the key or the model, or takes no tools although an environment has
    some.
    """
    client = config.client
    assert client.base_url is not None
    key = os.environ.get(client.api_key_var, "") if client.api_key_var else NO_KEY
    endpoint = EndpointSpec(client.base_url, key, config.model.name, client.timeout, client.max_retries, dict(client.parameters))
    specs = {
        name: PolicySpec(seed=config.seed, sampling=sampling_of(config, env), endpoints=[endpoint])
        for name, env in rollout_envs(config).items()
    }
    first = policy_of(next(iter(specs.values())), None, None)
    assert isinstance(first, OpenAIPolicy)
    stack.push_async_callback(first.close)
    beat(f"asking {client.base_url} for {config.model.name}")
    try:
        await first.check(tools=any(env.tools for env in envs.values()))
    except PolicyError as error:
        hint = f"; its key is ${client.api_key_var} (client.api_key_var)" if REFUSES in str(error) else ""
        raise PolicyError(f"{error}{hint}") from error
    for name, spec in specs.items():
        let_play(envs[name], spec, None, None)
        if isinstance(own := getattr(envs[name], "policy", None), OpenAIPolicy):  # it plays in this process
            stack.push_async_callback(own.close)
    return ApiBackend(first)


def _digest_of(states: Sequence[ServerState], weights: str, version: int) -> str | None:
    """A digest of the weights that servers have: of a version's manifest where this host can read it, else of the model and the place.

    None if the servers do not report which model they have.
    """
    digest = digest_at(weights) if version else None
    if digest is not None:
        return digest
    found = {f"{state.identity} {weights}" if version else state.identity for state in states}
    return ", ".join(sorted(found)) if all(state.identity for state in states) else None


def check_model(wanted: str, served: Sequence[str], weights_dir: str | None) -> None:
    """Raise InferenceError if servers that somebody else started have another model than the one `wanted`: a folder or a hub name.

    Logs a warning where this cannot be decided: a server on another machine may have the same model at another path.
    """
    if weights_dir is not None and Path(wanted).is_relative_to(weights_dir):
        return  # the run's initial model is gone: these weights have its shape only
    for found in sorted(set(served)):
        one, other = _identity(wanted), _identity(found)
        if wanted == found or (one == other and one[1] is not None):
            continue
        if one[0] == other[0] and None not in (one[1], other[1]):
            raise InferenceError(
                f"the servers of inference.base_url have the model {found}, and this run is to play {wanted}.\n"
                f"  fix: name the servers' model (model.name={found}), or servers of {wanted}"
            )
        log.warning("the servers of inference.base_url have the model %s; whether that is %s is not known", found, wanted)


def _identity(text: str) -> tuple[str, str | None]:
    """Kind and name of a model: a hub name, also of a folder in the hub's cache; or a folder, None if it is on another machine."""
    cached = [part for part in Path(text).parts if part.startswith("models--")]
    if cached:
        return "hub", cached[-1].removeprefix("models--").replace("--", "/")
    if Path(text).is_dir():
        return "folder", str(Path(text).resolve())
    return ("folder", None) if text.startswith("/") else ("hub", text)


def check_version(rollout: Rollout, version: int) -> None:
    """Raise RuntimeError if a token of the rollout is not of this policy version."""
    if others := [one for one in rollout.trace.versions if one != version]:
        found = ", ".join(map(str, others))
        raise RuntimeError(
            f"the evaluation of version {version} has tokens of version {found}: rollout {rollout.member} of "
            f"{rollout.task.env}, example {rollout.task.example_id}. Does another run update the same servers (inference.base_url)?"
        )
