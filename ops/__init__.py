"""What operators need beside the processes: dashboards, rules and runbooks."""
