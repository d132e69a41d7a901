"""Hooks of the site (mkdocs.yml): pages that live beside docs/, notebooks as pages, folders in the navigation.

Links in the pages are those of the repository, so that they work in a checkout too; here they are turned into the site's.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
BESIDE = {  # files outside of docs/, and where the site has them
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "bench/README.md": "benchmarks.md",
    "bench/scale.png": "images/scale.png",
    "README.md": "index.md",
    "docs/examples": "examples.md",
    "docs/mechanisms": "mechanisms/README.md",
    "docs/reproduction": "reproduction/README.md",
    "docs/notebooks": "notebooks/first-run.md",
}
LINK = re.compile(r"(?P<text>\[[^\[\]]*)?\]\((?P<target>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")


def on_config(config: Any) -> Any:
    """A folder in the navigation ("reproduction/") stands for its pages, README first."""
    config["nav"] = [_spread(entry) for entry in config["nav"]]
    return config


def _spread(entry: Any) -> Any:
    (title, value) = next(iter(entry.items()))
    if isinstance(value, list):
        return {title: [_spread(one) for one in value]}
    if not value.endswith("/"):
        return entry
    found = sorted((ROOT / "docs" / value).glob("*.md"), key=lambda path: (path.stem != "README", _order(path.stem)))
    return {title: [f"{value}{path.name}" for path in found]}


def _order(stem: str) -> tuple[Any, ...]:
    return tuple(int(part) if part.isdigit() else part for part in re.split(r"(\d+)", stem))


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages beside docs/ and the notebooks."""
    for source, place in BESIDE.items():
        path = ROOT / source
        if path.is_file() and source != "README.md":
            files.append(File.generated(config, place, abs_src_path=str(path)))
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=notebook(path)))
    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            files.remove(file)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links of the repository become the site's; one to a file that the site has no page for becomes the file's name."""
    place = page.file.src_uri
    source = next((own for own, there in BESIDE.items() if there == place and own != "README.md"), f"docs/{place}")
    source = source if source.endswith(".md") else f"docs/{place}"

    def turned(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), found["target"]))
        there = BESIDE.get(target.rstrip("/"))
        if there is None and target.startswith("docs/"):
            there = target.removeprefix("docs/").removesuffix(".ipynb") + (".md" if target.endswith(".ipynb") else "")
        if there is None and found["text"] and (ROOT / target).exists():
            text = found["text"][1:].strip("`")
            return f"`{target}`" if text in ("", target, found["target"]) else f"{text} (`{target}`)"
        if there is None:
            return found[0]
        place_there = posixpath.relpath(there, posixpath.dirname(place) or ".")
        return f"{found['text'] or ''}]({place_there}{found['anchor'] or ''})"

    return LINK.sub(turned, markdown)


def notebook(path: Path) -> str:
    """An executed notebook as a page: text, code, and what the code printed or drew."""
    cells = json.loads(path.read_text("utf-8"))["cells"]
    parts = []
    for cell in cells:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        outputs = cell.get("outputs", [])
        printed = "".join("".join(one["text"]) for one in outputs if one["output_type"] == "stream")
        parts += [_output({"text": printed})] if printed else []  # in pieces or not: one block
        parts += [_output(one) for one in outputs if one["output_type"] != "stream"]
    return "\n\n".join(parts) + "\n"


def _output(output: Any) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        return f'<img alt="what the code above draws" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">'
    if "text/html" in data:
        return f'<div class="fv-output">{"".join(data["text/html"])}</div>'
    text = "".join(output.get("text", data.get("text/plain", "")))
    return "```text\n" + text.rstrip() + "\n```"
