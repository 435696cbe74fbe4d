"""The dashboards as code: `python -m ops.dashboards` writes ops/grafana/dashboards/*.json.

Each dashboard is a module that reads like its table of contents. `panels` says what a panel looks like, `promql`
writes the queries that come again and again, `frame` adds what all dashboards have, and `limits` takes the limits
of alerts and objectives from ops/prometheus/rules, so that a threshold is drawn where the alert begins.
"""
