"""Anthropic's Messages API: its bodies, converted to the requests that chats become."""
