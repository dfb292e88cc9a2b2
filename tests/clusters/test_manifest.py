"""The JobSet manifest is what Kubernetes and JobSet know, and its pods are a job of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lazygt.runtime.cluster.environment import Job

yaml = pytest.importorskip("yaml", reason="needs PyYAML: pip install lazygt[manifests]")

ROOT = Path(__file__).parents[2]
MANIFEST = ROOT / "examples" / "clusters" / "jobset.yaml"
KUBERNETES = "1.31"


def documents() -> dict[str, dict[str, Any]]:
    """The manifest's documents by their kind."""
    return {each["kind"]: each for each in yaml.safe_load_all(MANIFEST.read_text())}


def pod_of(jobset: dict[str, Any]) -> dict[str, Any]:
    (replicated,) = jobset["spec"]["replicatedJobs"]
    pod: dict[str, Any] = replicated["template"]["spec"]["template"]
    return pod


def without_nothing(value: Any) -> Any:
    """A document without fields that say nothing."""
    if isinstance(value, dict):
        kept = {name: without_nothing(part) for name, part in value.items()}
        return {name: part for name, part in kept.items() if part not in (None, {}, [])}
    return [without_nothing(part) for part in value] if isinstance(value, list) else value


def test_jobset_knows_every_field() -> None:
    """Its own model of the API drops what it does not know."""
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="pip install lazygt[manifests]"
    )
    jobset = documents()["JobSet"]
    read = models.JobsetV1alpha2JobSet.from_dict(jobset).to_dict()
    assert without_nothing(read) == without_nothing(jobset)
    wrong = {**jobset, "spec": {**jobset["spec"], "replicatedJob": []}}
    assert "replicatedJob" not in models.JobsetV1alpha2JobSet.from_dict(wrong).to_dict()["spec"]


def test_kubernetes_knows_every_field() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install lazygt[manifests]")
    parts = documents()
    validate.validate(parts["NetworkPolicy"], KUBERNETES, strict=True)
    (replicated,) = parts["JobSet"]["spec"]["replicatedJobs"]
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "train"},
        "spec": replicated["template"]["spec"],
    }
    validate.validate(job, KUBERNETES, strict=True)
    job["spec"] = {**job["spec"], "completionModus": "Indexed"}
    with pytest.raises(validate.ValidationError):
        validate.validate(job, KUBERNETES, strict=True)


def test_pods_of_manifest_form_one_job() -> None:
    jobset = documents()["JobSet"]
    name = jobset["metadata"]["name"]
    (replicated,) = jobset["spec"]["replicatedJobs"]
    spec = replicated["template"]["spec"]
    (container,) = pod_of(jobset)["spec"]["containers"]
    given = {each["name"]: each.get("value", "") for each in container["env"]}
    assert int(given["WORLD_SIZE"]) == spec["parallelism"] == spec["completions"]
    domain = jobset["spec"]["network"]["subdomain"]
    assert given["MASTER_ADDR"] == f"{name}-{replicated['name']}-0-0.{domain}"
    job = Job.from_environment({**given, "RANK": "3"})
    assert job is not None
    assert (job.rank, job.world_size, job.local_world_size, job.hosts) == (3, 4, 1, 4)
    assert job.leads_host


def test_network_policy_admits_only_pods_of_job() -> None:
    parts = documents()
    labels = pod_of(parts["JobSet"])["metadata"]["labels"]
    policy = parts["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == labels
    assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": labels}}]}]
