"""A judge at an OpenAI-compatible endpoint scores the answer; a second function checks it exactly."""

import verifiers as vf
from openai import AsyncOpenAI
from rlx_test_envs import words


def exact(completion: vf.Messages, answer: str) -> float:
    """1 if the reply is the answer."""
    return float(completion[-1]["content"].strip() == answer)


async def approved(judge, prompt: vf.Messages, completion: vf.Messages, answer: str, state: vf.State) -> float:
    """1 if the judge says yes."""
    return float("yes" in (await judge(prompt, completion, answer, state)).lower())


def load_environment(url: str, num_examples: int = 8) -> vf.Environment:
    """The environment. `url`: of the judge."""
    rubric = vf.JudgeRubric(judge_client=AsyncOpenAI(base_url=url, api_key="none"), judge_model="judge")
    rubric.add_reward_func(approved, weight=0.5)
    rubric.add_reward_func(exact, weight=1.0)
    return vf.SingleTurnEnv(dataset=words(num_examples), rubric=rubric)
