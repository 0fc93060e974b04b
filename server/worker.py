"""The entry of a worker process: `python -m topkd.server.worker --control-fd N ...`, started by the front.

Nothing heavy is imported before the kernel has been asked to end this process with the front: importing torch takes
seconds, in which the front may die.
"""

import argparse
import ctypes
import os
import signal
import socket
import sys

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1
_GRPC_EXPERIMENTS = "-event_engine_listener"
"""gRPC's server polls on the thread that serves instead of on threads of its own, which hand every message over: a call
takes an eighth less, a message of a stream a seventh."""


def main(arguments: list[str] | None = None) -> int:
    """Runs a worker; returns only if it cannot start."""
    parser = argparse.ArgumentParser(prog="topkd.server.worker")
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--limits", required=True)
    parser.add_argument("--grace-s", type=float, required=True)
    parser.add_argument("--cpu-threads", type=int)
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-format", default="json")
    options = parser.parse_args(arguments)
    die_with(options.parent)
    os.environ.setdefault("GRPC_EXPERIMENTS", _GRPC_EXPERIMENTS)  # read when grpc is imported
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front tells the workers when to end
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    from . import _logging
    from ._control import send

    log = _logging.configure(options.log_level, options.log_format, process="worker", pid=os.getpid())
    control = socket.socket(fileno=options.control_fd)
    control.set_inheritable(False)
    try:
        from ._worker import Worker

        worker = Worker(options, control, log)
        worker.start()
    except Exception as error:  # whatever it is, the front is told and reports it
        log.debug("worker_failed", exc_info=error)
        text = str(error) if type(error).__name__ == "DeviceError" else f"{type(error).__name__}: {error}"
        send(control, {"t": "failed", "message": f"the worker cannot start: {text}"[:2000]})
        return 1
    worker.run()
    return 0


def die_with(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Asks the kernel for a signal when the parent dies, and ends this process if that has happened already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
