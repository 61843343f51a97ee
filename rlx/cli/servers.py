"""`rlx servers list|add|remove RUN [URL]`: the inference servers of a run that runs."""

from __future__ import annotations

import hashlib
import os
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlx.inference.endpoints import Endpoint

SUMMARY = "the inference servers of a running run: list, add, remove"
TIMEOUT = 5.0  # seconds for an answer


def help_text() -> str:
    return f"""\
rlx servers: {SUMMARY}.

usage: rlx servers list RUN
       rlx servers add RUN URL [--key-var NAME]
       rlx servers remove RUN URL

  --key-var NAME         the environment variable with the server's secret; default: RLX_SECRET

  rlx servers add outputs/mine http://host:8001         it gets the run's version before its first request
  rlx servers remove outputs/mine http://host:8001      it completes the requests that it has; the run does not stop it

A server is started with the command that dry_run=true prints, and sees the run's directory under the same path: docs/servers.md.
The run looks every 2 s. The last server stays."""


def run(argv: list[str]) -> int:
    from pathlib import Path

    from rlx.cli.arguments import Parser
    from rlx.config.errors import ConfigError
    from rlx.config.load import load_play
    from rlx.inference.endpoints import Endpoint, present_servers, publish_endpoint
    from rlx.runs.run import Run

    parser = Parser("servers")
    parser.add_argument("what", choices=("list", "add", "remove"))
    parser.add_argument("run", type=Path)
    parser.add_argument("url", nargs="?")
    parser.add_argument("--key-var", default="RLX_SECRET")
    given = parser.parse_args(argv)
    if (given.url is None) != (given.what == "list"):
        parser.error(f"{given.what} takes {'no URL' if given.what == 'list' else 'a URL'}")
    found = Run.open(given.run)
    servers = present_servers(load_play(found.root), found.paths)
    if given.what == "list":
        for server in servers:
            print(f"{server.url}   {_state(server) or 'serves'}" + ("" if server.file else "   of inference.base_url"))
        return 0
    if (state := found.state()) != "running":
        raise ConfigError(f"{found.root} is {state}, and only a running run takes servers.\n  fix: wait until it runs")
    url = given.url.rstrip("/")
    if given.what == "add" and any(server.url == url for server in servers):
        print(f"{url} is a server of the run already")
        return 0
    if given.what == "add":
        added = Endpoint(url, os.environ.get(given.key_var, ""))
        if problem := _state(added):
            raise ConfigError(f"{url} {problem}.\n  fix: start it as docs/servers.md says; ${given.key_var} holds its secret (--key-var)")
        name = hashlib.sha256(url.encode()).hexdigest()[:8]
        publish_endpoint(found.paths.endpoints / f"inference_added_{name}.json", added)
        print(f"{url} was added; it serves when it has the run's version: rlx watch {found.root}")
        return 0
    file = next((server.file for server in servers if server.url == url and server.file is not None), None)
    if file is None or len(servers) == 1:
        why = "is the run's last server" if file is not None else "is no server that can be removed"
        raise ConfigError(f"{url} {why}.\n  fix: rlx servers list {found.root} shows them; those of inference.base_url stay")
    file.unlink()
    print(f"{url} was removed; it completes the requests that it has")
    return 0


def _state(server: Endpoint) -> str:
    """Why a server does not serve; empty if it does."""
    asked = urllib.request.Request(f"{server.url}/health", headers=server.headers)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked, timeout=TIMEOUT):
            return ""
    except urllib.error.HTTPError as error:
        return "refuses the secret (401)" if error.code == 401 else f"answers {error.code}"
    except (OSError, ValueError) as error:
        return f"does not answer ({error})"
