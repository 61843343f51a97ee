"""Marks of tests that need sandboxes of this machine. Where they must run (RLX_REQUIRE_SANDBOX), a machine without is a failure."""

from __future__ import annotations

import os

import pytest

from rlx.agents.images import problem_of

NEEDS_BWRAP = pytest.mark.skipif(
    problem_of("bwrap") is not None and not os.environ.get("RLX_REQUIRE_SANDBOX"), reason=f"bubblewrap: {problem_of('bwrap')}"
)
