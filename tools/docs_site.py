"""What MkDocs cannot do by itself for the site: README as its first page, an API reference of all public names, links that leave docs/.

The checkout has no public address yet. So a link to a file outside docs/ becomes the file's path, and a path that does not exist fails the build.
"""

import inspect
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

import paged

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)]*)?\)")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
# Where a page lies in the site, and in the checkout.
MOVED = {"index.md": "README.md", "pages.md": "docs/README.md"}


def on_files(files: Any, config: Any) -> Any:
    """README and the index of pages under their names in the site, and the API reference."""
    files.remove(files.get_file_from_path("README.md"))
    for name, source in MOVED.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text(encoding="utf-8")))
    files.append(File.generated(config, "api.md", content=api()))
    return files


def api() -> str:
    """Every public class and function of `paged`, where it is defined."""
    found: dict[str, list[str]] = {}
    for name in sorted(paged.__all__):
        value = getattr(paged, name)
        module = getattr(value, "__module__", None)
        if module is None or not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        found.setdefault(module.split(".")[1], []).append(f"::: {module}.{name}")
    parts = [f"## {package}\n\n" + "\n\n".join(names) for package, names in sorted(found.items())]
    return (
        "# API\n\nThe names that `from paged import ...` gives, by the package that defines them.\n\n"
        + "\n\n".join(parts)
        + "\n"
    )


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as they are in the site."""
    name = page.file.src_uri
    if name == "api.md":
        return markdown
    here = PurePosixPath(MOVED.get(name, f"docs/{name}")).parent

    def moved(found: re.Match[str]) -> str:
        mark, text, target, anchor = found.groups()
        path = (ROOT / here / target).resolve()
        if not path.exists():
            raise PluginError(f"{name}: {target} leads nowhere")
        inside = path.relative_to(ROOT).as_posix()
        names = {source: site for site, source in MOVED.items()}
        if inside in names or (inside.startswith("docs/") and path.is_file()):
            goal = names.get(inside, inside.removeprefix("docs/"))
            depth = len(PurePosixPath(name).parts) - 1
            return f"{mark}[{text}]({'../' * depth}{goal}{anchor or ''})"
        return f"{text} (`{inside}`)" if inside not in text else f"`{inside}`"

    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else LINK.sub(moved, part) for part in parts)
