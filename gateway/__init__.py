"""The stateless HTTP gateway. Each folder is one stage of request handling; imports point right.

api > stream, dispatch, prompt, dialects, auth > accounts > errors, settings > contract.
"""
