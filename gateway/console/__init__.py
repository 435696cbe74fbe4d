"""The console: web pages for customers on their port, and for operators on theirs.

Pages call the services of `/v1` and `/admin` with the rights of the credential that logged in.
Pages work without JavaScript.
"""
