"""A group of environments in a group of environments. One member's reward compares the rollouts of a group."""

import rlx_test_group
import rlx_test_multi
import rlx_test_single
import verifiers as vf


def load_environment(num_examples: int = 2) -> vf.Environment:
    """Rows of the group in the group, in its order: single turns, then several turns; then those whose reward compares."""
    inner = vf.EnvGroup([rlx_test_single.load_environment(num_examples), rlx_test_multi.load_environment(num_examples)], ["one", "many"])
    compared = vf.EnvGroup([rlx_test_group.load_environment(num_examples)], ["short"])
    return vf.EnvGroup([inner, compared], ["inner", "compared"])
