"""`topkd select`: a selection from the rows of a file, by a server or in this process."""

from __future__ import annotations

import argparse
import time
import zipfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from topkd._cli_common import CommandError, add_json, add_target, connect, number, print_json, progress

__all__ = ["add_commands"]

_DESCRIPTION = """\
Select the k best scores of every row of a two-dimensional array (a vector is one row).

numpy has no bfloat16: give its bit patterns as uint16 with --dtype bfloat16.
"""
_BITS = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32}
_SHOWN = 6
_UNREADABLE = (ValueError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError)
"""What numpy and zipfile raise on a file that is something else, damaged, or packed or encrypted in other ways."""


class _Rows(NamedTuple):
    """Score rows read from a file: floats, or bit patterns of `dtype`."""

    name: str
    data: np.ndarray[Any, Any]
    dtype: str


class _Answer(NamedTuple):
    """What a selection gave, as numpy arrays."""

    indices: np.ndarray[Any, Any]
    values: np.ndarray[Any, Any] | None
    kernel: str
    backend: str
    seconds: float
    device_seconds: float | None


def add_commands(commands: Any) -> None:
    """Adds the command to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "select",
        help="select from the rows of a .npy or .npz file",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("file", type=Path, metavar="FILE", help="a .npy file, or a .npz archive")
    add("-k", type=int, required=True, metavar="N", help="elements selected per row")
    add("--array", metavar="NAME", help="array of a .npz archive (default: its only one of two dimensions)")
    add("--dtype", choices=list(_BITS), help="what the array's unsigned integers are the bit patterns of")
    add(
        "--lengths",
        metavar="N[,N...]|NAME",
        help="valid scores of each row (one number: of all), or an array of the archive that holds them",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--largest", action="store_true", default=True, help="select the largest (the default)")
    which.add_argument("--smallest", dest="largest", action="store_false", help="select the smallest")
    add("--order", choices=["any", "index", "value"], default="any", help="order inside a row's output (default any)")
    add(
        "--ties",
        choices=["any", "lowest", "highest"],
        default="any",
        help="which of equal scores are taken (default any)",
    )
    add("--group", type=int, metavar="N", help="select groups of N scores by their maximum")
    add("--kernel", metavar="NAME", help="force one kernel family")
    add("--values", action="store_true", help="the selected scores too")
    add("--out", type=Path, metavar="FILE.npz", help="write indices (and values) there")
    add("--local", action="store_true", help="in this process, without a server (needs torch)")
    add_target(parser)
    add_json(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    with progress(f"reading {args.file}"):
        rows, lengths = _read(args)
    options: dict[str, Any] = {"largest": args.largest, "order": args.order, "ties": args.ties, "values": args.values}
    if args.group is not None:
        options["group"] = args.group
    if args.kernel is not None:
        options["kernel"] = args.kernel
    if lengths is not None:
        options["lengths"] = lengths
    count, width = rows.data.shape
    with progress(f"selecting {args.k} of {count} x {width}"):
        answer = _select_here(rows, args.k, options) if args.local else _select_there(args, rows, options)
    if args.out is not None:
        _write(args.out, answer)
    if args.json:
        print_json(_document(args, rows, answer), indent=None)
    else:
        print(*_lines(args, rows, answer), sep="\n")
    return 0


def _read(args: argparse.Namespace) -> tuple[_Rows, np.ndarray[Any, Any] | None]:
    """Reads the rows and their lengths."""
    arrays = _arrays(args.file)
    name, data = _choose(args, arrays)
    if data.ndim == 1:
        data = data[None, :]
    if data.ndim != 2:
        raise CommandError(f"{name} has {data.ndim} dimensions; rows are an array of two")
    if data.dtype.kind == "u" and args.dtype is not None and data.dtype == _BITS[args.dtype]:
        dtype = args.dtype
    elif data.dtype in (np.float16, np.float32) and args.dtype in (None, data.dtype.name):
        dtype = data.dtype.name
    else:
        raise CommandError(
            f"{name} is of {data.dtype}; scores are float32, float16, or uint16 and uint32 bit patterns with --dtype"
        )
    data = np.ascontiguousarray(data)
    return _Rows(name, data, dtype), _lengths(args.lengths, arrays, len(data))


def _arrays(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Reads the arrays of a file; members of an archive that are none are left out."""
    try:
        with path.open("rb") as file:  # np.load leaves a file of its own open where it fails
            loaded = np.load(file, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                return {path.name: loaded}
            with loaded:
                members = {name: loaded[name] for name in loaded.files}
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror or error}") from None
    except MemoryError:
        raise CommandError(f"{path} says that it holds more than the memory of this machine") from None
    except _UNREADABLE:
        raise CommandError(f"{path} is no .npy or .npz file of plain numbers, or it is damaged") from None
    arrays = {name: member for name, member in members.items() if isinstance(member, np.ndarray)}
    if not arrays:
        raise CommandError(f"{path} holds no array")
    return arrays


