"""Checks the chart: lint, values, every variant strictly against Kubernetes' schemas, and what its pods must be."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import definitions
import helm_python
import jsonschema
import kubernetes_validate
import yaml

HERE = Path(__file__).resolve().parent
CHART = HERE / "helm/topkd"
VERSIONS = ("1.34", "1.37")
MANIFESTS = {"default": "node.yaml", "mps": "node-mps.yaml", "sidecar": "sidecar.yaml"}
REFUSED: list[dict[str, Any]] = [
    {"shape": "deployment"},
    {"server": {"devices": "gpu"}},
    {"server": {"devices": "cpu:0"}},
    {"server": {"preStopSeconds": 0}},
    {"server": {"limits": {"wishes": 3}}},
    {"server": {"limits": {"sessions": 0}}},
    {"gpu": {"mode": "some"}},
    {"sockets": {"hostPath": "run/topkd"}},
    {"user": 0},
    {"tcp": {"enabled": True}},
    {"tcp": {"enabled": True, "tokenSecret": "t"}},
    {"tcp": {"enabled": True, "tlsSecret": "t"}},
    {"tcp": {"enabled": True, "clientCaSecret": "c", "allowInsecure": True}},
    {"metrics": {"monitor": "podmonitor"}},
    {"metrics": {"port": 70000}},
    {"networkPolicy": {"metricsFrom": [{"podselector": {}}]}},
    {"updateStrategy": {"maxUnavailable": 0}},
    {"imagee": {}},
]
"""Values that the schema must not take."""
CPU: dict[str, Any] = {"server": {"devices": "cpu:1"}, "engine": {"device": "cpu"}}
WITHOUT: dict[str, Any] = {"sidecar": {"gpu": {"mode": "none"}}}
CONTRARY: list[tuple[str, dict[str, Any]]] = [
    ("mps.enabled with gpu.mode none", {"mps": {"enabled": True}, "gpu": {"mode": "none"}, **CPU}),
    ("mps.enabled with gpu.mode shared", {"mps": {"enabled": True}, "gpu": {"mode": "shared"}}),
    ("mps.enabled with sidecar.gpu.mode none", {"shape": "sidecar", "mps": {"enabled": True}, **WITHOUT, **CPU}),
    (
        "mps.enabled with sidecar.gpu.mode shared",
        {"shape": "sidecar", "mps": {"enabled": True}, "sidecar": {"gpu": {"mode": "shared"}}},
    ),
    ("server.devices is all with gpu.mode none", {"gpu": {"mode": "none"}}),
    ("server.devices is all with sidecar.gpu.mode none", {"shape": "sidecar", **WITHOUT}),
    ("server.devices is cpu:1 with gpu.mode all", CPU),
    ("server.devices is cpu:1 with sidecar.gpu.mode claim", {"shape": "sidecar", **CPU}),
    ("engine.device is cpu with server.devices all", {"engine": {"enabled": True, "device": "cpu"}}),
    (
        "engine.device is cuda with server.devices cpu:1",
        {"gpu": {"mode": "none"}, "server": {"devices": "cpu:1"}, "engine": {"enabled": True}},
    ),
    ("a sidecar's pod is its engine's", {"shape": "sidecar", "networkPolicy": {"metricsFrom": [{"podSelector": {}}]}}),
    ("a sidecar's pod is its engine's", {"shape": "sidecar", "networkPolicy": {"tcpFrom": [{"podSelector": {}}]}}),
]
"""Values that are right by themselves and do not go together, and what the chart says of them."""

Resource = dict[str, Any]


def check() -> None:
    """Checks everything; raises AssertionError."""
    sets = value_sets()
    report = helm_python.lint(CHART)
    worst = [message for message in report["messages"] if message["severity"] >= 2]
    assert not report["errors"], report["errors"]
    assert not worst, worst
    with helm_python.Chart.load(CHART) as chart:
        check_refusals(chart)
        rendered = {name: render(chart, values) for name, values in sets.items()}
        assert len(rendered) >= 6, sets.keys()
    check_validator([resource for resources in rendered.values() for resource in resources])
    count = 0
    for name, resources in rendered.items():
        for resource in resources:
            validate(resource, f"{name}: {resource['kind']} {resource['metadata']['name']}")
            count += 1
        check_pods(name, resources)
        check_references(name, resources)
        check_acting(name, resources)
    print(f"chart: lint is clean; {len(REFUSED)} wrong values and {len(CONTRARY)} contradictions are refused")
    print(
        f"chart: {count} resources of {len(rendered)} value sets are strictly valid for Kubernetes",
        " and ".join(VERSIONS),
    )
    print(f"chart: {', '.join(sorted(definitions.KINDS))} are by the definitions of their operator, strictly")
    check_rendered(rendered)


def value_sets() -> dict[str, dict[str, Any]]:
    """Returns the values of every variant that is checked."""
    return {path.stem: yaml.safe_load(path.read_text()) or {} for path in sorted((CHART / "ci").glob("*.yaml"))}


def render(chart: helm_python.Chart, values: dict[str, Any]) -> list[Resource]:
    """Returns the resources that the chart makes of some values."""
    made = chart.render(values, name="topkd", namespace="topkd")
    notes = [text for path, text in made.items() if path.endswith("NOTES.txt")]
    assert len(notes) == 1, made.keys()
    assert notes[0].strip(), "the notes are empty"
    texts = [made[path] for path in sorted(made) if not path.endswith("NOTES.txt")]
    return [resource for text in texts for resource in yaml.safe_load_all(text) if resource]


def check_refusals(chart: helm_python.Chart) -> None:
    """Says that wrong values are refused, each for itself."""
    for values in REFUSED:
        try:
            render(chart, values)
        except helm_python.HelmError:
            continue
        raise AssertionError(f"the chart takes {values}")
    for reason, values in CONTRARY:
        said = "nothing"
        try:
            render(chart, values)
        except helm_python.HelmError as error:
            said = str(error)
        assert reason in said, f"of {values} the chart says: {said}"


def validate(resource: Resource, name: str) -> None:
    """Validates strictly: a field that there is not, or of the wrong type, raises."""
    for version in VERSIONS:
        try:
            if resource["kind"] in definitions.KINDS:
                definitions.validate(resource, version)
            else:
                kubernetes_validate.validate(resource, version, strict=True)
        except (jsonschema.ValidationError, kubernetes_validate.ValidationError) as error:
            raise AssertionError(f"{name}: {'.'.join(map(str, error.path))}: {error.message}") from None


MISTAKES: dict[str, list[tuple[str, Any]]] = {
    "DaemonSet": [
        ("spec.template.spec.hostPid", True),
        ("spec.template.spec.terminationGracePeriodSeconds", "long"),
    ],
    "PodMonitor": [
        ("spec.podMetricEndpoints", []),
        ("spec.podMetricsEndpoints.0.interval", "soon"),
        ("spec.podMetricsEndpoints.0.relabelings.0.sourceLabel", "x"),
        ("metadata.label", {}),
    ],
    "ServiceMonitor": [("spec.endpoints.0.port", 9477), ("apiVersion", "monitoring.coreos.com/v2")],
    "PrometheusRule": [("spec.groups.0.rules.0.expression", "1"), ("spec.groups.0.rules.0.for", "a while")],
}
"""Places in a resource of some kind, and values there that the validator must not take."""


def check_validator(resources: list[Resource]) -> None:
    """Says that the validator sees mistakes: fields that there are not, values that may not be."""
    for kind, mistakes in MISTAKES.items():
        right = next(resource for resource in resources if resource["kind"] == kind)
        for path, value in mistakes:
            broken = copy.deepcopy(right)
            *parents, last = (int(part) if part.isdigit() else part for part in path.split("."))
            place: Any = broken
            for part in parents:
                place = place[part]
            place[last] = value
            try:
                validate(broken, "broken")
            except AssertionError:
                continue
            raise RuntimeError(f"the validator takes {kind} {path}: {value!r}")


def pods(resources: list[Resource]) -> Iterator[tuple[str, Resource]]:
    """Yields the name and spec of every pod that some resources make."""
    for resource in resources:
        if resource["kind"] in ("DaemonSet", "Deployment"):
            yield resource["metadata"]["name"], resource["spec"]["template"]["spec"]
        elif resource["kind"] == "Pod":
            yield resource["metadata"]["name"], resource["spec"]


def check_pods(variant: str, resources: list[Resource]) -> None:
    """Checks users, rights, probes, grace periods, mounts."""
    for name, pod in pods(resources):
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        mounted = set()
        assert pod["automountServiceAccountToken"] is False
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            where = f"{variant}: {name}/{container['name']}"
            rights = container["securityContext"]
            assert rights["readOnlyRootFilesystem"], where
            assert not rights["allowPrivilegeEscalation"], where
            assert rights["capabilities"]["drop"] == ["ALL"], where
            if container["name"] == "directories":
                assert set(rights["capabilities"]["add"]) <= {"CHOWN", "FOWNER", "FSETID"}, where
            else:
                assert rights["runAsNonRoot"], where
                assert rights["runAsUser"] > 0, where
                assert "add" not in rights["capabilities"], where
            assert "memory" in container["resources"]["limits"], where
            mounted |= {mount["name"] for mount in container.get("volumeMounts", [])}
            if container["name"] == "server":
                check_server(where, pod, container)
            if container["name"] == "engine":
                check_engine(where, pod, container)
        assert mounted == volumes, f"{variant}: {name}: volumes {volumes}, mounted {mounted}"


def check_server(where: str, pod: Resource, container: Resource) -> None:
    """Checks a server's container."""
    arguments = dict(text.partition("=")[::2] for text in container["args"] if text.startswith("--"))
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert arguments["--health-address"].endswith(f":{ports['health']}"), where
    assert arguments["--metrics-port"] == str(ports["metrics"]), where
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["grpc"]["port"] == ports["health"], where
    assert container["livenessProbe"]["grpc"]["service"] == "live", (
        "one broken GPU must not restart the others' servers"
    )
    assert "service" not in container["readinessProbe"]["grpc"], where
    stop = container["lifecycle"]["preStop"]["sleep"]["seconds"] + float(arguments["--drain-seconds"]) + 5
    assert pod["terminationGracePeriodSeconds"] > stop, f"{where}: killed before the drain is over"
    shared = pod.get("hostPID") or pod.get("shareProcessNamespace")
    assert shared or arguments["--devices"].startswith("cpu"), f"{where}: PID numbers may collide"
    assert ("--tcp" in arguments) == ("tcp-0" in ports), where


