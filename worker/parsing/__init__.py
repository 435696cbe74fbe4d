"""How the answer of a chat is read apart, token by token: reasoning, calls of tools, and content."""
