"""The gateway. Each package is a subject of the product, and imports only those below it.

cli          the `sluice` command line, and `sluice up`
process      a gateway process: its services, applications, HTTP server and shutdown
console      web pages for customers and operators, and the public status page
jobs         what runs by itself, on Celery
billing      what was used and what it costs: ledger, usage, invoices, exports, credits, prices
adapters     LoRA adapters of tenants
batches      offline requests, and their files
accounts     who buys: tenants, projects, members, keys, plans, webhooks, audit log
completions  the path of a request; its packages are its stages, in order
http         what requests to all routes pass: body, authorization, errors
models       what can be requested: catalogue, aliases, adapters, access, prices in force
limits       what may be used: reservation, settlement, storage, refused requests
auth         who sends a request: keys, tokens, identity providers
dialects     the public APIs: profiles and parameters, converted into one request
platform     technology: settings, database, Redis, telemetry, concurrency, outbound requests
records      nouns without technology: tenants, limits, rights, usage records, errors
"""
