"""The stateless HTTP gateway.

The packages are stages of a generation request, in this order:

    server      uvicorn, HTTP limits, the applications and their routers
    http        middleware, authorization, error bodies, process-wide resources
    auth        credentials: API keys and JWTs
    dialects    parameters of six APIs, parsed into one `GenerationRequest`
    generation  model choice, checks, price, admission: `/v1/completions`, `/v1/chat/completions`
    prompt, images, structure, templates  the prompt's tokens and the output's grammar
    quota       limits: reservation before, settlement after
    dispatch    the queue to the workers, and their replies
    responses   settlement of every admitted request; responses that clients can resume
    stream      bodies and events of a response, from the workers' deltas
    delivery    one response to one client

Beside them: `management` (a package for each resource), `ledger` and `jobs` (usage records into
SQL, schedules), `database` and `tenancy` (tables and records), `commands`, `launch` and `terminal`
(the command line), `supervision` (child processes). import-linter checks their order
(pyproject.toml).
"""
