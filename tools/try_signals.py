"""Send Ctrl-C and SIGTERM to commands at random moments, and see that they are gone at once and leave nothing half done: `make signals`.

Each command runs in a terminal session of its own. Ctrl-C goes to all of its processes, as a terminal sends it, or to the first alone;
SIGTERM to the first alone. Held: the status is 130 or 143 in a shell (or the command's own, where it had ended), no process of the session is left
after a second, no traceback on either stream, the terminal's cursor is shown again, and each file that the command writes is what it was
before or whole, with nothing left beside it. Moments are drawn from the whole time that a command takes, from its first line on.

    python tools/try_signals.py                                # 50 of each signal at each command: half an hour on two cores
    python tools/try_signals.py plan generate --times 5
"""

import json
import os
import platform
import pty
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

BEFORE = "what was there before\n"
SIGNALS = (signal.SIGINT, signal.SIGTERM)
# The model of the demo has read the Python manual, and writes of tracebacks and errors, too.
TRACEBACK = re.compile(r'Traceback \(most recent call last\):\s+File "|Exception ignored in|resource_tracker:')
# Before this the interpreter is starting, and no line of paged has run.
FIRST_LINE_S = 0.15
# A command that ended just before the signal did nothing wrong.
MOST_ENDED = 0.5


@dataclass(frozen=True)
class Command:
    """Arguments, and how to see that a file it writes, named in them by {name}, is whole."""

    arguments: tuple[str, ...]
    files: dict[str, Callable[[str], bool]] = field(default_factory=dict)
    stdin: str = ""
    in_terminal: bool = False


def _is_csv(text: str) -> bool:
    lines = text.splitlines()
    return len(lines) == 5 and len({line.count(",") > 50 for line in lines}) == 1


def _is_page(text: str) -> bool:
    return text.startswith("<!doctype html>") and text.endswith("</html>\n")


def _is_json(text: str) -> bool:
    return isinstance(json.loads(text), dict)


def _is_log(text: str) -> bool:
    return text.endswith("\n") and all(isinstance(json.loads(line), dict) for line in text.splitlines())


_LOAD = ("azure", "--limit", "300", "--blocks", "2000")
COMMANDS = {
    "simulate": Command(
        ("simulate", *_LOAD, "--policy", "paged,vllm,fastgen,sarathi", "--csv", "{csv}", "--html", "{html}"),
        {"csv": _is_csv, "html": _is_page},
    ),
    "simulate one": Command(
        ("simulate", *_LOAD, "--log", "{log}", "--trace-events", "{events}"), {"log": _is_log, "events": _is_json}
    ),
    "plan": Command(
        ("plan", *_LOAD, "--find", "rate", "--ttft", "10", "--gap", "1", "--policy", "paged,vllm"), in_terminal=True
    ),
    "demo": Command(("demo", "--speed", "40"), in_terminal=True),
    "generate": Command(("generate", "--file", "-", "--max-tokens", "80"), stdin="def f(x):\n" * 40),
    "generate one": Command(("generate", "--prompt", "def f(x):", "--max-tokens", "200"), in_terminal=True),
    "profile": Command(
        ("profile", "--rounds", "3", "--max-sequences", "4", "--max-context", "96", "--out", "{profile}"),
        {"profile": _is_json},
        in_terminal=True,
    ),
    "bench": Command(("bench", "scheduler", "--rows", "64,256", "--steps", "4000")),
    "bench attention": Command(("bench", "attention", "--rounds", "3"), in_terminal=True),
    "bench engine": Command(("bench", "engine", "--runs", "8"), in_terminal=True),
}


@dataclass(frozen=True)
class Ran:
    """What became of a command: its exit status, the time from the signal to the end of its last process, what it said, what is wrong."""

    status: int
    seconds: float
    said: str
    wrong: list[str]


