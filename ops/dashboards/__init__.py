"""Grafana dashboards as code: `python -m ops.dashboards` writes ops/grafana/dashboards/*.json.

Each dashboard is a module that lists its rows and panels. `panels` builds panels, `promql` builds
common queries, `frame` adds what all dashboards share, and `limits` reads the limits of alerts and
objectives from ops/prometheus/rules. So each threshold line matches its alert.
"""
