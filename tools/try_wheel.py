"""Build the wheel, install it in an empty environment, and use it beside modules that have its folders' names: `make wheel`.

Holds what an install brings (numpy and msgspec), what it puts at the top level (`paged`), that the README's embedding lines run, that the
script says what brings the command line, and that the acceptance tests pass on what was installed. The checkout is on no path.

    python tools/try_wheel.py
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
ROOMS = ("attention", "block_manager", "scheduler")
INSTALLED = {"msgspec", "numpy", "paged"}

EMBEDDING = """
import importlib, pathlib, sys
import embed
delivered = []
names = {
    "engine": embed.StandInEngine(512, 16, 512),
    "prompt": list(range(100)),
    "deliver": lambda *arguments: delivered.append(arguments),
}
exec(compile(pathlib.Path("readme_lines.py").read_text(), "README.md", "exec"), names)
assert delivered[-1][2] == "length", delivered
assert importlib.import_module("scheduler").OURS
import paged
assert paged.__file__.startswith(sys.prefix), paged.__file__
"""
"""What the README leaves to its reader, and then its lines, beside a `scheduler.py` that is the reader's own."""


class Failed(Exception):
    """Something does not hold of the wheel."""


def run(*command: object, cwd: Path, status: int = 0) -> "subprocess.CompletedProcess[str]":
    """Run a command that sees no path but its environment's own. Raises Failed with its output at another exit status."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PAGED_", "COV_"))}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=clean, capture_output=True, text=True)
    if done.returncode != status:
        raise Failed(f"{command} ends with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done


def expect(found: object, wanted: object, what: str) -> None:
    """Raises Failed when they differ."""
    if found != wanted:
        raise Failed(f"{what}: {found}, and not {wanted}")


def readers_folder(folder: Path) -> Path:
    """An engine's own folder: modules with our folders' names, the README's lines, and the example's engine."""
    folder.mkdir()
    for room in ROOMS:
        (folder / f"{room}.py").write_text("OURS = True\n")
    shutil.copy(REPOSITORY / "examples" / "embed.py", folder)
    found = re.search(r"^## Embed it\n\n```python\n(.*?)^```$", (REPOSITORY / "README.md").read_text(), re.M | re.S)
    if found is None:
        raise Failed("the README has no lines under `Embed it`")
    (folder / "readme_lines.py").write_text(found[1])
    return folder


def with_tests(folder: Path) -> Path:
    """The folder, with the acceptance tests and the settings that they run under."""
    for name in ("pyproject.toml", "tests/conftest.py", "tests/driving.py", "tests/shown.py", "tests/strange.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, folder / name)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "tests" / "acceptance", folder / "tests" / "acceptance", ignore=ignored)
    return folder


def tried(folder: Path) -> Iterator[str]:
    """What holds of the wheel, sentence by sentence. Raises Failed at the first that does not."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, REPOSITORY, cwd=folder)
    (wheel,) = folder.glob("paged-*.whl")
    inside = zipfile.ZipFile(wheel).namelist()
    at_the_top = {name.partition("/")[0] for name in inside}
    expect({name for name in at_the_top if not name.endswith(".dist-info")}, {"paged"}, "the top level of the wheel")
    yield f"{wheel.name} holds `paged` alone."

    # Compiled where they are used.
    c_sources = {str(file.relative_to(REPOSITORY)) for file in (REPOSITORY / "paged").glob("*/native/*.[ch]")}
    expect({name for name in inside if name.endswith((".c", ".h", ".so"))}, c_sources, "the C sources in the wheel")
    yield f"It holds {len(c_sources)} C sources, and no library."

    venv.create(folder / "environment", with_pip=False)
    scripts = folder / "environment" / ("Scripts" if os.name == "nt" else "bin")
    python, constraints = scripts / "python", REPOSITORY / "constraints.txt"
    install = [*pip, "--python", python, "install", "--quiet", "-c", constraints]
    run(*install, wheel, cwd=folder)
    listed = run(*pip, "--python", python, "list", "--format=freeze", cwd=folder).stdout.split()
    expect({line.partition("==")[0] for line in listed}, INSTALLED, "what an install brings")
    yield f"An install brings {', '.join(sorted(INSTALLED))}."

    theirs = readers_folder(folder / "their-engine")
    run(python, "-W", "error", "-c", EMBEDDING, cwd=theirs)
    yield "The README's lines run beside a scheduler.py, an attention.py and a block_manager.py."

    said = run(scripts / "paged", "policies", cwd=theirs, status=2).stderr
    brings = "paged: paged.cli needs typer, which is not installed; `pip install '.[cli]'` in a checkout of paged brings it.\n"
    expect(said, brings, "the script without its extra")
    yield "The script says in a line what brings the command line."

    run(*install, f"{wheel}[testing]", cwd=folder)
    done = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/acceptance", cwd=with_tests(theirs))
    yield f"Acceptance tests: {done.stdout.strip().splitlines()[-1]}."


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="paged-wheel-") as name:
        try:
            for sentence in tried(Path(name)):
                print(sentence, flush=True)
        except Failed as problem:
            sys.exit(str(problem))


if __name__ == "__main__":
    main()