def _choose(args: argparse.Namespace, arrays: dict[str, np.ndarray[Any, Any]]) -> tuple[str, np.ndarray[Any, Any]]:
    if args.array is not None:
        if args.array not in arrays:
            raise CommandError(f"{args.file} has no array {args.array}; it has {', '.join(arrays)}")
        return f"{args.file.name}:{args.array}", arrays[args.array]
    if len(arrays) == 1:
        return next(iter(arrays.items()))
    matrices = [name for name, array in arrays.items() if array.ndim == 2]
    if len(matrices) != 1:
        raise CommandError(f"{args.file} has several arrays: choose with --array, of {', '.join(matrices or arrays)}")
    return f"{args.file.name}:{matrices[0]}", arrays[matrices[0]]


def _lengths(text: str | None, arrays: dict[str, np.ndarray[Any, Any]], rows: int) -> np.ndarray[Any, Any] | None:
    if text is None:
        return None
    if text in arrays:
        given = arrays[text].reshape(-1)
        if given.dtype.kind not in "iu":
            raise CommandError(f"--lengths {text}: the array is of {given.dtype}, not of integers")
    else:
        try:
            given = np.array([int(part) for part in text.split(",")], np.int64)
        except ValueError:
            raise CommandError(f"--lengths {text}: it must be integers, or an array of the file") from None
    if len(given) == 1:
        given = np.repeat(given, rows)
    if len(given) != rows:
        raise CommandError(f"--lengths gives {len(given)} lengths for {rows} rows")
    lengths: np.ndarray[Any, Any] = np.clip(given, -(2**31), 2**31 - 1).astype(np.int32)
    return lengths


def _select_here(rows: _Rows, k: int, options: dict[str, Any]) -> _Answer:
    try:
        import torch

        from topkd import kernels
    except ModuleNotFoundError as error:
        raise CommandError(
            f"--local needs the package {error.name}, which is not installed: pip install torch"
        ) from None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scores, options = _on_device(rows, options, device)
    started = time.perf_counter()
    try:
        request = kernels.validate_select(scores, k, **options)
        result = kernels.run_select(request)
    except (TypeError, ValueError) as error:
        raise CommandError(str(error)) from None
    indices = result.indices.cpu().numpy()
    took = time.perf_counter() - started
    values = None if result.values is None else _to_floats(result.values)
    return _Answer(indices, values, kernels.choose(request)[0], f"{device}, in process", took, None)


def _select_there(args: argparse.Namespace, rows: _Rows, options: dict[str, Any]) -> _Answer:
    with connect(args) as client:
        backend = client.info().device.backend.value
        scores, options = _on_device(rows, options, "cuda") if _has_cuda(backend) else (_on_host(rows), options)
        started = time.perf_counter()
        result = client.select_topk(scores, args.k, wait="host", **options)
        took = time.perf_counter() - started
        indices = result.indices if isinstance(result.indices, np.ndarray) else result.indices.cpu().numpy()
        values = None if result.values is None else _to_floats(result.values)
        return _Answer(np.array(indices), values, result.kernel, f"{backend} server", took, result.device_time)


