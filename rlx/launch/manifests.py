"""The Kubernetes objects of one run, from the values of the chart in `charts/rlx`. Pure.

    values ─► PersistentVolumeClaim (if it is to be created) · ConfigMap (config.yaml) · Service (names for the pods) · Job (a pod a host)

The Job is indexed: pod i is host i of the layout, has the name JOB-i, and finds the others by the headless Service. An indexed Job needs
nothing in the cluster but Kubernetes; a JobSet needs its own controller. `charts/rlx/templates` has the same objects as templates, and a
test compares the two.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import yaml

from rlx.config.inherited import Later
from rlx.config.load import to_yaml
from rlx.config.roots import root_of
from rlx.config.saved import text_of
from rlx.config.schema import CommandConfig
from rlx.config.tree import merge

CONFIG = "/etc/rlx"  # where the ConfigMap is mounted
PORT = 8470  # of the agent in every pod (`rlx.launch.agents`)
MARGIN = 20  # seconds beyond the run's own grace times until the kubelet kills a pod
LONGEST = 52  # characters of a name, so that a pod's host name with its number is a DNS label
NO_RETRY = (1, 2, 130)  # exit codes of a failed, a refused and an interrupted run, which would only repeat themselves
LEFT = 75  # exit code of a preempted attempt (`rlx.waiting.LEFT`): the Job starts it again, and rlx itself counts

Object = dict[str, Any]


def object_name(run: str) -> str:
    """The name of a run's objects: lower case, digits and dashes. A name that loses something gets a hash of the whole."""
    plain = re.sub(r"[^a-z0-9-]+", "-", run.lower()).strip("-")[:LONGEST].rstrip("-")
    if plain == run and plain[:1].isalpha():
        return plain
    digest = hashlib.blake2b(run.encode(), digest_size=3).hexdigest()
    return f"{plain if plain[:1].isalpha() else f'run-{plain}'.rstrip('-')}"[: LONGEST - 7].rstrip("-") + f"-{digest}"


def values_of(cfg: CommandConfig, later: Later | None = None) -> dict[str, Any]:
    """The values of the chart for a settled configuration. `later`: what it takes from a run that only the pods can read."""
    kube, hardware = cfg.kubernetes, cfg.hardware
    return {
        "image": kube.image or "IMAGE",
        "imagePullPolicy": kube.image_pull_policy,
        "imagePullSecrets": list(kube.image_pull_secrets),
        "command": root_of(cfg).command,
        "arguments": [],
        "config": to_yaml(cfg) if later is None else _left_open(cfg, later),
        "nodes": hardware.nodes,
        "gpusPerNode": hardware.gpus_per_node if hardware.device == "cuda" else 0,
        "gpuResource": kube.gpu_resource,
        "cpus": None if kube.cpus is None else f"{kube.cpus:g}",
        "memory": _gib(kube.memory_gb),
        "sharedMemory": _gib(kube.shared_memory_gb),
        "persistence": {
            "existingClaim": kube.claim if kube.storage_gb is None else None,
            "claimName": kube.claim,
            "storageClass": kube.storage_class,
            "size": _gib(kube.storage_gb),
            "accessMode": kube.access_mode,
            "mountPath": kube.mount,
        },
        "secretEnv": {name: dict(zip(("name", "key"), place.split("/", 1), strict=True)) for name, place in sorted(kube.secrets.items())},
        "env": {name: str(value) for name, value in sorted(kube.env.items())},
        "nodeSelector": {name: str(value) for name, value in kube.node_selector.items()},
        "tolerations": [each | {"value": str(each["value"])} if "value" in each else each for each in kube.tolerations],
        "priorityClassName": kube.priority_class,
        "serviceAccountName": kube.service_account,
        "user": kube.user,
        "startTimeout": int(kube.start_timeout),
        "grace": int(cfg.launcher.preempt_grace + cfg.launcher.grace) + MARGIN,
        "maxRestarts": cfg.launcher.max_requeues,
        "keepSeconds": kube.keep_seconds,
    }


def _left_open(cfg: CommandConfig, later: Later) -> str:
    """The text of a `config.yaml` without what a run that only the pods can read is to give it there."""
    data, root = yaml.safe_load(to_yaml(cfg)), root_of(cfg)
    del data["defaults"]
    for key in later.sections:
        section, (*above, last) = data, key.split(".")
        for part in above:
            section = section[part]
        del section[last]
    merge(data, later.given)
    return text_of(data, root.command, root.schema_name).replace("  - _self_\n", "  - rlx_inherited\n  - _self_\n", 1)


def _gib(size: float | None) -> str | None:
    if size is None:
        return None
    return f"{int(size)}Gi" if size == int(size) else f"{round(size * 1024)}Mi"


