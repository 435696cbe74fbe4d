"""Rooms 5 and 9: put jobs on the queue, follow their replies, take them back."""
