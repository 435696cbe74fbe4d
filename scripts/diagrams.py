"""Draw the Mermaid diagrams of the documents as docs/diagrams/*.svg (`make diagrams`).

The site shows these files, so that no reader's browser has to load Mermaid. Needs Chromium.

Usage: python -m scripts.diagrams PACKAGE, which is the archive of @mermaid-js/tiny.
"""

import shutil
import sys
import tarfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from scripts.site import DIAGRAM, DIAGRAMS, REPOSITORY, diagram_name

_SETTINGS = {
    "startOnLoad": False,
    "theme": "neutral",
    "fontFamily": "sans-serif",
    "flowchart": {"htmlLabels": False},
}
_DRAW = """async ([settings, source]) => {
  mermaid.initialize(settings);
  const { svg } = await mermaid.render("diagram", source);
  const drawn = new DOMParser().parseFromString(svg, "text/html").querySelector("svg");
  drawn.style.backgroundColor = "white";
  const [, , width, height] = drawn.getAttribute("viewBox").split(" ");
  drawn.setAttribute("width", width);
  drawn.setAttribute("height", height);
  return new XMLSerializer().serializeToString(drawn);
}"""


def main(package: Path) -> None:
    """Write the files of all diagrams, and remove others."""
    documents = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")]
    sources = [source for path in documents for source in DIAGRAM.findall(path.read_text())]
    with tarfile.open(package) as archive:
        [script] = (
            file.read().decode()
            for file in [archive.extractfile("package/dist/mermaid.tiny.js")]
            if file is not None
        )
    shutil.rmtree(DIAGRAMS, ignore_errors=True)
    DIAGRAMS.mkdir()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium-headless-shell"), args=["--no-sandbox"]
        )
        for source in sources:
            page = browser.new_page()
            page.add_script_tag(content=script)
            (DIAGRAMS / diagram_name(source)).write_text(
                page.evaluate(_DRAW, [_SETTINGS, source]) + "\n"
            )
            page.close()
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
