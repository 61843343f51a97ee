"""verifiers' own ReasoningGymEnv on one of reasoning-gym's data sets."""

import verifiers as vf


def load_environment(gym: str = "chain_sum", num_examples: int = 32, seed: int = 0, system_prompt: str = "") -> vf.Environment:
    """The environment; the whole reply is the answer."""
    return vf.ReasoningGymEnv(
        gym, num_train_examples=num_examples, num_eval_examples=4, seed=seed, system_prompt=system_prompt, parser=vf.Parser()
    )
