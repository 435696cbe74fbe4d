"""Queue: enqueue jobs, deliver their replies, retry lost attempts and cancel jobs.

dispatcher   the interface of the package
generation              the jobs of one request and its unread replies
ticket, output          one job: its attempt, retry limits and traces; its output
jobs, recovery          all jobs in flight; retries of those whose attempt is over
reader, replies, notices  this gateway's reply stream
presence, lost_jobs     heartbeat; expired leases and jobs without replies
"""
