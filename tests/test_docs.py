"""What the documentation says is so."""

from __future__ import annotations

import contextlib
import io
import linecache
import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

import topkd
from tests.compiled import QUIET, needs_compiler
from tests.conftest import Server
from topkd._doctor import examine
from topkd._doctor_rules import Facts
from topkd.cli import build_parser
from topkd.server.config import ServerLimits
from topkd.server.metrics import ServerMetrics

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
OPERATIONS = (ROOT / "docs/operations.md").read_text()
EXAMPLE = re.compile(r"```python\n(?P<code>.*?)```\n\n```text\n(?P<printed>.*?)```", re.DOTALL)


@QUIET
@pytest.mark.parametrize(
    "page",
    ["README.md", "docs/client.md", "docs/selection.md", pytest.param("docs/torch.md", marks=needs_compiler)],
)
def test_examples_print_what_the_page_says(page: str, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPKD_SOCKET_DIR", str(server.socket_dir))
    text = (ROOT / page).read_text()
    examples = list(EXAMPLE.finditer(text))
    assert len(examples) == text.count("```python"), "every example says what it prints"
    for example in examples:
        linecache.cache[page] = (len(example["code"]), None, example["code"].splitlines(True), page)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(example["code"], page, "exec"), {"__name__": "example"})
        assert printed.getvalue() == example["printed"]


def test_every_metric_is_listed() -> None:
    registry = CollectorRegistry()
    ServerMetrics(registry)
    names = [family.name + ("_total" if family.type == "counter" else "") for family in registry.collect()]
    assert [name for name in names if f"`{name}`" not in OPERATIONS] == []


def test_every_rule_of_the_doctor_is_listed() -> None:
    assert [finding.rule for finding in examine(Facts()) if f"| `{finding.rule}` |" not in OPERATIONS] == []


def test_troubleshooting_knows_every_rule_and_quotes_errors_as_they_are() -> None:
    part = OPERATIONS.split("## Troubleshooting\n")[1]
    errors, rules = part.split("By the doctor's rules")
    assert [finding.rule for finding in examine(Facts()) if f"| `{finding.rule}` |" not in rules] == []
    package = Path(str(topkd.__file__)).parent
    folders = (package, package / "server", package / "kernels")
    sources = "\n".join(path.read_text() for folder in folders for path in folder.glob("*.py"))
    quoted = re.findall(r"^\| `(.+?)` \|", errors, re.MULTILINE)
    assert len(quoted) > 20
    assert [text for text in quoted if text not in sources] == []


def test_every_option_and_limit_of_serve_is_listed() -> None:
    help_text = build_parser()._subparsers._group_actions[0].choices["serve"].format_help()  # type: ignore[union-attr,call-overload,index]
    options = set(re.findall(r"--[a-z-]+", help_text)) - {"--help", "--json"}
    limits = {name.removeprefix("max_") for name in ServerLimits.__dataclass_fields__}
    assert [name for name in options if f"`{name}" not in OPERATIONS] == []
    assert [name for name in limits if f"`{name}`" not in OPERATIONS] == []
