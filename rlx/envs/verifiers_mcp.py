"""verifiers 0.3 is written for mcp 1; this module lets it run with mcp 2, which vLLM needs in the same Python.

mcp 2 renamed what verifiers uses of mcp 1. `install` gives mcp 2 those old names, in this process. The tool servers and programs that
verifiers starts in this Python are processes of their own: `python` is the command that installs the names there first.
Nothing of it acts where verifiers accepts the installed mcp: verifiers 0.4, or 0.3 in a Python of its own.
It imports neither rlx nor verifiers, because it also runs as a script, in any folder: `PYTHON verifiers_mcp.py -m MODULE` or `… FILE`.
"""

from __future__ import annotations

import contextvars
import functools
import importlib.machinery
import importlib.metadata
import os
import runpy
import shutil
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from packaging.requirements import Requirement

OFFERED = "1.30"  # the version of mcp whose names these are, as far as verifiers uses them


@functools.cache
def needed() -> bool:
    """Whether verifiers asks for another mcp than the installed one, and the installed one is mcp 2."""
    try:
        installed = importlib.metadata.version("mcp")
        wanted = [Requirement(each) for each in importlib.metadata.requires("verifiers") or ()]
    except importlib.metadata.PackageNotFoundError:
        return False
    return installed.startswith("2.") and any(one.name == "mcp" and not one.specifier.contains(installed) for one in wanted)


def is_offered(requirement: Requirement) -> bool:
    """Whether these names are what a script for mcp 1 asks for."""
    return requirement.name == "mcp" and needed() and requirement.specifier.contains(OFFERED)


def python(*arguments: str) -> list[str]:
    """The command that runs this Python with the old names, where they are needed. `arguments`: `-m MODULE` or a file."""
    return [sys.executable, *([__file__] if needed() else []), *arguments]


def install() -> None:
    """Give mcp the old names when it is imported, or now if it was. The import takes time and memory that most environments do not need."""
    if needed() and "mcp" in sys.modules:
        _rename()
    elif needed() and _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)


class _Finder:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name == "mcp" else None
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(_executed, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def _executed(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    execute(module)
    _rename()


def _rename() -> None:
    """Give the imported mcp 2 the names of mcp 1 that verifiers uses."""
    if "mcp.server.fastmcp" in sys.modules:
        return
    from mcp.client import stdio, streamable_http
    from mcp.server.lowlevel import server as lowlevel
    from mcp.types import ImageContent, Tool

    connect, library = streamable_http.create_mcp_http_client, streamable_http.httpx2

    def create_mcp_http_client(headers: Any = None, timeout: Any = None, auth: Any = None) -> Any:
        if timeout is not None and not isinstance(timeout, library.Timeout):  # of httpx; mcp 2 has its successor, of the same interface
            timeout = library.Timeout(**timeout.as_dict())
        return connect(headers, timeout, auth)

    start = stdio.stdio_client

    def stdio_client(server: Any, *more: Any, **keys: Any) -> Any:
        (first, *_) = server.args or ["-"]
        if shutil.which(server.command) == sys.executable and (first == "-m" or not first.startswith("-")):
            server = server.model_copy(update={"args": python(*server.args)[1:]})  # a server of the environment's own, written for mcp 1
        return start(server, *more, **keys)

    stdio.stdio_client = stdio_client
    streamable_http.create_mcp_http_client = create_mcp_http_client
    Tool.inputSchema = property(lambda tool: tool.input_schema)  # type: ignore[attr-defined]
    ImageContent.mimeType = property(lambda image: image.mime_type)  # type: ignore[attr-defined]
    lowlevel.request_ctx = contextvars.ContextVar("request_ctx")  # type: ignore[attr-defined]
    fastmcp = ModuleType("mcp.server.fastmcp")
    fastmcp.FastMCP = _fast_mcp(lowlevel.request_ctx)  # type: ignore[attr-defined]
    sys.modules["mcp.server.fastmcp"] = fastmcp


def _fast_mcp(request_ctx: contextvars.ContextVar[Any]) -> type:
    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError, UnexpectedToolError

    async def with_request(ctx: Any, call_next: Callable[[Any], Any]) -> Any:
        token = request_ctx.set(ctx)
        try:
            return await call_next(ctx)
        finally:
            request_ctx.reset(token)

    class FastMCP(MCPServer[Any]):
        """mcp 1's server: its constructor takes the settings of the HTTP application, and a model reads what a tool raised."""

        def __init__(self, name: str | None = None, **settings: Any) -> None:
            http = {key: settings.pop(key) for key in ("json_response", "stateless_http", "transport_security") if key in settings}
            super().__init__(name, middleware=[with_request], **settings)
            self.streamable_http_app = functools.partial(super().streamable_http_app, **http)  # type: ignore[method-assign]

        async def call_tool(self, name: str, arguments: dict[str, Any], context: Any = None) -> Any:
            try:
                return await super().call_tool(name, arguments, context)
            except UnexpectedToolError as error:
                raise ToolError(f"{error}: {error.__cause__}") from error

        @property
        def _mcp_server(self) -> _Handlers:
            return _Handlers(self)

    return FastMCP


class _Handlers:
    """mcp 1's server without a list of tools, as far as verifiers' NeMo Gym uses it: decorators of the functions that list and call."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def list_tools(self) -> Callable[[Callable], None]:
        return lambda function: setattr(self._server, "list_tools", function)

    def call_tool(self, validate_input: bool) -> Callable[[Callable], None]:
        assert not validate_input, "mcp 2 does not validate what such a function gets"
        return lambda function: setattr(self._server, "call_tool", lambda name, arguments, _: function(name, arguments))


def main() -> None:
    """Run a module or a file with the old names, as Python would without them."""
    del sys.argv[0]
    folder = os.getcwd()
    is_module = sys.argv[0] == "-m"
    if is_module:
        del sys.argv[0]
    else:
        folder = os.path.dirname(os.path.abspath(sys.argv[0]))
    if not sys.flags.safe_path:
        sys.path[0] = folder  # it was this file's, whose modules have common names
    install()
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
