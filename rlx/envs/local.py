"""What the environments of this process have in common: one episode for each member, its time limit, and what becomes of one that fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlx.envs.base import failed, filled
from rlx.envs.errors import FailureLog, failure_of
from rlx.envs.stacks import waits_at
from rlx.envs.together import abandon, raised_by, run_for, together
from rlx.policy.base import Episode, Policy, PromptTooLong
from rlx.stacks import rollout_name
from rlx.trace import Trace
from rlx.types import Rollout, Task

log = logging.getLogger("rlx.envs")


class LocalEnvironment:
    """See `rlx.envs.base.Environment`. An implementation plays one rollout, or has a `play` of its own."""

    _rollout: Callable[[Task, int, int], Coroutine[Any, Any, Rollout]]  # of a task, its member and its attempt
    rows: Sequence[dict[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    agents: Sequence[str] = ()
    scores_groups = False

    def __init__(self, name: str, timeout: float, reward_raises: str, sources: Path | None) -> None:
        """`timeout`: seconds for an episode. `reward_raises`: the rule of `with_raised_reward`. `sources`: the environment's own code."""
        self.name, self.timeout, self.reward_raises, self.sources = name, timeout, reward_raises, sources
        self.policy: Policy | None = None
        self.scores: Callable[[Trace], None] | None = None  # called before rewards compute, with what is trained if it has any
        self.failures = FailureLog(log)

    def rehearse(self) -> None:
        """Try, before a run, what its first rollout would do without a policy. Raises what that raises."""

    async def play(self, task: Task, members: Sequence[int], attempt: int) -> list[Rollout]:
        """See `rlx.envs.base.Environment`. An episode may take `timeout` seconds."""
        return await together([self._rollout(task, member, attempt) for member in members])

    async def close(self) -> None:
        """Write how often each failure came."""
        self.failures.close()

    def demonstration(self, row: Mapping[str, Any], errs: bool, random: Any) -> Any:
        """What the environment's own teacher says in a row (`rlx.envs.answers`); None: nothing."""
        return None

    def answer_of(self, row: Mapping[str, Any]) -> str | None:
        """The right answer as the model is to write it; None if it is not known."""
        task = row.get("task")
        answer = (task if isinstance(task, Mapping) else row).get("answer")
        return answer if isinstance(answer, str) and answer else None

    def tools_of(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The functions that are offered in a row, in OpenAI's form."""
        return [dict(tool) for tool in self.tools]

    def is_raw(self, row: Mapping[str, Any]) -> bool:
        """Whether the policy is asked with raw text, which has no chat format."""
        return False

    def _episode_of(self, task: Task, member: int, attempt: int) -> Episode:
        assert self.policy is not None, "the environment has no policy; set it before the first play"
        return self.policy.episode(task, member, attempt)

    async def _timed(self, work: Coroutine[Any, Any, Any], task: Task, member: int, episode: Episode, timing: dict[str, Any]) -> Any:
        """What an episode returned; the failed rollout if it raised, or did not end in time. `timing` gets all but its parts."""
        began = time.monotonic()
        playing = await run_for(self.timeout, work, rollout_name(task, member))
        timing["total"] = time.monotonic() - began
        timing |= {"began": time.time() - timing["total"], "requests": list(episode.times)}
        if not playing.done():
            where = waits_at(playing, self.sources) + episode.waits_for
            await abandon(playing)
            text = f"no result after {self.timeout:g} s (rollout_timeout){where}"
            return failed(task, member, episode, "timeout", "timeout", text, timing)
        raised = raised_by(playing)
        if raised is None:
            return playing.result()
        if isinstance(raised, PromptTooLong):
            return failed(task, member, episode, "error", "prompt_too_long", filled(self.policy), timing)
        text = self._noted(f"example {task.example_id}", raised)
        return failed(task, member, episode, "error", self._cause_of(raised), text, timing)

    def _cause_of(self, error: BaseException) -> str:
        """The `stop` of a rollout whose episode raised."""
        return "environment_error"

    def _noted(self, what: str, error: BaseException) -> str:
        """The error in one line. The log gets its traceback, once for all errors of its kind."""
        failure = failure_of(error, self.sources)
        self.failures.note(self.name, what, failure)
        return failure.text
