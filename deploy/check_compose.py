"""Checks compose.yaml: its form by the Compose specification, its names, what it must and must not say."""

import copy
import importlib.util
import re
import subprocess
from pathlib import Path
from typing import Any

import compose_spec
import yaml

HERE = Path(__file__).resolve().parent
FILE = HERE / "compose/compose.yaml"
MEMBERS = {"namespaces", "mps", "server", "engine"}
DRAIN = 10 + 5
"""Seconds that a server takes to end at most: --drain-seconds, and the margin of its fronts."""
PAIRS = {("security_opt", "cap_drop"), ("ipc", "pid")}
VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")


def check() -> None:
    """Checks everything; raises AssertionError."""
    text = VARIABLE.sub(lambda found: found[2], FILE.read_text())
    assert "$" not in text.replace("$$", ""), "a variable without a default"
    document: dict[str, Any] = yaml.safe_load(text)
    parse(document)
    for broken in mistakes(document):
        try:
            parse(broken)
        except ValueError:
            continue
        raise AssertionError("the checker takes a file that is wrong")
    ask_compose(document)
    check_names(document)
    check_isolation(document["services"])
    check_reasons(FILE.read_text())
    print(
        f"compose.yaml: {len(document['services'])} services are as the Compose specification says,",
        "refer to what there is, and have a reason for every setting",
    )


def check_reasons(text: str) -> None:
    """Says that every setting of a service has a comment: above it, below its name, or with one that it goes with."""
    lines = text.splitlines()
    services, volumes = lines.index("services:"), lines.index("volumes:")
    for place, line in enumerate(lines[:volumes]):
        own = re.fullmatch(r" {4}(\w+):.*" if place > services else r" {2}(\w+):.*", line)
        if own is None or own[1] == "resources":
            continue
        above, opens = lines[place - 1].strip(), re.search(r":( &[\w-]+)?$", line) is not None
        below = opens and lines[place + 1].strip().startswith("#")
        said = above.startswith("#") or below or (own[1], above.split(":")[0]) in PAIRS
        assert said, f"no reason for: {line}"


def parse(document: dict[str, Any]) -> None:
    """Reads it strictly: an unknown key or a value of the wrong kind is a ValueError."""
    compose_spec.PyCompose.from_yaml(yaml.safe_dump(document, sort_keys=False)).to_spec()


def ask_compose(document: dict[str, Any]) -> None:
    """Has Docker Compose read the file, as `docker compose config` does; it needs no engine for that."""
    found = importlib.util.find_spec("compose")
    if found is None or found.origin is None:
        print("NOT SHOWN: docker compose config (its package has no program for this Python and machine)")
        return
    program = Path(found.origin).with_name("docker-compose")
    config = [program, "--file", FILE, "config"]
    read = subprocess.run([*config, "--services"], capture_output=True, text=True, check=False)
    assert read.returncode == 0, read.stderr
    assert not read.stderr, read.stderr
    assert set(read.stdout.split()) == set(document["services"]), read.stdout
    config[2] = "-"
    for broken in mistakes(document)[::2]:  # Compose leaves the values of `restart` and `ipc` to the engine
        text = yaml.safe_dump(broken, sort_keys=False)
        wrong = subprocess.run([*config, "--quiet"], input=text, capture_output=True, text=True, check=False)
        assert wrong.returncode, "Docker Compose takes a file that is wrong"
    version = subprocess.run([program, "version", "--short"], capture_output=True, text=True, check=True).stdout.strip()
    print(f"compose.yaml: docker compose config ({version}) takes it, and says nothing about it")


def mistakes(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the same file with a mistake in each, which the checker has to see."""
    found = []
    for key, value in (("comand", ["x"]), ("restart", "sometimes"), ("ports", ["70000:1"]), ("ipc", ["host"])):
        broken = copy.deepcopy(document)
        broken["services"]["server"][key] = value
        found.append(broken)
    return found


def check_names(document: dict[str, Any]) -> None:
    """Says that services, volumes and files that are named exist."""
    services, volumes = document["services"], document["volumes"]
    used = set()
    for name, service in services.items():
        for other in service.get("depends_on", {}):
            assert other in services, f"{name} depends on {other}"
            waits = (
                isinstance(service["depends_on"], dict)
                and service["depends_on"][other]["condition"] == "service_healthy"
            )
            off = services[other].get("healthcheck", {}).get("disable")
            assert not (waits and off), f"{name} waits for the health of {other}, which has no check"
        for space in ("pid", "ipc"):
            kind, _, other = service.get(space, "").partition(":")
            assert kind != "service" or other in services, f"{name}: {space} of {other}"
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (FILE.parent / source).exists(), f"{name}: no {source}"
            else:
                assert source in volumes, f"{name}: no volume {source}"
                used.add(source)
    assert used == set(volumes), f"volumes that nobody uses: {set(volumes) - used}"


def check_isolation(services: dict[str, Any]) -> None:
    """Says that the containers of topkd share what they must, and have no more than they need."""
    users = {services[name]["user"] for name in MEMBERS}
    assert users == {"10001:10001"}, "MPS serves one user"
    for name in MEMBERS:
        service = services[name]
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert not service.get("privileged"), name
        assert not service.get("cap_add"), name
        assert "no-new-privileges:true" in service["security_opt"], name
        if name != "namespaces":
            assert service["pid"] == service["ipc"] == "service:namespaces", (
                f"{name}: PID numbers and /dev/shm must be shared"
            )
    for name, service in services.items():
        for space in ("pid", "ipc", "network_mode", "uts", "userns_mode"):
            assert service.get(space) != "host", f"{name}: {space} of the host"
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), f"{name}: {port} is open to the network"
    sockets = {
        name: [v for v in services[name].get("volumes", []) if v.startswith("sockets:")]
        for name in ("server", "engine")
    }
    assert sockets == {"server": ["sockets:/run/topkd"], "engine": ["sockets:/run/topkd:ro"]}
    grace = int(re.search(r"\d+", services["server"]["stop_grace_period"])[0])  # type: ignore[index]
    assert grace > DRAIN, "the grace period is shorter than the drain"
