"""Files of deploy/: every flag is accepted, every metric exists, linters of the formats pass if they are installed."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from moe_engine.config.args import EngineArgs
from moe_engine.planning.flags.validate import check
from tests.server.fake_engine import FakeClient
from tests.server.harness import get

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
VARIABLES = {
    "$(API_KEY)": "k", "${API_KEY:?set API_KEY}": "k", "$(LWS_GROUP_SIZE)": "2", "$(LWS_WORKER_INDEX)": "1",
    "$(LWS_LEADER_ADDRESS)": "moe-engine-0.moe-engine",
}  # fmt: skip


def documents(file: Path) -> list[Any]:
    return list(yaml.safe_load_all(file.read_text()))


def pods(value: Any) -> list[dict[str, Any]]:
    """The specifications of pods below a value."""
    if isinstance(value, list):
        return [pod for each in value for pod in pods(each)]
    if not isinstance(value, dict):
        return []
    own = [value] if "containers" in value else []
    return own + [pod for each in value.values() for pod in pods(each)]


def is_router(pod: dict[str, Any]) -> bool:
    return "sglang_router.launch_router" in pod["containers"][0].get("command", ())


def commands() -> dict[str, list[str]]:
    """The arguments of `moe-engine serve`, by their place in the file."""
    found = {}
    for name, service in documents(DEPLOY / "compose.yaml")[0]["services"].items():
        found[f"compose {name}"] = service["command"]
    for file in MANIFESTS:
        for i, pod in enumerate(pod for pod in pods(documents(file)) if not is_router(pod)):
            found[f"{file.name} {i}"] = pod["containers"][0]["args"]
    (line,) = re.findall(r"^CMD (\[.*\])$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    found["Dockerfile"] = json.loads(line)
    return found


COMMANDS = commands()


def filled(text: str) -> str:
    for variable, value in VARIABLES.items():
        text = text.replace(variable, value)
    return text


@pytest.mark.parametrize("place", COMMANDS)
def test_flags_are_accepted(place: str):
    words = [filled(str(word)) for word in COMMANDS[place]]
    assert not any("$" in word for word in words), "a variable without a value in this test"
    args = EngineArgs.from_cli(words)
    check(args)
    assert args.server.port == 30000 and args.server.host == "0.0.0.0"


def test_commands_in_comments_build_the_files():
    """Paths and build arguments exist."""
    docker = (DEPLOY / "Dockerfile").read_text()
    arguments = set(re.findall(r"^ARG (\w+)", docker, re.MULTILINE))
    assert set(re.findall(r"--build-arg (\w+)=", docker)) <= arguments
    for service in documents(DEPLOY / "compose.yaml")[0]["services"].values():
        build = service["build"]
        assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()
        assert set(build.get("args", {})) <= arguments
    assert (
        ".installed-serve:" in (ROOT / "Makefile").read_text() or "$(STAMP_SERVE):" in (ROOT / "Makefile").read_text()
    )
    assert (ROOT / "constraints-gpu.txt").is_file()


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.name)
def test_manifests(file: Path):
    """Names, ports and volumes agree."""
    found = documents(file)
    for document in found:
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", document["metadata"]["name"])
    service = next(document for document in found if document["kind"] == "Service")
    for pod in pods(found):
        (container,) = pod["containers"]
        volumes = {volume["name"] for volume in pod.get("volumes", ())}
        assert {mount["name"] for mount in container.get("volumeMounts", ())} == volumes
        for port in container.get("ports", ()):
            assert f"--port={port['containerPort']}" in container["args"] or port["name"] == "metrics"
            assert len(port["name"]) <= 15
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            if probe in container and not is_router(pod):
                assert get(FakeClient(), container[probe]["httpGet"]["path"]).status_code == 200
    served = [pod for pod in pods(found) if pod["containers"][0].get("ports")]
    served = [pod for pod in served if is_router(pod)] or served
    assert (
        len(served) == 1 and service["spec"]["ports"][0]["targetPort"] == served[0]["containers"][0]["ports"][0]["name"]
    )


def test_the_router_accepts_its_flags_and_finds_the_servers():
    found = documents(DEPLOY / "kubernetes/router.yaml")
    server, router = (d["spec"]["template"] for d in found if d["kind"] == "Deployment")
    args = router["spec"]["containers"][0]["args"]
    labels = args[args.index("--selector") + 1 :]
    assert dict(label.split("=") for label in labels[:2]) == server["metadata"]["labels"]
    assert router["spec"]["serviceAccountName"] in {
        d["metadata"]["name"] for d in found if d["kind"] == "ServiceAccount"
    }
    router_args = pytest.importorskip("sglang_router.router_args", reason="needs sglang-router")
    parser = argparse.ArgumentParser()
    router_args.RouterArgs.add_cli_args(parser)
    assert parser.parse_args(args).service_discovery


def test_ranks_of_a_worker_set_fill_its_nodes():
    """Eight GPUs per pod, and one rank per GPU."""
    (worker_set,) = (
        d for d in documents(DEPLOY / "kubernetes/leader-worker-set.yaml") if d["kind"] == "LeaderWorkerSet"
    )
    template = worker_set["spec"]["leaderWorkerTemplate"]
    leader, worker = (template[name]["spec"]["containers"][0] for name in ("leaderTemplate", "workerTemplate"))
    assert leader["args"] == worker["args"] and leader["env"] == worker["env"]
    args = EngineArgs.from_cli([filled(word) for word in leader["args"]])
    assert args.parallel.tp_size == template["size"] * int(leader["resources"]["limits"]["nvidia.com/gpu"])


METRIC = re.compile(r"sglang:\w+")


def expressions() -> dict[str, list[str]]:
    dashboard = json.loads((DEPLOY / "monitoring/grafana.json").read_text())
    rules = [rule for group in documents(DEPLOY / "monitoring/alerts.yaml")[0]["groups"] for rule in group["rules"]]
    return {
        "grafana.json": [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]],
        "alerts.yaml": [rule["expr"] for rule in rules],
    }


@pytest.mark.parametrize("file", ["grafana.json", "alerts.yaml"])
def test_metrics_exist(file: str):
    known = set(METRIC.findall((ROOT / "docs/metrics.md").read_text()))  # compared with the registry by test_docs.py
    for expression in expressions()[file]:
        for name in METRIC.findall(expression):
            assert name in known or name.removesuffix("_bucket") in known, name
        assert expression.count("(") == expression.count(")") and expression.count("{") == expression.count("}")


def test_panels_do_not_overlap():
    panels = json.loads((DEPLOY / "monitoring/grafana.json").read_text())["panels"]
    cells = set()
    for panel in panels:
        place = panel["gridPos"]
        own = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not own & cells and place["x"] + place["w"] <= 24
        cells |= own
    assert len({panel["id"] for panel in panels}) == len(panels)


def lint(*command: str) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"needs {command[0]}")
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_systemd_accepts_the_unit(tmp_path: Path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    text = (DEPLOY / "moe-engine.service").read_text()
    (command,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    assert shlex.split(command)[1:] == ["serve", "--config", "/etc/moe-engine/serve.yaml"]
    unit = tmp_path / "moe-engine.service"
    unit.write_text(text.replace(command, "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, env=os.environ)
    assert "Unknown" not in done.stderr and "Invalid" not in done.stderr, done.stderr


def test_hadolint_accepts_the_dockerfile():
    lint("hadolint", "--ignore", "DL3008", "deploy/Dockerfile")


def test_compose_file_has_its_schema():
    lint("check-jsonschema", "--builtin-schema", "vendor.compose-spec", "deploy/compose.yaml")


def test_promtool_accepts_the_alerts():
    lint("promtool", "check", "rules", "deploy/monitoring/alerts.yaml")
