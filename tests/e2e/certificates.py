"""Certificates for one run, made by the `openssl` command."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Certificate:
    """A self-signed certificate, which is its own authority."""

    certificate: Path
    key: Path


def make(folder: Path, name: str) -> Certificate:
    """Makes a certificate for this host that holds for a day; skips the test where there is no openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl command to make certificates with")
    made = Certificate(folder / f"{name}.pem", folder / f"{name}.key")
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "1",
    ]
    command += ["-keyout", str(made.key), "-out", str(made.certificate), "-subj", f"/CN={name}"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    return made
