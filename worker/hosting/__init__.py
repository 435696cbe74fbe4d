"""A worker host: serves several models in turns, with one worker process at a time."""
