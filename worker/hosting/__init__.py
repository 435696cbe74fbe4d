"""A worker host: serves several models in turns, with one worker awake at a time."""
