"""An environment that asks the model beside the trajectory: a planner before the answer, and a judge in the reward."""

import verifiers as vf
from rlx_test_envs import words


class Planned(vf.MultiTurnEnv):
    """Asks for a plan through `get_model_response`, then for the answer. The plan is not in the trajectory."""

    async def get_prompt_messages(self, state: vf.State) -> vf.Messages:
        asked = [{"role": "user", "content": f"plan {state['answer']}"}]
        plan = await self.get_model_response(state, asked, sampling_args={"temperature": 0.25, "max_tokens": 5})
        state["plan"] = plan.message.content
        return [*state["prompt"]]

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs) -> vf.Messages:
        raise AssertionError("one turn")


async def judged(state: vf.State) -> float:
    """1 if the judge, the same model without sampling, says what the model said."""
    said = state["completion"][-1]["content"]
    judge = await state["client"].get_response(
        prompt=[vf.UserMessage(content=said)], model=state["model"], sampling_args={"temperature": 0.0}
    )
    return float(bool(judge.message.content))


def load_environment(num_examples: int = 8) -> vf.Environment:
    """The environment."""
    return Planned(dataset=words(num_examples), max_turns=1, rubric=vf.Rubric(funcs=[judged]))
