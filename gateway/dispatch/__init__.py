"""Rooms 6 to 9 seen from the gateway: put jobs on the queue, follow their replies, take them back."""
