"""An environment whose code misbehaves for some words, by `kind`: what an environment can do to the process that plays it."""

import asyncio
import ctypes
import os
import threading
import time

import verifiers as vf
from rlx_test_envs import words

KEPT: list[bytearray] = []  # what `leak` never frees
RETURNED = {"nan": float("nan"), "none": None, "text": "one"}  # by a reward


def sleep_in_c(seconds: float) -> None:
    """Sleeps in C with the interpreter held: no other thread of the process can run."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:  # a signal wakes it
        ctypes.PyDLL(None).sleep(int(seconds))


def hoard(mib: float) -> None:
    """Takes so many MiB, a part at a time, and never ends."""
    for _ in range(int(mib) // 16):
        KEPT.append(bytearray(b"x") * 2**24)
        time.sleep(0.03)
    time.sleep(3600)


def misbehave(kind: str, seconds: float) -> None:
    """Do it."""
    if kind == "power":
        eval("9**9**9")
    elif kind == "c":
        sleep_in_c(seconds)
    elif kind == "cpu":
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass
    elif kind == "raise":
        raise RuntimeError("the word list is not there")
    elif kind == "exit":
        os._exit(1)
    elif kind == "kill":
        os.kill(os.getpid(), 9)
    elif kind == "leak":
        KEPT.append(bytearray(os.urandom(1) * int(seconds * 2**20)))
    elif kind == "hoard":
        hoard(seconds)


def load_environment(
    kind: str = "power", num_examples: int = 64, every: int = 8, seconds: float = 3600.0, where: str = "reward", load: str = ""
) -> vf.Environment:
    """Every `every`-th example misbehaves in its reward, in `env_response`, in a `thread`, never stops (`endless`), has a long `prompt`.

    `load`: what `load_environment` itself does: `raise` or `exit`.
    """
    if load == "raise":
        raise RuntimeError("the word list is not there")
    if load == "exit":
        print("this package cannot live here", flush=True)
        os._exit(7)
    if load == "thread":
        threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()

    def wanted(info: dict) -> bool:
        return info["number"] % every == 0

    async def backwards(completion: vf.Messages, answer: str, info: dict) -> float:
        """1 if the reply is the answer."""
        if where == "reward" and wanted(info):
            misbehave(kind, seconds)
            if kind in RETURNED:
                return RETURNED[kind]
        if where == "thread" and wanted(info):
            await asyncio.to_thread(misbehave, kind, seconds)
        return float(completion[-1]["content"].strip() == answer)

    class Asking(vf.MultiTurnEnv):
        """Two turns."""

        async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs) -> vf.Messages:
            if where == "env_response" and wanted(state["info"]):
                misbehave(kind, seconds)
            return [{"role": "user", "content": state["prompt"][-1]["content"]}]

    data = words(num_examples)
    data = data.map(lambda row, place: {"info": {"number": place}}, with_indices=True)
    if where == "prompt":
        data = data.map(lambda row: {"question": "abc " * 4096 if wanted(row["info"]) else row["question"]})
    rubric = vf.Rubric(funcs=[backwards])
    if where in ("env_response", "endless"):
        return Asking(dataset=data, rubric=rubric, max_turns=2 if where == "env_response" else -1)
    return vf.SingleTurnEnv(dataset=data, rubric=rubric)
