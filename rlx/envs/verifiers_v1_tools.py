"""Tool servers of a rollout in the environment's own process, for the chat loop that runs there: no process, no HTTP.

verifiers starts a Python for each task-scoped `Toolset` of each rollout, which takes seconds. Here the same object, with its hooks and its
MCP server, answers a client of mcp's over memory, and its `state` is the rollout's own. That takes mcp 2; elsewhere verifiers' way stays.
`rollout.serve_tools` is replaced (one name, in 0.3 and 0.4).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any

from verifiers.v1 import rollout

NUMBERS = itertools.count()
LOCAL: dict[str, Any] = {}
"""The MCP servers of this process, by what stands for their URLs."""
SERVERS: list[Any] = []
"""The interception servers of this process, which know the rollout of a secret."""


def client_of(server: Any) -> Any:
    """mcp's client of a server in this process."""
    from mcp import Client

    return Client(server)


@functools.cache
def can_be_here() -> bool:
    """Whether the installed mcp has a client over memory."""
    try:
        from mcp import Client  # noqa: F401
    except ImportError:
        return False
    return True


def server_type() -> Any:
    """The class of MCP servers that verifiers is written for."""
    try:
        from mcp.server.fastmcp import FastMCP  # type: ignore[attr-defined]  # the name of mcp 1, which verifiers 0.3 has
    except ImportError:
        from mcp.server.mcpserver import MCPServer

        return MCPServer
    return FastMCP


def install() -> None:
    """Keep the tool servers of rollouts that are played by the chat loop in this process."""
    theirs = rollout.serve_tools

    @contextlib.asynccontextmanager
    async def serve_tools(toolsets: Sequence[Any], runtime: Any, *more: Any, state_secret: str = "", **named: Any) -> AsyncIterator[Any]:
        session = next((each.state_sessions[state_secret] for each in SERVERS if state_secret in each.state_sessions), None)
        may = session is not None and getattr(runtime, "loop_is_here", False) and can_be_here()
        near = [each for each in toolsets if may and is_near(each.config)]
        async with contextlib.AsyncExitStack() as stack:
            others = [each for each in toolsets if each not in near]
            urls = dict(await stack.enter_async_context(theirs(others, runtime, *more, state_secret=state_secret, **named)))
            for toolset in near:
                urls[toolset.server_name] = await stack.enter_async_context(here(toolset, session))
            yield urls

    if not hasattr(theirs, "of_rlx"):
        serve_tools.of_rlx = True  # type: ignore[attr-defined]
        rollout.serve_tools = serve_tools


def is_near(config: Any) -> bool:
    """Whether a tool server would be a process of this machine, which nobody else reaches."""
    return not config.url and not getattr(config, "colocated", False) and config.runtime.type == "subprocess"


@contextlib.asynccontextmanager
async def here(toolset: Any, session: Any) -> AsyncIterator[str]:
    """A tool server in this process, by what stands for its URL."""

    async def pull() -> Any:
        return session.trace.state

    async def push(before: Any) -> None:
        """The state is the rollout's own."""

    toolset._pull_state, toolset._push_state = pull, push
    async with toolset._exit_stack:
        await toolset.setup()
        await toolset.setup_task(session.trace.task.data)
        server = server_type()(toolset.server_name or type(toolset).__name__)
        toolset.register(server)
        key = f"local:{next(NUMBERS)}"
        LOCAL[key] = server
        try:
            yield key
        finally:
            del LOCAL[key]
