"""`deploy/kubernetes` and `deploy/skypilot`, and their scripts, executed with stand-ins for Ray and rlhf."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import jsonschema
import pytest
import yaml

from tests.members import ROOT
from tests.test_docs_commands import configure

DEPLOY = ROOT / "deploy"
TRAIN, STOP = DEPLOY / "ray/train.sh", DEPLOY / "ray/stop.sh"
RAYJOB, CLAIM, TASK = (
    yaml.safe_load((DEPLOY / name).read_text())
    for name in ("kubernetes/rayjob.yaml", "kubernetes/volume.yaml", "skypilot/train.yaml")
)
CLUSTER = RAYJOB["spec"]["rayClusterSpec"]
PODS = [group["template"]["spec"] for group in (CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"])]

# -------------------------------------------------------------------------------------------- manifests

FIELDS = """
apiVersion:str kind:str metadata.name:str
spec.entrypoint:str spec.shutdownAfterJobFinishes:bool spec.backoffLimit:int spec.runtimeEnvYAML:str
CLUSTER.rayVersion:str CLUSTER.authOptions.mode:str CLUSTER.headGroupSpec.rayStartParams.num-cpus:str
GROUP.groupName:str GROUP.replicas:int GROUP.minReplicas:int GROUP.maxReplicas:int
POD.terminationGracePeriodSeconds:int POD.securityContext.fsGroup:int POD.securityContext.fsGroupChangePolicy:str
POD.tolerations[].key:str POD.tolerations[].operator:str
CONTAINER.name:str CONTAINER.image:str CONTAINER.lifecycle.preStop.exec.command[]:str
CONTAINER.resources.limits.cpu:int CONTAINER.resources.limits.memory:str CONTAINER.resources.limits.nvidia.com/gpu:int
CONTAINER.env[].name:str CONTAINER.env[].value:str
CONTAINER.envFrom[].secretRef.name:str CONTAINER.envFrom[].secretRef.optional:bool
CONTAINER.volumeMounts[].name:str CONTAINER.volumeMounts[].mountPath:str
POD.volumes[].name:str POD.volumes[].persistentVolumeClaim.claimName:str POD.volumes[].configMap.name:str
POD.volumes[].emptyDir.medium:str POD.volumes[].emptyDir.sizeLimit:str
spec.accessModes[]:str spec.resources.requests.storage:str
name:str num_nodes:int workdir:str run:str volumes./shared:str
resources.accelerators:str resources.memory:str resources.image_id:str
resources.job_recovery.recover_on_exit_codes[]:int
secrets.RAY_AUTH_TOKEN:NoneType secrets.HF_TOKEN:NoneType secrets.WANDB_API_KEY:NoneType
"""
"""The fields of the files with the types of their values. The two tests below, which need what others publish, compared
them with KubeRay 1.7.0 and SkyPilot 0.14.1; execute these again after a change."""


def fields(node: object, path: str = "") -> set[str]:
    """Every field below ``node``."""
    if isinstance(node, dict):
        return {field for name, value in node.items() for field in fields(value, f"{path}.{name}")}
    if isinstance(node, list):
        return {field for value in node for field in fields(value, f"{path}[]")}
    short = path.removeprefix(".")
    for name, prefix in (
        ("GROUP", r"spec\.rayClusterSpec\.workerGroupSpecs\[\]"),
        ("CLUSTER", r"spec\.rayClusterSpec"),
        ("POD", r"(?:GROUP|CLUSTER\.headGroupSpec)\.template\.spec"),
        ("CONTAINER", r"POD\.containers\[\]"),
    ):
        short = re.sub(f"^{prefix}", name, short)
    return {f"{short}:{type(node).__name__}"}


def test_the_files_have_the_fields_that_were_compared_with_the_schemas():
    assert fields(RAYJOB) | fields(CLAIM) | fields(TASK) == set(FIELDS.split())


def strict(schema: object) -> object:
    """The schema with unknown fields refused."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "properties" not in schema:
        return {key: strict(part) for key, part in schema.items()}
    parts = {name: strict(part) for name, part in schema["properties"].items()}
    return {"additionalProperties": False, **schema, "properties": parts}


@pytest.mark.skipif("RLHF_KUBERAY_CRD" not in os.environ, reason="RLHF_KUBERAY_CRD names no ray.io_rayjobs.yaml")
def test_kuberays_schema_allows_the_manifests():
    definition = yaml.load(Path(os.environ["RLHF_KUBERAY_CRD"]).read_text(), yaml.CSafeLoader)
    [version] = [v for v in definition["spec"]["versions"] if v["name"] == RAYJOB["apiVersion"].split("/")[1]]
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}  # Kubernetes' own
    jsonschema.validate(RAYJOB, schema)
    head = schema["properties"]["spec"]["properties"]["rayClusterSpec"]["properties"]["headGroupSpec"]["properties"]
    volume = head["template"]["properties"]["spec"]["properties"]["volumes"]["items"]["properties"]["ephemeral"]
    jsonschema.validate(CLAIM["spec"], volume["properties"]["volumeClaimTemplate"]["properties"]["spec"])


