"""Tool servers of a rollout in the environment's own process, for the chat loop that runs there: no process, no HTTP.

verifiers starts a Python for each task-scoped `Toolset` of each rollout, which takes seconds. Here the same object, with its hooks and its
MCP server, answers a client of mcp's over memory, and its `state` is the rollout's own.
`rollout.serve_tools` is replaced (one name, in 0.3 and 0.4).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from verifiers.v1 import rollout

NUMBERS = itertools.count()
LOCAL: dict[str, Callable[[], Any]] = {}
"""Clients of the MCP servers of this process, by what stands for their URLs."""
SERVERS: list[Any] = []
"""The interception servers of this process, which know the rollout of a secret."""


def server_of(toolset: Any) -> Any:
    """The MCP server of a toolset."""
    try:  # the name of mcp 1, which verifiers 0.3 has
        from mcp.server.fastmcp import FastMCP
    except ImportError:
        from mcp.server.mcpserver import MCPServer as FastMCP  # type: ignore[no-redef]
    server: Any = FastMCP(toolset.server_name or "tools")
    toolset.register(server)
    return server


def client_of(server: Any) -> Any:
    """mcp's client of a server in this process."""
    try:
        from mcp import Client  # type: ignore[attr-defined]
    except ImportError:
        from mcp.shared.memory import create_connected_server_and_client_session as Client
    return Client(server)


def in_openai_form(server: str, tool: Any) -> dict[str, Any]:
    """A tool of an MCP server as a function; verifiers puts the server's name before it."""
    # in mcp 2, in mcp 1, and as a server holds it
    parameters = getattr(tool, "input_schema", None) or getattr(tool, "inputSchema", None) or tool.parameters
    about = {"name": f"{server}_{tool.name}" if server else tool.name, "description": tool.description or "", "parameters": parameters}
    return {"type": "function", "function": about}


def functions_of(toolsets: Sequence[Any]) -> list[dict[str, Any]]:
    """The functions of tool servers, which need not run. Those of servers elsewhere are known when they are asked."""
    return [in_openai_form(each.server_name, tool) for each in toolsets for tool in server_of(each)._tool_manager.list_tools()]


def install() -> None:
    """Keep the tool servers of rollouts that are played by the chat loop in this process."""
    theirs = rollout.serve_tools

    @contextlib.asynccontextmanager
    async def serve_tools(toolsets: Sequence[Any], runtime: Any, *more: Any, state_secret: str = "", **named: Any) -> AsyncIterator[Any]:
        session = next((each.state_sessions[state_secret] for each in SERVERS if state_secret in each.state_sessions), None)
        here = session is not None and getattr(runtime, "loop_is_here", False)
        near = [each for each in toolsets if here and is_near(each.config)]
        async with contextlib.AsyncExitStack() as stack:
            others = [each for each in toolsets if each not in near]
            urls = dict(await stack.enter_async_context(theirs(others, runtime, *more, state_secret=state_secret, **named)))
            for toolset in near:
                urls[toolset.server_name] = await stack.enter_async_context(served(toolset, session))
            yield urls

    if not hasattr(theirs, "of_rlx"):
        serve_tools.of_rlx = True  # type: ignore[attr-defined]
        rollout.serve_tools = serve_tools


def is_near(config: Any) -> bool:
    """Whether a tool server would be a process of this machine, which nobody else reaches."""
    return not config.url and not getattr(config, "colocated", False) and config.runtime.type == "subprocess"


@contextlib.asynccontextmanager
async def served(toolset: Any, session: Any) -> AsyncIterator[str]:
    """A tool server in this process, by what stands for its URL."""

    async def pull() -> Any:
        return session.trace.state

    async def push(before: Any) -> None:
        """The state is the rollout's own."""

    toolset._pull_state, toolset._push_state = pull, push
    async with toolset._exit_stack:
        await toolset.setup()
        await toolset.setup_task(session.trace.task.data)
        key = f"local:{next(NUMBERS)}"
        LOCAL[key] = functools.partial(client_of, server_of(toolset))
        try:
            yield key
        finally:
            del LOCAL[key]
