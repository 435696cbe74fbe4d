"""Technology below the features: settings, stores, telemetry, concurrency."""
