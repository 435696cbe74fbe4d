"""Chat requests: messages, tools, template arguments."""
