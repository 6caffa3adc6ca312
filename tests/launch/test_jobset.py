"""jobset.sh: the JobSet that it writes, against JobSet's own schema, and a stand-in of kubectl."""

import json

import jsonschema
import pytest
import yaml
from launch_cases import TRAINING
from places import SUPPORT

RUN = ["run", "--name=my-run", "--topology=v5p:4x4x4", "--image=us-docker.pkg.dev/p/i/s:1"]
BUCKET = ["--bucket=mine"]
POD_NAME = 63  # characters of a name in Kubernetes


@pytest.fixture
def cluster(stage):
    stage.tool("kubectl", 'case $* in *apply*) cat >"$STAGE/applied" ;; esac')
    return stage


def closed(schema):
    """The schema, with no other fields than those that it lists."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items()}
    if isinstance(made.get("properties"), dict) and made.get("type") == "object":
        made.setdefault("additionalProperties", False)
    return made


def jobset(stage, *arguments, training=TRAINING):
    """The JobSet of a dry run, checked against the schema that a cluster checks it against."""
    done = stage.run("jobset.sh", *RUN, *arguments, "--dry-run", *training)
    assert done.returncode == 0, done.stderr
    made = yaml.safe_load(done.stdout)
    schema = closed(json.loads((SUPPORT / "jobset_schema.json").read_text()))
    schema["properties"]["metadata"] = {"type": "object"}
    jsonschema.Draft7Validator(schema).validate(made)
    return made


def parts(made, name="slice"):
    """The Job of a slice (or of a worker), its pod and its container."""
    (slices,) = [each for each in made["spec"]["replicatedJobs"] if each["name"] == name]
    job = slices["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    return slices, job, job["template"]["spec"], container


ALL = [*BUCKET, "--slices=2", "--service-account=trainer", "--queue=team", "--spot"]


WORKERS = [*ALL, "--workers=3", "--worker-topology=v6e:2x4"]
LISTENING = ["--config.rollout.port=8790", "--config.rollout.host=0.0.0.0"]
ASYNCHRONOUS = [*TRAINING, *LISTENING, "--config.rollout.max_lag=1"]


@pytest.mark.parametrize("options", [BUCKET, ALL, WORKERS], ids=("few", "all", "workers"))
def test_the_jobset_is_one_that_its_schema_allows(stage, options):
    made = jobset(stage, *options, training=ASYNCHRONOUS)
    assert (made["apiVersion"], made["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")


def test_the_schema_finds_a_field_that_is_not_there(stage):
    made = jobset(stage, *BUCKET)
    made["spec"]["failurePolicy"]["maxRestart"] = 3
    schema = closed(json.loads((SUPPORT / "jobset_schema.json").read_text()))
    with pytest.raises(jsonschema.ValidationError, match="maxRestart"):
        jsonschema.Draft7Validator(schema["properties"]["spec"]).validate(made["spec"])


def test_a_slice_is_one_job_on_one_node_pool_with_all_chips(stage):
    made = jobset(stage, *ALL)
    slices, job, pod, container = parts(made)
    key = "alpha.jobset.sigs.k8s.io/exclusive-topology"
    annotations = slices["template"]["metadata"]["annotations"]
    assert annotations == {key: "cloud.google.com/gke-nodepool"}
    assert made["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team"}
    assert slices["replicas"] == 2 and job["parallelism"] == job["completions"] == 16
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
        "cloud.google.com/gke-tpu-topology": "4x4x4",
        "cloud.google.com/gke-spot": "true",
    }
    assert container["resources"] == dict.fromkeys(("requests", "limits"), {"google.com/tpu": 4})
    assert pod["serviceAccountName"] == "trainer"
    # The hosts find each other by names that a headless service gives them, before all are ready.
    assert made["spec"]["network"] == {
        "enableDNSHostnames": True,
        "publishNotReadyAddresses": True,
    }


def test_what_is_not_asked_for_is_not_there(stage):
    made = jobset(
        stage, training=[TRAINING[0], "--workdir=w", "--config.checkpoint.directory=gs://b/c"]
    )
    _, job, pod, container = parts(made)
    assert "labels" not in made["metadata"] and "metadata" not in job["template"]
    assert not {"volumes", "serviceAccountName"} & pod.keys() and "volumeMounts" not in container
    assert len(pod["nodeSelector"]) == 2 and len(pod["tolerations"]) == 1


@pytest.mark.parametrize(
    "topology, more, label, hosts, chips",
    [
        ("v4:2x2x4", [], "tpu-v4-podslice", 4, 4),
        ("v5e:4x4", [], "tpu-v5-lite-podslice", 4, 4),
        ("v5e:2x4", ["--chips-per-host=8"], "tpu-v5-lite-podslice", 1, 8),
        ("v6e:1x1", [], "tpu-v6e-slice", 1, 1),
        ("tpu7x:2x2x1", [], "tpu7x", 1, 4),
    ],
)
def test_hosts_and_chips_follow_from_the_topology(stage, topology, more, label, hosts, chips):
    _, job, pod, container = parts(jobset(stage, *BUCKET, f"--topology={topology}", *more))
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-accelerator"] == label
    assert job["parallelism"] == hosts
    assert container["resources"]["limits"]["google.com/tpu"] == chips


def test_a_lost_host_restarts_all_slices_and_a_mistake_ends_them(stage):
    made = jobset(stage, *BUCKET, "--max-restarts=7", "--grace=90")
    policy = made["spec"]["failurePolicy"]
    # Pods of before are gone when those of after begin: they use the same port and workdir.
    assert policy["maxRestarts"] == 7 and policy["restartStrategy"] == "BlockingRecreate"
    (rule,) = policy["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    _, job, pod, container = parts(made)
    (mistake,) = job["podFailurePolicy"]["rules"]
    assert mistake["action"] == "FailJob" and mistake["onExitCodes"] == {
        "containerName": container["name"],
        "operator": "In",
        "values": [2],
    }
    assert job["backoffLimit"] == 0 and pod["restartPolicy"] == "Never"
    assert pod["terminationGracePeriodSeconds"] == 90


def test_the_bucket_is_mounted_as_on_a_tpu_vm(stage):
    _, job, pod, container = parts(jobset(stage, *BUCKET))
    assert job["template"]["metadata"]["annotations"] == {"gke-gcsfuse/volumes": "true"}
    (volume,) = pod["volumes"]
    attributes = volume["csi"]["volumeAttributes"]
    assert volume["csi"]["driver"] == "gcsfuse.csi.storage.gke.io"
    assert attributes["bucketName"] == "mine" and attributes["hostNetworkPodKSA"] == "true"
    script = (stage.checkout / "launch" / "on_host.sh").read_text()
    assert all(f"--{option}" in script for option in attributes["mountOptions"].split(","))
    assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": "/mnt/mine"}]


def test_arguments_arrive_whole_and_sigterm_reaches_the_training(stage):
    *_, container = parts(jobset(stage, *BUCKET, "--module=my.module"))
    command = container["command"]
    assert command == ["launch/on_host.sh", "run", "python", "-m", "my.module", *TRAINING]


def test_words_that_yaml_takes_for_something_else_stay_words(stage):
    made = jobset(
        stage, "--name=on", "--bucket=123", training=[TRAINING[0], "--workdir=/mnt/123/x"]
    )
    *_, pod, _ = parts(made)
    assert made["metadata"]["name"] == "on"
    assert pod["volumes"][0]["csi"]["volumeAttributes"]["bucketName"] == "123"


def test_names_of_pods_are_short_enough(stage):
    name = "a" * 40
    large = ["--slices=99", "--topology=v5p:16x16x24", "--workers=999", WORKERS[-1]]
    made = jobset(stage, *BUCKET, f"--name={name}", *large, training=ASYNCHRONOUS)
    for each in ("slice", "worker"):
        jobs, job, *_ = parts(made, each)
        last = f"{name}-{each}-{jobs['replicas'] - 1}-{job['completions'] - 1}-abcde"
        assert len(last) <= POD_NAME


def test_the_jobset_is_applied_as_it_is_printed(cluster):
    place = ["--context=c", "--namespace=n"]
    done = cluster.run("jobset.sh", *RUN, *ALL, *place, *TRAINING)
    assert done.returncode == 0, done.stderr
    assert cluster.calls() == [["kubectl", *place, "apply", "--filename=-"]]
    applied = yaml.safe_load((cluster.folder / "applied").read_text())
    assert applied == jobset(cluster, *ALL)


def test_what_the_cluster_refuses_is_reported(cluster):
    cluster.tool("kubectl", "cat >/dev/null; echo 'error: no JobSet here' >&2; exit 1")
    done = cluster.run("jobset.sh", *RUN, *BUCKET, *TRAINING)
    assert done.returncode == 1
    assert done.stderr.startswith("error: no JobSet here\njobset: error: the cluster rejected")


def test_the_first_hosts_log_is_followed_and_a_jobset_deleted(cluster):
    assert cluster.run("jobset.sh", "logs", "--name=my-run").returncode == 0
    assert cluster.run("jobset.sh", "delete", "--name=my-run").returncode == 0
    logs, delete = cluster.calls()
    assert logs[:4] == ["kubectl", "logs", "--follow", "--tail=-1"]
    assert logs[4:] == [
        "--container=train",
        "--selector=jobset.sigs.k8s.io/jobset-name=my-run,"
        "jobset.sigs.k8s.io/replicatedjob-name=slice,"
        "batch.kubernetes.io/job-completion-index=0,jobset.sigs.k8s.io/job-index=0",
    ]
    assert delete == ["kubectl", "delete", "jobset/my-run"]


def test_the_log_of_one_worker_is_followed(cluster):
    assert cluster.run("jobset.sh", "logs", "--name=my-run", "--worker=2").returncode == 0
    ((*_, selector),) = cluster.calls()
    assert "/replicatedjob-name=worker," in selector and selector.endswith("/job-index=2")


def test_a_worker_is_a_job_of_one_host_that_runs_the_same_command_alone(stage):
    flags = "--worker-flags=--config.mesh.tensor=8  --config.env.options={'a':'*'}"
    made = jobset(stage, *WORKERS, flags, training=ASYNCHRONOUS)
    workers, job, pod, container = parts(made, "worker")
    *_, trainer = parts(made)
    assert workers["replicas"] == 3 and job["parallelism"] == job["completions"] == 1
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
        "cloud.google.com/gke-tpu-topology": "2x4",
    }
    assert container["resources"]["limits"] == {"google.com/tpu": 8}
    # Several workers may have nodes of one pool.
    assert "metadata" not in workers["template"]
    run = ["launch/on_host.sh", "run"]
    training = ["python", "-m", "seeupo_jax.train", *ASYNCHRONOUS]
    assert trainer["command"] == [*run, *training]
    own = ["--config.mesh.tensor=8", "--config.env.options={'a':'*'}"]
    # It waits for slices that wait for nodes: that it gives them up is no mistake of a user.
    wanted = [*run, "--alone", *training, "--patience=86400", *own, "--role=rollout"]
    assert container["command"] == wanted
    assert container["volumeMounts"] == trainer["volumeMounts"]


def test_workers_may_be_on_spot_machines_and_slices_not(stage):
    options = [*BUCKET, *WORKERS[-2:], "--worker-spot"]
    made = jobset(stage, *options, training=ASYNCHRONOUS)
    spot = "cloud.google.com/gke-spot"
    *_, slice_pod, _ = parts(made)
    *_, worker_pod, _ = parts(made, "worker")
    assert worker_pod["nodeSelector"][spot] == "true" and spot not in slice_pod["nodeSelector"]
    assert len(worker_pod["tolerations"]) == 2 and len(slice_pod["tolerations"]) == 1


def test_a_lost_worker_comes_back_without_the_slices_and_the_run_ends_with_them(stage):
    made = jobset(stage, *WORKERS, "--max-restarts=7", training=ASYNCHRONOUS)
    _, job, pod, _ = parts(made, "worker")
    mistake, stopped, preempted = job["podFailurePolicy"]["rules"]
    assert (mistake["action"], mistake["onExitCodes"]["values"]) == ("FailJob", [2])
    # Neither counts: its Job makes another pod.
    assert (stopped["action"], stopped["onExitCodes"]["values"]) == ("Ignore", [143])
    assert preempted == {
        "action": "Ignore",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }
    assert job["backoffLimit"] == 7 and pod["restartPolicy"] == "Never"
    assert parts(made)[1]["backoffLimit"] == 0  # a lost host of a slice is all slices' affair
    # Actions for one Job need a feature gate of JobSet that is off by default.
    assert [rule["action"] for rule in made["spec"]["failurePolicy"]["rules"]] == ["FailJobSet"]
    assert made["spec"]["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["slice"]}
    assert "successPolicy" not in jobset(stage, *BUCKET)["spec"]


ANSWERS = """
answer=$(head -n 1 "$STAGE/answers")
sed 1d "$STAGE/answers" >"$STAGE/rest" && mv "$STAGE/rest" "$STAGE/answers"
case $answer in *rror*) echo "$answer" >&2; exit 1 ;; esac
echo "$answer"
"""


@pytest.mark.parametrize(
    "answers, code, words",
    [
        (["", "", "Completed"], 0, ""),
        (["", "Failed"], 1, "jobset: error: the JobSet failed; "),
        (["Error: no connection", "Completed"], 0, "jobset: Error: no connection"),
        (["Error from server (NotFound)"], 2, "error: --name: got 'my-run'; allowed: a JobSet"),
    ],
)
def test_waiting_ends_as_the_jobset_does(cluster, answers, code, words):
    cluster.tool("kubectl", ANSWERS)
    cluster.tool("sleep")
    (cluster.folder / "answers").write_text("\n".join(answers) + "\n")
    done = cluster.run("jobset.sh", "wait", "--name=my-run")
    assert done.returncode == code and done.stderr.startswith(words)
    assert len(cluster.calls("kubectl")) == len(answers)