def ran(command: Command, folder: Path, number: int | None, after_s: float, *, to_all: bool, limit_s: float) -> Ran:
    """Run it, and send it the signal after so many seconds; None: let it run to its end."""
    paths = {name: folder / f"out.{name}" for name in command.files}
    for path in paths.values():
        path.write_text(BEFORE)
    arguments = [sys.executable, "-m", "paged", *(each.format(**paths) for each in command.arguments)]
    with tempfile.TemporaryFile() as said:
        ours, theirs = pty.openpty() if command.in_terminal else (None, None)
        with heard():
            process = subprocess.Popen(
                arguments,
                stdin=subprocess.PIPE if theirs is None else theirs,
                stdout=said if theirs is None else theirs,
                stderr=said if theirs is None else theirs,
                start_new_session=True,
            )
        if process.stdin is not None:
            process.stdin.write(command.stdin.encode())
            process.stdin.close()
        if theirs is not None:
            os.close(theirs)
        output = bytearray()
        due = None if number is None else time.monotonic() + after_s
        sent = None
        while process.poll() is None or session(process.pid):
            now = time.monotonic()
            if ours is not None:
                _drain(ours, output)
            if due is not None and number is not None and now >= due and process.poll() is None:
                (os.killpg if to_all else os.kill)(process.pid, number)
                sent, due = now, None
            if sent is not None and now - sent > 10:
                break
            time.sleep(0.005)
        seconds = 0.0 if sent is None else time.monotonic() - sent
        wrong = []
        left = session(process.pid)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        process.wait()
        if ours is not None:
            _drain(ours, output)
            os.close(ours)
        said.seek(0)
        text = (bytes(output) + said.read()).decode(errors="replace")
    if left:
        wrong.append(f"{len(left)} processes were left")
    elif seconds > limit_s:
        wrong.append(f"gone after {seconds:.2f} s")
    # A process that the signal itself has ended has its number with a minus here, and 128 and the number in a shell.
    allowed = {0} if sent is None or number is None else {0, 128 + number, -number}
    if process.returncode not in allowed:
        wrong.append(f"status {process.returncode}")
    if TRACEBACK.search(text):
        wrong.append("a traceback")
    if text.count("\x1b[?25l") > text.count("\x1b[?25h"):
        wrong.append("the cursor stays hidden")
    for name, path in paths.items():
        content = path.read_text()
        if content != BEFORE and not command.files[name](content):
            wrong.append(f"{path.name} is neither as before nor whole")
    beside = sorted(set(folder.iterdir()) - set(paths.values()))
    if beside:
        wrong.append(f"left beside: {', '.join(each.name for each in beside)}")
        for each in beside:
            each.unlink()
    return Ran(process.returncode, seconds, text, wrong)


@contextmanager
def heard() -> Iterator[None]:
    """What is started here hears Ctrl-C, though this process may ignore it: as one does that a shell has put behind `&`."""
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _drain(terminal: int, output: bytearray) -> None:
    """What a terminal has to show: one that is not read stops who writes to it."""
    os.set_blocking(terminal, False)
    try:
        while piece := os.read(terminal, 1 << 16):
            output += piece
    except (BlockingIOError, OSError):
        # Nothing there now, or no process on the other side any more.
        pass


def session(leader: int) -> list[int]:
    """The processes of a session that run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            except OSError:
                continue
            if int(session) == leader and state not in "ZX":
                found.append(int(entry.name))
    return found


def main(
    commands: Annotated[
        list[str] | None, typer.Argument(help=f"Which of {', '.join(COMMANDS)}; all by default.")
    ] = None,
    times: Annotated[int, typer.Option(min=1, help="Moments for each signal and command.")] = 50,
    limit: Annotated[float, typer.Option(help="Seconds within which all processes have to be gone.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the moments.")] = 0,
) -> None:
    """Interrupt commands at random moments; status 1 where one is not gone at once, or leaves something half done."""
    unknown = [name for name in commands or () if name not in COMMANDS]
    if unknown:
        raise typer.BadParameter(f'unknown command "{unknown[0]}"; known are {", ".join(COMMANDS)}')
    out, chance = Console(), random.Random(seed)
    table = Table("command", "signal", "sent", "had ended", "slowest, s", "median, s", "wrong", box=None)
    wrong: list[str] = []
    for name in commands or COMMANDS:
        command = COMMANDS[name]
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            started = time.monotonic()
            whole = ran(command, folder, None, 0.0, to_all=False, limit_s=limit)
            takes = time.monotonic() - started
            if whole.wrong:
                raise SystemExit(f"{name}, without a signal: {whole.wrong}\n{whole.said[-500:]}")
            for number in SIGNALS:
                found: list[Ran] = []
                for _ in range(times):
                    to_all = number == signal.SIGINT and chance.random() < 0.5
                    after_s = chance.uniform(FIRST_LINE_S, takes)
                    each = ran(command, folder, number, after_s, to_all=to_all, limit_s=limit)
                    found.append(each)
                    for problem in each.wrong:
                        wrong.append(f"{name}, signal {number} after {after_s:.3f} s: {problem}")
                        out.print(f"{wrong[-1]}\n{each.said[-500:]}", markup=False, highlight=False)
                ended = sum(each.status == 0 for each in found)
                if ended > MOST_ENDED * times:
                    wrong.append(f"{name}: {ended} of {times} had ended before the signal")
                seconds = sorted(each.seconds for each in found)
                cells = (
                    f"{seconds[-1]:.2f}",
                    f"{seconds[len(seconds) // 2]:.2f}",
                    str(sum(bool(each.wrong) for each in found)),
                )
                table.add_row(name, signal.Signals(number).name, str(times), str(ended), *cells)
    out.print(f"Python {platform.python_version()}, {os.cpu_count()} cores, seed {seed}")
    out.print(table)
    for line in wrong:
        out.print(line, markup=False, highlight=False)
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    typer.run(main)
