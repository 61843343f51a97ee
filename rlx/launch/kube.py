"""Talks to a Kubernetes cluster through its official Python client: creates a run's objects, follows its Job, deletes them.

The client is an optional package; every function raises ConfigError with a remedy where it is missing, and where the cluster refuses.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rlx.config.errors import ConfigError
from rlx.config.schema_launch import KubernetesConfig
from rlx.config.signatures import is_installed
from rlx.launch.manifests import Object

ASK = 3.0  # seconds between two looks at a Job
PATIENCE = 300.0  # seconds that a cluster which has answered may fail to, while a Job is followed: an API server is upgraded or moved
ANSWER = (10.0, 60.0)  # seconds to connect, and without a byte; then the log is opened again
LAST = 10.0  # seconds to print the end of the output of a Job that has ended
MANAGED = "app.kubernetes.io/name=rlx"
LEAST = ("Scheduled", "Pulling", "Pulled", "Created", "Started", "SuccessfulCreate", "Completed")  # events of a pod that gets on
DELETE = {"propagationPolicy": "Foreground"}

T = TypeVar("T")


@dataclass
class Cluster:
    """A namespace of a cluster, and the client's interfaces to it."""

    namespace: str
    core: Any
    batch: Any

    @classmethod
    def of(cls, kube: KubernetesConfig) -> Cluster:
        """The cluster of the kubeconfig or, inside a pod, its own. Raises ConfigError if there is none, or no client."""
        require_client()
        from kubernetes import client, config
        from kubernetes.config.config_exception import ConfigException

        try:
            config.load_kube_config(context=kube.context)
            default = _namespace_of(kube.context)
        except ConfigException as error:
            try:
                config.load_incluster_config()
                with open("/var/run/secrets/kubernetes.io/serviceaccount/namespace") as file:
                    default = file.read().strip()
            except (ConfigException, OSError):
                wanted = (
                    f"kubernetes.context={kube.context} must be a context of your kubeconfig: kubectl config get-contexts"
                    if kube.context
                    else "get a kubeconfig from whoever runs the cluster (of a cloud: its command, such as aws eks update-kubeconfig or "
                    "gcloud container clusters get-credentials), and put it at ~/.kube/config or name it with KUBECONFIG"
                )
                raise ConfigError(f"no Kubernetes cluster: {str(error).rstrip('.')}.\n  fix: {wanted}") from error
        return cls(kube.namespace or default, client.CoreV1Api(), client.BatchV1Api())


def _namespace_of(context: str | None) -> str:
    """The namespace of a context of the kubeconfig; None: of its current one. A file in which one is named need not have that."""
    from kubernetes.config.kube_config import KUBE_CONFIG_DEFAULT_LOCATION, KubeConfigLoader, KubeConfigMerger

    loader = KubeConfigLoader(KubeConfigMerger(KUBE_CONFIG_DEFAULT_LOCATION).config, active_context=context)
    return str(loader.current_context["context"].get("namespace", "default"))


def require_client() -> None:
    """Raise ConfigError if the client is not installed."""
    if not is_installed("kubernetes"):
        raise ConfigError("launcher=kubernetes needs the package kubernetes.\n  fix: pip install 'rlx[kubernetes]', or dry_run=true")


@contextlib.contextmanager
def explained(doing: str) -> Iterator[None]:
    """Turn an error of the cluster into a ConfigError with its message and a remedy."""
    from kubernetes.client.exceptions import ApiException

    try:
        yield
    except ApiException as error:
        remedy = {
            401: "log in again (the kubeconfig's token has expired)",
            403: "ask for these rights in the namespace: create, get, list, delete of jobs, services, configmaps; get, list of pods, "
            "pods/log, events; with kubernetes.storage_gb also create of persistentvolumeclaims",
            404: "correct kubernetes.namespace, or the name",
            422: "correct the kubernetes section: the cluster refuses the manifest (dry_run=true shows it)",
        }.get(error.status, "see the message of the cluster")
        raise ConfigError(f"{doing}: {error.status} {message_of(error)}.\n  fix: {remedy}") from error
    except Exception as error:  # of the client's HTTP library
        if not isinstance(error, OSError) and not type(error).__module__.startswith("urllib3"):
            raise
        raise ConfigError(
            f"{doing}: the cluster cannot be reached: {error}.\n  fix: kubectl cluster-info shows where it should be"
        ) from error


def is_passing(error: BaseException) -> bool:
    """Whether a question may be answered if it is asked again: the connection failed, or the API server is busy or restarting."""
    from kubernetes.client.exceptions import ApiException

    if isinstance(error, ApiException):
        return error.status == 429 or (error.status or 500) >= 500
    return isinstance(error, OSError) or type(error).__module__.startswith("urllib3")


