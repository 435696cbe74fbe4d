"""The contract of gateway and worker: messages, outcomes, Redis keys and the queue's Lua scripts.

The package also holds what all processes share for health checks, metrics, logs and traces. It
opens no connection by itself and reads no setting. Gateway and worker can therefore be deployed
separately, as long as both contain the same contract.
"""
