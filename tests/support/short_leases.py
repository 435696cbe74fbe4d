"""`sluice` with short leases and frequent sweeps, so that no test waits for half a minute.

python -m tests.support.short_leases gateway --port 8080
"""

LEASE_SECONDS = 12.0
"""More than twice as long as any fault of a short run keeps a gateway from renewing."""
RENEW_SECONDS = 2.0
SWEEP_SECONDS = 1.0
HEARTBEAT_SECONDS = 1.0
"""Of six, after which a gateway counts as dead."""


def shorten_leases() -> None:
    """Shorten leases of reservations and gateways, and the sweep's interval."""
    from gateway.completions.queue import dispatcher
    from gateway.jobs import schedule
    from gateway.limits import reservations
    from gateway.process import heartbeat

    # The product declares them final, and reads them as globals of their modules.
    vars(dispatcher).update(HEARTBEAT_SECONDS=HEARTBEAT_SECONDS)
    vars(heartbeat).update(HEARTBEAT_SECONDS=HEARTBEAT_SECONDS, RENEW_SECONDS=RENEW_SECONDS)
    vars(reservations).update(LEASE_MS=round(LEASE_SECONDS * 1000))
    jobs = [
        job._replace(schedule=SWEEP_SECONDS) if job.name == "sweep" else job
        for job in schedule.TASKS
    ]
    vars(schedule).update(TASKS=tuple(jobs))


def main() -> None:
    """Run the command that the first argument names."""
    from gateway.cli.main import main as sluice

    shorten_leases()
    sluice(prog_name="sluice")


if __name__ == "__main__":
    main()