def message_of(error: Any) -> str:
    """The message in the answer of a refused request."""
    import json

    try:
        return str(json.loads(error.body)["message"]).rstrip(".")
    except (TypeError, ValueError, KeyError):
        return str(error.reason)


def apply(cluster: Cluster, objects: Sequence[Object]) -> str:
    """Create a run's objects and return the uid of its Job. A claim that exists is used as it is.

    The Job owns the Service and the ConfigMap, so they go with it. Raises ConfigError if one cannot be created; what was created for the
    run is then deleted, except a claim.
    """
    from kubernetes.client.exceptions import ApiException

    job = next(each for each in objects if each["kind"] == "Job")
    name, space = job["metadata"]["name"], cluster.namespace
    for claim in (each for each in objects if each["kind"] == "PersistentVolumeClaim"):
        with explained(f"the claim {claim['metadata']['name']}"):
            try:
                cluster.core.create_namespaced_persistent_volume_claim(space, claim)
            except ApiException as error:
                if error.status != 409:
                    raise
    with explained(f"the Job {name}"):
        try:
            made = cluster.batch.create_namespaced_job(space, job)
        except ApiException as error:
            if error.status != 409:
                raise
            raise ConfigError(
                f"there is a Job {name} in {space} already.\n  fix: rlx pods delete {name}, or give another run.name="
            ) from error
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": made.metadata.uid}
    create = {"Service": cluster.core.create_namespaced_service, "ConfigMap": cluster.core.create_namespaced_config_map}
    try:
        for each in (each for each in objects if each["kind"] in create):
            with explained(f"the {each['kind']} {name}"):
                create[each["kind"]](space, {**each, "metadata": {**each["metadata"], "ownerReferences": [owner]}})
    except ConfigError:
        delete(cluster, name)
        raise
    return str(made.metadata.uid)


def delete(cluster: Cluster, name: str) -> None:
    """Delete a run's Job, and with it its pods, Service and ConfigMap. The pods get their grace time for a checkpoint."""
    with explained(f"the Job {name}"):
        cluster.batch.delete_namespaced_job(name, cluster.namespace, body=DELETE)


def jobs(cluster: Cluster) -> list[tuple[str, str, str]]:
    """Name, state and age of every run's Job in the namespace."""
    with explained("the Jobs"):
        found = cluster.batch.list_namespaced_job(cluster.namespace, label_selector=MANAGED).items
    return [(each.metadata.name, _state(each), str(each.metadata.creation_timestamp or "-")) for each in found]


def _state(job: Any) -> str:
    for condition in job.status.conditions or ():
        if condition.status == "True" and condition.type in ("Complete", "Failed"):
            return "completed" if condition.type == "Complete" else f"failed ({condition.reason})"
    return f"{job.status.active or 0} of {job.spec.completions} pods active"


# following


