"""What gateway and worker agree on: messages, outcomes, Redis keys and the Lua scripts of the queue.

Data and pure arithmetic, and how processes tell of their health and their metrics. Nothing in this package opens
a connection or reads a setting, so both processes can be deployed apart as long as they carry the same contract.
"""
