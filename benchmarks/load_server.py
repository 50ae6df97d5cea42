"""A server process under load: started, watched, killed and started again."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import threading
from collections.abc import Sequence

import httpx
import psutil

_GAUGE = re.compile(r"^(kda_[a-z_]+) ([-+.\de]+)$", re.MULTILINE)
_READY = re.compile(r"is served at (http://\S+)")


@dataclasses.dataclass(frozen=True)
class Sample:
    """One look: seconds since the start, bytes resident, and the server's own numbers."""

    at: float
    rss: int
    metrics: dict[str, float]


class ServerProcess:
    """A command that prints where it serves; ``{port}`` in it becomes the port.

    The first start takes any free port, and the ones after it the same.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._process: subprocess.Popen[str] | None = None
        self.url, self.starts = "", 0

    def start(self) -> None:
        """Returns when it listens.

        Raises:
          RuntimeError: it ended instead.
        """
        port = self.url.rpartition(":")[2] or "0"
        command = [part.replace("{port}", port) for part in self._command]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if found := _READY.search(line):
                self.url, self.starts = found[1], self.starts + 1
                # Nobody reads the rest; a full pipe would stop the server.
                threading.Thread(target=self._process.stdout.read, daemon=True).start()
                return
        raise RuntimeError(f"the server ended with {self._process.wait()}: {' '.join(command)}")

    def kill(self) -> None:
        """SIGKILL."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def terminate(self, timeout: float) -> int:
        """SIGTERM; the exit code."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(timeout)

    def rss(self) -> int:
        """Bytes resident, of the process and its children."""
        assert self._process is not None
        one = psutil.Process(self._process.pid)
        return sum(each.memory_info().rss for each in (one, *one.children(recursive=True)))


def read_metrics(http: httpx.Client) -> dict[str, float]:
    """The server's numbers without labels."""
    text = http.get("/metrics").raise_for_status().text
    return {name: float(value) for name, value in _GAUGE.findall(text)}