def _has_cuda(backend: str) -> bool:
    """Says whether this process can put tensors on the server's GPU."""
    if backend != "cuda":
        return False
    try:
        import torch
    except ModuleNotFoundError:
        return False  # rows then travel in the message
    return torch.cuda.is_available()


def _on_host(rows: _Rows) -> Any:
    """Returns the rows as a numpy array, or as a torch tensor where numpy lacks the type."""
    if rows.data.dtype.kind == "f":
        return rows.data
    if rows.dtype != "bfloat16":
        return rows.data.view(rows.dtype)
    try:
        import ml_dtypes
    except ModuleNotFoundError:
        try:
            return _as_torch(rows)
        except ModuleNotFoundError:
            raise CommandError("bfloat16 needs the package ml_dtypes, or torch: pip install ml_dtypes") from None
    return rows.data.view(ml_dtypes.bfloat16)


def _on_device(rows: _Rows, options: dict[str, Any], device: str) -> tuple[Any, dict[str, Any]]:
    """Returns the rows, and the options, with their arrays as torch tensors on a device."""
    import torch

    placed = {
        name: torch.from_numpy(value).to(device) if isinstance(value, np.ndarray) else value
        for name, value in options.items()
    }
    return _as_torch(rows).to(device), placed


def _as_torch(rows: _Rows) -> Any:
    import torch

    if rows.data.dtype.kind == "f":
        return torch.from_numpy(rows.data)
    carrier = np.int16 if rows.data.itemsize == 2 else np.int32
    return torch.from_numpy(rows.data.view(carrier)).view(getattr(torch, rows.dtype))


def _to_floats(values: Any) -> np.ndarray[Any, Any]:
    """Returns scores as float32, which holds every type's values."""
    if not isinstance(values, np.ndarray):
        values = values.float().cpu().numpy()
    return np.array(values, np.float32)


def _write(path: Path, answer: _Answer) -> None:
    arrays = {"indices": answer.indices} | ({} if answer.values is None else {"values": answer.values})
    try:
        with path.open("wb") as file:  # a path alone would get a suffix where it has none
            np.savez(file, **arrays)  # type: ignore[arg-type]  # its stub takes the names for the keyword allow_pickle
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from None


def _document(args: argparse.Namespace, rows: _Rows, answer: _Answer) -> dict[str, Any]:
    values = None if answer.values is None else [[number(v) for v in row] for row in answer.values.tolist()]
    return {
        "array": rows.name,
        "rows": rows.data.shape[0],
        "width": rows.data.shape[1],
        "dtype": rows.dtype,
        "k": args.k,
        "by": answer.backend,
        "kernel": answer.kernel,
        "seconds": answer.seconds,
        "device_seconds": answer.device_seconds,
        "indices": answer.indices.tolist(),
        "values": values,
    }


def _lines(args: argparse.Namespace, rows: _Rows, answer: _Answer) -> list[str]:
    count, width = rows.data.shape
    lines = [
        f"{rows.name}: {count} x {width} {rows.dtype}, k = {args.k}, {answer.backend}, kernel {answer.kernel}, "
        f"{answer.seconds * 1e3:.2f} ms",
        f"{'row':>5}  {'selected':>8}  indices",
    ]
    for row, indices in enumerate(answer.indices):
        kept = indices >= 0
        more = " ..." if len(indices) > _SHOWN else ""
        line = f"{row:>5}  {int(kept.sum()):>8}  {' '.join(map(str, indices[:_SHOWN].tolist()))}{more}"
        if answer.values is not None and kept.any():
            shown = answer.values[row][kept[: answer.values.shape[1]]]
            line += f"   values {np.min(shown):g} .. {np.max(shown):g}"
        lines.append(line)
    return lines
