"""Runs on Kubernetes through the real client, against a stand-in for the API server: created, followed, refused, deleted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("kubernetes")

from kube_stand_in import Cluster, container, pod, problems
from test_kubernetes_chart import LARGE, SMALL, config

from rlx.cli import main
from rlx.launch import kube
from rlx.launch.manifests import manifests, values_of

FAILED = {"type": "Failed", "status": "True", "reason": "PodFailurePolicy", "message": "Container rlx failed with exit code 1"}
DONE = {"type": "Complete", "status": "True"}
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("known_environments")]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    stand_in = Cluster()
    names = {"cluster": "stand-in", "user": "me", "namespace": "research"}
    kubeconfig = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "stand-in", "cluster": {"server": stand_in.url}}],
        "users": [{"name": "me", "user": {"token": "t"}}],
        "contexts": [{"name": "here", "context": names}],
        "current-context": "here",
    }
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(kubeconfig))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kubeconfig"))
    monkeypatch.setattr(kube, "ASK", 0.05)
    monkeypatch.setattr("rlx.cli.start.check_nodes", lambda *_: None)  # imports torch
    monkeypatch.chdir(tmp_path)
    yield stand_in
    stand_in.close()


def names(cluster: Cluster, method: str) -> list[str]:
    return [place for done, place, _ in cluster.calls if done == method]


@pytest.mark.parametrize("overrides", [SMALL, LARGE])
def test_every_object_is_one_that_kubernetes_knows(overrides):
    kinds = {"Job": "V1Job", "Service": "V1Service", "ConfigMap": "V1ConfigMap", "PersistentVolumeClaim": "V1PersistentVolumeClaim"}
    for each in manifests("mine", values_of(config(*overrides))):
        assert problems(each, kinds[each["kind"]]) == []
    (job,) = [each for each in manifests("mine", values_of(config(*overrides))) if each["kind"] == "Job"]
    job["spec"]["template"]["spec"]["containers"][0]["image_pull_policy"] = "Always"
    assert problems(job, "V1Job") == ['.spec.template.spec.containers[0]: unknown field "image_pull_policy"'], "the stand-in is strict"


def test_a_run_is_created_with_what_goes_with_its_job(cluster, capsys):
    assert main(["train", *SMALL, "kubernetes.storage_gb=10"]) == 0
    assert names(cluster, "POST") == ["persistentvolumeclaims/", "jobs/", "configmaps/", "services/"]
    bodies = {place: body for method, place, body in cluster.calls if method == "POST"}
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "mine", "uid": "uid-of-mine"}
    assert [bodies[kind]["metadata"].get("ownerReferences") for kind in ("services/", "configmaps/", "persistentvolumeclaims/")] == [
        *([owner], [owner], None)
    ]
    shown = capsys.readouterr().out
    assert "Job mine in research: /runs/mine on the claim rlx" in shown
    assert "rlx pods delete mine --namespace research" in shown
    assert not Path("outputs").exists()


def test_a_claim_that_exists_is_used_and_a_job_that_exists_is_refused(cluster, capsys):
    assert main(["train", *SMALL, "kubernetes.storage_gb=10"]) == 0
    capsys.readouterr()
    assert main(["train", *SMALL, "kubernetes.storage_gb=10"]) == 2
    assert "there is a Job mine in research already.\n  fix: rlx pods delete mine, or give another run.name=" in capsys.readouterr().err
    assert main(["train", *SMALL, "kubernetes.storage_gb=10", "run.name=other"]) == 0


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        ({("POST", "jobs"): (403, "jobs.batch is forbidden")}, "the Job mine: 403 jobs.batch is forbidden.\n  fix: ask for these rights"),
        ({("POST", "jobs"): (422, "exceeded quota: gpus")}, "exceeded quota: gpus"),
        ({("POST", "configmaps"): (403, "configmaps is forbidden")}, "the ConfigMap mine: 403"),
        ({("POST", "jobs"): (401, "Unauthorized")}, "log in again"),
    ],
)
def test_what_the_cluster_refuses_is_said_with_its_message_and_nothing_is_left(cluster, capsys, refused, words):
    cluster.refuse = refused
    assert main(["train", *SMALL]) == 2
    assert words in capsys.readouterr().err
    assert [kind for kind, _ in cluster.objects if kind == "jobs"] == []


def test_the_rights_that_a_claim_needs_are_named(cluster, capsys):
    cluster.refuse = {("POST", "persistentvolumeclaims"): (403, "forbidden")}
    assert main(["train", *SMALL, "kubernetes.storage_gb=10"]) == 2
    said = capsys.readouterr().err
    assert "the claim rlx: 403 forbidden" in said
    assert "create of persistentvolumeclaims" in said


def test_a_cluster_that_does_not_answer_and_one_that_is_not_configured_are_told_apart(cluster, capsys, tmp_path, monkeypatch):
    cluster.close()
    monkeypatch.setattr("urllib3.util.retry.Retry.DEFAULT", 0)
    assert main(["pods", "delete", "mine"]) == 2
    assert "the cluster cannot be reached" in capsys.readouterr().err
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "absent"))
    assert main(["pods"]) == 2
    said = capsys.readouterr().err
    assert "no Kubernetes cluster" in said
    assert "get a kubeconfig from whoever runs the cluster" in said
    assert "KUBECONFIG" in said
    assert "Nothing was started" not in said, "a list starts nothing"


def test_a_kubeconfig_without_a_current_context_serves_one_that_is_named(cluster, tmp_path, capsys):
    file = tmp_path / "kubeconfig"
    content = yaml.safe_load(file.read_text())
    del content["current-context"]
    file.write_text(yaml.safe_dump(content))
    assert main(["train", *SMALL, "kubernetes.context=here"]) == 0
    assert "Job mine in research" in capsys.readouterr().out
    assert main(["pods"]) == 2
    assert "current-context" in capsys.readouterr().err


def conditions(cluster: Cluster, *found: dict[str, Any]) -> None:
    cluster.objects["jobs", "mine"]["status"] = {"conditions": [*found]}


def life(*stages: tuple[list[dict[str, Any]], list[dict[str, Any]]]) -> list[Any]:
    """One call for each stage: the pods and the Job's conditions."""

    def at(pods: list[dict[str, Any]], found: list[dict[str, Any]]) -> Any:
        def become(cluster: Cluster) -> None:
            cluster.pods = pods
            conditions(cluster, *found)

        return become

    return [at(*stage) for stage in stages]