def test_skypilot_reads_the_task():
    task = pytest.importorskip("sky", reason="skypilot is not installed").Task.from_yaml(DEPLOY / "skypilot/train.yaml")
    assert (task.num_nodes, task.volumes) == (TASK["num_nodes"], TASK["volumes"])


def test_the_manifest_names_what_there_is():
    [ray] = re.findall(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert CLUSTER["rayVersion"] == ray
    [user] = re.findall(r"--uid (\d+)", (DEPLOY / "Dockerfile").read_text())
    header = (DEPLOY / "kubernetes/rayjob.yaml").read_text()
    files = {Path(name).name: name for name in re.findall(r"--from-file=(\S+)", header)}
    assert [name for name in files.values() if name != "run.toml" and not (ROOT / name).exists()] == []
    assert {Path(name).name for name in re.findall(r"/etc/rlhf/[\w.]+", header)} == set(files)
    for pod in PODS:
        [container] = pod["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
        assert {"/etc/rlhf", "/dev/shm", "/shared"} == set(mounts.values())
        assert pod["securityContext"]["fsGroup"] == int(user)
        assert not any(re.search("KEY|TOKEN|SECRET", variable["name"]) for variable in container["env"])
    assert CLAIM["metadata"]["name"] in [v.get("persistentVolumeClaim", {}).get("claimName") for v in pod["volumes"]]


def test_ray_keeps_the_exit_code_of_the_job():
    """With the variable of the nodes Ray loses it, and a failed run gets no further attempt."""
    variable = "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper"
    nodes = {v["value"] for pod in PODS for c in pod["containers"] for v in c["env"] if v["name"] == variable}
    job = yaml.safe_load(RAYJOB["spec"]["runtimeEnvYAML"])["env_vars"]
    assert (nodes, job[variable]) == ({"true"}, "false")


# ---------------------------------------------------------------------------------------------- scripts

STANDINS = {
    "ray": """
        case $1 in
        start) echo "ray $*" >>"$TEST_LOG"; case $* in *--head*) trap 'exit 0' TERM; touch "$TEST_LOG.up"
               while true; do sleep 0.05; done ;; *) exit 1 ;; esac ;;
        health-check) [ -e "$TEST_LOG.up" ] ;;
        esac
    """,
    # Asked whether $3 nodes have joined.
    "python": """
        joined=$(grep -c "ray start" "$TEST_LOG"); [ "$joined" -ge "$3" ] || { echo "$joined have joined"; exit 1; }
    """,
    "rlhf": """
        words="$*"
        while [ "$1" != --output ]; do shift; done
        mkdir -p "$2"; touch "$2/config.toml"
        trap 'sleep 0.3; echo saved >>"$TEST_LOG"; exit 143' TERM
        echo "rlhf $words" >>"$TEST_LOG"
        while [ -n "${TEST_ENDLESS:-}" ]; do sleep 0.05; done
        exit ${TEST_EXIT:-0}
    """,
}


class Scripts:
    """Executes scripts with the stand-ins. ``log``: what these were called with."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.output, self._log = folder, folder / "shared/runs/one", folder / "log"
        (folder / "tools").mkdir()
        for name, text in STANDINS.items():
            (folder / "tools" / name).write_text(f"#!/bin/bash\n{text}")
            (folder / "tools" / name).chmod(0o755)
        self.started: list[subprocess.Popen[str]] = []

    @property
    def log(self) -> list[str]:
        return self._log.read_text().splitlines() if self._log.exists() else []

    def start(self, *words: str | Path, **variables: str) -> subprocess.Popen[str]:
        base = {k: v for k, v in os.environ.items() if not k.startswith(("RLHF_", "RAY_"))}
        defaults = {"TEST_LOG": str(self._log), "RLHF_OUTPUT": str(self.output), "RAY_CLUSTER_NAME": "c"}
        path = f"{self.folder / 'tools'}{os.pathsep}{os.environ['PATH']}"
        environment = {**base, **defaults, "PATH": path, **variables}
        words = tuple(map(str, words))
        process = subprocess.Popen(
            words, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        self.started.append(process)
        return process

    def run(self, *words: str | Path, **variables: str) -> tuple[int, str]:
        process = self.start(*words, **variables)
        _, err = process.communicate(timeout=120)
        return process.returncode, err

    def until(self, text: str) -> None:
        deadline = time.monotonic() + 60
        while not any(text in line for line in self.log):
            assert time.monotonic() < deadline, self.log
            time.sleep(0.05)


@pytest.fixture
def scripts(tmp_path):
    scripts = Scripts(tmp_path)
    yield scripts
    for process in scripts.started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def require_valid(line: str) -> None:
    """The logged call of ``rlhf`` is one that it accepts, for a run file with these three options."""
    words = [word for word in line.split()[1:] if word not in ("run.toml", "/etc/rlhf/run.toml")]
    configure([*words, "--algo", "sft", "--model", "PATH", "--data", "FILE"])


def test_the_entry_point_starts_the_run_and_later_continues_it(scripts):
    entry = RAYJOB["spec"]["entrypoint"].replace("/etc/rlhf/train.sh", str(TRAIN)).split()
    assert scripts.run(*entry)[0] == 0
    assert scripts.run(*entry, "--run.seed", "3", TEST_EXIT="3")[0] == 3
    first, second = scripts.log
    words = f"rlhf train --backend ray --launcher.address auto --output {scripts.output}"
    assert first == f"{words} /etc/rlhf/run.toml"
    assert second == f"{words} --resume /etc/rlhf/run.toml --run.seed 3"
    for line in (first, second):
        require_valid(line)
    assert [path.name for path in scripts.output.parent.iterdir()] == ["one"]


def test_the_run_saves_and_ends_where_a_pod_is_taken_away(scripts):
    run = scripts.start(TRAIN, "run.toml", TEST_ENDLESS="yes")
    scripts.until("rlhf ")
    assert scripts.run(STOP) == (0, "")
    assert scripts.log[-1] == "saved", "the hook waits for the checkpoint"
    _, err = run.communicate(timeout=60)
    assert (run.returncode, scripts.log[-1]) == (143, "saved")
    assert err.count("it saves and stops") == 1


def test_a_pod_without_a_run_ends_at_once(scripts):
    assert scripts.run(STOP) == (0, "")
    scripts.output.parent.mkdir(parents=True)
    mark = scripts.output.parent / "one.running-c"
    mark.touch()
    stop = scripts.start(STOP)
    deadline = time.monotonic() + 60
    while not mark.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.utime(mark, (0, 0))  # as if the driver's pod had been lost long ago
    assert stop.wait(60) == 0


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        ([TRAIN, "run.toml", "--output", "x"], {}, "train.sh: --output is not possible here"),
        ([TRAIN, "run.toml", "--run.overwrite=true"], {}, "train.sh: --run.overwrite=true is not possible"),
        ([TRAIN, "run.toml", "--launcher.address=x"], {}, "train.sh: --launcher.address=x is not possible"),
        ([TRAIN, "run.toml"], {"RLHF_OUTPUT": "runs/one"}, "must be an absolute path"),
        ([DEPLOY / "ray/nodes.sh", "0", "1", "127.0.0.1"], {}, "usage: nodes.sh"),
        ([DEPLOY / "ray/nodes.sh", "0", "1", "127.0.0.1", "true"], {}, "RAY_AUTH_TOKEN is not set"),
    ],
)
def test_scripts_refuse(scripts, words, variables, message):
    code, err = scripts.run(*words, **variables)
    assert code == 2
    assert message in err
    assert scripts.log == []


def node(scripts, rank: int, count: int, **variables: str) -> subprocess.Popen[str]:
    """The commands of the SkyPilot task on one of its nodes."""
    text = TASK["run"].replace("/shared", str(scripts.folder / "shared"))
    sky = {"NODE_RANK": str(rank), "NUM_NODES": str(count), "NODE_IPS": "10.0.0.1\n10.0.0.2", "TASK_ID": "one"}
    sky = {f"SKYPILOT_{name}": value for name, value in sky.items()}
    return scripts.start("bash", "-euc", text, **sky, **{"RAY_AUTH_TOKEN": "0" * 64, **variables})


def test_skypilot_starts_ray_on_every_node_and_the_run_on_the_first(scripts):
    nodes = [node(scripts, rank, 2, TEST_EXIT="143") for rank in range(2)]
    assert [process.wait(120) for process in nodes] == [143, 0], "what job_recovery waits for"
    assert TASK["resources"]["job_recovery"]["recover_on_exit_codes"] == [143]
    start = "ray start --block --dashboard-agent-listen-port=52366"
    head = f"{start} --head --node-ip-address=10.0.0.1 --port=6379 --include-dashboard=false"
    assert scripts.log[:-1] == [head, f"{start} --address=10.0.0.1:6379"]
    run = scripts.log[-1]
    assert run == f"rlhf train --backend ray --launcher.address auto --output {scripts.output} run.toml"
    require_valid(run)


def test_nodes_that_never_join_end_the_job(scripts):
    process = node(scripts, 0, 2, RLHF_START="1")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "nodes.sh: not 2 Ray nodes within 1 s (RLHF_START gives more time): 1 have joined" in err


def test_a_signal_to_the_first_node_reaches_the_run(scripts):
    process = node(scripts, 0, 1, TEST_ENDLESS="yes")
    scripts.until("rlhf ")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert (process.returncode, scripts.log[-1]) == (143, "saved")
