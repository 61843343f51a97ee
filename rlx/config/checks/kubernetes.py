"""The rules for `launcher=kubernetes`: what the pods could not do with what they are given."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from rlx.config.checks.run import is_path
from rlx.config.environment import variable_of
from rlx.config.rules import Show, rule
from rlx.config.schema import CommandConfig, Config
from rlx.config.secret import secrets_of

SECRET = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?/[-._a-zA-Z0-9]+")  # name of a Secret and a key in it
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SECRET_WORDS = {"TOKEN", "KEY", "APIKEY", "SECRET", "PASSWORD"}  # whole words: TOKENIZERS_PARALLELISM and NCCL_IB_PKEY are no secrets
PLACES = {"FILE", "PATH", "DIR"}  # HF_TOKEN_PATH says only where one is
FORBIDDEN = ("PYTHONPATH", "CUDA_VISIBLE_DEVICES")  # rlx sets them for each process


def names_a_secret(variable: str) -> bool:
    words = variable.upper().split("_")
    return bool(SECRET_WORDS & {*words}) and words[-1] not in PLACES


def in_a_pod() -> bool:
    """Whether this is a host of a run already (`rlx pod`): Kubernetes sets the variable in the pods of an indexed Job."""
    return "JOB_COMPLETION_INDEX" in os.environ


@rule("launcher", "kubernetes", "hardware", "dry_run")
def kubernetes_cluster(cfg: CommandConfig, of: Show) -> Iterator[str]:
    if cfg.launcher.name != "kubernetes":
        return
    kube = cfg.kubernetes
    if kube.image is None and not cfg.dry_run and not in_a_pod():
        yield (
            f"the pods have no image: {of('kubernetes.image')}.\n"
            "Build one (docker build -t REGISTRY/rlx .; docker push REGISTRY/rlx) and set kubernetes.image=REGISTRY/rlx."
        )
    if kube.gpus_per_node is not None and cfg.hardware.device == "cuda" and cfg.hardware.gpus_per_node > kube.gpus_per_node:
        yield (
            f"no node can hold a pod of this layout: {of('hardware.gpus_per_node')} > {of('kubernetes.gpus_per_node')}.\n"
            "Choose another hardware=, or another kubernetes=; with the chart, correct gpusPerNode."
        )
    if kube.storage_gb is not None and kube.access_mode != "ReadWriteMany" and cfg.hardware.nodes > 1:
        yield (
            f"only one node could have the volume that is created: {of('kubernetes.access_mode')}, {of('hardware.nodes')}.\n"
            "Leave out kubernetes.access_mode, and choose a kubernetes.storage_class that all nodes can write."
        )
    if not kube.mount.startswith("/") or kube.mount == "/":
        yield f"the volume needs a place of its own: {of('kubernetes.mount')}. Use an absolute path such as /runs."
    for variable, place in kube.secrets.items():
        if not VARIABLE.fullmatch(variable) or not SECRET.fullmatch(place):
            yield (
                f"a secret is a variable and where its value is: {of(f'kubernetes.secrets.{variable}')}.\n"
                "Write kubernetes.secrets.HF_TOKEN=SECRET/KEY, and create it: kubectl create secret generic SECRET --from-literal=KEY=…"
            )
    for variable in {*kube.env, *kube.secrets} & {*FORBIDDEN}:
        where = "env" if variable in kube.env else "secrets"
        yield f"rlx sets this variable for every process: {of(f'kubernetes.{where}.{variable}')}. Remove it."
    for variable in {*filter(lambda name: not names_a_secret(name), kube.env)} & {*kube.secrets}:
        yield f"a variable has two values: {of(f'kubernetes.env.{variable}')}, {of(f'kubernetes.secrets.{variable}')}. Remove one."
    if kube.memory_gb is not None and kube.shared_memory_gb >= kube.memory_gb:
        yield (
            f"/dev/shm would take all memory of the pod: {of('kubernetes.shared_memory_gb')}, {of('kubernetes.memory_gb')}.\n"
            "Raise kubernetes.memory_gb or lower kubernetes.shared_memory_gb."
        )


@rule("launcher", "kubernetes", "run", "resume", "model.name", "model.gguf")
def paths_on_the_volume(cfg: CommandConfig, of: Show) -> Iterator[str]:
    """Files that exist only on this machine cannot be read in the cluster."""
    if cfg.launcher.name != "kubernetes":
        return
    named = {"run.dir": cfg.run.dir, "model.gguf": cfg.model.gguf}
    if is_path(cfg.model.name) and cfg.model.warm_start is None:
        named["model.name"] = cfg.model.name
    if cfg.resume is not None and cfg.resume != "latest" and not cfg.resume.isdecimal():
        named["resume"] = cfg.resume
    if isinstance(cfg, Config):
        named["replay"] = cfg.replay
    for key, path in named.items():
        if path is not None and not Path(path).is_relative_to(cfg.kubernetes.mount):
            yield (
                f"the pods cannot read or write this path: {of(key)} is not on their volume, {of('kubernetes.mount')}.\n"
                f"Use a path below {cfg.kubernetes.mount}" + ("; or run.name=NAME, which is there." if key == "run.dir" else ".")
            )


@rule("launcher", "kubernetes")
def no_secrets_in_manifests(cfg: CommandConfig, of: Show) -> Iterator[str]:
    if cfg.launcher.name != "kubernetes":
        return
    for key in () if in_a_pod() else secrets_of(cfg):  # a pod has them from its variables, and sends them nowhere
        yield (
            f"a secret must not be in a manifest: {of(key)} with {of('launcher.name')}.\n"
            f"Leave it out, and set kubernetes.secrets.{variable_of(key)}=SECRET/KEY: the pods take it from there."
            + (" Without both, the key is a random one." if key == "inference.api_key" else "")
        )
    for variable in sorted(filter(names_a_secret, cfg.kubernetes.env)):
        yield (
            f"a secret must not be in a manifest: kubernetes.env.{variable} would be there for all to read.\n"
            f"Set kubernetes.secrets.{variable}=SECRET/KEY (with the chart: secretEnv, which becomes a secretKeyRef), and create it: "
            "kubectl create secret generic SECRET --from-literal=KEY=…"
        )