def manifests(name: str, values: Mapping[str, Any]) -> list[Object]:
    """The objects in the order in which they are created. `name`: of all of them (`object_name`)."""
    disk = values["persistence"]
    objects = []
    if disk["existingClaim"] is None:
        objects.append(_object("v1", "PersistentVolumeClaim", disk["claimName"] or name, name, spec=_claim(disk)))
    if values["config"]:
        objects.append(_object("v1", "ConfigMap", name, name, data={"config.yaml": values["config"]}))
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": _labels(name), "ports": [{"name": "agent", "port": PORT}]}
    objects.append(_object("v1", "Service", name, name, spec=service))
    objects.append(_object("batch/v1", "Job", name, name, spec=_job(name, values)))
    return objects


def _object(version: str, kind: str, name: str, instance: str, **content: Any) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "labels": _labels(instance)}, **content}


def _labels(instance: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "rlx", "app.kubernetes.io/instance": instance}


def _claim(disk: Mapping[str, Any]) -> Object:
    spec: Object = {"accessModes": [disk["accessMode"]], "resources": {"requests": {"storage": disk["size"]}}}
    return {**spec, "storageClassName": disk["storageClass"]} if disk["storageClass"] else spec


def _job(name: str, values: Mapping[str, Any]) -> Object:
    spec: Object = {
        "completionMode": "Indexed",
        "completions": values["nodes"],
        "parallelism": values["nodes"],
        "backoffLimit": values["maxRestarts"],
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": {"containerName": "rlx", "operator": "In", "values": list(NO_RETRY)}},
                {"action": "Ignore", "onExitCodes": {"containerName": "rlx", "operator": "In", "values": [LEFT]}},
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {"metadata": {"labels": _labels(name)}, "spec": _pod(name, values)},
    }
    return spec if values["keepSeconds"] is None else {**spec, "ttlSecondsAfterFinished": values["keepSeconds"]}


def _pod(name: str, values: Mapping[str, Any]) -> Object:
    disk = values["persistence"]
    volumes: list[Object] = [
        {"name": "runs", "persistentVolumeClaim": {"claimName": disk["existingClaim"] or disk["claimName"] or name}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": values["sharedMemory"]}},
    ]
    if values["config"]:
        volumes.append({"name": "config", "configMap": {"name": name}})
    spec: Object = {
        "restartPolicy": "Never",
        "subdomain": name,
        "terminationGracePeriodSeconds": values["grace"],
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": values["user"],
            "runAsGroup": values["user"],
            "fsGroup": values["user"],
            "fsGroupChangePolicy": "OnRootMismatch",
        },
        "containers": [_container(name, values)],
        "volumes": volumes,
    }
    chosen = {
        "imagePullSecrets": [{"name": each} for each in values["imagePullSecrets"]],
        "nodeSelector": values["nodeSelector"],
        "tolerations": values["tolerations"],
        "priorityClassName": values["priorityClassName"],
        "serviceAccountName": values["serviceAccountName"],
    }
    return spec | {key: value for key, value in chosen.items() if value}


def _container(name: str, values: Mapping[str, Any]) -> Object:
    mount = values["persistence"]["mountPath"]
    configured = ["--config-dir", CONFIG, "--config-name", "config"] if values["config"] else []
    mounts: list[Object] = [{"name": "runs", "mountPath": mount}, {"name": "shm", "mountPath": "/dev/shm"}]
    if values["config"]:
        mounts.append({"name": "config", "mountPath": CONFIG, "readOnly": True})
    place = ["--job", name, "--nodes", str(values["nodes"]), "--gpus", str(values["gpusPerNode"]), "--volume", mount]
    place += ["--start-timeout", str(values["startTimeout"])]
    return {
        "name": "rlx",
        "image": values["image"],
        "imagePullPolicy": values["imagePullPolicy"],
        "command": ["python", "-m", "rlx.cli", "pod"],
        "args": [*place, values["command"], *configured, *values["arguments"]],
        "workingDir": mount,
        "env": _environment(mount, values),
        "ports": [{"name": "agent", "containerPort": PORT}],
        "resources": _resources(values),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": mounts,
    }


def _environment(mount: str, values: Mapping[str, Any]) -> list[Object]:
    own: list[Object] = [
        {"name": "JOB_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['controller-uid']"}}},
        {"name": "HOME", "value": f"{mount}/.home"},
        {"name": "HF_HOME", "value": f"{mount}/.cache/huggingface"},
        {"name": "RLX_CACHE", "value": f"{mount}/.cache/rlx"},
    ]
    secret = [{"name": name, "valueFrom": {"secretKeyRef": dict(place)}} for name, place in values["secretEnv"].items()]
    return [*own, *secret, *({"name": name, "value": str(value)} for name, value in values["env"].items())]


def _resources(values: Mapping[str, Any]) -> Object:
    gpus = {values["gpuResource"]: str(values["gpusPerNode"])} if values["gpusPerNode"] else {}
    memory = {"memory": values["memory"]} if values["memory"] else {}
    cpus = {"cpu": str(values["cpus"])} if values["cpus"] else {}
    found = {"requests": {**cpus, **memory, **gpus}, "limits": {**memory, **gpus}}
    return {kind: each for kind, each in found.items() if each}
