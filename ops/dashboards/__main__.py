"""Write every dashboard to ops/grafana/dashboards."""

import argparse
from pathlib import Path

from ops.dashboards.catalogue import DASHBOARDS
from ops.dashboards.frame import to_json

FOLDER = Path(__file__).parents[1] / "grafana" / "dashboards"


def main() -> None:
    """Write all dashboards, and print their paths."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for build in DASHBOARDS:
        dashboard = build()
        path = FOLDER / f"{dashboard.uid}.json"
        path.write_text(to_json(dashboard))
        print(path)


if __name__ == "__main__":
    main()
