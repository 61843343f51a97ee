"""rlx: reinforcement-learning experiments on language models, composed, launched and reproduced by one command."""

__version__ = "0.2.0"