def check_engine(where: str, pod: Resource, container: Resource) -> None:
    """Checks an engine's container: that it looks for its server where that is, and may enter there."""
    device = container["command"][-1]
    sockets = next(each["value"] for each in container["env"] if each["name"] == "TOPKD_SOCKET_DIR")
    assert sockets.endswith("/cpu-0") == (device == "cpu"), f"{where}: {device}, {sockets}"
    beside = next((each for each in pod.get("initContainers", []) if each["name"] == "server"), None)
    if beside is not None:
        own = next(each["value"] for each in beside["env"] if each["name"] == "TOPKD_SOCKET_DIR")
        assert sockets.removesuffix("/cpu-0") == own, where
    resources = container["resources"]
    has_gpu = bool(resources.get("claims")) or any("/" in name for name in resources["limits"])
    assert has_gpu == (device == "cuda"), f"{where}: {resources}"
    mount = next(each for each in container["volumeMounts"] if each["name"] == "sockets")
    assert mount["readOnly"], f"{where}: an engine makes no sockets"
    assert pod["securityContext"]["supplementalGroups"], where


def check_acting(variant: str, resources: list[Resource]) -> None:
    """Says that budgets can keep something from going, and that policies are of pods without an engine."""
    for resource in resources:
        if resource["kind"] == "PodDisruptionBudget":
            [replicas] = [each["spec"]["replicas"] for each in resources if each["kind"] == "Deployment"]
            assert resource["spec"]["maxUnavailable"] < replicas, f"{variant}: a budget that does nothing"
        if resource["kind"] == "NetworkPolicy":
            part = resource["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
            assert part == "server", f"{variant}: the policy is of the {part}"


def check_references(variant: str, resources: list[Resource]) -> None:
    """Checks that selectors select, and that names lead somewhere."""
    labels = [
        resource["spec"]["template"]["metadata"]["labels"]
        if "template" in resource["spec"]
        else resource["metadata"]["labels"]
        for resource in resources
        if resource["kind"] in ("DaemonSet", "Deployment", "Pod")
    ]
    services = [resource["metadata"]["labels"] for resource in resources if resource["kind"] == "Service"]
    names = [(resource["kind"], resource["metadata"]["name"]) for resource in resources]
    assert len(set(names)) == len(names), f"{variant}: {names}"
    for resource in resources:
        spec, kind = resource.get("spec", {}), resource["kind"]
        selector = spec.get("podSelector") or spec.get("selector")
        if not selector:
            continue
        wanted = selector.get("matchLabels", selector)
        among = services if kind == "ServiceMonitor" else labels
        chosen = [one for one in among if wanted.items() <= one.items()]
        assert len(chosen) == 1, f"{variant}: {kind} {resource['metadata']['name']} selects {len(chosen)}"
    for name, pod in pods(resources):
        for claim in pod.get("resourceClaims", []):
            assert ("ResourceClaimTemplate", claim["resourceClaimTemplateName"]) in names, f"{variant}: {name}"
        for volume in pod.get("volumes", []):
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in names, f"{variant}: {name}"


def rendered_texts() -> dict[Path, str]:
    """Returns the files that are made from the chart: its README, and plain manifests of both shapes."""
    texts = {CHART / "README.md": readme()}
    with helm_python.Chart.load(CHART) as chart:
        for name, file in MANIFESTS.items():
            head = f"# Made from deploy/helm/topkd with the values {name} by `make deploy-render`; namespace topkd.\n"
            values = value_sets()[name]
            kept = [
                one for one in render(chart, values) if "helm.sh/hook" not in one["metadata"].get("annotations", {})
            ]
            for one in kept:
                one["metadata"]["namespace"] = "topkd"
            texts[HERE / "manifests" / file] = head + yaml.safe_dump_all(kept, sort_keys=False, width=120)
    return texts


def check_rendered(_: dict[str, list[Resource]]) -> None:
    """Says whether the files made from the chart are those that it makes now."""
    old = [
        path.relative_to(HERE)
        for path, text in rendered_texts().items()
        if not path.exists() or path.read_text() != text
    ]
    assert not old, f"{', '.join(map(str, old))}: not what the chart makes; run make deploy-render"
    print("chart: README.md and the plain manifests are those of the chart as it stands")


def write_rendered() -> None:
    """Writes them."""
    for path, text in rendered_texts().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def readme() -> str:
    """Returns the chart's README: how to install it, and a table of its values from the comments in values.yaml."""
    rows = ["| value | default | meaning |", "|---|---|---|"]
    path: list[str] = []
    comment: list[str] = []
    for line in (CHART / "values.yaml").read_text().splitlines():
        if found := re.match(r"\s*# (-- )?(.*)", line):
            comment = [found[2]] if found[1] else [*comment, found[2]]
            continue
        found = re.match(r"( *)([A-Za-z]+):(.*)", line)
        if found is None:
            continue
        path = [*path[: len(found[1]) // 2], found[2]]
        if comment or found[3].strip():
            default = f"`{found[3].strip()}`" if found[3].strip() else ""
            rows.append(f"| `{'.'.join(path)}` | {default} | {' '.join(comment)} |")
        comment = []
    metadata = yaml.safe_load((CHART / "Chart.yaml").read_text())
    head = (HERE / "helm/README.head.txt").read_text()
    sets = "\n".join(
        f"- [{path.stem}](ci/{path.name}): {path.read_text().splitlines()[0].lstrip('# ')}"
        for path in sorted((CHART / "ci").glob("*.yaml"))
    )
    return head.replace("VERSION", metadata["version"]).replace("SETS", sets).replace("VALUES", "\n".join(rows))
