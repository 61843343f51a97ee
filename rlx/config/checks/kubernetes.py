"""The rules for `launcher=kubernetes`: what the pods could not do with what they are given."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlx.config.chat_format import template_names
from rlx.config.checks.run import is_path
from rlx.config.checks.sft import is_file_or_folder
from rlx.config.elsewhere import in_a_pod, is_the_images
from rlx.config.environment import variable_of
from rlx.config.rules import Show, rule
from rlx.config.schema import CommandConfig, Config, EvaluatedRun, SftRoot
from rlx.config.secret import secrets_of

SECRET = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?/[-._a-zA-Z0-9]+")  # name of a Secret and a key in it
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SECRET_WORDS = {"TOKEN", "KEY", "APIKEY", "SECRET", "PASSWORD"}  # whole words: TOKENIZERS_PARALLELISM and NCCL_IB_PKEY are no secrets
PLACES = {"FILE", "PATH", "DIR"}  # HF_TOKEN_PATH says only where one is
FORBIDDEN = ("PYTHONPATH", "CUDA_VISIBLE_DEVICES")  # rlx sets them for each process


def names_a_secret(variable: str) -> bool:
    words = variable.upper().split("_")
    return bool(SECRET_WORDS & {*words}) and words[-1] not in PLACES


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


@rule("launcher", "kubernetes")
def texts_of_manifests(cfg: CommandConfig, of: Show) -> Iterator[str]:
    """Values that YAML does not read as text. A whole number stays what it is; of others the text changes, or the cluster refuses them."""
    if cfg.launcher.name != "kubernetes":
        return
    kube = cfg.kubernetes
    for section, values in (("env", kube.env), ("node_selector", kube.node_selector)):
        for name, value in values.items():
            if not _is_text(value):
                key = f"kubernetes.{section}" if "." in name else f"kubernetes.{section}.{name}"
                wrong = f"YAML does not read the value of {name} as text, so the pods would get other text: {of(key)}."
                yield f"{wrong}\n{_quoted(name, value, key if '.' not in name else None)}"
    for each in kube.tolerations:
        if not isinstance(each, dict):
            yield f"a toleration has keys: {of('kubernetes.tolerations')}. Write {{key: NAME, operator: Exists, effect: NoSchedule}}."
        elif not _is_text(each.get("value", "")):
            wrong = f"the value of a toleration is no text, which the cluster refuses: {of('kubernetes.tolerations')}."
            yield f"{wrong}\n{_quoted('value', each['value'])}"


def _is_text(value: object) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)


def _quoted(name: str, value: object, key: str | None = None) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    here = f"; on the command line, quotes within those of the shell: \"{key}='{text}'\"" if key is not None else ""
    return f"Quote it: {name}: '{text}' in a file{here}."


@rule("launcher", "kubernetes", "run", "resume")
def run_on_the_volume(cfg: CommandConfig, of: Show) -> Iterator[str]:
    if cfg.run.dir is not None:
        yield from _off_the_volume(cfg, {"run.dir": cfg.run.dir}, of, "; or run.name=NAME, which is there")
    if cfg.resume is not None and cfg.resume != "latest" and not cfg.resume.isdecimal():
        yield from _off_the_volume(cfg, {"resume": cfg.resume}, of)


@rule("launcher", "kubernetes", "replay")
def replay_on_the_volume(cfg: Config, of: Show) -> Iterator[str]:
    yield from _off_the_volume(cfg, {"replay": cfg.replay}, of)


@rule("launcher", "kubernetes", "model.name", "model.gguf", "model.warm_start")
def model_on_the_volume(cfg: CommandConfig, of: Show) -> Iterator[str]:
    name = cfg.model.name if is_path(cfg.model.name) and cfg.model.warm_start is None else None
    yield from _off_the_volume(cfg, {"model.gguf": cfg.model.gguf, "model.name": name}, of)


# The rules from here on ask here alone. In a pod, a path may also lead into its image, and other rules say whether anything is there.


@rule("launcher", "kubernetes", "model.chat_template")
def chat_template_on_the_volume(cfg: CommandConfig, of: Show) -> Iterator[str]:
    if not in_a_pod() and cfg.model.chat_template not in template_names():
        yield from _off_the_volume(cfg, {"model.chat_template": cfg.model.chat_template}, of, "; or the name of a template of rlx")


@rule("launcher", "kubernetes", "ref.name")
def reference_on_the_volume(cfg: Config, of: Show) -> Iterator[str]:
    if not in_a_pod() and cfg.ref.name is not None and is_path(cfg.ref.name):
        yield from _off_the_volume(cfg, {"ref.name": cfg.ref.name}, of)


@rule("launcher", "kubernetes", "weights_dir")
def weights_on_the_volume(cfg: Any, of: Show) -> Iterator[str]:
    if not in_a_pod():
        yield from _off_the_volume(cfg, {"weights_dir": cfg.weights_dir}, of)


@rule("launcher", "kubernetes", "data", "val.name")
def data_on_the_volume(cfg: SftRoot, of: Show) -> Iterator[str]:
    names = {"data.name": cfg.data.name, "val.name": cfg.val.name} | {f"data.sets.{key}.name": e.name for key, e in cfg.data.sets.items()}
    if not in_a_pod():
        paths = {key: name for key, name in names.items() if name is not None and (is_file_or_folder(name) or Path(name).exists())}
        yield from _off_the_volume(cfg, paths, of, "; or a name on the Hugging Face hub")


@rule("launcher", "kubernetes", "envs")
def pythons_on_the_volume(cfg: Any, of: Show) -> Iterator[str]:
    yield from _pythons(cfg, {f"envs.{name}.python": env.python for name, env in cfg.envs.items()}, of)


@rule("launcher", "kubernetes", "eval.envs")
def pythons_of_evaluations_on_the_volume(cfg: EvaluatedRun, of: Show) -> Iterator[str]:
    yield from _pythons(cfg, {f"eval.envs.{name}.python": env.python for name, env in cfg.eval.envs.items()}, of)


def _pythons(cfg: CommandConfig, given: Mapping[str, str | None], of: Show) -> Iterator[str]:
    """Problems with the Pythons of environments. One in a system folder is the image's."""
    if not in_a_pod() and cfg.launcher.check_envs:
        paths = {key: path for key, path in given.items() if path is not None and not is_the_images(Path(path))}
        yield from _off_the_volume(
            cfg, paths, of, "; or a Python of the image, below /opt or /usr, or elsewhere with launcher.check_envs=false"
        )


def _off_the_volume(cfg: CommandConfig, paths: Mapping[str, str | None], of: Show, other: str = "") -> Iterator[str]:
    """A problem for each path that the pods would not have. `other`: what else helps."""
    for key, path in paths.items() if cfg.launcher.name == "kubernetes" else ():
        if path is not None and not Path(path).is_relative_to(cfg.kubernetes.mount):
            yield (
                f"the pods cannot read or write this path: {of(key)} is not on their volume, {of('kubernetes.mount')}.\n"
                f"Use a path below {cfg.kubernetes.mount}{other}."
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
