"""The objects of a run on Kubernetes: names, rules, the chart, which makes the same ones, and what a stranger's image has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_templates import Chart

from rlx.cli import main
from rlx.cli.pods import objects_of, settled, text_of
from rlx.config.errors import ConfigError
from rlx.config.load import compose
from rlx.launch.manifests import manifests, object_name, values_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
ON = ("launcher=kubernetes", "kubernetes.image=registry/rlx:1", "run.name=mine")
LARGE = (
    *(*ON, "hardware=node8x2", "model=qwen3_8b", "env=math", "kubernetes.gpus_per_node=8", "kubernetes.memory_gb=256.5"),
    *("kubernetes.secrets.HF_TOKEN=tokens/hf", "kubernetes.env.NCCL_DEBUG=INFO", "kubernetes.cpus=32", "kubernetes.storage_gb=500"),
    *("kubernetes.storage_class=nfs", "kubernetes.node_selector={gpu: h100}", "kubernetes.keep_seconds=0"),
    *("kubernetes.tolerations=[{key: nvidia.com/gpu, operator: Exists}]", "kubernetes.image_pull_secrets=[login]"),
    *("kubernetes.priority_class=low", "kubernetes.service_account=runner"),
)
SMALL = (*ON, "hardware=cpu")
TEACHER = ("loss=opd", "teacher.base_url=[http://host:8000]")


def config(*overrides: str) -> Any:
    return settled(compose([*overrides], environ={}).cfg, "label")


def job_of(objects: list[dict[str, Any]]) -> dict[str, Any]:
    return next(each for each in objects if each["kind"] == "Job")["spec"]


@pytest.mark.parametrize(
    ("run", "name"),
    [
        ("mine", "mine"),
        ("a-1", "a-1"),
        ("reverse_text-tiny-grpo-1a2b3c", None),
        ("7-runs", None),
        ("x" * 80, None),
        ("Ünïcode", None),
        ("_", None),
    ],
)
def test_every_runs_name_becomes_one_of_its_own_that_kubernetes_takes(run: str, name: str | None):
    found = object_name(run)
    assert name is None or found == name
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", found)
    assert len(f"{found}-9999") <= 63, "a pod's host name is a DNS label"
    assert object_name(run) == found
    assert object_name(f"{run}.") != found


def test_a_host_of_the_layout_is_a_pod_with_its_gpus_and_a_name_that_the_others_find():
    objects = manifests("mine", values_of(config(*LARGE)))
    assert [each["kind"] for each in objects] == ["PersistentVolumeClaim", "ConfigMap", "Service", "Job"]
    spec = job_of(objects)
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    pod = spec["template"]["spec"]
    assert (pod["subdomain"], objects[2]["metadata"]["name"], objects[2]["spec"]["clusterIP"]) == ("mine", "mine", "None")
    assert objects[2]["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"memory": "262656Mi", "nvidia.com/gpu": "8"}
    assert {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "tokens", "key": "hf"}}} in container["env"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}} in pod["volumes"]
    saved = yaml.safe_load(objects[1]["data"]["config.yaml"])
    assert saved["run"] == {"name": "mine", "dir": "/runs/mine"}
    assert saved["launcher"]["name"] == "kubernetes"


def test_the_pod_composes_what_the_config_map_holds(tmp_path: Path):
    cfg = config(*LARGE)
    (tmp_path / "config.yaml").write_text(objects_of(cfg)[1]["data"]["config.yaml"])
    again = compose(["--config-dir", str(tmp_path), "--config-name", "config"], environ={}).cfg
    assert again == cfg


def test_a_whole_number_becomes_a_text_where_kubernetes_wants_one():
    numbers = (
        "kubernetes.env.A=16",
        "kubernetes.node_selector={x: 1}",
        "kubernetes.tolerations=[{key: x, value: 2, tolerationSeconds: 3}]",
    )
    cfg = config(*SMALL, *numbers, "kubernetes.env.B='true'", "kubernetes.storage_gb=1500000")
    claim, *_, job = manifests("mine", values_of(cfg))
    pod = job["spec"]["template"]["spec"]
    assert {"A": "16", "B": "true"}.items() <= {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}.items()
    assert (pod["nodeSelector"], pod["tolerations"]) == ({"x": "1"}, [{"key": "x", "value": "2", "tolerationSeconds": 3}])
    assert claim["spec"]["resources"]["requests"] == {"storage": "1500000Gi"}


def test_a_claim_that_a_small_run_creates_serves_every_later_run():
    (claim, *_) = manifests("mine", values_of(config(*SMALL, "kubernetes.storage_gb=1")))
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"], "what the chart's default is, too"
    (claim, *_) = manifests("mine", values_of(config(*SMALL, "kubernetes.storage_gb=1", "kubernetes.access_mode=ReadWriteOnce")))
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]


def test_a_failed_run_is_not_repeated_and_a_preempted_one_is():
    rules = job_of(manifests("mine", values_of(config(*SMALL))))["podFailurePolicy"]["rules"]
    by_code = {code: rule["action"] for rule in rules if "onExitCodes" in rule for code in rule["onExitCodes"]["values"]}
    assert by_code == {1: "FailJob", 2: "FailJob", 130: "FailJob", 75: "Ignore"}
    cfg = config(*SMALL, "launcher.preempt_grace=100", "launcher.grace=7")
    grace = job_of(manifests("mine", values_of(cfg)))["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > 107, "the kubelet must not kill a pod before the run has written its checkpoint"


@pytest.mark.parametrize("overrides", [SMALL, LARGE])
def test_the_chart_makes_the_same_objects(overrides):
    values = values_of(config(*overrides))
    rendered = Chart(ROOT / "charts" / "rlx").render("mine", values)
    for each in rendered:
        each["metadata"].pop("annotations", None)  # helm's own: `uninstall` keeps the claim
    ours = json.loads(json.dumps(manifests("mine", values)))
    (container,) = job_of(ours)["template"]["spec"]["containers"]
    if not container["resources"]:
        del container["resources"]
    assert rendered == ours


def test_the_charts_defaults_make_what_the_launcher_makes_of_the_same_values():
    chart = Chart(ROOT / "charts" / "rlx")
    values = chart.defaults | {"image": "registry/rlx:1", "arguments": ["loss=gspo", "env=[math,sums]"]}
    rendered = chart.render("mine", values)
    rendered[0]["metadata"].pop("annotations")
    ours = json.loads(json.dumps(manifests("mine", values)))
    del job_of(ours)["template"]["spec"]["containers"][0]["resources"]
    assert rendered == ours
    assert job_of(ours)["template"]["spec"]["containers"][0]["args"][-3:] == ["train", "loss=gspo", "env=[math,sums]"]
    assert set(values) == set(values_of(config(*SMALL))), "a value of one is a value of the other"
    with pytest.raises(ValueError, match="image: build one"):
        chart.render("mine", {})


def test_the_charts_grace_is_that_of_the_default_run():
    assert Chart(ROOT / "charts" / "rlx").defaults["grace"] == values_of(config(*SMALL))["grace"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("kubernetes.image=null",), "the pods have no image"),
        (("model.name=/home/me/model", "model=qwen3_8b", "env=math"), "model.name=/home/me/model (command line) is not on their volume"),
        (("run.dir=/home/me/mine",), "is not on their volume"),
        (("resume=outputs/other",), "is not on their volume"),
        (("hardware=node8", "kubernetes.gpus_per_node=4"), "no node can hold a pod of this layout"),
        (("kubernetes.secrets.HF_TOKEN=hf_abcdef",), "a secret is a variable and where its value is"),
        (("kubernetes.env.PYTHONPATH=/x",), "rlx sets this variable"),
        (("kubernetes.env.A=1", "kubernetes.secrets.A=a/b"), "a variable has two values"),
        (("inference.api_key=abc",), "set kubernetes.secrets.RLX_INFERENCE__API_KEY=SECRET/KEY"),
        (("teacher.api_key=abc", *TEACHER), "set kubernetes.secrets.RLX_TEACHER__API_KEY=SECRET/KEY"),
        (("kubernetes.env.HF_TOKEN=abc", "kubernetes.env.TOKENIZERS_PARALLELISM=no"), "Set kubernetes.secrets.HF_TOKEN=SECRET/KEY"),
        (("kubernetes.env.MY_API_KEY=abc", "kubernetes.secrets.MY_API_KEY=a/b"), "kubernetes.env.MY_API_KEY would be there for all"),
        (
            ("kubernetes.env.A=true",),
            "YAML does not read the value of A as text, so the pods would get other text: kubernetes.env.A=true (command line)",
        ),
        (("kubernetes.env={A: 1.10}",), "Quote it: A: '1.1' in a file"),
        (("kubernetes.env.A=null",), "does not read the value of A as text"),
        (("kubernetes.node_selector={example.com/x: true}",), "does not read the value of example.com/x as text"),
        (("kubernetes.tolerations=[{key: x, value: true}]",), "the value of a toleration is no text, which the cluster refuses"),
        (("kubernetes.tolerations=[x]",), "a toleration has keys: kubernetes.tolerations=[x]"),
        (("kubernetes.mount=runs",), "the volume needs a place of its own"),
        (("hardware=cpu_3nodes", "kubernetes.storage_gb=1", "kubernetes.access_mode=ReadWriteOnce"), "only one node could have the volume"),
        (("kubernetes.memory_gb=4",), "/dev/shm would take all memory"),
        (("hardware=auto",), "hardware=auto does not know the nodes of the cluster: kubernetes.gpus_per_node=null"),
    ],
)
def test_what_pods_cannot_do_is_refused_before_anything_is_created(overrides, words):
    with pytest.raises(ConfigError) as refused:
        compose([*SMALL, *overrides], environ={})
    assert words in str(refused.value)
    assert "abc" not in str(refused.value).replace("abcdef", "")


def test_a_path_on_the_volume_is_left_to_the_pods():
    cfg = config(*ON, "hardware=node8", "model=qwen3_8b", "model.name=/runs/models/mine", "env=math", "kubernetes.gpus_per_node=8")
    assert cfg.model.name == "/runs/models/mine"
    assert config(*ON, "kubernetes.gpus_per_node=4").hardware.name == "gpu4", "hardware=auto goes by the cluster's nodes"


@pytest.mark.usefixtures("known_environments")
def test_a_dry_run_prints_manifests_and_needs_neither_client_nor_cluster(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rlx.launch.kube.is_installed", lambda _: False)
    assert main(["train", *SMALL, "dry_run=true"]) == 0
    shown = capsys.readouterr().out
    printed = shown.partition("\nmanifests\n")[2].partition("\ndry run:")[0]
    assert [each["kind"] for each in yaml.safe_load_all(printed)] == ["ConfigMap", "Service", "Job"]
    assert list(tmp_path.iterdir()) == []
    assert main(["train", *SMALL]) == 2
    assert "pip install 'rlx[kubernetes]'" in capsys.readouterr().err
    assert main(["train", "-m", "seed=1,2", *SMALL]) == 2
    assert "launcher=kubernetes starts one run, not a sweep" in capsys.readouterr().err


def test_the_printed_text_is_what_the_cluster_gets():
    objects = objects_of(config(*LARGE))
    assert list(yaml.safe_load_all(text_of(objects))) == json.loads(json.dumps(objects))


def test_the_image_has_what_the_pods_rely_on():
    """The pods' command, user, and no more than the checkout needs."""
    text = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^FROM \S+:3\.1[123]\.\d+-slim-\w+(@sha256:[0-9a-f]{64})? AS build$", text, re.MULTILINE), "a pinned Python"
    assert f"USER {values_of(config(*SMALL))['user']}" in text
    assert "constraints.txt" in text
    for source in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        assert all((ROOT / each).exists() for each in source.split()), source
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", "outputs"} <= set(ignored)
