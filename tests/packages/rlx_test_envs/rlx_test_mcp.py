"""verifiers' MCPEnv with a local server: it reverses a word. Run as a program, this file is the server."""

import sys

if __name__ == "__main__":
    from mcp.server.fastmcp import FastMCP

    server = FastMCP("words")

    @server.tool()
    def reverse(text: str) -> str:
        """Reverse a text."""
        return text[::-1]

    server.run()
    sys.exit()

import verifiers as vf
from rlx_test_envs import words
from verifiers.envs.experimental.mcp_env import MCPEnv


def right(completion: vf.Messages, answer: str) -> float:
    """1 if the last message is the answer."""
    return float((completion[-1]["content"] or "").strip() == answer)


def load_environment(num_examples: int = 8) -> vf.Environment:
    """The environment; loading it starts the server."""
    servers = [{"name": "words", "command": sys.executable, "args": [__file__]}]
    return MCPEnv(mcp_servers=servers, dataset=words(num_examples), rubric=vf.Rubric(funcs=[right]), max_turns=3)
