"""A server as its users start it: `paged serve` in a process of its own, on a port that is free, ended as a service manager ends it.

with served(max_sequences=8) as server:
    ...                              server.url, server.process, server.stderr
"""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer
from typing import Any, TextIO

READY = re.compile(r"ready at (https?://\S+:(\d+))")
# Two cores that run other tests beside it load torch and a model in some seconds each.
START_S = 600.0
END_S = 600.0


@dataclass(frozen=True)
class Served:
    """A server that takes requests: its address without a slash at the end, its process, and the file that has its standard error."""

    url: str
    port: int
    process: subprocess.Popen[str]
    stderr: Path

    @property
    def said(self) -> str:
        return self.stderr.read_text(errors="replace")

    @property
    def lines(self) -> list[dict[str, Any]]:
        """What stands in its log: JSON, but for the line that says what is loaded."""
        return [json.loads(line) for line in self.said.splitlines(keepends=True) if line[0] == "{" and line[-1] == "\n"]

    @property
    def engine(self) -> int:
        return int(subprocess.check_output(["pgrep", "-P", str(self.process.pid)], text=True).split()[0])

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Come back as soon as it is so, which has to be before the server ends."""
        began = time.monotonic()
        while not condition():
            waited = time.monotonic() - began
            assert self.process.poll() is None and waited < END_S, self.said
            # A look costs both sides, and a start takes seconds.
            time.sleep(min(0.02 + waited / 10, 0.3))


def flags(options: dict[str, object]) -> list[str]:
    """Options as a command line has them: `max_sequences=8` is --max-sequences 8, True is --name, False --no-name, a list the option
    several times, None nothing."""
    found: list[str] = []
    for option, value in options.items():
        name = option.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            several = isinstance(value, Sequence) and not isinstance(value, str)
            for each in value if several else [value]:
                found += [f"--{name}", str(each)]
    return found


def imported_first(folder: Path, program: str) -> dict[str, str]:
    """The environment in which every Python runs this before anything else."""
    (folder / "sitecustomize.py").write_text(program)
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextmanager
def launched(
    *arguments: str, env: dict[str, str] | None = None, stderr: TextIO | None = None
) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """`paged serve *arguments`, and the file that has its standard error. How it ends is the caller's to judge; what still runs then is killed.

    Unless they say otherwise it has eight seats: memory for the usual 64 takes a tenth of a start to clear.
    `stderr` is where its standard error goes, instead of a file. `env` is added to an environment without variables of paged's own.
    """
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PAGED_", "COV_"))}
    with TemporaryDirectory() as folder:
        said = Path(folder) / "stderr"
        with said.open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "paged", "serve", "--max-sequences", "8", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr or errors,
                text=True,
                env={**clean, **(env or {})},
            )
        assert process.stdout is not None, "it was asked for"
        try:
            yield process, said
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
            process.stdout.close()


@contextmanager
def started(*arguments: str, env: dict[str, str] | None = None, stderr: TextIO | None = None) -> Iterator[Served]:
    """`launched` on a port that is free, once it takes requests."""
    with launched("--port", "0", *arguments, env=env, stderr=stderr) as (process, said):
        late = Timer(START_S, process.kill)
        late.start()
        found, lines = None, []
        while found is None and (line := process.stdout.readline()):
            lines.append(line)
            found = READY.search(line)
        late.cancel()
        if found is None:
            raise AssertionError(f"the server did not begin: {''.join(lines)}{said.read_text(errors='replace')}")
        yield Served(found[1], int(found[2]), process, said)


@contextmanager
def served(
    model: str | Path | None = None, *, env: dict[str, str] | None = None, **options: object
) -> Iterator[Served]:
    """A server with these options, until the block ends: then SIGTERM has to end it with status 0, and without a traceback."""
    arguments = [*flags(options), *([] if model is None else [str(model)])]
    with started(*arguments, env=env) as server:
        yield server
        server.process.terminate()
        status = server.process.wait(END_S)
        said = server.said
        assert status == 0, f"status {status}: {said}"
        assert "Traceback" not in said, said