def test_a_job_is_followed_from_the_queue_to_its_end_with_the_reasons_why_it_waits(cluster, capsys):
    unschedulable = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/4 nodes: 4 Insufficient nvidia.com/gpu",
    }
    pull = {"reason": "ImagePullBackOff", "message": "Back-off pulling image registry/rlx:1"}
    cluster.log = "[0:07] step 1/3   reward 0.250\nmine: completed after 3 of 3 steps, 0:21\n"
    cluster.stages = life(
        ([pod(0, "Pending", conditions=[unschedulable])], []),
        ([pod(0, "Pending", conditions=[unschedulable])], []),
        ([pod(0, "Pending", containerStatuses=container(waiting=pull))], []),
        ([pod(0, "Running", containerStatuses=container(running={}))], []),
        ([pod(0, "Succeeded", containerStatuses=container(terminated={"exitCode": 0}))], [DONE]),
    )
    assert main(["train", *SMALL, "launcher.wait=true"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("Unschedulable: 0/4 nodes: 4 Insufficient nvidia.com/gpu") == 1, "once, and not at every look"
    assert "host 0 (mine-0-abcde): pending: ImagePullBackOff: Back-off pulling image registry/rlx:1" in shown
    assert "running on node0" in shown
    assert shown.count("step 1/3   reward 0.250") == 1
    assert shown.rstrip().endswith("Job mine: completed")


def test_a_failed_run_ends_with_its_exit_code_and_the_clusters_reason(cluster, capsys):
    ended = container(terminated={"exitCode": 130, "reason": "Error"})
    cluster.stages = life(([pod(0, "Failed", containerStatuses=ended)], [FAILED]))
    assert main(["train", *SMALL, "launcher.wait=true"]) == 130
    assert "Job mine: failed (PodFailurePolicy): Container rlx failed with exit code 1" in capsys.readouterr().out


def test_a_cluster_that_stops_answering_for_a_while_does_not_end_the_following_of_a_run(cluster, capsys):
    running = [pod(0, "Running", containerStatuses=container(running={}))]
    ended = [pod(0, "Succeeded", containerStatuses=container(terminated={"exitCode": 0}))]
    cluster.log, cluster.busy, cluster.drops = "step 1\nstep 2\nstep 3\n", [503, 429, 500], 1
    cluster.stages = life((running, []), (running, []), (ended, [DONE]))
    assert main(["train", *SMALL, "launcher.wait=true"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("the cluster does not answer (503 the server is starting); the run goes on") == 1
    assert "the cluster answers again" in shown
    assert [line for line in shown.splitlines() if line.startswith("step")] == ["step 1", "step 2", "step 3"], "each once, and in order"
    again = [asked for _, place, asked in cluster.calls if place == "pods/mine-0-abcde" and "sinceSeconds" in asked]
    assert again, "a log that drops is opened again, but not read from its beginning"


def test_a_run_that_cannot_be_followed_is_not_said_to_be_none(cluster, capsys, monkeypatch):
    monkeypatch.setattr(kube, "PATIENCE", 0.0)
    cluster.busy = [503] * 100
    assert main(["train", *SMALL, "launcher.wait=true"]) == 1
    said = capsys.readouterr().err
    assert "the Job mine: 503 the server is starting" in said
    assert "The Job mine was started, but cannot be followed: rlx pods follow mine --namespace research" in said
    assert main(["pods", "follow", "mine"]) == 2
    assert "Nothing was started" not in said + capsys.readouterr().err


def test_a_warning_about_a_pod_is_shown_while_it_waits(cluster, capsys):
    lost = {
        "type": "Warning",
        "reason": "FailedMount",
        "message": 'persistentvolumeclaim "rlx" not found',
        "metadata": {},
        "involvedObject": {},
    }
    cluster.events = [lost]
    done = [pod(0, "Succeeded", containerStatuses=container(terminated={"exitCode": 0}))]
    cluster.stages = life(([pod(0, "Pending")], []), (done, [DONE]))
    assert main(["train", *SMALL, "launcher.wait=true"]) == 0
    assert 'pending: FailedMount: persistentvolumeclaim "rlx" not found' in capsys.readouterr().out
    asked = [body for method, place, body in cluster.calls if place == "events/"]
    assert asked[0]["fieldSelector"] == "involvedObject.name=mine-0-abcde"


def test_ctrl_c_leaves_the_job_and_a_command_deletes_it(cluster, capsys, monkeypatch):
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    cluster.stages = life(([pod(0, "Pending")], []))
    monkeypatch.setattr(kube.time, "sleep", interrupt)
    assert main(["train", *SMALL, "launcher.wait=true"]) == 130
    assert "the Job mine continues; stop it with: rlx pods delete mine --namespace research" in capsys.readouterr().err
    assert main(["pods"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["mine", "0"]
    assert main(["pods", "delete", "mine"]) == 0
    assert names(cluster, "DELETE") == ["jobs/mine"]
    assert cluster.calls[-1][2] == {"propagationPolicy": "Foreground"}, "the pods keep their grace time"
    assert main(["pods", "follow", "mine"]) == 2
    assert "404" in capsys.readouterr().err
    assert main(["pods", "remove"]) == 2


def test_no_secret_is_sent(cluster, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_precious")
    monkeypatch.setenv("WANDB_API_KEY", "precious")
    assert main(["train", *SMALL, "kubernetes.secrets.HF_TOKEN=tokens/hf"]) == 0
    bodies = {place: body for method, place, body in cluster.calls if method == "POST"}
    assert "precious" not in str(bodies)
    (container,) = bodies["jobs/"]["spec"]["template"]["spec"]["containers"]
    assert {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "tokens", "key": "hf"}}} in container["env"]
