"""Which line of an environment's code a process was at, and for which request."""

from __future__ import annotations

from rlx.envs.worker_process import read_dump

MAIN = """Current thread 0x00007fe9d388eb80 (most recent call first):
  File "/v/lib/python3.11/site-packages/sympy/core/power.py", line 1167 in _eval_expand
  File "/v/lib/python3.11/site-packages/my_env/__init__.py", line 40 in correct
  File "/v/lib/python3.11/site-packages/verifiers/rubrics/rubric.py", line 96 in _call
"""


def test_the_environments_function_and_its_request_are_found_in_a_dump_of_stacks() -> None:
    idle = 'Thread 0x00007fe9affff6c0 (most recent call first):\n  File "/usr/lib/python3.11/threading.py", line 331 in wait\n\n'
    asked = '  File "<request 17>", line 3 in _awaited\n'
    sources = "/v/lib/python3.11/site-packages/my_env"
    own = f"{sources}/__init__.py:40 in correct"
    assert read_dump(idle + MAIN + asked, sources) == ({17}, own)
    assert read_dump(idle + MAIN, f"{sources}/__init__.py") == (set(), own), "without a request, the main thread's line"
    waits = idle.replace(" in wait\n", " in wait\n" + asked)
    assert read_dump(waits + MAIN, sources) == ({17}, "/usr/lib/python3.11/threading.py:331 in wait")
    assert read_dump("", "") == (set(), "")
