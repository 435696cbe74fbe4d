"""OpenAI's Responses API: its bodies, converted to the requests that chats become."""
