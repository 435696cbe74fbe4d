"""The HTTP server: uvicorn with limits, direct connections and a graceful shutdown.

Only this package imports uvicorn. It overrides private parts, so `pyproject.toml` limits uvicorn to
the minor versions that have them.
"""
