"""The tables in docs/configuration.md, made from `EngineConfig` and the server's `Settings`.

python tools/configuration_page.py            # rewrite the tables in the page
python tools/configuration_page.py --check    # exit status 1 if they are stale
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from page_parts import run

from paged.engine.config import EngineConfig, Field, fields_of
from paged.serving.settings import SERVED, Settings

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
BEGIN, END = "<!-- made by tools/configuration_page.py -->\n", "<!-- end of the tables -->\n"


def row(setting: Field, defaults: list[str]) -> list[str]:
    """The cells of a setting; a server's default comes second, where it is another one."""
    positive = [each.partition("/")[0] for each in setting.options]
    # Options that are the name with dashes, or vLLM's name with dashes, need not be said.
    own = [each for each in setting.options[:1] if each.partition("/")[0] != "--" + setting.name.replace("_", "-")]
    own = [] if own and positive[0] == "--" + "".join(setting.vllm[:1]).replace("_", "-") else own
    names = " ".join(f"`{each}`" for each in (setting.name, *own, setting.letter) if each)
    vllm = ", ".join("the same" if each == setting.name else f"`{each}`" for each in setting.vllm)
    default = "; of a server ".join(dict.fromkeys(defaults))
    return [names, default, setting.takes, vllm, setting.help, *([setting.when] if setting.group else [])]


def lines() -> Iterator[str]:
    """The tables, line by line, one a panel of the help."""
    panel, engine, served, server = "", EngineConfig(), SERVED, Settings()
    for setting in (*fields_of(EngineConfig).values(), *fields_of(Settings).values()):
        head = ["setting", "default", "takes", "vLLM's name", "what it is"]
        if setting.group:
            configs = [getattr(each, setting.group) for each in (engine, served)]
            head.append("when to change it")
        elif not setting.options:
            continue
        else:
            configs = [server]
        if setting.panel != panel:
            panel = setting.panel
            yield from ("", f"### {panel}", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|")
        cells = row(setting, [setting.shown(getattr(each, setting.name)) for each in configs])
        yield "| " + " | ".join(cells).replace("\n", " ") + " |"


if __name__ == "__main__":
    run(__doc__.splitlines()[0], PAGE, BEGIN, END, lambda: [*lines(), ""])
