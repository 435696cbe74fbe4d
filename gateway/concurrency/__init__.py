"""Background tasks, threads and fair scheduling of processor time."""
