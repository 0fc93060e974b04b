"""Writes the hashed locks of the image: every wheel that is installed in it, by version and SHA-256.

    python deploy/image/lock.py        write them (asks the package index; needs uv, see deploy/requirements.txt)
    python deploy/image/lock.py check  say whether they fit pyproject.toml and the constraints (asks nobody)

`base.lock` is all but torch and the compiler, `torch.lock` is torch with CUDA, `compiler.lock` the kernel compiler,
`build.lock` what builds topkd's own wheel.
"""

import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
CONSTRAINTS = [ROOT / f"constraints{name}.txt" for name in ("", "-torch", "-dev")]
PYTHON, PLATFORM = "3.12", "x86_64-manylinux_2_28"
TORCH = re.compile(r"torch|triton|cuda-toolkit|nvidia-(?!cutlass)")
COMPILER = re.compile(r"nvidia-cutlass")
PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s;\\]+)", re.MULTILINE)
NAME = re.compile(r"[A-Za-z0-9._-]+")


def normal(name: str) -> str:
    """Returns a package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements() -> tuple[list[str], list[str]]:
    """Returns what the image needs by pyproject.toml: to run (the compiler with it), and to build the wheel."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    wanted = list(project["project"]["dependencies"])
    for extra in ("gpu-server", "cpu-server", "compiler"):
        wanted += [line for line in extras[extra] if not line.startswith("topkd[")]
    return wanted, project["build-system"]["requires"]


def resolve(wanted: list[str]) -> dict[str, str]:
    """Returns the lock's block of every package, by name."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "in.txt"), Path(folder, "out.txt")
        source.write_text("\n".join(wanted))
        command = ["uv", "pip", "compile", str(source), "-o", str(target), "--quiet", "--no-header", "--no-annotate"]
        command += ["--generate-hashes", "--python-version", PYTHON, "--python-platform", PLATFORM]
        for path in CONSTRAINTS:
            command += ["-c", str(path)]
        subprocess.run(command, check=True)
        blocks = re.split(r"\n(?=\S)", target.read_text().strip())
    return {normal(PIN.match(block)[1]): block for block in blocks}  # type: ignore[index]


def write() -> None:
    """Writes the locks."""
    running, building = requirements()
    found = resolve(running)
    parts = {
        "base": [block for name, block in found.items() if not TORCH.match(name) and not COMPILER.match(name)],
        "torch": [block for name, block in found.items() if TORCH.match(name)],
        "compiler": [block for name, block in found.items() if COMPILER.match(name)],
        "build": list(resolve(building).values()),
    }
    for name, blocks in parts.items():
        head = f"# Made by `make image-lock` for Python {PYTHON}; deploy/image/lock.py says what is where.\n"
        (FOLDER / f"{name}.lock").write_text(head + "\n".join(sorted(blocks)) + "\n")


def pins(path: Path) -> dict[str, str]:
    """Returns the versions that a file pins, by package."""
    return {normal(name): version for name, version in PIN.findall(path.read_text())}


def problems() -> list[str]:
    """Returns what does not fit: locks against constraints, requirements and hashes."""
    locks = {path.name: pins(path) for path in sorted(FOLDER.glob("*.lock"))}
    locked = {name: version for one in locks.values() for name, version in one.items()}
    known = {name: version for path in CONSTRAINTS for name, version in pins(path).items()}
    found = [
        f"{file}: {name} is {version}, in the constraints {known[name]}"
        for file, one in locks.items()
        for name, version in one.items()
        if known.get(name, version) != version
    ]
    running, building = requirements()
    for line in (*running, *building):
        name = normal(NAME.match(line)[0])  # type: ignore[index]
        if name not in locked:
            found.append(f"{name}, which pyproject.toml names, is in no lock")
    for path in FOLDER.glob("*.lock"):
        blocks = re.split(r"\n(?=\S)", path.read_text().strip())[1:]
        found += [f"{path.name}: {block.split()[0]} has no hash" for block in blocks if "--hash=sha256:" not in block]
    return found


def main() -> int:
    """Writes or checks; returns 1 if something does not fit."""
    if sys.argv[1:] != ["check"]:
        write()
    wrong = problems()
    print(*wrong, f"locks of the image: {len(wrong)} problems", sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
