"""Which line of an environment's code a process was at."""

from __future__ import annotations

from rlx.envs.stacks import environments_line, threads


def test_the_environments_function_is_found_in_a_dump_of_stacks() -> None:
    dump = """Thread 0x00007fe9affff6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Current thread 0x00007fe9d388eb80 (most recent call first):
  File "/v/lib/python3.11/site-packages/sympy/core/power.py", line 1167 in _eval_expand
  File "/v/lib/python3.11/site-packages/my_env/__init__.py", line 40 in correct
  File "/v/lib/python3.11/site-packages/verifiers/rubrics/rubric.py", line 96 in _call
  File "/v/lib/python3.11/asyncio/base_events.py", line 639 in run
"""
    frames = threads(dump)[0]
    own = "/v/lib/python3.11/site-packages/my_env/__init__.py:40 in correct"
    assert environments_line(frames, "/v/lib/python3.11/site-packages/my_env") == own
    assert environments_line(frames, "/v/lib/python3.11/site-packages/my_env/__init__.py") == own
    assert environments_line(frames[:1], "") == "/v/lib/python3.11/site-packages/sympy/core/power.py:1167 in _eval_expand"
    assert environments_line([], "") == ""
