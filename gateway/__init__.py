"""The stateless HTTP gateway: one folder for each room that a request walks through.

api > stream, dispatch, prompt, dialects, auth > accounts > errors, settings > contract.
"""
