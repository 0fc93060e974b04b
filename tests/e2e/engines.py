"""Starts `engine.py` and listens to it."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any


class Engine:
    """A client process."""

    def __init__(self, socket_dir: Path, mode: str, program: str = "engine.py") -> None:
        """Starts it."""
        command = [sys.executable, str(Path(__file__).with_name(program)), str(socket_dir), mode]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/")
        self._said: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def pid(self) -> int:
        """The process."""
        return self.process.pid

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.put(json.loads(line))
        self._said.put(None)

    def wait_for(self, state: str, timeout: float = 60.0) -> dict[str, Any]:
        """Returns what it says when it comes to a state; everything before that is dropped."""
        while True:
            try:
                said = self._said.get(timeout=timeout)
            except queue.Empty:
                raise AssertionError(f"the engine does not come to {state!r} in {timeout} s") from None
            assert said is not None, f"the engine ended with {self.process.wait(5)} before it came to {state!r}"
            if said["state"] == state:
                return said

    def finish(self, state: str = "ended") -> dict[str, Any]:
        """Ends its standard input and returns its report."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.wait_for(state)

    def kill(self) -> None:
        """Ends it by SIGKILL."""
        self.process.kill()
        self.process.wait(10)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
