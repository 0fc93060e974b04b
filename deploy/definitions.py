"""Resources that are not Kubernetes' own, strictly by the definitions of those who made them.

    python deploy/definitions.py CRD.yaml...      take definitions into deploy/schemas, their prose left out

A cluster prunes fields that a definition does not have, without a word: here they are errors.
"""

import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

__all__ = ["KINDS", "validate"]

FOLDER = Path(__file__).resolve().parent / "schemas"
KINDS = frozenset(path.stem for path in FOLDER.glob("*.json"))
"""Kinds that have a definition here."""
VERSION = "operator.prometheus.io/version"
_PROSE = ("description", "x-kubernetes-list-map-keys", "x-kubernetes-list-type", "x-kubernetes-map-type")


def validate(resource: dict[str, Any], version: str) -> None:
    """Raises jsonschema.ValidationError or kubernetes_validate.ValidationError for what the definition has not.

    Args:
        resource: of one of KINDS.
        version: of Kubernetes, whose metadata every resource has.
    """
    definition = json.loads((FOLDER / f"{resource['kind']}.json").read_text())
    properties = definition["schema"]["properties"]
    properties["apiVersion"] = {"const": definition["apiVersion"]}
    jsonschema.validate(resource, _closed(definition["schema"]))
    stand_in = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": resource["metadata"]}
    kubernetes_validate.validate(stand_in, version, strict=True)


def _closed(schema: Any, *, of_properties: bool = False) -> Any:
    """Returns a schema that takes no property that it does not name, but for `metadata`, which is Kubernetes'.

    Go lets a pattern ignore case from any place on, Python from its beginning.
    """
    if isinstance(schema, str):
        return "(?i)^" + schema.removeprefix("^(?i)") if schema.startswith("^(?i)") else schema
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {
        name: _closed(each, of_properties=name == "properties" and not of_properties) for name, each in schema.items()
    }
    if not of_properties and "properties" in closed:
        closed["additionalProperties"] = False
    return closed


def _spare(schema: Any, *, of_properties: bool = False) -> Any:
    """Returns a schema without what only people and the API server's merging read."""
    if isinstance(schema, list):
        return [_spare(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: _spare(each, of_properties=name == "properties" and not of_properties)
        for name, each in schema.items()
        if of_properties or name not in _PROSE
    }


def main(paths: list[str]) -> None:
    """Takes definitions: the version that is stored of each."""
    for path in paths:
        definition = yaml.safe_load(Path(path).read_text())
        spec, annotations = definition["spec"], definition["metadata"]["annotations"]
        [stored] = [version for version in spec["versions"] if version["storage"]]
        taken = {
            "$comment": f"Prometheus operator {annotations[VERSION]}, Apache-2.0; prose left out",
            "apiVersion": f"{spec['group']}/{stored['name']}",
            "schema": _spare(stored["schema"]["openAPIV3Schema"]),
        }
        (FOLDER / f"{spec['names']['kind']}.json").write_text(json.dumps(taken, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
