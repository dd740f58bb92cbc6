"""scripts/cluster/jobset.yaml: what it makes of the environment, and when it starts again.

tests/slurm runs the other templates.
"""

import re

import pytest
import yaml
from experimenting import ROOT

from jaxtrain import ExitCode
from jaxtrain.launch.evidence import decide

(JOBSET,) = yaml.safe_load_all((ROOT / "scripts" / "cluster" / "jobset.yaml").read_text())
(REPLICATED,) = JOBSET["spec"]["replicatedJobs"]
JOB = REPLICATED["template"]["spec"]
(CONTAINER,) = JOB["template"]["spec"]["containers"]


def environment_of(index):
    """Variables of a pod, as Kubernetes and the JobSet controller document them."""
    labels = {
        "jobset.sigs.k8s.io/jobset-name": JOBSET["metadata"]["name"],
        "jobset.sigs.k8s.io/replicatedjob-name": REPLICATED["name"],
        "jobset.sigs.k8s.io/replicatedjob-replicas": str(REPLICATED["replicas"]),
        "jobset.sigs.k8s.io/job-index": "0",
    }
    environ = {"JOB_COMPLETION_INDEX": str(index)}
    for variable in CONTAINER["env"]:
        if "value" in variable:
            environ[variable["name"]] = variable["value"]
            continue
        path = variable["valueFrom"]["fieldRef"]["fieldPath"]
        (label,) = re.fullmatch(r"metadata\.labels\['(.+)'\]", path).groups()
        environ[variable["name"]] = labels[label]
    assert all(isinstance(value, str) for value in environ.values())
    return environ


def test_the_pods_of_the_jobset_are_the_processes_of_a_run():
    assert JOBSET["kind"] == "JobSet"
    assert JOB["completionMode"] == "Indexed"
    assert JOB["parallelism"] == JOB["completions"] == 2
    decisions = [decide(environment_of(index)) for index in range(JOB["completions"])]
    assert [decision.process_id for decision in decisions] == [0, 1]
    for decision in decisions:
        assert decision.launcher == "kubernetes"
        assert decision.num_processes == JOB["completions"]
        # <jobset>-<replicatedJob>-<job index>-<pod index>.<subdomain>, the subdomain is the jobset.
        assert decision.coordinator == "lm-workers-0-0.lm:8476"


def job_fails_for_good(code=None, *, is_evicted=False):
    """What podFailurePolicy and failurePolicy make of a failed pod, by their documentation."""
    reason = "BackoffLimitExceeded"
    for rule in JOB["podFailurePolicy"]["rules"]:
        if "onPodConditions" in rule and is_evicted:
            assert rule["action"] == "Count"
            break
        exits = rule.get("onExitCodes")
        if exits is not None and code is not None and code not in exits["values"]:
            assert (exits["operator"], rule["action"]) == ("NotIn", "FailJob")
            assert exits["containerName"] == CONTAINER["name"]
            reason = "PodFailurePolicy"
            break
    assert JOB["backoffLimit"] == 0
    (rule,) = JOBSET["spec"]["failurePolicy"]["rules"]
    assert rule["action"] == "FailJobSet"
    return reason in rule["onJobFailureReasons"]


@pytest.mark.parametrize("code", [*filter(None, ExitCode), 137])
def test_only_codes_after_which_the_same_command_helps_start_it_again(code):
    helps = code in (ExitCode.PREEMPTED, ExitCode.PEER_LOST, ExitCode.STALLED)
    assert job_fails_for_good(code) == (not helps)
    assert JOBSET["spec"]["failurePolicy"]["maxRestarts"] > 0


def test_an_evicted_pod_starts_it_again():
    assert not job_fails_for_good(137, is_evicted=True)