@dataclass
class Follower:
    """Says what happens to a Job, and prints the output of its first host."""

    cluster: Cluster
    name: str
    say: Callable[[str], None]
    answered: bool = False  # whether the cluster has answered before; then failures to answer are waited out
    told: dict[str, str] = field(default_factory=dict)  # the last line about each pod
    readers: dict[str, threading.Thread] = field(default_factory=dict)  # by pod: what prints its output
    ended: set[str] = field(default_factory=set)  # pods whose output is complete
    over: threading.Event = field(default_factory=threading.Event)  # the Job has ended

    def run(self) -> int:
        """Wait for the Job's end and return the run's exit code. Raises ConfigError if the Job is gone or may not be read."""
        while True:
            with explained(f"the Job {self.name}"):
                job, pods = self._patiently(self._look)
            if (state := _state(job)) == "completed" or state.startswith("failed"):
                self.over.set()
                deadline = time.monotonic() + LAST
                for reader in self.readers.values():
                    reader.join(max(0.0, deadline - time.monotonic()))
                self.say(f"Job {self.name}: {state}" + "".join(f": {c.message}" for c in job.status.conditions or () if c.type == "Failed"))
                return 0 if state == "completed" else self._exit_code(pods)
            time.sleep(ASK)

    def _look(self) -> tuple[Any, list[Any]]:
        job = self.cluster.batch.read_namespaced_job(self.name, self.cluster.namespace, _request_timeout=ANSWER)
        pods = self._pods()
        for pod in pods:
            self._tell(pod)
        return job, pods

    def _patiently(self, look: Callable[[], T]) -> T:
        """Ask until there is an answer. Raises an error that would come again at once, and others after `PATIENCE`."""
        since: float | None = None
        while True:
            try:
                found = look()
            except Exception as error:
                if not is_passing(error) or not self.answered or (since is not None and time.monotonic() - since > PATIENCE):
                    raise
                if since is None:
                    since = time.monotonic()
                    self.say(f"the cluster does not answer ({_short(error)}); the run goes on, and it is asked again for {PATIENCE:g} s")
                time.sleep(ASK)
            else:
                if since is not None:
                    self.say("the cluster answers again")
                self.answered = True
                return found

    def _pods(self) -> list[Any]:
        label = f"job-name={self.name}"
        found = self.cluster.core.list_namespaced_pod(self.cluster.namespace, label_selector=label, _request_timeout=ANSWER).items
        return sorted(found, key=lambda pod: (_index(pod), str(pod.metadata.creation_timestamp)))

    def _tell(self, pod: Any) -> None:
        name, phase, why = pod.metadata.name, pod.status.phase, self.why(pod)
        line = f"host {_index(pod)} ({name}): {phase.lower()}" + (f" on {pod.spec.node_name}" if pod.spec.node_name and not why else "")
        line += f": {why}" if why else ""
        if self.told.get(name) != line:
            self.told[name] = line
            self.say(line)
        if phase not in ("Pending", "Running"):
            self.ended.add(name)
        if _index(pod) == 0 and phase != "Pending" and name not in self.readers:
            self.readers[name] = threading.Thread(target=self._print_log, args=(name,), daemon=True)
            self.readers[name].start()

    def why(self, pod: Any) -> str:
        """Why a pod waits or has failed: its container's state, its scheduling, or the newest warning about it."""
        for status in pod.status.container_statuses or ():
            if (waiting := status.state.waiting) is not None and waiting.reason not in (None, "ContainerCreating", "PodInitializing"):
                return f"{waiting.reason}: {waiting.message}" if waiting.message else waiting.reason
            if (ended := status.state.terminated) is not None and ended.exit_code:
                return f"exit code {ended.exit_code}" + (f" ({ended.reason})" if ended.reason not in (None, "Error") else "")
        for condition in pod.status.conditions or ():
            if condition.type == "PodScheduled" and condition.status == "False":
                return f"{condition.reason}: {condition.message}"
        if pod.status.phase != "Pending":
            return ""
        about = f"involvedObject.name={pod.metadata.name}"
        events = self.cluster.core.list_namespaced_event(self.cluster.namespace, field_selector=about, _request_timeout=ANSWER)
        warnings = [each for each in events.items if each.type == "Warning" and each.reason not in LEAST]
        return f"{warnings[-1].reason}: {warnings[-1].message}" if warnings else ""

    def _print_log(self, pod: str) -> None:
        """Print a pod's output until it has ended. A log that drops is opened again where it was, by the times of its lines."""
        last, heard = "", None
        while True:
            is_last = pod in self.ended or self.over.is_set()
            since: dict[str, Any] = {} if heard is None else {"since_seconds": int(time.monotonic() - heard) + 10}
            try:
                for line in self._log(pod, follow=not is_last, **since):
                    if not line.endswith(b"\n") and not is_last:
                        break  # cut off: the next reading has all of it
                    stamp, _, text = line.decode(errors="replace").rstrip("\n").partition(" ")
                    if (at := _sortable(stamp)) > last:
                        last, heard = at, time.monotonic()
                        self.say(text)
            except Exception as error:
                if not is_passing(error):  # the pod is gone, or nobody may read it; the Job's state is what counts
                    self.say(f"the output of {pod} cannot be read: {_short(error)}")
                    return
                is_last = False
            if is_last:
                return
            self.over.wait(ASK)

    def _log(self, pod: str, **how: Any) -> Any:
        return self.cluster.core.read_namespaced_pod_log(
            pod, self.cluster.namespace, timestamps=True, _preload_content=False, _request_timeout=ANSWER, **how
        )

    def _exit_code(self, pods: Sequence[Any]) -> int:
        codes = [
            status.state.terminated.exit_code
            for pod in pods
            if _index(pod) == 0
            for status in pod.status.container_statuses or ()
            if status.state.terminated is not None
        ]
        return next((code for code in reversed(codes) if code), 1)


def _index(pod: Any) -> int:
    marks = {**(pod.metadata.annotations or {}), **(pod.metadata.labels or {})}
    return int(marks.get("batch.kubernetes.io/job-completion-index", 0))


def _sortable(stamp: str) -> str:
    """A time of the log, `2026-01-01T00:00:00.5Z`, with all nine digits of its fraction, so that times sort as texts."""
    whole, _, fraction = stamp.rstrip("Z").partition(".")
    return f"{whole}.{fraction:0<9}"


def _short(error: Exception) -> str:
    status = getattr(error, "status", None)
    return f"{status} {message_of(error)}" if status else (str(error).splitlines() or [type(error).__name__])[0][:200]
