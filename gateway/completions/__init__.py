"""The path of a request. Its packages are its stages, in order.

endpoints    routes of the generation API
admission    read, choose the model, check, reserve, submit
idempotency  requests that a client repeats
prompt       chat templates, images, tokens, the context window
structure    grammars for the output
queue        jobs in flight: enqueue, replies, retries, cancellation
stored       responses that clients can resume, and their takeover
settlement   the end of a request: usage and cost
rendering    replies as events or as one body
sending      events and bodies to the client
"""
