"""verifiers 0.3 runs with mcp 2: its tool servers and programs do what they did with mcp 1, as long as it needs help for that."""

from __future__ import annotations

import asyncio
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from rlx.envs import verifiers_mcp

TOOLS = """
import verifiers.v1 as vf

class Count(vf.State):
    calls: int = 0

class Toolset(vf.Toolset[vf.SharedToolsetConfig, Count]):
    TOOL_PREFIX = "t"

    @vf.tool
    async def ratio(self, a: int, b: float = 2.5) -> float:
        '''A ratio.'''
        return a / b

    @vf.tool
    async def rows(self, of: dict[str, int]) -> list[dict]:
        return [{"é": of}, {}]

    @vf.tool
    async def fails(self) -> str:
        raise KeyError("no such page")

if __name__ == "__main__":
    Toolset.run()
"""
RATIO = {
    "type": "object",
    "title": "ratioArguments",
    "properties": {"a": {"title": "A", "type": "integer"}, "b": {"default": 2.5, "title": "B", "type": "number"}},
    "required": ["a"],
}
MCP_1: list[tuple[str, dict[str, Any], str]] = [  # what verifiers 0.3.1's own client gets from its own server with mcp 1.30
    ("ratio", {"a": "3"}, "1.2"),
    ("ratio", {"a": 1, "b": 0}, "Error executing tool ratio: float division by zero"),
    ("ratio", {}, "Error executing tool ratio: 1 validation error for ratioArguments\na\n  Field required"),
    ("rows", {"of": {"x": 1}}, '{\n  "é": {\n    "x": 1\n  }\n}\n{}'),
    ("fails", {}, "Error executing tool fails: 'no such page'"),
]


def test_verifiers_still_asks_for_another_mcp_than_the_installed_one() -> None:
    """When this fails, remove `rlx/envs/verifiers_mcp.py`, its callers, this file and the line about mcp in overrides.txt."""
    assert verifiers_mcp.needed(), "verifiers accepts the installed mcp, so it needs no names of mcp 1 any more"


def test_a_script_runs_as_python_runs_it_and_finds_the_mcp_that_it_asks_for(tmp_path: Path) -> None:
    text = """
# /// script
# dependencies = ["mcp>=1.24.0,<2"]
# ///
import json, sys
from mcp.server.fastmcp import FastMCP
from mcp.types import Tool
tool = Tool(name="t", inputSchema={"type": "object"})
print(json.dumps([__name__, sys.argv, sys.path[0], tool.inputSchema, FastMCP.__name__]))
"""
    from rlx.envs.verifiers_v1_needs import is_met, requirements_of

    assert all(is_met(one) for one in requirements_of(text))
    assert not is_met(Requirement("mcp<1.24"))
    (tmp_path / "one.py").write_text(text)

    def said(*arguments: str) -> list[Any]:
        done = subprocess.run(verifiers_mcp.python(*arguments), capture_output=True, text=True, check=True, cwd=tmp_path)
        return json.loads(done.stdout)

    rest = [{"type": "object"}, "FastMCP"]
    assert said("one.py", "-m") == ["__main__", ["one.py", "-m"], str(tmp_path), *rest]
    assert said("-m", "one", "x") == ["__main__", [str(tmp_path / "one.py"), "x"], str(tmp_path), *rest]


@pytest.mark.slow
@pytest.mark.parametrize("library", ["mcp.server.fastmcp import FastMCP", "mcp.server.mcpserver import MCPServer as FastMCP"])
def test_a_server_of_a_classic_environment_may_be_written_for_either_mcp(library: str, tmp_path: Path) -> None:
    text = f"""
from {library}
server = FastMCP("words")

@server.tool()
def reverse(text: str) -> str:
    return text[::-1]

server.run()
"""
    (tmp_path / "words.py").write_text(text)
    verifiers_mcp.install()
    import datasets
    import verifiers as vf
    from verifiers.envs.experimental.mcp_env import MCPEnv

    rows = datasets.Dataset.from_list([{"question": "q", "answer": "a"}])
    server = {"name": "words", "command": sys.executable, "args": [str(tmp_path / "words.py")]}
    env = MCPEnv(mcp_servers=[server], dataset=rows, rubric=vf.Rubric(funcs=[]))
    assert [(tool.name, tool.parameters["required"]) for tool in env.tool_defs] == [("reverse", ["text"])]
    said = asyncio.run(env.call_tool("reverse", {"text": "word"}, "1"))
    assert said["content"] == "drow"
    asyncio.run(env.teardown_mcp_servers())


@pytest.mark.slow
def test_a_model_reads_of_a_tool_what_it_reads_with_mcp_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import verifiers.v1 as vf
    from verifiers.v1.mcp import launch
    from verifiers.v1.runtimes import make_runtime

    from rlx.envs.verifiers_v1_client import connected, tool_client
    from rlx.envs.verifiers_v1_needs import adapt_processes

    (tmp_path / "tools_of_mcp_1.py").write_text(TOOLS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    adapt_processes()

    async def read() -> tuple[list[dict], list[str], str]:
        server = importlib.import_module("tools_of_mcp_1").Toolset(vf.SharedToolsetConfig())
        runtime = make_runtime(server.config.runtime)
        await runtime.start()
        try:
            url = f"http://127.0.0.1:{await launch.serve_in_runtime(server, runtime, exposed=True)}/mcp"
            async with connected({"t": url, "forged": f"{url}?vf_state_url=http://elsewhere"}, 60) as (tools, dispatch, servers):
                results = [await tool_client.call_mcp(servers, dispatch, f"t_{name}", given) for name, given, _ in MCP_1]
                return tools, results, await tool_client.call_mcp(servers, dispatch, "forged_ratio", {"a": 1})
        finally:
            await runtime.stop()

    tools, results, forged = asyncio.run(read())
    found = {tool["function"]["name"]: tool["function"] for tool in tools}
    assert found["t_ratio"] == {"name": "t_ratio", "description": "A ratio.", "parameters": RATIO}
    assert [result[: len(expected)] for result, (*_, expected) in zip(results, MCP_1, strict=True)] == [one for *_, one in MCP_1]
    assert forged == "Error executing tool ratio: invalid shared state coordinates", "a call's query reaches the tool server"
    bare = subprocess.run(
        [sys.executable, "-m", "tools_of_mcp_1"], capture_output=True, text=True, check=False, env={"VF_CONFIG": "{}"}, cwd=tmp_path
    )
    assert "mcp.server.fastmcp" in bare.stderr, "verifiers' tool servers start with mcp 2 by themselves: remove rlx/envs/verifiers_mcp.py"
