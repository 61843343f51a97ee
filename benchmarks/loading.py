"""Peak host memory and time of loading a model of 1.0e9 random float32 parameters, in files of 1 GB, on several ranks.

    python benchmarks/loading.py [--ranks 2] [--layers 22]

Needs 4 GB of disk while it runs. Prints one line per rank: resident memory before the model is loaded (Python, torch, transformers, the
process group), its peak while the rank reads its shards, and the growth since, also with the check on a few tokens that follows: its
forward gathers embedding, head and a layer, as every forward of training does. Peaks are the kernel's own (VmHWM), reset before.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

GB = 1e9
WIDTH, INNER, VOCABULARY = 2048, 5632, 32768


def make(folder: Path, layers: int) -> None:
    """Write the model. A process of its own does this, so that its memory is gone afterwards."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=layers, num_attention_heads=16, num_key_value_heads=4,
        vocab_size=VOCABULARY, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.uniform_(parameter, -0.02, 0.02)
    model.save_pretrained(folder, max_shard_size="1GB")


def memory() -> dict[str, float]:
    """GB of this process: VmRSS, VmHWM, RssAnon, …"""
    lines = (line.split() for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 / GB for words in lines if len(words) == 3 and words[2] == "kB"}


def rank(folder: Path) -> None:
    import torch
    import torch.distributed.checkpoint.state_dict  # noqa: F401
    import torch.distributed.fsdp  # noqa: F401

    from rlx.models import load
    from rlx.parallel.mesh import join

    number, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    mesh = join(torch.device("cpu"), rank=number, world_size=ranks, timeout=600)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / GB
    mesh.barrier()
    before = memory()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets VmHWM
    peaks: list[float] = []
    check = load.check_packed_forward

    def checked(*args: Any) -> None:
        peaks.append(memory()["VmHWM"])
        check(*args)

    load.check_packed_forward = checked
    started = time.perf_counter()
    model = load.load_policy(str(folder), mesh, dtype="float32")
    seconds = time.perf_counter() - started
    peaks.append(memory()["VmHWM"])
    resident = memory()["VmRSS"]
    parameters = sum(p.numel() for p in model.parameters())
    for turn in range(ranks):
        mesh.barrier()
        if turn == number:
            grown = [(value - before["VmRSS"]) / size for value in (*peaks, resident)]
            print(
                f"| {number} of {ranks} | {parameters / 1e9:.3f}e9 parameters, {size:.2f} GB | {before['VmRSS']:.2f} | {peaks[0]:.2f} | "
                f"{' | '.join(f'{share:.2f}' for share in grown)} | {seconds:.1f} |",
                flush=True,
            )
    mesh.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--made", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.made is not None:
        rank(args.made)
        return
    with tempfile.TemporaryDirectory() as name:
        made = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import loading, pathlib"
        subprocess.run([sys.executable, "-c", f"{made}; loading.make(pathlib.Path({name!r}), {args.layers})"], check=True)
        print("| rank | model | before, GB | peak of reading, GB | grown, of the model | with the check | afterwards | s |")
        print("|---|---|---|---|---|---|---|---|")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
        subprocess.run([*launcher, __file__, "--made", name], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    main()
