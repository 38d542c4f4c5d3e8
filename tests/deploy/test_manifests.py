"""What is rendered passes the checkers of those who read it, and says the same thing everywhere."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from ncd_serve.deploy import Target
from ncd_serve.deploy.facts import Deployment
from ncd_serve.deploy.memory import DECODING_MIB
from ncd_serve.deploy.render import PINS, SOURCES, render
from ncd_serve.triton import gate, probe
from ncd_serve.triton.process import USUAL_PORTS
from ncd_serve.triton.server import DRAIN_SECONDS
from tests.deploy.conftest import Tool
from tests.deploy.kserve_schema import validate_kserve

ROOT = Path(__file__).parents[2]
EVERYTHING = "monitoring.operator=true,monitoring.labels.release=stack,monitoring.dashboard=true"
Manifests = dict[str, dict[str, Any]]


def manifests(tool: Tool, chart: Path, settings: str = EVERYTHING) -> Manifests:
    text = tool("helm", "template", "birds", chart, "--namespace", "zoo", "--set", settings)
    return {f"{entry['kind']}/{entry['metadata']['name']}": entry for entry in yaml.safe_load_all(text) if entry}


@pytest.fixture(scope="module")
def chart(tool: Tool, rendered: dict[Target, Path]) -> Manifests:
    return manifests(tool, rendered[Target.HELM] / "chart")


@pytest.fixture(scope="module")
def gpu(gpu_deployment: Deployment, tmp_path_factory: pytest.TempPathFactory) -> dict[Target, Path]:
    place = tmp_path_factory.mktemp("gpu-rendered")
    for target in (Target.COMPOSE, Target.HELM):
        render(gpu_deployment, target, place / target.value)
    return {target: place / target.value for target in (Target.COMPOSE, Target.HELM)}


def pod_of(entry: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    pod = entry["spec"]["template"]["spec"]
    return pod, pod["containers"][0]


@pytest.mark.parametrize(
    "settings",
    [
        EVERYTHING,
        "autoscaling.enabled=false",
        "repository.uri=pvc://models/birds",
        "repository.uri=s3://bucket/models,repository.secret=storage",
        "repository.uri=gs://bucket/models,repository.secret=storage,network.clientNamespaces={shop,web}",
        "repository.uri=gs://bucket/models,engineCache.path=/var/cache/x,engineCache.claim=engines",
        "nodeSelector.pool=gpu,imagePullSecrets[0].name=pull,serviceAccount.annotations.role=reader",
    ],
)
def test_every_manifest_of_the_chart_is_strictly_valid(tool: Tool, rendered: dict[Target, Path], settings: str) -> None:
    oldest, latest = "1.28", kubernetes_validate.latest_version()
    for entry in manifests(tool, rendered[Target.HELM] / "chart", settings).values():
        if entry["kind"] not in ("PodMonitor", "PrometheusRule"):  # see below
            for version in (oldest, latest):
                kubernetes_validate.validate(entry, version, strict=True)


def test_the_checkers_see_mistakes(tool: Tool, chart: Manifests, rendered: dict[Target, Path]) -> None:
    wrong = json.loads(json.dumps(chart["Deployment/birds"]))
    wrong["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, kubernetes_validate.latest_version(), strict=True)
    _, service = yaml.safe_load_all((rendered[Target.KSERVE] / "inferenceservice.yaml").read_text())
    service["spec"]["predictor"]["model"]["storageURL"] = "s3://x"
    with pytest.raises(jsonschema.ValidationError):
        validate_kserve(service)
    with pytest.raises(AssertionError, match="autoscalling"):
        manifests(tool, rendered[Target.HELM] / "chart", "autoscalling.min=3")


def test_helm_is_content(tool: Tool, rendered: dict[Target, Path], gpu: dict[Target, Path]) -> None:
    for folder in (rendered[Target.HELM], gpu[Target.HELM]):
        assert "0 chart(s) failed" in tool("helm", "lint", "--strict", folder / "chart")


def test_operator_resources_hold_what_they_may(tool: Tool, chart: Manifests, tmp_path: Path) -> None:
    """No registry that we reach has the schemas of the Prometheus operator: these are the fields that we use."""
    monitor = chart["PodMonitor/birds"]["spec"]
    assert set(monitor) == {"selector", "podMetricsEndpoints"}
    assert set(monitor["podMetricsEndpoints"][0]) == {"port", "interval"}
    for name in ("PodMonitor/birds", "PrometheusRule/birds"):
        assert chart[name]["metadata"]["labels"]["release"] == "stack"
    rule = tmp_path / "rule.yaml"
    rule.write_text(yaml.safe_dump(chart["PrometheusRule/birds"]["spec"]))
    tool("promtool", "check", "rules", rule)


def test_kserve_resources_are_strictly_valid(
    deployment: Deployment, gpu_deployment: Deployment, tmp_path: Path
) -> None:
    stored = dataclasses.replace(gpu_deployment, repository_uri="gs://birds/models", storage="gs")
    for one in (deployment, stored):
        render(one, Target.KSERVE, tmp_path / "out")
        runtime, service = yaml.safe_load_all((tmp_path / "out" / "inferenceservice.yaml").read_text())
        validate_kserve(runtime)
        validate_kserve(service)
        model = service["spec"]["predictor"]["model"]
        assert model["runtime"] == runtime["metadata"]["name"] == one.name
        assert model["modelFormat"] in runtime["spec"]["supportedModelFormats"]
        assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]
        assert model.get("storageUri", "") == one.repository_uri
    assert runtime["spec"]["containers"][0]["args"] == ["--model-repository=/mnt/models"]
    assert runtime["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1


def test_compose_files_are_valid(rendered: dict[Target, Path], gpu: dict[Target, Path], deployment: Deployment) -> None:
    from compose_spec import PyOptions

    for folder in (rendered[Target.COMPOSE], gpu[Target.COMPOSE]):
        text = (folder / "compose.yaml").read_text()
        PyOptions(apply_merge=True).from_yaml(text)
        for name, service in yaml.safe_load(text)["services"].items():
            assert service["read_only"] and service["cap_drop"] == ["ALL"], name
            assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
            for volume in service.get("volumes", ()):
                if isinstance(volume, str) and volume.startswith("./"):
                    assert (folder / volume.partition(":")[0]).is_file() and volume.endswith(":ro")
    triton = yaml.safe_load((rendered[Target.COMPOSE] / "compose.yaml").read_text())["services"]["triton"]
    (mount,) = triton["volumes"]
    assert (rendered[Target.COMPOSE] / mount["source"]).resolve() == deployment.repository.resolve()
    assert mount["read_only"] and triton["command"] == [f"--model-repository={mount['target']}"]


def test_hadolint_is_content_and_pins_are_ours(
    tool: Tool, rendered: dict[Target, Path], gpu: dict[Target, Path]
) -> None:
    for folder in (*rendered.values(), *gpu.values()):
        tool("hadolint", "--failure-threshold", "style", folder / "image" / "Dockerfile")
        tool("sh", "-n", folder / "image" / "start.sh")
    pinned = dict(re.findall(r"^([\w-]+)==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert all(PINS[name] == pinned[name] for name in ("numpy", "pydantic"))
    # Pillow 13 has no wheel for the Python 3.10 of the image.
    assert int(PINS["pillow"].split(".")[0]) >= 11 and '"pillow>=11"' in (ROOT / "pyproject.toml").read_text()


def test_prometheus_is_content(tool: Tool, rendered: dict[Target, Path], tmp_path: Path) -> None:
    monitoring = rendered[Target.COMPOSE] / "monitoring"
    tool("promtool", "check", "config", monitoring / "prometheus.yml")
    tests = (
        Path(__file__).with_name("alerts_test.yaml").read_text().replace("AUTOSCALER", json.dumps(autoscaler_query()))
    )
    (tmp_path / "rules.yaml").write_text((monitoring / "rules.yaml").read_text())
    (tmp_path / "test.yaml").write_text(tests)
    tool("promtool", "test", "rules", tmp_path / "test.yaml")


def autoscaler_query() -> str:
    """As prometheus-adapter fills it in for the pods of a namespace."""
    (rule,) = yaml.safe_load((SOURCES / "helm" / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    query = str(rule["metricsQuery"])
    return query.replace("<<.GroupBy>>", "pod").replace("<<.LabelMatchers>>", 'namespace="n",pod=~"a|new"')


def test_questions_of_the_dashboard_are_promql(tool: Tool, tmp_path: Path) -> None:
    panels = json.loads((SOURCES / "monitoring" / "dashboard.json").read_text())["panels"]
    asked = [target["expr"].replace("$__rate_interval", "5m") for panel in panels for target in panel["targets"]]
    rules = [{"record": f"question_{number}", "expr": expression} for number, expression in enumerate(asked)]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(asked)} rules found" in tool("promtool", "check", "rules", tmp_path / "rules.yaml")


def test_grafana_knows_every_field_of_the_dashboard(rendered: dict[Target, Path]) -> None:
    pytest.importorskip("grafana_foundation_sdk", reason="it needs Python 3.11")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    ours = json.loads((rendered[Target.COMPOSE] / "monitoring" / "dashboard.json").read_text())
    read = json.loads(json.dumps(Dashboard.from_json(ours), cls=JSONEncoder))
    assert_kept(ours, read, "dashboard")
    places = [tuple(panel["gridPos"].values()) for panel in ours["panels"]]
    assert len({panel["id"] for panel in ours["panels"]}) == len(set(places)) == len(places)


def assert_kept(ours: Any, read: Any, where: str) -> None:
    """Fields that Grafana does not know are dropped when it reads them."""
    if isinstance(ours, dict):
        for key, value in ours.items():
            assert key in read, f"{where}.{key}"
            assert_kept(value, read[key], f"{where}.{key}")
    elif isinstance(ours, list):
        assert len(ours) == len(read), where
        for number, (one, other) in enumerate(zip(ours, read, strict=True)):
            assert_kept(one, other, f"{where}[{number}]")
    else:
        assert ours == read, where


def test_pods_have_as_few_rights_as_can_be(chart: Manifests, rendered: dict[Target, Path]) -> None:
    pod, container = pod_of(chart["Deployment/birds"])
    runtime, _ = yaml.safe_load_all((rendered[Target.KSERVE] / "inferenceservice.yaml").read_text())
    (served,) = runtime["spec"]["containers"]
    for context in ({**pod["securityContext"], **container["securityContext"]}, served["securityContext"]):
        assert context["runAsNonRoot"] and context["runAsUser"] == context["runAsGroup"] == 1000
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
        assert context["capabilities"] == {"drop": ["ALL"]}
    assert pod["automountServiceAccountToken"] is False
    assert chart["NetworkPolicy/birds"]["spec"]["egress"] == []


def test_all_parts_mean_the_same_pods(chart: Manifests) -> None:
    labels = chart["Deployment/birds"]["spec"]["template"]["metadata"]["labels"]
    spread = chart["Deployment/birds"]["spec"]["template"]["spec"]["topologySpreadConstraints"]
    selectors = [
        chart["Service/birds"]["spec"]["selector"],
        chart["Service/birds-grpc"]["spec"]["selector"],
        chart["Deployment/birds"]["spec"]["selector"]["matchLabels"],
        chart["PodDisruptionBudget/birds"]["spec"]["selector"]["matchLabels"],
        chart["NetworkPolicy/birds"]["spec"]["podSelector"]["matchLabels"],
        chart["PodMonitor/birds"]["spec"]["selector"]["matchLabels"],
        *(entry["labelSelector"]["matchLabels"] for entry in spread),
    ]
    for selector in selectors:
        assert selector and selector.items() <= labels.items()
    scaled = chart["HorizontalPodAutoscaler/birds"]["spec"]["scaleTargetRef"]
    assert f"{scaled['kind']}/{scaled['name']}" in chart and "replicas" not in chart["Deployment/birds"]["spec"]
    assert chart["Service/birds-grpc"]["spec"]["clusterIP"] == "None"
    account = chart["Deployment/birds"]["spec"]["template"]["spec"]["serviceAccountName"]
    assert f"ServiceAccount/{account}" in chart


def test_ports_are_those_of_the_code(chart: Manifests, rendered: dict[Target, Path]) -> None:
    wanted = USUAL_PORTS._asdict()
    _, container = pod_of(chart["Deployment/birds"])
    runtime, _ = yaml.safe_load_all((rendered[Target.KSERVE] / "inferenceservice.yaml").read_text())
    for ports in (container["ports"], runtime["spec"]["containers"][0]["ports"]):
        assert {port["name"]: port["containerPort"] for port in ports} == wanted
    for name in ("Service/birds", "Service/birds-grpc"):
        for port in chart[name]["spec"]["ports"]:
            assert wanted[port["targetPort"]] == port["port"]
    clients, monitoring = chart["NetworkPolicy/birds"]["spec"]["ingress"]
    assert [port["port"] for port in clients["ports"]] == [USUAL_PORTS.http, USUAL_PORTS.grpc]
    assert [port["port"] for port in monitoring["ports"]] == [USUAL_PORTS.metrics]
    annotations = chart["Deployment/birds"]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(USUAL_PORTS.metrics)
    scraped = yaml.safe_load((rendered[Target.COMPOSE] / "monitoring" / "prometheus.yml").read_text())
    assert scraped["scrape_configs"][0]["static_configs"] == [{"targets": [f"triton:{USUAL_PORTS.metrics}"]}]
    assert f"EXPOSE {' '.join(map(str, USUAL_PORTS))}" in (rendered[Target.HELM] / "image" / "Dockerfile").read_text()


def test_image_user_paths_and_probes_are_those_of_the_dockerfile(
    chart: Manifests, rendered: dict[Target, Path], deployment: Deployment
) -> None:
    pod, container = pod_of(chart["Deployment/birds"])
    runtime, _ = yaml.safe_load_all((rendered[Target.KSERVE] / "inferenceservice.yaml").read_text())
    compose = yaml.safe_load((rendered[Target.COMPOSE] / "compose.yaml").read_text())["services"]["triton"]
    (served,) = runtime["spec"]["containers"]
    assert container["image"] == served["image"] == compose["image"] == deployment.image
    for folder in rendered.values():
        dockerfile = (folder / "image" / "Dockerfile").read_text()
        user, place = re.findall(
            r"^USER (.+)$|^COPY --chmod=0555 start.sh probe.py gate.py (.+)$", dockerfile, re.MULTILINE
        )[::-1]
        assert (
            user[0]
            == compose["user"]
            == f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}"
        )
        assert f"COPY --from=repository / {deployment.model_path}/" in dockerfile
        assert f'CMD ["python3", "{place[1]}probe.py", "ready"]' in dockerfile
        for program in (probe, gate):
            copied = folder / "image" / Path(program.__file__).name
            assert copied.read_text() == Path(program.__file__).read_text()
    for one in (container, served):
        for name, question in {"startupProbe": "ready", "readinessProbe": "ready", "livenessProbe": "live"}.items():
            assert one[name]["exec"]["command"] == ["python3", f"{place[1]}probe.py", question]
        assert one["startupProbe"]["failureThreshold"] * one["startupProbe"]["periodSeconds"] == 600
        assert f"--model-repository={deployment.model_path}" in one["args"]
        assert {"/tmp", "/dev/shm"} == {mount["mountPath"] for mount in one["volumeMounts"]}


def test_every_image_has_a_triton_that_outlives_what_ended_older_ones(rendered: dict[Target, Path]) -> None:
    """CVE-2025-23310 and CVE-2025-23311 are mended in 25.07."""
    for target, folder in rendered.items():
        files = [path for path in folder.rglob("*") if path.is_file()]
        named = [found for path in files for found in re.findall(r"tritonserver:(\S+)", path.read_text())]
        assert named, target
        for tag in named:
            release = re.fullmatch(r"(\d\d)\.(\d\d)-py3", tag)
            assert release and (int(release[1]), int(release[2])) >= (25, 7), (target, tag)


def test_http_of_every_deployment_comes_through_the_gate(
    chart: Manifests, rendered: dict[Target, Path], deployment: Deployment
) -> None:
    for folder in rendered.values():
        start = (folder / "image" / "start.sh").read_text()
        assert 'gate.py" "${NCD_SERVE_HTTP:-0.0.0.0:8000}=$inner" &' in start
        assert '--http-address="${inner%:*}"' in start and "127.0.0.1:18000" in start
    exposed = [port["containerPort"] for port in pod_of(chart["Deployment/birds"])[1]["ports"]]
    assert deployment.inner_http_port not in exposed


def test_a_pod_has_the_time_to_drain(chart: Manifests, rendered: dict[Target, Path]) -> None:
    pod, container = pod_of(chart["Deployment/birds"])
    runtime, service = yaml.safe_load_all((rendered[Target.KSERVE] / "inferenceservice.yaml").read_text())
    for grace, one in (
        (pod["terminationGracePeriodSeconds"], container),
        (service["spec"]["predictor"]["terminationGracePeriodSeconds"], runtime["spec"]["containers"][0]),
    ):
        assert grace > int(one["lifecycle"]["preStop"]["exec"]["command"][1]) + DRAIN_SECONDS
    assert f"--exit-timeout-secs={DRAIN_SECONDS}" in container["args"]
    assert f"--exit-timeout-secs={DRAIN_SECONDS} " in (rendered[Target.KSERVE] / "image" / "start.sh").read_text()
    compose = yaml.safe_load((rendered[Target.COMPOSE] / "compose.yaml").read_text())
    assert int(compose["services"]["triton"]["stop_grace_period"].rstrip("s")) > DRAIN_SECONDS


def test_what_a_bundle_decides(chart: Manifests, deployment: Deployment) -> None:
    entry = chart["Deployment/birds"]
    _, container = pod_of(entry)
    assert entry["metadata"]["labels"]["ncd-serve/bundle"] == deployment.bundle_id
    assert entry["metadata"]["labels"]["ncd-serve/model"] == "ncd_global"
    pod = entry["spec"]["template"]["metadata"]
    assert pod["annotations"]["ncd-serve/digest"] == deployment.digest and deployment.digest.startswith("sha256:")
    others = 1536 + DECODING_MIB
    assert others + 1.5 * deployment.peak_mib <= deployment.memory_mib < others + 256 + 1.5 * deployment.peak_mib
    assert container["resources"]["limits"] == {"memory": f"{deployment.memory_mib}Mi"}
    assert deployment.peak_mib > 20 and deployment.max_batch == 64 and deployment.side == 32


def test_a_model_for_tensorrt_gets_a_gpu_a_cache_and_its_storage(
    tool: Tool, gpu: dict[Target, Path], gpu_deployment: Deployment
) -> None:
    found = manifests(tool, gpu[Target.HELM] / "chart", "repository.secret=storage")
    pod, container = pod_of(found["Deployment/birds"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert {"name": "engines", "mountPath": "/var/cache/ncd-serve"} in container["volumeMounts"]
    assert container["startupProbe"]["failureThreshold"] == 180  # half an hour: engines are built
    assert f"--model-repository={gpu_deployment.repository_uri}" in container["args"]
    assert container["envFrom"] == [{"secretRef": {"name": "storage"}}]
    dns, storage = found["NetworkPolicy/birds"]["spec"]["egress"]
    assert {port["port"] for port in dns["ports"]} == {53} and storage["ports"] == [{"port": 9000}]
    assert "to" not in dns, "a DNS cache on the node is in no namespace"
    own = manifests(tool, gpu[Target.HELM] / "chart", "repository.secret=")["NetworkPolicy/birds"]["spec"]["egress"][2:]
    assert {rule["to"][0]["ipBlock"]["cidr"]: [port["port"] for port in rule["ports"]] for rule in own} == {
        "169.254.169.254/32": [80, 8080],
        "169.254.169.252/32": [987, 988],
    }
    dockerfile = (gpu[Target.HELM] / "image" / "Dockerfile").read_text()
    assert "/var/cache/ncd-serve" in dockerfile and "CUDA_VISIBLE_DEVICES" not in dockerfile
    compose = yaml.safe_load((gpu[Target.COMPOSE] / "compose.yaml").read_text())["services"]["triton"]
    assert compose["deploy"]["resources"]["reservations"]["devices"][0]["driver"] == "nvidia"
    assert "engines:/var/cache/ncd-serve" in compose["volumes"]


def test_a_claim_is_mounted_read_only(tool: Tool, rendered: dict[Target, Path]) -> None:
    found = manifests(tool, rendered[Target.HELM] / "chart", "repository.uri=pvc://models/birds/v2")
    pod, container = pod_of(found["Deployment/birds"])
    (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "models"]
    assert mount == {"name": "models", "mountPath": "/models", "subPath": "birds/v2", "readOnly": True}
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "models"]
    assert volume["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
    assert found["NetworkPolicy/birds"]["spec"]["egress"] == []


def test_the_autoscaler_asks_for_what_the_adapter_gives(chart: Manifests) -> None:
    (rule,) = yaml.safe_load((SOURCES / "helm" / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    spec = chart["HorizontalPodAutoscaler/birds"]["spec"]
    assert chart["HorizontalPodAutoscaler/birds"]["apiVersion"] == "autoscaling/v2"
    assert spec["metrics"][0]["pods"]["metric"]["name"] == rule["name"]["as"]


def test_the_folder_at_the_top_is_the_one_of_the_package() -> None:
    assert (ROOT / "deploy").resolve() == SOURCES.resolve()
