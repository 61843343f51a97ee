"""The chart for Kubernetes: the objects that its values make, and what a stranger's image has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from helm_templates import Chart

from rlx.config.load import compose
from rlx.launch.agents import PORT
from rlx.polling import LEFT

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
CHART = Chart(ROOT / "charts" / "rlx")
LARGE: dict[str, Any] = {
    "nodes": 2,
    "gpusPerNode": 8,
    "cpus": 32,
    "memory": "256Gi",
    "config": "seed: 1\n",
    "secretEnv": {"HF_TOKEN": {"name": "tokens", "key": "hf"}},
    "env": {"NCCL_DEBUG": "INFO", "NUMBER": 16},
    "nodeSelector": {"gpu": "h100"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "imagePullSecrets": ["login"],
    "priorityClassName": "low",
    "keepSeconds": 0,
    "persistence": {"storageClass": "nfs", "size": "500Gi"},
}


def rendered(**values: Any) -> dict[str, Any]:
    """The objects by kind."""
    return {each["kind"]: each for each in CHART.render("mine", {"image": "registry/rlx:1", **values})}


def container_of(objects: dict[str, Any]) -> dict[str, Any]:
    (container,) = objects["Job"]["spec"]["template"]["spec"]["containers"]
    return dict(container)


def test_a_host_of_the_layout_is_a_pod_with_its_gpus_and_a_name_that_the_others_find():
    objects = rendered(**LARGE)
    assert set(objects) == {"NetworkPolicy", "PersistentVolumeClaim", "ConfigMap", "Service", "Job"}
    spec, service = objects["Job"]["spec"], objects["Service"]
    pod, container = spec["template"]["spec"], container_of(objects)
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert (pod["subdomain"], service["metadata"]["name"], service["spec"]["clusterIP"]) == ("mine", "mine", "None")
    assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    assert [each["containerPort"] for each in container["ports"]] == [each["port"] for each in service["spec"]["ports"]] == [PORT]
    assert container["resources"]["limits"] == {"memory": "256Gi", "nvidia.com/gpu": "8"}
    assert container["resources"]["requests"] == {"cpu": "32", "memory": "256Gi", "nvidia.com/gpu": "8"}
    assert {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "tokens", "key": "hf"}}} in container["env"]
    assert {"name": "NUMBER", "value": "16"} in container["env"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}} in pod["volumes"]
    assert (pod["nodeSelector"], pod["tolerations"], pod["priorityClassName"]) == ({"gpu": "h100"}, LARGE["tolerations"], "low")
    assert spec["ttlSecondsAfterFinished"] == 0
    assert objects["ConfigMap"]["data"] == {"config.yaml": "seed: 1\n"}
    claim = objects["PersistentVolumeClaim"]["spec"]
    assert (claim["accessModes"], claim["storageClassName"]) == (["ReadWriteMany"], "nfs")


def test_without_values_a_pod_asks_for_nothing_and_composes_its_arguments():
    objects = rendered(arguments=["loss=gspo", "env=[math,sums]"], persistence={"existingClaim": "theirs"})
    assert set(objects) == {"NetworkPolicy", "Service", "Job"}
    container = container_of(objects)
    assert "resources" not in container
    assert container["args"][-3:] == ["train", "loss=gspo", "env=[math,sums]"]
    volumes = objects["Job"]["spec"]["template"]["spec"]["volumes"]
    assert {"name": "runs", "persistentVolumeClaim": {"claimName": "theirs"}} in volumes
    with pytest.raises(ValueError, match="image: build one"):
        CHART.render("mine", {})


def test_only_the_runs_own_pods_reach_its_pods():
    objects = rendered()
    policy, labels = objects["NetworkPolicy"]["spec"], objects["Job"]["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    assert policy["ingress"] == [{"from": [{"podSelector": policy["podSelector"]}]}]


def test_a_failed_run_is_not_repeated_and_a_preempted_one_is():
    rules = rendered()["Job"]["spec"]["podFailurePolicy"]["rules"]
    by_code = {code: rule["action"] for rule in rules if "onExitCodes" in rule for code in rule["onExitCodes"]["values"]}
    assert by_code == {1: "FailJob", 2: "FailJob", 130: "FailJob", LEFT: "Ignore"}


def test_a_pod_that_is_taken_away_lives_until_the_default_run_has_written_its_checkpoint():
    launcher = compose(["hardware=cpu"], {}).cfg.launcher
    assert rendered()["Job"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > launcher.preempt_grace + launcher.grace


def test_the_image_has_what_the_pods_rely_on():
    """The pods' command, user, and no more than the checkout needs."""
    text = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^FROM \S+:3\.1[123]\.\d+-slim-\w+(@sha256:[0-9a-f]{64})? AS build$", text, re.MULTILINE), "a pinned Python"
    assert f"USER {CHART.defaults['user']}" in text
    assert "constraints.txt" in text
    for source in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        assert all((ROOT / each).exists() for each in source.split()), source
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", "outputs"} <= set(ignored)
