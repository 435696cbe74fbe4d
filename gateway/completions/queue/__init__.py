"""Queue: enqueue jobs, deliver their replies, retry lost attempts and cancel jobs.

dispatcher   the interface of the package
generation, selection   the jobs of one request and its unread replies
catalogue, overload     the models with their workers; full queues
ticket, states, output, retries, spans  one job: its attempt, output, retry limits and traces
jobs, recovery          all jobs in flight; retries of those whose attempt is over
reader, replies, notices  this gateway's reply stream
presence, leases, silence  heartbeat; expired leases; jobs without replies
"""
